"""Published weights of one run: `{weights_root}/{run_id}/step_{weight_version:06d}/`.

A published directory is what `transformers` and every engine load: safetensors, config.json, the
generation config and tokenizer files of the initial model, and `manifest.json` (see
`rollpacker.refit`). It is written aside and renamed, so a directory under its final name is
whole; it is replaced whole or not at all. The last few versions stay, for engines that still
read them.

With an adapter (LoRA, `trainer.lora_publish: adapter`) `model.safetensors` is the base, written
once and linked from version to version, and the adapter lies beside it in peft's format
(`rollpacker.refit.adapter`). `merge` makes a plain directory of it.

Nothing is fsynced: the checkpoint is what survives a power loss, and OpenRun publishes its
weights again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from rollpacker.refit.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    merged,
    read_scale,
)
from rollpacker.refit.manifest import MANIFEST, Manifest

_PREFIX = "step_"
_KEEP = 4
_COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
)


_MODEL = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank adapter: whole tensors on the CPU, and its adapter_config.json."""

    tensors: dict[str, Tensor]
    config: Mapping[str, Any]


class WeightPublisher:
    """Publishes the weight versions of one run; used by the leader alone."""

    def __init__(self, directory: Path, model_directory: Path) -> None:
        """`directory` is the run's own below the weights root; tokenizers come from the model."""
        self._directory = directory
        self._companions = [
            path
            for pattern in _COPIED
            for path in sorted(model_directory.glob(pattern))
            if path.is_file()
        ]

    def uri(self, weight_version: int) -> str:
        """file:// URI of a version, published or not."""
        return self._path(weight_version).absolute().as_uri()

    def publish(
        self,
        weight_version: int,
        tensors: dict[str, Tensor],
        config: Any,
        adapter: Adapter | None = None,
    ) -> str:
        """Write one version and return its URI. Deletes old ones, and all newer ones.

        `tensors` are whole, on the CPU, tied ones once; none: those of the newest version, to which
        the adapter belongs too. `config` is the transformers config. Repeat: replaces the version.
        """
        for remainder in self._directory.glob(".*-[0-9]*"):
            shutil.rmtree(remainder)
        aside = self._directory / f".partial-{weight_version:06d}"
        aside.mkdir(parents=True)
        if tensors:
            save_file(tensors, aside / _MODEL, metadata={"format": "pt"})
        else:
            os.link(self._base(), aside / _MODEL)
        if adapter is not None:
            save_file(adapter.tensors, aside / ADAPTER_TENSORS, metadata={"format": "pt"})
            text = json.dumps(adapter.config, indent=1)
            (aside / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
        config.save_pretrained(aside)
        for path in self._companions:
            shutil.copyfile(path, aside / path.name)
        manifest = Manifest.of_directory(aside, weight_version)
        (aside / MANIFEST).write_bytes(manifest.to_json())
        final = self._path(weight_version)
        if final.exists():
            replaced = self._directory / f".replaced-{weight_version:06d}"
            final.rename(replaced)
            aside.rename(final)
            shutil.rmtree(replaced)
        else:
            aside.rename(final)
        self._prune(final)
        return self.uri(weight_version)

    def _base(self) -> Path:
        """That of the newest version; a run publishes it when it is opened."""
        return max(self._directory.glob(f"{_PREFIX}[0-9]*")) / _MODEL

    def _path(self, weight_version: int) -> Path:
        return self._directory / f"{_PREFIX}{weight_version:06d}"

    def _prune(self, newest: Path) -> None:
        """Versions above the newest belong to a past that was rewound."""
        paths = sorted(self._directory.glob(f"{_PREFIX}[0-9]*"))
        kept = [path for path in paths if path <= newest][-_KEEP:]
        for path in paths:
            if path not in kept:
                shutil.rmtree(path)


def merge(published: Path, target: Path) -> None:
    """Make a plain model directory of a published one with an adapter.

    Raises AdapterError, and OSError where `target` exists or a file is missing.
    """
    tensors = merged(
        load_file(published / _MODEL), load_file(published / ADAPTER_TENSORS), read_scale(published)
    )
    left_out = shutil.ignore_patterns("*.safetensors", ADAPTER_CONFIG, MANIFEST)
    shutil.copytree(published, target, ignore=left_out)
    save_file(tensors, target / _MODEL, metadata={"format": "pt"})
