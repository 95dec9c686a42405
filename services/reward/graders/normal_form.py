"""One spelling for the many ways to write the same mathematics: text in, text out.

`normalise` removes what only changes the looks (dollars, `\\left`, thin spaces, `\\text`) and gives
synonyms one name (`\\dfrac` is `\\frac`, U+2212 is `-`). `to_latex` then makes LaTeX of plain
notation (`sqrt(2)`, `pi/2`, `x^10`). Nothing is evaluated here.
"""

from __future__ import annotations

import re

_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "﹣": "-", "－": "-", "∗": "*", "·": "\\cdot ",
        "×": "\\times ", "÷": "/", "⁄": "/", "∞": "\\infty ", "π": "\\pi ", "√": "\\sqrt ",
        "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "∪": "\\cup ", "±": "\\pm ", "∈": "\\in ",
        "°": " degrees ", "²": "^{2}", "³": "^{3}", "\u00a0": " ", "\u202f": " ", "\u2009": " ",
        "，": ",", "（": "(", "）": ")", "％": "%", "$": "", "`": "",
    }
)  # fmt: skip
_SYNONYMS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\!|\\displaystyle(?![A-Za-z])|\\limits(?![A-Za-z])", ""),
        (r"\\[()\[\]]", ""),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])", ""),
        (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])", " "),
        (r"\{,\}", ","),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:leq|leqslant)(?![A-Za-z])|<=", r"\\le "),
        (r"\\(?:geq|geqslant)(?![A-Za-z])|>=", r"\\ge "),
        (r"\\neq(?![A-Za-z])|!=", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])", " degrees "),
        (r"\\%", "%"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\(?:dots|cdots|ldots)(?![A-Za-z])|…|\.\.\.", r"\\ldots "),
    )
)
_FONT = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|boldsymbol|operatorname|mbox)"
_FONT_GROUP = re.compile(_FONT + r"\*?\s*\{([^{}]*)\}")
_FONT_LETTER = re.compile(_FONT + r"\s+([A-Za-z])(?![A-Za-z])")
_SPACES = re.compile(r"\s+")
_MAX_NESTED_FONTS = 4
_EDGES = re.compile(r"^[*_\s]+|[*_\s.,;:]+$")  # markdown, and the end of a sentence

_WORD_COMMANDS = (
    "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|infty"
)
_PLAIN_WORD = re.compile(rf"(?<![\\A-Za-z])({_WORD_COMMANDS})(?![A-Za-z])")
_PLAIN_INFINITY = re.compile(r"(?<![\\A-Za-z])(?:inf|infinity|oo)(?![A-Za-z])", re.IGNORECASE)
_PLAIN_EXPONENT = re.compile(r"\^\s*(-?\d+(?:\.\d+)?)")
_FRACTION = re.compile(r"\\frac(?![A-Za-z])\s*(\S)")
_ROOT_OF_PARENTHESIS = re.compile(r"(\\sqrt|\^)\s*\(")
_ROOT_OF_NUMBER = re.compile(r"\\sqrt\s*(\d+|[A-Za-z])")


def normalise(text: str) -> str:
    """The answer without its looks: fonts, dollars, spacing, markdown, a full stop at the end."""
    text = text.replace("\\$", "").translate(_CHARACTERS)
    for pattern, replacement in _SYNONYMS:
        text = pattern.sub(replacement, text)
    for _ in range(_MAX_NESTED_FONTS):
        text, count = _FONT_GROUP.subn(r" \1 ", text)
        if not count:
            break
    text = _FONT_LETTER.sub(r" \1", text)
    return _without_outer_braces(_EDGES.sub("", _SPACES.sub(" ", text)))


def to_latex(text: str) -> str:
    """LaTeX for a normalised text that may be in plain notation."""
    text = _PLAIN_INFINITY.sub(r"\\infty ", text)
    text = _PLAIN_WORD.sub(r"\\\1 ", text).replace("**", "^")
    text = _braced_arguments(text)
    text = _ROOT_OF_NUMBER.sub(r"\\sqrt{\1}", text)
    text = _fraction_arguments(_PLAIN_EXPONENT.sub(r"^{\1}", text))
    return _SPACES.sub(" ", text.replace("*", r" \cdot ")).strip()


def closing_index(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`, or -1. `(` and `[` may close mixed."""
    depth = 0
    for index in range(start, len(text)):
        character = text[index]
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0:
                return index
    return -1


def _without_outer_braces(text: str) -> str:
    while text.startswith("{") and closing_index(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _braced_arguments(text: str) -> str:
    """`\\sqrt(2)` and `x^(2)` with braces instead of parentheses."""
    position = 0
    while match := _ROOT_OF_PARENTHESIS.search(text, position):
        opening = match.end() - 1
        closing = closing_index(text, opening)
        if closing < 0:
            break
        inner = text[opening + 1 : closing]
        text = f"{text[: match.start()]}{match[1]}{{{inner}}}{text[closing + 1 :]}"
        position = match.start() + len(match[1])
    return text


def _fraction_arguments(text: str) -> str:
    """`\\frac12`, `\\frac1{x}` and `\\frac{a}b` with both arguments in braces."""
    position = 0
    while match := _FRACTION.search(text, position):
        first, rest = _argument(text, match.start(1))
        second, rest = _argument(text, rest)
        if not (first and second):
            break
        head = f"{text[: match.start()]}\\frac"
        text = f"{head}{{{first}}}{{{second}}}{text[rest:]}"
        position = len(head)
    return text


def _argument(text: str, start: int) -> tuple[str, int]:
    """The LaTeX argument at `start` without braces, and where the text goes on."""
    while start < len(text) and text[start] == " ":
        start += 1
    if start == len(text):
        return "", start
    if text[start] == "{":
        end = closing_index(text, start)
        return ("", start) if end < 0 else (text[start + 1 : end].strip(), end + 1)
    if command := re.match(r"\\[A-Za-z]+", text[start:]):
        return command[0], start + command.end()
    return text[start], start + 1
