"""Which part of a response is its program.

Only what follows the last `</think>` counts. Programs stand in fenced blocks (``` or ~~~); a fence
that is never closed runs to the end. Blocks marked as Python count; without any, unmarked ones do,
unless a block is marked as another programming language. Among several blocks:

- for tests by standard input: the last that reads the input (others are usage or output), else the
  last;
- for function tests: the last that defines the wanted name, else the last that defines a class
  `Solution`, else the last.

The text is searched, never compiled; all of it is linear in the length of the response.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rollpacker.types import Verdict
from services.reward.graders.extraction import after_thinking

_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})([^`\n]*)")
_PYTHON = frozenset({"python", "python3", "py", "py3", "python-3"})
_NO_PROGRAM = frozenset(
    {
        "text", "txt", "plaintext", "plain", "output", "input", "console", "bash", "sh", "shell",
        "json", "yaml", "markdown", "md", "latex", "tex", "math", "diff", "csv", "toml", "ini",
    }
)  # fmt: skip
_READS_INPUT = re.compile(r"\binput\s*\(|\bstdin\b|\bopen\s*\(\s*0\b|\bfileinput\b|\bos\.read\s*\(")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block; its language in lower case, empty where none is marked."""

    language: str
    text: str


def find_program(response: str, names: tuple[str, ...] = ()) -> str | Verdict:
    """The program, or NO_CODE or UNSUPPORTED_LANGUAGE. `names`: what function tests will call."""
    rest = after_thinking(response)
    blocks = fenced_blocks(rest) if rest is not None else []
    candidates = [block.text for block in blocks if block.language in _PYTHON]
    if not candidates:
        languages = {block.language for block in blocks}
        if languages - _NO_PROGRAM - {""}:
            return Verdict.UNSUPPORTED_LANGUAGE
        candidates = [block.text for block in blocks if block.language == ""]
    candidates = [text for text in candidates if text.strip()]
    if not candidates:
        return Verdict.NO_CODE
    return _choose(candidates, names)


def _choose(candidates: list[str], names: tuple[str, ...]) -> str:
    if names:
        patterns = [_defines("|".join(map(re.escape, names))), _defines("Solution")]
    else:
        patterns = [_READS_INPUT]
    for pattern in patterns:
        for text in reversed(candidates):
            if pattern.search(text):
                return text
    return candidates[-1]


def _defines(names: str) -> re.Pattern[str]:
    return re.compile(
        rf"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+(?:{names})\b|^(?:{names})[ \t]*=", re.M
    )


def fenced_blocks(text: str) -> list[Block]:
    """Every fenced block, in order."""
    blocks: list[Block] = []
    opening: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        fence = _FENCE.match(line)
        if opening is None:
            if fence:
                opening, lines = fence, []
        elif fence and not fence[3].strip() and fence[2].startswith(opening[2]):
            blocks.append(_block(opening, lines))
            opening = None
        else:
            lines.append(line)
    if opening is not None:
        blocks.append(_block(opening, lines))
    return blocks


def _block(opening: re.Match[str], lines: list[str]) -> Block:
    indent = opening[1]
    words = opening[3].replace("{", " ").replace("}", " ").split()
    language = words[0].lstrip(".").lower() if words else ""
    return Block(language, "".join(line.removeprefix(indent) for line in lines))
