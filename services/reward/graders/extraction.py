"""Where in a response its final answer stands.

Only what follows the last `</think>` counts, and a think that is never closed gives no answer. In
the rest the first of these that is present decides, and an unusable one is no answer (an earlier
mark does not step in for it):

1. the last `\\boxed{...}`; left open or empty, there is no answer;
2. what follows the last `####`, to the end of its line;
3. what follows the last `answer:` (any case, anywhere in a line), to the end of its sentence or
   line or, when nothing else stands there, the next line that is not empty;
4. the whole response, if it is an answer and not prose;
5. what follows the last `answer is`.

All of it is linear in the length of the response.
"""

from __future__ import annotations

import re
from collections import deque

_THINK, _END_OF_THINK = "<think>", "</think>"
_BOX = re.compile(r"\\boxed\s*\{")
_ANSWER_COLON = re.compile(r"\banswer(?:[ \t]+is)?[ \t*_`]*[:：][ \t*_`]*", re.IGNORECASE)
_ANSWER_IS = re.compile(r"\banswer[ \t]+is\b[ \t*_`]*", re.IGNORECASE)
_DISPLAY = {"$$": "$$", "\\[": "\\]"}  # opening and closing of display mathematics
_SENTENCE_END = re.compile(r"\.\s+(?=[A-Z])")
_MAX_WHOLE_CHARACTERS = 400
_COMMAND = re.compile(r"\\[A-Za-z]+")
_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|operatorname|mbox)\s*\{[^{}]*\}")
_WORD = re.compile(r"[A-Za-z]{2,}")
_MATH_WORDS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt pi mod gcd lcm max"  # noqa: SIM905
    " min inf infty infinity oo or and abs det percent degrees".split()
)
_SHORT_PROSE = frozenset(
    "am an as at be by do go he if in is it me my no of on ok so to up us we".split()  # noqa: SIM905
)


def final_answer(response: str) -> str | None:
    """The text of the final answer, not yet normalised; None when there is none."""
    rest = after_thinking(response)
    if rest is None:
        return None
    answer = _boxed(rest)
    if answer is None:
        answer = _marked(rest)
    if answer is None:
        answer = rest if is_bare_answer(rest) else _after_last(_ANSWER_IS, rest)
    return (answer or "").strip() or None


def only_answer_after(response: str, delimiter: str) -> str | None:
    """What follows the only occurrence of the delimiter; None when it occurs never or twice."""
    rest = after_thinking(response)
    if rest is None or rest.count(delimiter) != 1:
        return None
    return rest.partition(delimiter)[2].strip() or None


def after_thinking(response: str) -> str | None:
    """What follows the last `</think>`; None when a think is left open."""
    rest = response.rpartition(_END_OF_THINK)[2]
    return None if _THINK in rest else rest


def is_bare_answer(text: str) -> bool:
    """Whether a whole text is one answer: one line of mathematics, or one word."""
    text = text.strip()
    if not text or "\n" in text or len(text) > _MAX_WHOLE_CHARACTERS:
        return False
    if text.strip(".*`$()").isalpha():
        return True
    plain = _COMMAND.sub(" ", _TEXT_COMMAND.sub(" ", text))
    return not any(_is_prose(word.lower()) for word in _WORD.findall(plain))


def _is_prose(word: str) -> bool:
    return word in _SHORT_PROSE if len(word) == 2 else word not in _MATH_WORDS


def _boxed(text: str) -> str | None:
    """The content of the last box, "" when it is left open, None without a box."""
    last = _last(_BOX, text)
    if last is None:
        return None
    depth, position = 1, last.end()
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[last.end() : position]
        position += 1
    return ""


def _marked(text: str) -> str | None:
    """What follows `####` or `answer:`; None without such a mark."""
    _, mark, tail = text.rpartition("####")
    if mark:
        return tail.partition("\n")[0]
    return _after_last(_ANSWER_COLON, text)


def _last(mark: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = deque(mark.finditer(text), maxlen=1)
    return found[0] if found else None


def _after_last(mark: re.Pattern[str], text: str) -> str | None:
    last = _last(mark, text)
    if last is None:
        return None
    tail = text[last.end() :].lstrip()
    for opening, closing in _DISPLAY.items():
        if tail.startswith(opening):
            return tail[len(opening) :].partition(closing)[0]
    return _SENTENCE_END.split(tail.partition("\n")[0], maxsplit=1)[0]
