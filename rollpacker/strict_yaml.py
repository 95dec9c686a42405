"""YAML as people write it in run files and overrides.

As `yaml.safe_load` reads it, but a key that stands twice is refused instead of half of it dropped,
and what is wrong fits into one line.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"  # `<<`, which brings keys that may be overridden


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag != _MERGE and isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"{key_node.value!r:.80} stands twice; keep one",
                        problem_mark=key_node.start_mark,
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """The value of a document; None for an empty one. Raises ValueError."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  it is a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{place}{error.problem}") from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
