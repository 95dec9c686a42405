"""What an answer is: a number, a collection, a relation, words, or an expression.

`parse_answer` reads one normalised text and decides by its outer shape alone; the text of an
expression is not understood here. Nothing is evaluated, and depth and size are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from services.reward.graders.normal_form import closing_index, normalise
from services.reward.graders.numbers import Number, is_grouped, parse_number, unit_name

MAX_ANSWER_CHARACTERS = 1000
_MAX_DEPTH = 6
_MAX_ITEMS = 100


@dataclass(frozen=True, slots=True)
class Collection:
    """Items between brackets: a tuple, an interval, a set (`{`) or a bare list (no bracket)."""

    opening: str  # "(", "[", "{" or ""
    items: tuple[Answer, ...]
    closing: str


@dataclass(frozen=True, slots=True)
class Union:
    """Sets joined by a cup, in any order."""

    parts: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of cells."""

    rows: tuple[tuple[Answer, ...], ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """left operator right, both sides as text."""

    operator: str  # "=", "\\ne", "<", "\\le", ">" or "\\ge"
    left: str
    right: str


@dataclass(frozen=True, slots=True)
class Words:
    """An answer that is not mathematics, in one case and spacing."""

    text: str


@dataclass(frozen=True, slots=True)
class Expression:
    """Any other mathematics, as normalised text."""

    text: str
    unit: str = ""  # as that of a Number


Answer = Number | Collection | Union | Matrix | Relation | Words | Expression


@dataclass(frozen=True, slots=True)
class _End:
    """One end of an interval."""

    is_low: bool
    bound: str
    bracket: str


_OPERATOR = re.compile(r"\\(?:le|ge|ne)(?![A-Za-z])|[<>=]")
_CUP = re.compile(r"\\cup(?![A-Za-z])")
_OR = re.compile(r"[,;]|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])")
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])")
_MEMBER = re.compile(r"[A-Za-z]\s*\\in(?![A-Za-z])\s*")
_MATRIX = re.compile(r"\\begin\s*\{([pbv]?matrix)\}(.*)\\end\s*\{\1\}", re.DOTALL)
_ARRAY = re.compile(
    r"[(\[]\s*\\begin\s*\{array\}\s*\{[clr| ]*\}(.*)\\end\s*\{array\}\s*[)\]]", re.DOTALL
)
_REALS = re.compile(r"\\mathbb\s*(?:\{\s*R\s*\}|R)|(?i:all real numbers|all reals)")
_VARIABLE = re.compile(r"(?:[A-Za-df-z]|\\(?!pi|infty)[a-z]+)(?:_\{?\w+\}?)?")
_TURNED = re.compile(r"(?P<open>[\[\]])(?P<inner>[^\[\]]*)(?P<close>[\[\]])")
_SET_BUILDER = re.compile(
    r"\\\{\s*(?P<variable>[A-Za-z])\s*(?:\\in\s*\\mathbb\s*(?:\{\s*R\s*\}|R)\s*)?"
    r"(?:\\(?:mid|vert|colon)(?![A-Za-z])|[|:]|such that)\s*(?P<condition>.*)\\\}",
    re.DOTALL,
)
_EITHER = re.compile(r"(?<![A-Za-z\\])or(?![A-Za-z])|\\(?:lor|vee)(?![A-Za-z])")
_CHOICE = re.compile(r"\(?([A-Za-df-hj-z])\)?")  # not e and i, which are numbers
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*[A-Za-z]")
_SYMBOLIC_WORDS = frozenset(
    "sin cos tan log ln exp sqrt pi inf infinity oo".split()  # noqa: SIM905
)
_TEXT_UNIT = re.compile(
    r"\\(?:text|mathrm)\s*\{(?P<unit>[A-Za-z ]+)\}\s*(?:\^\s*\{?\s*(?P<power>[23])\s*\}?)?[\s.$]*$"
)
_SPACES = re.compile(r"\s+")
_MIRRORED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "=": "=", "\\ne": "\\ne"}
_CLOSING = {"(": ")]", "[": ")]", "{": "}"}


def readings(text: str) -> tuple[Answer, ...]:
    """Each way to read an extracted answer; none for an empty one.

    Only `1,234` has two: a number, and a list of two.
    """
    if len(text) > MAX_ANSWER_CHARACTERS:
        return (_words(text),)
    whole, text = text, normalise(text)
    if not text:
        return ()
    first = _parse(text, 0)
    if isinstance(first, Expression):
        return (_without_unit(whole, first),)
    if isinstance(first, Number) and is_grouped(text):
        return first, _collection("", list(_split(text, _OR)), "", 0)
    return (first,)


def _without_unit(text: str, expression: Expression) -> Expression:
    """`12\\pi\\text{ cm}` is 12 pi, in cm. Without `\\text` m would be a variable."""
    found = _TEXT_UNIT.search(text)
    power = f"^{found['power']}" if found and found["power"] else ""
    unit = unit_name(found["unit"].strip() + power) if found else None
    rest = normalise(text[: found.start()]) if found and unit else ""
    return Expression(rest, unit) if rest and unit else expression


def _parse(text: str, depth: int) -> Answer:
    text = _unturned(text.strip())
    number = parse_number(text)
    if number is not None:
        return number
    if depth > _MAX_DEPTH:
        return Expression(text)
    return _parse_composite(text, depth + 1) or _parse_simple(text)


def _parse_composite(text: str, depth: int) -> Answer | None:
    if member := _MEMBER.match(text):
        return _parse(text[member.end() :], depth)
    if _REALS.fullmatch(text):
        return _interval(_End(True, "-\\infty", "("), _End(False, "\\infty", ")"), depth)
    if matrix := _MATRIX.fullmatch(text) or _ARRAY.fullmatch(text):
        return _matrix(matrix[matrix.lastindex or 0], depth)
    parts = list(_split(text, _CUP))
    if len(parts) > 1:
        return Union(tuple(_parse(part, depth) for part in parts))
    if solutions := _solutions(text, depth):
        return solutions
    if bracketed := _bracketed(text, depth):
        return bracketed
    parts = list(_split(text, _OR))
    if len(parts) > 1:
        return _collection("", parts, "", depth)
    if relation := _relation(text, depth):
        return relation
    if len(_PLUS_MINUS.findall(text)) == 1:
        both = [_PLUS_MINUS.sub(sign, text) for sign in ("+", "-")]
        return _collection("{", both, "}", depth)
    return None


def _parse_simple(text: str) -> Answer:
    if choice := _CHOICE.fullmatch(text):
        return _words(choice[1])
    if _WORDS.fullmatch(text) and _SYMBOLIC_WORDS.isdisjoint(text.lower().split()):
        return _words(text)
    return Expression(text)


def _words(text: str) -> Words:
    return Words(_SPACES.sub(" ", text).strip().casefold())


def _bracketed(text: str, depth: int) -> Answer | None:
    """A set, or a tuple or interval of two items and more, when brackets enclose everything."""
    is_set = text.startswith("\\{")
    body = text[1:] if is_set else text
    if not body or body[0] not in ("{" if is_set else "(["):
        return None
    end = closing_index(body, 0)
    if end != len(body) - 1 or body[end] not in _CLOSING[body[0]]:
        return None
    inner = body[1:end].rstrip("\\") if is_set else body[1:end]
    parts = list(_split(inner, _OR))
    if not is_set and len(parts) < 2:
        return None
    return _collection(body[0], parts, body[end], depth)


def _unturned(text: str) -> str:
    """`]0, 1[`, an open interval where brackets are turned outwards, is `(0, 1)`; in unions too."""
    if "[" not in text and "]" not in text:
        return text
    return "\\cup ".join(map(_unturned_part, _CUP.split(text)))


def _unturned_part(text: str) -> str:
    found = _TURNED.fullmatch(text.strip())
    if not found or (found["open"], found["close"]) == ("[", "]"):
        return text
    inner = found["inner"]
    if closing_index(f"({inner})", 0) != len(inner) + 1 or len(list(_split(inner, _OR))) != 2:
        return text
    return f"{'(' if found['open'] == ']' else '['}{inner}{')' if found['close'] == '[' else ']'}"


def _solutions(text: str, depth: int) -> Answer | None:
    """`\\{x \\mid x > 2\\}`, x being real: what its condition says; None where that says more."""
    found = _SET_BUILDER.fullmatch(text)
    if found is None:
        return None
    parts = [part.strip() for part in _split(found["condition"], _EITHER)]
    ranges = [_range(part, found["variable"], depth) for part in parts]
    known = tuple(range_ for range_ in ranges if range_ is not None)
    if len(known) < len(parts):
        return None
    return known[0] if len(known) == 1 else Union(known)


def _range(condition: str, variable: str, depth: int) -> Collection | None:
    """The interval of an inequality about the variable alone."""
    sides = [side.strip() for side in _split(condition, _OPERATOR)]
    if sides.count(variable) != 1 or len(list(_split(condition, _OR))) > 1:
        return None
    found = _relation(condition, depth)
    return found if isinstance(found, Collection) else None


def _collection(opening: str, parts: list[str], closing: str, depth: int) -> Answer:
    if len(parts) > _MAX_ITEMS:
        return _words(f"{opening}{','.join(parts)}{closing}")
    return Collection(opening, tuple(_parse(part, depth) for part in parts), closing)


def _matrix(body: str, depth: int) -> Answer:
    rows = [row for row in re.split(r"\\\\", body) if row.strip()]
    if sum(row.count("&") + 1 for row in rows) > _MAX_ITEMS:
        return _words(body)
    return Matrix(tuple(tuple(_parse(cell, depth) for cell in row.split("&")) for row in rows))


def _relation(text: str, depth: int) -> Answer | None:
    """A relation; an inequality about one variable is the interval of its solutions."""
    sides = [side.strip() for side in _split(text, _OPERATOR)]
    operators = [match[0] for match in _top_level(text, _OPERATOR)]
    if not operators or not all(sides):
        return None
    if set(operators) == {"="}:
        return Relation("=", sides[0], sides[-1])
    if len(operators) == 1:
        return _one_sided(sides[0], operators[0], sides[1], depth)
    if len(operators) == 2 and _VARIABLE.fullmatch(sides[1]):
        ends = [_end(_MIRRORED[operators[0]], sides[0]), _end(operators[1], sides[2])]
        low = next((end for end in ends if end and end.is_low), None)
        high = next((end for end in ends if end and not end.is_low), None)
        if low and high:
            return _interval(low, high, depth)
    return None


def _one_sided(left: str, operator: str, right: str, depth: int) -> Answer:
    if _VARIABLE.fullmatch(right) and not _VARIABLE.fullmatch(left):
        left, operator, right = right, _MIRRORED[operator], left
    end = _end(operator, right) if _VARIABLE.fullmatch(left) else None
    if end is None or _VARIABLE.fullmatch(right):
        return Relation(operator, left, right)
    low = end if end.is_low else _End(True, "-\\infty", "(")
    high = _End(False, "\\infty", ")") if end.is_low else end
    return _interval(low, high, depth)


def _end(operator: str, bound: str) -> _End | None:
    """The end that `variable operator bound` puts to an interval; None for = and unequal."""
    brackets = {"<": ")", "\\le": "]", ">": "(", "\\ge": "["}
    if operator not in brackets:
        return None
    return _End(operator in (">", "\\ge"), bound, brackets[operator])


def _interval(low: _End, high: _End, depth: int) -> Collection:
    items = (_parse(low.bound, depth), _parse(high.bound, depth))
    return Collection(low.bracket, items, high.bracket)


def _split(text: str, separator: re.Pattern[str]) -> Iterator[str]:
    """The parts of a text between separators outside all brackets."""
    start = 0
    for match in _top_level(text, separator):
        yield text[start : match.start()]
        start = match.end()
    yield text[start:]


def _top_level(text: str, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
    depth = scanned = 0
    for match in pattern.finditer(text):
        chunk = text[scanned : match.start()]
        depth += sum(map(chunk.count, "([{")) - sum(map(chunk.count, ")]}"))
        scanned = match.start()
        if depth == 0:
            yield match
