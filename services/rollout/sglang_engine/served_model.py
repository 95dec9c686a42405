"""The model directory that SGLang is shown, and the proof that its weights arrived.

SGLang ends a response also at the end-of-text tokens of the model's own configuration; here only
the stop tokens of a request may end it. So SGLang is shown a directory of links to the weights
beside a copy of config.json without those tokens.

The proof: on a CPU, SGLang's checksum of a parameter is the first 8 bytes of the SHA-256 of its
memory. The same is computed here from the files, after the fusing that SGLang does (q, k, v into
qkv; gate, up into gate_up; all experts of a layer into w13 and w2) and its zero padding (the
vocabulary to a multiple of 64, the inner size of the MLP to a multiple of 32), and every parameter
must agree. A missing, stale or torn weight cannot pass.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from rollpacker.placement.shape import weight_kv_tokens
from rollpacker.refit.adapter import has_adapter
from services.rollout.engine import InvalidRequestError, WeightsNotFoundError

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FUSED: Final = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# One expert's matrices as they are called in the files: of Qwen's families, and of Mixtral.
_EXPERTS: Final = {
    "w13_weight": (("gate_proj", "up_proj"), ("w1", "w3")),
    "w2_weight": (("down_proj",), ("w2",)),
}
_EXPERT: Final = re.compile(r"(?P<experts>.*\.experts)\.\d+\.(?P<part>\w+)\.weight")
_PADDED_ROWS: Final = {
    "embed_tokens.weight": 64,
    "lm_head.weight": 64,
    "gate_proj.weight": 32,
    "up_proj.weight": 32,
    ".w1.weight": 32,
    ".w3.weight": 32,
}
_PADDED_COLUMNS: Final = {"down_proj.weight": 32, ".w2.weight": 32}


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A Hugging Face directory that was looked through: its files are there and whole."""

    path: Path
    config: Mapping[str, Any]
    weight_files: tuple[Path, ...]
    weight_kv_tokens: int  # whose KV is as many bytes as the weights; 0: not known

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def context(self) -> int:
        return int(self.config["max_position_embeddings"])

    def same_architecture(self, other: ModelDirectory) -> bool:
        """Whether one server can change from one to the other in place."""
        ignored = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
        return all(
            self.config.get(name) == other.config.get(name)
            for name in (self.config.keys() | other.config.keys()) - ignored
        )


def read_directory(path: Path) -> ModelDirectory:
    """Look a directory through; every tensor must be readable and finite.

    Raises WeightsNotFoundError, InvalidRequestError (`weights_uri`).
    """
    if has_adapter(path):
        raise InvalidRequestError(
            "weights_uri",
            f"{path} holds an adapter, which this engine does not add; set trainer.lora_publish to"
            " merged",
        )
    config = _read_json(path / _CONFIG)
    for name in ("vocab_size", "max_position_embeddings", "architectures"):
        if not config.get(name):
            raise InvalidRequestError("weights_uri", f"{path / _CONFIG} does not tell {name}")
    files = _weight_files(path)
    for name, tensor in read_tensors(files).items():
        if not bool(torch.isfinite(tensor).all()):
            raise InvalidRequestError(
                "weights_uri", f"{path}: {name} holds values that are not finite"
            )
    return ModelDirectory(path, config, files, weight_kv_tokens(path))


def show(model: ModelDirectory, place: Path) -> Path:
    """Make `place` the directory that SGLang is shown; returns it."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    config = {name: value for name, value in model.config.items() if name != "eos_token_id"}
    (place / _CONFIG).write_text(json.dumps({**config, "eos_token_id": None}), encoding="utf-8")
    index = model.path / _INDEX
    for file in (*model.weight_files, *([index] if index.is_file() else [])):
        (place / file.name).symlink_to(file.resolve())
    return place


def read_tensors(files: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Every tensor by name. Raises WeightsNotFoundError."""
    tensors = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  safe_open is no mapping
                    tensors[name] = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise WeightsNotFoundError(f"{path} cannot be read: {error}") from error
    return tensors


def differing_parameters(
    model: ModelDirectory, dtype: str, reported: Mapping[str, str]
) -> list[str]:
    """Parameters of `reported` (name, checksum) that are not what the files hold, sorted.

    A parameter that the files do not explain differs, and so does one that the server lacks.
    """
    tensors = read_tensors(model.weight_files)
    wrong = []
    for name, checksum in reported.items():
        tensor = _as_served(name, tensors)
        if tensor is None or _checksum(tensor.to(DTYPES[dtype])) != checksum:
            wrong.append(name)
    return sorted([*wrong, *_unserved(tensors.keys(), reported.keys(), model)])


def _as_served(name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The tensor behind SGLang's parameter `name`, or None."""
    experts, _, fused = name.rpartition(".")
    for parts in _EXPERTS.get(fused, ()):
        if any(f"{experts}.0.{part}.weight" in tensors for part in parts):
            return _all_experts(experts, parts, tensors)
    names = [name]
    for fused, parts in _FUSED.items():
        if f".{fused}." in name:
            names = [name.replace(fused, part) for part in parts]
    return _joined(names, tensors)


def _all_experts(
    experts: str, parts: Sequence[str], tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """[experts, rows, columns]: the parts of each expert below each other."""
    joined: list[torch.Tensor] = []
    for number in itertools.count():
        names = [f"{experts}.{number}.{part}.weight" for part in parts]
        if not any(name in tensors for name in names):
            return torch.stack(joined)
        one = _joined(names, tensors)
        if one is None:
            return None
        joined.append(one)
    raise AssertionError("the loop ends behind the last expert")


def _joined(names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    if any(name not in tensors for name in names):
        return None
    return torch.cat([_padded(name, tensors[name]) for name in names])


def _padded(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """With zeros up to the multiples that SGLang rounds sizes to on a CPU."""
    for suffix, multiple in _PADDED_ROWS.items():
        if name.endswith(suffix):
            return torch.nn.functional.pad(tensor, (0, 0, 0, -tensor.shape[0] % multiple))
    for suffix, multiple in _PADDED_COLUMNS.items():
        if name.endswith(suffix):
            return torch.nn.functional.pad(tensor, (0, -tensor.shape[1] % multiple))
    return tensor


def _unserved(stored: Collection[str], served: Collection[str], model: ModelDirectory) -> list[str]:
    """Tensors of the files that no parameter of the server stands for."""
    tied = bool(model.config.get("tie_word_embeddings"))
    missing = []
    for name in stored:
        idle = name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")
        if _served_name(name) not in served and not idle:
            missing.append(name)
    return missing


def _served_name(name: str) -> str:
    """The parameter of the server that a tensor of the files is part of."""
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        for fused, spellings in _EXPERTS.items():
            if any(expert["part"] in parts for parts in spellings):
                return f"{expert['experts']}.{fused}"
    fused_name = {part: fused for fused, parts in _FUSED.items() for part in parts}
    return ".".join(fused_name.get(word, word) for word in name.split("."))


def _checksum(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()[:16]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsNotFoundError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise WeightsNotFoundError(f"{path} holds no JSON object")
    return value


def _weight_files(path: Path) -> tuple[Path, ...]:
    names = {_SINGLE}
    if (path / _INDEX).is_file():
        weight_map = _read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise WeightsNotFoundError(f"{path / _INDEX} has no weight_map")
        names = {str(name) for name in weight_map.values()}
        if any(Path(name).name != name for name in names):
            raise WeightsNotFoundError(f"{path / _INDEX} names a file outside its directory")
    files = tuple(path / name for name in sorted(names))
    for file in files:
        if not file.is_file():
            raise WeightsNotFoundError(f"{file} does not exist: no complete weights there")
    return files
