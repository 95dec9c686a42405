"""Text to token ids and back, from the files of a Hugging Face model directory.

| file                                          | gives                                        |
|-----------------------------------------------|----------------------------------------------|
| tokenizer.json                                | the tokenizer itself                         |
| tokenizer_config.json, special_tokens_map.json | names of special tokens                     |
| chat_template.jinja, or tokenizer_config.json | the chat template                            |
| generation_config.json, else config.json      | the ids that end a response                  |

Everything is read once. A tokenizer never changes afterwards, so threads may share it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rollpacker.data.chat_template import ChatTemplate, Message
from rollpacker.data.errors import DataError, shorten

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


class UnknownTextError(ValueError):
    """The tokenizer cannot encode a text; the message is the library's own."""


class TextTokenizer:
    """A tokenizer with its chat template and stop tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token_ids: tuple[int, ...],
        chat_template: ChatTemplate | None,
        directory: Path,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.eos_token_ids = eos_token_ids  # ids that end a response; may be empty
        self.directory = directory

    @classmethod
    def load(cls, directory: Path, model_directory: Path | None = None) -> TextTokenizer:
        """Read a directory with tokenizer.json; stop ids come from `model_directory` if given.

        Raises DataError.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise DataError(
                path, "is missing; give a directory with tokenizer.json as data.tokenizer"
            )
        try:
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises it bare
            raise DataError(path, f"is no tokenizer: {error}") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        special_tokens = _read_special_tokens(directory)
        eos_token_ids = _read_eos_token_ids(model_directory or directory)
        if not eos_token_ids and "eos_token" in special_tokens:
            eos_token_id = tokenizer.token_to_id(special_tokens["eos_token"])
            eos_token_ids = () if eos_token_id is None else (eos_token_id,)
        template = _read_chat_template(directory, special_tokens)
        return cls(tokenizer, eos_token_ids, template, directory)

    @property
    def vocabulary_size(self) -> int:
        """Count of ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a text; `add_special_tokens` lets the tokenizer add its own (such as bos).

        A rendered chat already holds them: then False. Raises UnknownTextError.
        """
        try:
            return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except Exception as error:  # the library raises it bare
            raise UnknownTextError(str(error)) from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def render_chat(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None
    ) -> str:
        """Messages as text, up to where the assistant's answer begins.

        variables: what the template may read besides the messages, such as enable_thinking.
        Raises DataError without a template, ChatTemplateError if it refuses the messages.
        """
        if self._chat_template is None:
            raise DataError(
                self.directory,
                "has no chat_template.jinja and no chat_template in tokenizer_config.json;"
                " add one or set data.apply_chat_template: false",
            )
        return self._chat_template.render(messages, variables or {})


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object, empty when there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(path, f"cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(path, f"must be a JSON object, got {shorten(value)}")
    return value


def _read_special_tokens(directory: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        values = read_object(directory / name)
        for key in _SPECIAL_TOKENS:
            value = values.get(key)
            if isinstance(value, dict):  # an AddedToken
                value = value.get("content")
            if isinstance(value, str):
                found[key] = value
    return found


def _read_eos_token_ids(directory: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        value = read_object(directory / name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(item) is int and item >= 0 for item in ids):
            raise DataError(
                directory / name,
                f"must be a token id or a list of them, got {shorten(value)}",
                field="eos_token_id",
            )
        return tuple(ids)
    return ()


def _read_chat_template(directory: Path, special_tokens: dict[str, str]) -> ChatTemplate | None:
    path = directory / "chat_template.jinja"
    source: Any
    if path.is_file():
        source = path.read_text(encoding="utf-8")
    else:
        path = directory / "tokenizer_config.json"
        source = read_object(path).get("chat_template")
        if isinstance(source, list):  # several named ones
            named = {item.get("name"): item.get("template") for item in source}
            source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise DataError(path, f"must be text, got {shorten(source)}", field="chat_template")
    return ChatTemplate(source, special_tokens, path)
