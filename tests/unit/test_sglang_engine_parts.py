"""The parts of the SGLang engine that need no SGLang."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollpacker import sampling
from rollpacker.placement.shape import read_shape
from rollpacker.types import FinishReason
from services.rollout.engine import (
    EngineError,
    GenerationProgress,
    InvalidRequestError,
    WeightsNotFoundError,
)
from services.rollout.settings import RolloutServiceSettings
from services.rollout.sglang_engine import SglangEngine, SglangOptions, launch, served_model
from services.rollout.sglang_engine.client import (
    SglangGoneError,
    UnsupportedVersionError,
    check_version,
)
from services.rollout.sglang_engine.group_stream import EngineCounters, GroupStream
from tests.engine_contract import request, seeded
from tests.tiny_models import EXPERTS, save_model

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> served_model.ModelDirectory:
    return served_model.read_directory(save_model(tmp_path_factory.mktemp("model")))


def test_a_model_directory_knows_its_weights_in_kv_tokens(model):
    assert model.weight_kv_tokens == read_shape(model.path).weight_kv_tokens > 0


@pytest.mark.parametrize("version", ["0.5.20", "0.5.9.post2", "0.4.99", "unknown", ""])
def test_an_older_version_is_refused_with_its_number(version):
    with pytest.raises(UnsupportedVersionError, match=f"SGLang {version} is not supported"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.5.21", "0.5.21.post1", "0.5.23", "0.6.0rc1", "1.0"])
def test_later_versions_are_taken(version):
    check_version(version)


def test_the_noise_hash_for_sglang_on_a_cpu_is_the_noise_of_all_engines():
    place = launch.SHIMS / "sgl_kernel" / "__init__.py"
    spec = importlib.util.spec_from_file_location("sgl_kernel_shim", place)
    kernel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernel)
    seeds = [0, 1, 2**31, 2**32 + 5, 2**63 - 1]
    positions = [0, 1, 77, 100_000, 2**31 - 1]
    columns = [0, 1, 2, 151_999]
    hashed = torch.ops.sgl_kernel.murmur_hash32_cpu(
        torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.tensor(columns)
    )
    expected = [
        [int(sampling.noise_bits(sampling.seed_state(seed), position, c)) for c in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert hashed.dtype == torch.uint32
    assert np.array_equal(hashed.numpy(), np.array(expected))
    with pytest.raises(NotImplementedError, match="fused_experts does not run on a CPU"):
        kernel.fused_experts()


def test_the_command_of_a_server_names_budget_slots_and_size():
    options = SglangOptions(
        python="python", slots=7, kv_budget_tokens=100, extra_arguments=("--enable-metrics",)
    )
    command = launch.command(options, Path("/model"), 1234, 2)
    given = dict(zip(command, command[1:], strict=False))
    assert given["--max-total-tokens"] == str(100 + launch.RESERVED_TOKENS)
    assert (given["--max-running-requests"], given["--tp-size"]) == ("7", "2")
    assert "--enable-deterministic-inference" in command
    assert command[-1] == "--enable-metrics"
    environment = launch.environment(options, 2)
    assert environment["PYTHONPATH"].split(":")[0] == str(launch.SHIMS)
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"


def test_a_gpu_server_gets_no_shims():
    options = SglangOptions(device="cuda:1", environment={"PYTHONPATH": "/elsewhere"})
    command = launch.command(options, Path("/model"), 1234, 1)
    given = dict(zip(command, command[1:], strict=False))
    assert (given["--device"], given["--base-gpu-id"]) == ("cuda", "1")
    assert "--attention-backend" not in command
    assert launch.environment(options, 1)["PYTHONPATH"] == "/elsewhere"


def test_sglang_is_shown_the_model_without_its_own_stop_tokens(model, tmp_path):
    assert model.config["eos_token_id"] == 2
    shown = served_model.show(model, tmp_path / "shown")
    config = json.loads((shown / "config.json").read_text())
    assert config == {**model.config, "eos_token_id": None}
    assert sorted(path.name for path in shown.iterdir()) == ["config.json", "model.safetensors"]
    assert (shown / "model.safetensors").samefile(model.weight_files[0])


def reported(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Checksums as SGLang would tell them: fused, padded (48 inner rows to 64, 17 tokens to 64)."""
    pad = torch.nn.functional.pad
    shown = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            parts = [
                tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")
            ]
            shown[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif ".gate_proj." in name:
            up = tensors[name.replace("gate_proj", "up_proj")]
            shown[name.replace("gate_proj", "gate_up_proj")] = torch.cat(
                [pad(tensor, (0, 0, 0, 16)), pad(up, (0, 0, 0, 16))]
            )
        elif ".down_proj." in name:
            shown[name] = pad(tensor, (0, 16))
        elif "embed_tokens" in name or "lm_head" in name:
            shown[name] = pad(tensor, (0, 0, 0, 47))
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            shown[name] = tensor
    return {name: served_model._checksum(tensor) for name, tensor in shown.items()}


def test_weights_are_proven_parameter_by_parameter(model):
    tensors = load_file(model.weight_files[0])
    checksums = reported(tensors)
    assert served_model.differing_parameters(model, "float32", checksums) == []
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name].clone()
    tensors[name][0, 0] += 1e-6
    fused = name.replace("k_proj", "qkv_proj")
    assert served_model.differing_parameters(model, "float32", reported(tensors)) == [fused]
    del checksums["model.norm.weight"]
    assert served_model.differing_parameters(model, "float32", checksums) == ["model.norm.weight"]
    checksums = {**reported(load_file(model.weight_files[0])), "model.extra": "0" * 16}
    assert served_model.differing_parameters(model, "float32", checksums) == ["model.extra"]


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_proven_as_sglang_stacks_them(tmp_path, family):
    """24 and 48 inner rows are padded to 32 and 64."""
    directory = served_model.read_directory(save_model(tmp_path, family))
    tensors = load_file(directory.weight_files[0])
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else PROJECTIONS
    own = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    stacked = {}
    for stem in {name.partition(".experts.")[0] + ".experts" for name in tensors.keys() - own}:
        parts = [[tensors[f"{stem}.{i}.{x}.weight"] for x in (gate, up, down)] for i in range(4)]
        rows = -parts[0][0].shape[0] % 32
        pad = torch.nn.functional.pad
        stacked[f"{stem}.w13_weight"] = torch.stack(
            [torch.cat([pad(x, (0, 0, 0, rows)) for x in (g, u)]) for g, u, _ in parts]
        )
        stacked[f"{stem}.w2_weight"] = torch.stack([pad(d, (0, rows)) for _, _, d in parts])
    assert len(stacked) == 4
    checksums = reported(own) | {n: served_model._checksum(t) for n, t in stacked.items()}
    assert served_model.differing_parameters(directory, "float32", checksums) == []
    for name, tensor in stacked.items():
        changed = tensor.clone()
        changed[3, 0, 0] += 1e-6
        wrong = checksums | {name: served_model._checksum(changed)}
        assert served_model.differing_parameters(directory, "float32", wrong) == [name]
        missing = {other: value for other, value in checksums.items() if other != name}
        assert served_model.differing_parameters(directory, "float32", missing)


def test_weights_that_are_not_finite_are_refused(model, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(model.config)))
    tensors = load_file(model.weight_files[0])
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequestError, match=r"model\.norm\.weight holds values"):
        served_model.read_directory(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}')
    with pytest.raises(WeightsNotFoundError, match="outside its directory"):
        served_model.read_directory(tmp_path)


class ScriptedClient:
    """Answers each submission of a group with the next script of chunks."""

    url = "http://scripted"

    def __init__(self, *scripts) -> None:
        self.scripts = list(scripts)
        self.bodies: list[dict] = []

    async def serving(self):
        return self

    async def stream(self, body):
        self.bodies.append(body)
        for index, token_ids, completed, finish in self.scripts.pop(0):
            yield {
                "output_ids": token_ids,
                "meta_info": {
                    "id": body["rid"][index],
                    "completion_tokens": completed,
                    "output_token_logprobs": [[-0.5, token, None] for token in token_ids],
                    "finish_reason": finish,
                    "num_retractions": 1,
                },
            }
        if self.scripts:
            raise SglangGoneError("broke off")


LENGTH = {"type": "length", "length": 4}


async def events_of(client: ScriptedClient, requests) -> tuple[list, EngineCounters]:
    counters = EngineCounters()
    group = GroupStream(requests, 2, counters)
    await group.run(client.serving)
    return [group.events.get_nowait() for _ in range(group.events.qsize())], counters


async def test_what_a_lost_server_left_goes_on_at_the_next_behind_its_tokens():
    client = ScriptedClient(
        [(0, [5], 1, None), (1, [7, 7], 2, None), (0, [6, 4, 4], 4, LENGTH)],
        [(0, [8, 9], 2, LENGTH)],
    )
    events, counters = await events_of(
        client, seeded(2, max_response_tokens=4, stop_token_ids=frozenset())
    )
    results = {e.request_id: e for e in events if not isinstance(e, GenerationProgress)}
    assert results["r1"].token_ids == (5, 6, 4, 4)
    assert results["r2"].token_ids == (7, 7, 8, 9)
    assert {result.finish_reason for result in results.values()} == {FinishReason.LENGTH}
    first, second = client.bodies
    assert second["input_ids"] == [[*first["input_ids"][1], 7, 7]]
    assert second["sampling_params"][0]["max_new_tokens"] == 2
    assert not set(first["rid"]) & set(second["rid"])
    assert len({len(name) for name in (*first["rid"], *second["rid"])}) == 1
    assert (counters.retractions, counters.generated_tokens) == (3, 8)


async def test_chunks_that_repeat_tokens_add_only_the_new_ones():
    client = ScriptedClient(
        [(0, [5], 1, None), (0, [5, 6, 7], 3, None), (0, [5, 6, 7, 8], 4, LENGTH)]
    )
    events, _ = await events_of(client, [request(max_response_tokens=4)])
    assert events[-1].token_ids == (5, 6, 7, 8)
    assert [e.new_token_ids for e in events[:-1]] == [{"r1": (5,)}, {"r1": (6, 7)}]
    assert [len(e.new_logprobs["r1"]) for e in events[:-1]] == [1, 2]
    assert sum((e.new_logprobs["r1"] for e in events[:-1]), ()) == events[-1].logprobs[:3]


@pytest.mark.parametrize(
    "finish",
    [
        {"type": "stop", "matched": 2},  # the model's own end of text
        {"type": "length", "length": 2},  # not the cap
        {"type": "abort", "message": "out of memory"},  # nobody asked for it
    ],
)
async def test_an_end_that_nobody_asked_for_is_an_error(finish):
    events, _ = await events_of(ScriptedClient([(0, [5, 2], 2, finish)]), [request()])
    assert isinstance(events[-1], EngineError)
    assert str(finish) in str(events[-1])


def fake_sglang(place: Path, body: str, version: str = "0.5.21") -> SglangOptions:
    """Options for an interpreter whose `sglang.launch_server` is `body`."""
    metadata = place / f"sglang-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    (place / "sglang").mkdir()
    (place / "sglang" / "__init__.py").touch()
    (place / "sglang" / "launch_server.py").write_text(body)
    return SglangOptions(python=sys.executable, environment={"PYTHONPATH": str(place)})


@pytest.mark.parametrize(
    ("version", "named"),
    [("0.5.21", "no luck today"), ("0.5.20", r"SGLang 0\.5\.20 is not supported")],
)
async def test_a_server_that_cannot_start_is_told_with_its_reason(model, tmp_path, version, named):
    options = fake_sglang(tmp_path, "raise SystemExit('no luck today')", version)
    engine = SglangEngine(options)
    try:
        with pytest.raises(EngineError, match=named):
            await engine.load_weights(model.path)
        with pytest.raises(EngineError, match="no weights"):
            await anext(engine.generate([request()], 16))
    finally:
        await engine.close()


async def test_an_interpreter_without_sglang_is_told(model):
    engine = SglangEngine(SglangOptions(python=sys.executable))
    try:
        with pytest.raises(EngineError, match="has no SGLang"):
            await engine.load_weights(model.path)
    finally:
        await engine.close()


def test_settings_refuse_a_type_that_sglang_lacks(tmp_path):
    values = {"weights_root": tmp_path, "worker_id": "w", "coordinator_address": "127.0.0.1:1"}
    with pytest.raises(ValueError, match="float64 is not one of SGLang's"):
        RolloutServiceSettings(**values, engine="sglang", dtype="float64")
    assert RolloutServiceSettings(**values, engine="sglang").engine == "sglang"
