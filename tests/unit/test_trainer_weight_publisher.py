"""Published weights are what transformers loads, whole under their final name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.trainer.ranks import Ranks
from services.trainer.replica import GatherWeights, Open, Replica, WholeWeights
from services.trainer.weight_publisher import WeightPublisher
from tests.tiny_models import SGLANG_FAMILIES
from tests.trainer_support import make_model, trainer_settings

FILE = "model.safetensors"


def gather(model: Path, dtype: str = "float32", lora_rank: int = 0) -> WholeWeights:
    torch.set_num_threads(1)
    replica = Replica(Ranks())
    settings = trainer_settings(dtype=dtype, lora_rank=lora_rank)
    replica.execute(Open(model, settings, 1.0, None))
    whole = replica.execute(GatherWeights())
    assert isinstance(whole, WholeWeights)
    return whole


def publish(
    root: Path, model: Path, version: int, dtype: str = "float32", lora_rank: int = 0
) -> Path:
    whole = gather(model, dtype, lora_rank)
    uri = WeightPublisher(root, model).publish(version, whole.tensors, whole.config)
    assert uri.startswith("file:///")
    return Path(urlsplit(uri).path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_transformers_loads_what_was_published(tmp_path, tied, dtype):
    model = make_model(tmp_path / "model", tied=tied)
    path = publish(tmp_path / "weights", model, 0, dtype)
    wanted = getattr(torch, dtype)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert loaded.dtype == wanted
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    assert loaded.state_dict().keys() == original.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, original[name].to(wanted)), name


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("family", SGLANG_FAMILIES)
def test_the_tensors_have_the_names_and_bits_of_the_files_that_they_came_from(
    tmp_path, family, lora_rank
):
    """Of experts too, which the trainer keeps in one tensor: engines read one for each."""
    model = make_model(tmp_path / "model", family=family)
    published = load_file(publish(tmp_path / "weights", model, 0, lora_rank=lora_rank) / FILE)
    original = load_file(model / FILE)
    assert published.keys() == original.keys()
    assert all(torch.equal(published[name], original[name]) for name in original)


def test_the_manifest_names_every_other_file_with_its_hash(tmp_path):
    model = make_model(tmp_path / "model")
    path = publish(tmp_path / "weights", model, 3)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["weight_version"] == 3
    assert path == tmp_path / "weights" / "step_000003"
    files = {file.name for file in path.iterdir()} - {"manifest.json"}
    assert manifest["files"].keys() == files
    assert files >= {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}
    for name, entry in manifest["files"].items():
        content = (path / name).read_bytes()
        assert entry == {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }


def test_at_least_three_versions_stay_and_none_of_a_lost_past(tmp_path):
    model = make_model(tmp_path / "model")
    whole = gather(model)
    publisher = WeightPublisher(tmp_path / "weights", model)
    for version in range(6):
        publisher.publish(version, whole.tensors, whole.config)
    names = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert names == ["step_000002", "step_000003", "step_000004", "step_000005"]
    publisher.publish(4, whole.tensors, whole.config)  # the run was rewound
    names = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert names == ["step_000002", "step_000003", "step_000004"]


def test_a_version_that_is_published_again_is_replaced_whole(tmp_path):
    model = make_model(tmp_path / "model")
    whole = gather(model)
    publisher = WeightPublisher(tmp_path / "weights", model)
    publisher.publish(1, whole.tensors, whole.config)
    leftover = tmp_path / "weights" / "step_000001" / "stray"
    leftover.touch()
    halved = {name: tensor / 2 for name, tensor in whole.tensors.items()}
    publisher.publish(1, halved, whole.config)
    assert not leftover.exists()
    loaded = AutoModelForCausalLM.from_pretrained(leftover.parent).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in halved.items())
