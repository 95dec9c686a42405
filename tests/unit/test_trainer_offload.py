"""Offload moves every tensor of weights and optimizer, and keeps the parameters what they are."""

from __future__ import annotations

import torch
from torch import nn

from services.trainer.offload import Offload

META = torch.device("meta")  # a device that every machine has, though it holds no numbers


def test_weights_and_moments_move_and_the_step_count_stays_on_the_host():
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    offload = Offload([module], optimizer, META)
    offload.put_away()
    offload.bring_back()
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    for state in optimizer.state.values():
        assert (state["exp_avg"].device.type, state["exp_avg_sq"].device.type) == ("meta", "meta")
        assert state["step"].item() == 1.0


def test_on_the_host_nothing_moves_and_parameters_stay_the_same_objects():
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = [(id(p), p.data_ptr()) for p in module.parameters()]
    offload = Offload([module], optimizer, torch.device("cpu"))
    for _ in range(2):
        offload.put_away()
    offload.bring_back()
    assert [(id(p), p.data_ptr()) for p in module.parameters()] == before
    assert len(optimizer.state) == 2
