"""What the commands print with: tables for people, JSON lines for programs.

Text that a model wrote is printed only after `printable`: terminals obey control characters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH_WHEN_PIPED = 160


def console() -> Console:
    """Standard output; wide when it is no terminal, so that rows stay on one line."""
    width = None if sys.stdout.isatty() else _WIDTH_WHEN_PIPED
    return Console(width=width, highlight=False, markup=False, emoji=False)


def print_json(messages: Iterable[Message]) -> None:
    """One JSON object per line, in the fields of the proto."""
    for message in messages:
        print(
            json.dumps(
                MessageToDict(
                    message,
                    preserving_proto_field_name=True,
                    always_print_fields_with_no_presence=True,
                )
            )
        )


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> None:
    """A table, or the sentence `empty` when there are no rows.

    A column whose name starts with ">" is aligned to the right.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if right else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    if table.row_count:
        console().print(table)
    else:
        console().print(empty)


def printable(text: str) -> str:
    """The text with everything but printable characters written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters; the end is what gives way."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
