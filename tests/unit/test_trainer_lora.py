"""LoRA: an adapter is trained, and every way in which it is published computes the same."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollpacker.refit.adapter import AdapterError, merged
from services.rollout.engine import InvalidRequestError
from services.rollout.sglang_engine.served_model import read_directory
from services.rollout.torch_engine.decoder_config import read_config
from services.rollout.torch_engine.weights import read_weights
from services.trainer.packing import StreamPacker
from services.trainer.ranks import Ranks
from services.trainer.replica import (
    Accumulate,
    GatherWeights,
    Open,
    Replica,
    SaveTensors,
    Update,
    WholeWeights,
)
from services.trainer.weight_publisher import WeightPublisher, merge
from tests.trainer_support import make_group, make_model, trainer_settings

PROMPT = torch.tensor([[1, 2, 3, 4, 5, 6]])


@dataclass
class Trained:
    """A model before, and a replica after a few steps of its adapter."""

    model: Path
    replica: Replica

    def publish(self, directory: Path, *versions: int) -> Path:
        """The last of these versions, published as OpenRun does."""
        publisher = WeightPublisher(directory, self.model)
        uri = ""
        for version in versions:
            whole = self.replica.execute(GatherWeights(with_base=version == versions[0]))
            assert isinstance(whole, WholeWeights)
            uri = publisher.publish(version, whole.tensors, whole.config, whole.adapter)
        return Path(urlsplit(uri).path)


def open_replica(model: Path, publish: str, checkpoint: Path | None = None) -> Replica:
    torch.set_num_threads(1)
    replica = Replica(Ranks())
    settings = trainer_settings(lora_rank=3, lora_publish=publish, learning_rate=0.02)
    replica.execute(Open(model, settings, 1.0, checkpoint))
    return replica


def train(replica: Replica, step: int) -> None:
    packer = StreamPacker(1, 96)
    for index in range(5):
        packer.add(make_group(10 * step + index, step))
    ((window,),) = packer.flush()
    replica.execute(Accumulate(window))
    replica.execute(Update())


def make_trained(directory: Path, publish: str) -> Trained:
    model = make_model(directory / "model")
    replica = open_replica(model, publish)
    for step in range(3):
        train(replica, step)
    return Trained(model, replica)


def logits(directory: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(PROMPT).logits


def trained_logits(replica: Replica) -> torch.Tensor:
    with torch.no_grad():
        return replica._opened.model.module(PROMPT).logits


def test_the_first_policy_is_the_initial_model_and_only_the_adapter_is_trained(tmp_path):
    model = make_model(tmp_path / "model")
    replica = open_replica(model, "merged")
    assert torch.equal(trained_logits(replica), logits(model))
    before = {name: t.clone() for name, t in replica._opened.model.module.state_dict().items()}
    train(replica, 0)
    train(replica, 1)
    for name, tensor in replica._opened.model.module.state_dict().items():
        assert torch.equal(tensor, before[name]) == ("lora" not in name), name
    assert (trained_logits(replica) - logits(model)).abs().max() > 0.01


def test_merged_weights_are_a_plain_model_that_computes_what_is_trained(tmp_path):
    trained = make_trained(tmp_path, "merged")
    path = trained.publish(tmp_path / "weights", 3)
    assert not list(path.glob("adapter*"))
    original = AutoModelForCausalLM.from_pretrained(trained.model).state_dict()
    assert AutoModelForCausalLM.from_pretrained(path).state_dict().keys() == original.keys()
    assert torch.allclose(logits(path), trained_logits(trained.replica), atol=1e-5)


def test_an_adapter_beside_its_base_is_what_peft_engine_and_merge_take_for_the_same(tmp_path):
    trained = make_trained(tmp_path, "adapter")
    path = trained.publish(tmp_path / "weights", 2, 3)
    expected = trained_logits(trained.replica)
    base = AutoModelForCausalLM.from_pretrained(trained.model, dtype=torch.float32)
    with torch.no_grad():
        ours = PeftModel.from_pretrained(base, path)(PROMPT).logits
    assert torch.allclose(ours, expected, atol=1e-5)
    merge(path, tmp_path / "plain")
    assert torch.allclose(logits(tmp_path / "plain"), expected, atol=1e-5)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    served = read_weights(path, read_config(path))
    assert served.keys() == plain.keys()
    assert all(torch.equal(served[name], plain[name]) for name in plain)


def test_the_base_is_written_once_and_outlives_the_version_that_brought_it(tmp_path):
    trained = make_trained(tmp_path, "adapter")
    weights = tmp_path / "weights"
    path = trained.publish(weights, *range(7))
    assert not (weights / "step_000000").exists()
    files = [version / "model.safetensors" for version in sorted(weights.iterdir())]
    assert len({file.stat().st_ino for file in files}) == 1
    assert (path / "adapter_model.safetensors").stat().st_size < files[0].stat().st_size


def test_a_run_that_is_opened_with_another_model_publishes_its_base(tmp_path):
    first = make_trained(tmp_path / "first", "adapter")
    first.publish(tmp_path / "weights", 0)
    other = Trained(make_model(tmp_path / "other", seed=8), first.replica)
    other.replica = open_replica(other.model, "adapter")
    path = other.publish(tmp_path / "weights", 0, 1)
    assert torch.equal(
        load_file(path / "model.safetensors")["model.embed_tokens.weight"],
        load_file(other.model / "model.safetensors")["model.embed_tokens.weight"],
    )


def test_a_checkpoint_holds_the_adapter_alone_and_resumes_to_the_last_bit(tmp_path):
    trained = make_trained(tmp_path, "merged")
    (tmp_path / "saved").mkdir()
    written = trained.replica.execute(SaveTensors(tmp_path / "saved"))
    assert isinstance(written, Future)
    names = {key for key in written.result().state_dict_metadata if key.startswith("model.")}
    assert names
    assert all("lora" in name for name in names)
    resumed = open_replica(trained.model, "merged", tmp_path / "saved")
    for replica in (trained.replica, resumed):
        train(replica, 3)
    assert torch.equal(trained_logits(resumed), trained_logits(trained.replica))


def test_an_engine_that_adds_no_adapter_refuses_one(tmp_path):
    path = make_trained(tmp_path, "adapter").publish(tmp_path / "weights", 3)
    with pytest.raises(InvalidRequestError, match="lora_publish"):
        read_directory(path)


@pytest.mark.parametrize(
    "name", ["base_model.model.other.lora_A.weight", "base_model.model.x.modules_to_save.weight"]
)
def test_an_adapter_of_other_weights_is_refused(name):
    with pytest.raises(AdapterError):
        merged({"x.weight": torch.zeros(2, 2)}, {name: torch.zeros(1, 2)}, 1.0)
