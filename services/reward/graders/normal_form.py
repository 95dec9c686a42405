"""One spelling for the many ways to write the same mathematics: text in, text out.

`normalise` removes what only changes the looks (dollars, `\\left`, thin spaces, `\\text`) and gives
synonyms one name (`\\dfrac` is `\\frac`, U+2212 is `-`). Nothing is evaluated here.
"""

from __future__ import annotations

import re

_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "﹣": "-", "－": "-", "∗": "*", "·": "\\cdot ",
        "×": "\\times ", "÷": "/", "⁄": "/", "∞": "\\infty ", "π": "\\pi ", "√": "\\sqrt ",
        "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "∪": "\\cup ", "±": "\\pm ", "∈": "\\in ",
        "°": " degrees ", "²": "^{2}", "³": "^{3}", "\u00a0": " ", "\u202f": "\\,", "\u2009": "\\,",
        "，": ",", "（": "(", "）": ")", "％": "%", "$": "", "€": "", "£": "", "`": "",
        "ℝ": "\\mathbb{R}",
        # Marks that are not seen and move nothing. Those that turn a text around stay.
        "\u200b": "", "\u200c": "", "\u200d": "", "\u200e": "", "\u200f": "", "\u2060": "",
        "\ufeff": "", "\u00ad": "",
    }
)  # fmt: skip
_SYNONYMS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\!|\\displaystyle(?![A-Za-z])|\\limits(?![A-Za-z])", ""),
        (r"\\[()\[\]]", ""),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])", ""),
        (r"(?<=\d)\\[,; ](?=\d{3}(?!\d))", ""),  # a thin space between thousands
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
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"_\{(\d+|[A-Za-z])\}(?!\d)", r"_\1"),
        (r"\\(?:dots|cdots|ldots)(?![A-Za-z])|…|\.\.\.", r"\\ldots "),
    )
)
_FONT = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|boldsymbol|operatorname|mbox)"
_FONT_GROUP = re.compile(_FONT + r"\*?\s*\{([^{}]*)\}")
_FONT_LETTER = re.compile(_FONT + r"\s+([A-Za-z])(?![A-Za-z])")
_SPACES = re.compile(r"\s+")
_BEFORE_POWER = re.compile(r"\s+\^")
_MAX_NESTED_FONTS = 4
_EDGES = re.compile(r"^[*_\s]+|[*_\s.,;:]+$")  # markdown, and the end of a sentence


def normalise(text: str) -> str:
    """The answer without its looks: fonts, dollars, spacing, markdown, a full stop at the end."""
    text = text.replace("\\$", "").translate(_CHARACTERS)
    for pattern, replacement in _SYNONYMS:
        text = pattern.sub(replacement, text)
    for _ in range(_MAX_NESTED_FONTS):
        text, count = _FONT_GROUP.subn(r" \1 ", text)
        if not count:
            break
    text = _BEFORE_POWER.sub("^", _FONT_LETTER.sub(r" \1", text))
    return _without_outer_braces(_EDGES.sub("", _SPACES.sub(" ", text)))


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
