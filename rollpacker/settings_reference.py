"""docs/run_settings.md as `python -m rollpacker.settings_reference` writes it from the settings.

A test compares the file with this, so the document cannot fall behind the code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rollpacker.section import Section
from rollpacker.settings import RunSettings

_HEAD = """# Run settings

The YAML file of a run, and the `settings` of StartRun. Override any of them on the command line:
`rollpacker submit run.yaml trainer.learning_rate=1e-5`. Unknown keys are refused with the nearest
valid name. Paths in a file are relative to the file. Written from `rollpacker/settings.py` by
`python -m rollpacker.settings_reference > docs/run_settings.md`.

What a row of the data holds, in each format, is in [data.md](data.md).
"""


def settings_reference() -> str:
    """The whole document."""
    return "\n".join([_HEAD, *_section("", RunSettings)])


def _section(name: str, section: type[Section]) -> Iterator[str]:
    yield f"## `{name.removesuffix('.') or 'top level'}`\n"
    yield "| setting | default | what it is |"
    yield "|---|---|---|"
    nested: list[tuple[str, type[Section]]] = []
    for key, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            nested.append((f"{name}{key}.", kind))
            continue
        if issubclass(item := _item(kind), Section):
            nested.append((f"{name}{key}[].", item))
        what = " ".join(part for part in (field.description or "", _limits(field)) if part)
        yield f"| `{name}{key}` | {_default(field)} | {what} |"
    yield ""
    for child, kind in nested:
        yield from _section(child, kind)


def _item(kind: Any) -> type:
    """What a list holds; object for what is no list."""
    item = next(iter(get_args(kind)), object)
    return item if get_origin(kind) is tuple and isinstance(item, type) else object


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return "" if field.default in (None, "", (), {}) else f"`{field.default}`"


def _limits(field: FieldInfo) -> str:
    kind: Any = field.annotation
    if get_origin(kind) is not None and all(isinstance(a, str) for a in get_args(kind)):
        return "(" + ", ".join(f"`{value}`" for value in get_args(kind)) + ")"
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    limits = [
        f"{sign} {getattr(item, name)}"
        for item in field.metadata
        for name, sign in signs.items()
        if getattr(item, name, None) is not None
    ]
    return f"({', '.join(limits)})" if limits else ""


if __name__ == "__main__":
    print(settings_reference(), end="")
