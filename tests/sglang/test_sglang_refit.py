"""The three ways by which weights enter SGLang, each proven by its checksum of every parameter.

The service itself brings a verified directory to the host and loads from disk (`rollpacker.refit`);
that SGLang takes tensors and a gloo broadcast too is shown here, by what it reports afterwards.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.distributed
import torch.multiprocessing
from safetensors.torch import load_file

from services.rollout.sglang_engine import served_model
from tests.engine_contract import TOLERANCE, essence, seeded, worst_logprob_difference

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

HOST, GROUP = "127.0.0.1", "refit"
SECONDS = 60.0
_dist: Any = torch.distributed


async def post(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as http:
        answer = await http.post(path, json=body or {})
    assert answer.is_success, answer.text
    return answer.json() if answer.content else None


async def by_disk(url: str, directory: Path) -> None:
    await post(url, "/update_weights_from_disk", {"model_path": str(directory)})


async def by_tensor(url: str, directory: Path) -> None:
    tensors = list(load_file(directory / "model.safetensors").items())
    torch.multiprocessing.set_sharing_strategy("file_system")  # the server is no child of this
    try:
        content = io.BytesIO()
        ForkingPickler(content).dump(tensors)
        payload = base64.b64encode(content.getvalue()).decode()
        body = {"serialized_named_tensors": [payload], "flush_cache": True}
        await post(url, "/update_weights_from_tensor", body)
    finally:
        torch.multiprocessing.set_sharing_strategy("file_descriptor")


async def by_broadcast(url: str, directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    timeout = timedelta(seconds=SECONDS)
    store = _dist.TCPStore(HOST, 0, None, True, timeout, wait_for_workers=False)
    place = {
        "master_address": HOST,
        "master_port": store.port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": GROUP,
        "backend": "gloo",
    }
    joined = asyncio.create_task(post(url, "/init_weights_update_group", place))
    group = await asyncio.to_thread(_sender, store, timeout)
    await joined
    body = {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "group_name": GROUP,
        "flush_cache": True,
    }
    updated = asyncio.create_task(post(url, "/update_weights_from_distributed", body))
    for tensor in tensors.values():
        await asyncio.to_thread(group.broadcast([tensor]).wait)
    await updated
    await post(url, "/destroy_weights_update_group", {"group_name": GROUP})


def _sender(store: Any, timeout: timedelta) -> Any:
    """Rank 0 of the group that SGLang makes: it names its keys by group, then by device."""
    for prefix in (GROUP, f"{GROUP}/", "cpu/"):
        store = _dist.PrefixStore(prefix, store)
    return _dist.ProcessGroupGloo(store, 0, 2, timeout)


@pytest.mark.parametrize("carrier", [by_disk, by_tensor, by_broadcast])
async def test_what_a_carrier_brought_is_what_sglang_holds_and_samples_from(
    subject, tmp_path, carrier
):
    before = await subject.run(seeded(4))
    other = served_model.read_directory(subject.other)
    url = subject.engine._server.client.url
    shown = served_model.show(other, tmp_path / "shown")
    session = carrier is not by_disk  # tensors come one after the other, within a session
    if session:
        await post(url, "/begin_weight_update")
    await carrier(url, shown)
    if session:
        await post(url, "/end_weight_update")
    (rank,) = (await post(url, "/weights_checker", {"action": "checksum"}))["ranks"]
    assert served_model.differing_parameters(other, "float32", rank["checksums"]) == []
    print(json.dumps({"carrier": carrier.__name__, "parameters_proven": len(rank["checksums"])}))
    between = await subject.run(seeded(4))
    assert worst_logprob_difference(subject.other, between.values(), 1.0) < TOLERANCE
    await subject.engine.load_weights(subject.directory)
    after = await subject.run(seeded(4))
    assert {n: essence(r) for n, r in after.items()} == {n: essence(r) for n, r in before.items()}
