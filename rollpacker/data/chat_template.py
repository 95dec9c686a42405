"""Chat messages to text, by the model's own Jinja template, in a sandbox.

The template is code from a model directory, so it runs in an immutable sandboxed environment. It
gets no clock: a prompt must be the same text after a resume, and templates that ask for today's
date (`strftime_now`) fall back to a fixed one when it is not defined.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollpacker.data.errors import DataError

Message = Mapping[str, Any]  # at least `role` and `content`


class ChatTemplateError(ValueError):
    """The template refuses these messages; the message is the template's own."""


class ChatTemplate:
    """A compiled template with the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], path: Path) -> None:
        """`path` is the file that `source` came from. Raises DataError if it is not Jinja."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise DataError(
                path, f"is no usable template: {error}", field="chat_template"
            ) from error

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """The text up to where the assistant's answer begins. Raises ChatTemplateError.

        variables: chat_template_kwargs; they may replace all but the messages.
        """
        known = {"add_generation_prompt": True, **self._special_tokens, **variables}
        try:
            return self._template.render({**known, "messages": list(messages)})
        except (TemplateError, TypeError) as error:
            raise ChatTemplateError(str(error)) from error


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text; rendered as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None) -> str:
    """As chat templates expect it: no HTML escapes, keys in their order."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
