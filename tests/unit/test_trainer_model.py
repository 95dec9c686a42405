"""How the trainer's model comes to its devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from services.trainer.lora import Lora
from services.trainer.model import PolicyModel
from tests.trainer_support import make_model


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("lora", [None, Lora(2, 4)])
def test_a_model_is_sharded_before_it_moves_and_holds_the_same_bits(
    tmp_path: Path, mesh: DeviceMesh, lora: Lora | None
) -> None:
    """A device that forgets numbers: had the whole model been on it, they would be gone."""
    directory = make_model(tmp_path / "model")
    forgets = torch.device("meta")
    torch.manual_seed(0)
    sharded = PolicyModel(directory, "float32", forgets, mesh, lora=lora)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.module.parameters())
    torch.manual_seed(0)
    whole = PolicyModel(directory, "float32", torch.device("cpu"), None, lora=lora)
    ours, theirs = dict(sharded.whole_tensors()), dict(whole.whole_tensors())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
