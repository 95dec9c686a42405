"""The memory of a model, against numbers worked out by hand, and what the planner makes of it.

The shapes are those of the config.json of Qwen2.5 7B, 14B and 32B (Hugging Face, Qwen/Qwen2.5-*).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from typer.testing import CliRunner

from rollpacker.cli.main import app
from rollpacker.placement import (
    Job,
    Machine,
    ModelShape,
    Placement,
    PlacementError,
    Proposal,
    memory,
    propose,
)
from rollpacker.placement.memory import GIB
from rollpacker.placement.shape import parse_shape
from rollpacker.settings import SettingsError


def config(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }


CONFIGS = {
    "7b": config(3584, 18944, 28, 28, 4),
    "14b": config(5120, 13824, 48, 40, 8),
    "32b": config(5120, 27648, 64, 40, 8),
}
SEVEN, FOURTEEN, THIRTY_TWO = (parse_shape(values) for values in CONFIGS.values())
JOB = Job(sequence_tokens=8192)


def machine(gpus: int, gib: int = 80) -> Machine:
    return Machine(gpus, gib * GIB)


@pytest.mark.parametrize(
    ("shape", "parameters", "kv_bytes"),
    [
        (SEVEN, 7_615_616_512, 57_344),  # 2 x 28 layers x 4 heads x 128 x 2 B
        (FOURTEEN, 14_770_033_664, 196_608),  # 2 x 48 x 8 x 128 x 2
        (THIRTY_TWO, 32_763_876_352, 262_144),  # 2 x 64 x 8 x 128 x 2
    ],
)
def test_parameters_and_kv_bytes_are_those_of_the_published_models(
    shape: ModelShape, parameters: int, kv_bytes: int
) -> None:
    assert shape.parameters == parameters
    assert memory.kv_bytes_per_token(shape, 1) == kv_bytes
    assert memory.engine_weights(shape, 2).size == parameters  # 2 bytes over 2 ranks
    assert memory.trainer_states(shape, 8).size == 2 * parameters  # 16 bytes over 8 shards


def test_a_decode_step_reads_the_weights_without_the_input_table() -> None:
    """14B: (14,770,033,664 - 152,064 x 5,120) numbers, of a token 98,304."""
    assert FOURTEEN.weight_kv_tokens == 142_329


def test_more_ranks_than_heads_of_keys_copy_a_head() -> None:
    assert memory.kv_bytes_per_token(SEVEN, 4) == memory.kv_bytes_per_token(SEVEN, 8) == 14_336


def test_the_parts_of_seven_billion_on_three_shards() -> None:
    # A layer: 12,845,056 + 3,584 (q), 2 x (1,835,008 + 512) (k, v), 12,845,056 (o),
    # 3 x 3,584 x 18,944 (feed-forward), 2 x 3,584 (norms).
    assert SEVEN.layer_parameters == 233_057_792
    assert SEVEN.root_parameters == 2 * 544_997_376 + 3_584
    assert memory.gathered(SEVEN, 3).size == 10 * 233_057_792 + 8 * 1_089_998_336
    assert memory.head_work(SEVEN).size == GIB // 2 + 6 * 544_997_376
    # 8 x 3,584 + 4 x 18,944 + 2 x (3,584 + 512) + 4 + 2 x 28 numbers of 2 bytes
    assert memory.saved_layer_bytes(SEVEN, 3) == 2 * 112_700
    assert memory.activation_bytes_per_token(SEVEN, 3, False) == 28 * 225_400
    assert memory.activation_bytes_per_token(SEVEN, 3, True) == 28 * 2 * 3_584 + 225_400


def test_seven_billion_on_eight_gpus_trains_on_three_and_samples_on_five() -> None:
    found = propose(SEVEN, machine(8), JOB)
    assert found.placement is Placement.SEPARATE
    assert (found.trainer.gpus, found.engine.replicas, found.engine.tensor_parallel_size) == (
        3, 5, 1
    )  # fmt: skip
    # usable 0.94 x 80 GiB - 2 GiB, less 4 GiB of the engine and 15,231,233,024 B of weights
    usable = int(80 * GIB * 0.94) - 2 * GIB
    assert found.engine.kv_budget_tokens == (usable - 4 * GIB - 15_231_233_024) // 57_344
    assert found.trainer.activation_checkpointing
    assert found.trainer.micro_batch_tokens == 53_248


def test_two_gpus_cannot_hold_the_passes_of_seven_billion() -> None:
    """States are 16 B x 7.6e9 / 2 = 56.7 GiB; 10.3 GiB gathered and 3.6 GiB of logits come on top,
    which leaves 2.6 GiB of 73.2: too little for 8,192 tokens of 426,104 B."""
    with pytest.raises(PlacementError, match=r"forward and backward needs 73\.\d GiB of 73\.2"):
        propose(SEVEN, machine(3), JOB, Placement.SEPARATE)


def test_fourteen_billion_on_eight_gpus_is_separate_or_takes_turns_when_that_is_wished() -> None:
    """4 shards of 16 B x 14.8e9 are 55.0 GiB each, with 19.0 GiB gathered and of logits over 73.2;
    5 are 44.0 GiB."""
    separate = propose(FOURTEEN, machine(8), JOB)
    assert separate.placement is Placement.SEPARATE
    assert (separate.trainer.gpus, separate.engine.replicas) == (5, 3)
    turns = propose(FOURTEEN, machine(8), JOB, Placement.COLOCATED)
    assert (turns.trainer.gpus, turns.engine.replicas) == (8, 8)
    names = [part.name for part in turns.engine.account.parts]
    assert names == ["weights", "keys and values"]  # the trainer's are in host memory


def test_thirty_two_billion_trains_on_gpus_that_cannot_hold_it_once() -> None:
    """4 B x 32.8e9 = 122 GiB are sharded in host memory; 20 B / 7 of states and update are not
    enough shards for 8 GPUs."""
    with pytest.raises(PlacementError, match=r"update needs 87\.2 GiB of 73\.2 GiB") as refused:
        propose(THIRTY_TWO, machine(8), JOB)
    assert all(account.free < 0 for account in refused.value.accounts)
    found = propose(THIRTY_TWO, machine(16), JOB)
    assert (found.trainer.gpus, found.engine.replicas) == (11, 2)
    assert propose(THIRTY_TWO, machine(16, gib=141), JOB).trainer.gpus <= 8


def test_a_sequence_beyond_the_context_is_refused() -> None:
    with pytest.raises(PlacementError, match="exceed the model's context of 32768"):
        propose(SEVEN, machine(8), Job(sequence_tokens=32769))


@given(
    shape=st.sampled_from([SEVEN, FOURTEEN, THIRTY_TWO]),
    gpus=st.integers(1, 40),
    per_node=st.integers(1, 8),
    gib=st.integers(8, 200),
    sequence=st.integers(1, 32768),
    responses=st.integers(1, 32),
    reference=st.booleans(),
    wish=st.sampled_from([None, *Placement]),
)
def test_a_proposal_fits_and_a_refusal_shows_what_does_not(
    shape: ModelShape,
    gpus: int,
    per_node: int,
    gib: int,
    sequence: int,
    responses: int,
    reference: bool,
    wish: Placement | None,
) -> None:
    there = Machine(gpus, gib * GIB, per_node)
    job = Job(sequence, responses, reference)
    found = propose_or_refusal(shape, there, job, wish)
    if isinstance(found, PlacementError):
        assert all(account.free < 0 for account in found.accounts)
        assert found.accounts or gpus == 1
        return
    engine, trainer = found.engine, found.trainer
    assert all(account.free >= 0 for account in (engine.account, *trainer.accounts))
    assert wish is None or found.placement is wish
    assert engine.replicas >= 1
    assert shape.query_heads % engine.tensor_parallel_size == 0
    assert engine.tensor_parallel_size <= per_node
    assert engine.kv_budget_tokens >= sequence
    assert trainer.micro_batch_tokens >= sequence
    used = engine.replicas * engine.tensor_parallel_size
    if found.placement is Placement.SEPARATE:
        used += trainer.gpus
    assert used <= gpus


def propose_or_refusal(
    shape: ModelShape, there: Machine, job: Job, wish: Placement | None
) -> Proposal | PlacementError:
    try:
        return propose(shape, there, job, wish)
    except PlacementError as error:
        return error


@given(gib=st.integers(16, 160), more=st.integers(0, 80))
def test_larger_gpus_never_turn_a_proposal_into_a_refusal(gib: int, more: int) -> None:
    if isinstance(propose_or_refusal(SEVEN, machine(8, gib), JOB, None), Proposal):
        propose(SEVEN, machine(8, gib + more), JOB)


A30 = {  # Qwen/Qwen3-30B-A3B
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


def test_a_mixture_of_experts_is_counted_whole_and_computes_in_part() -> None:
    """A layer: 18,874,368 of attention, 128 x 3 x 2,048 x 768 of experts, 262,144 of the router,
    4,352 of norms."""
    shape = parse_shape(A30)
    assert shape.layer_parameters == 18_874_368 + 603_979_776 + 262_144 + 4_352
    assert shape.parameters == 30_532_122_624
    dense = dataclasses.replace(shape, experts=0, intermediate_size=8 * 768)
    assert memory.saved_layer_bytes(shape, 8) > memory.saved_layer_bytes(dense, 8)
    found = propose(shape, machine(32), JOB)
    assert found.trainer.gpus + found.engine.replicas * found.engine.tensor_parallel_size <= 32


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts": 0}, "num_experts=0"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok=None"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    ],
)
def test_experts_that_are_not_understood_are_refused_by_name(
    change: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        parse_shape({**A30, **change})


SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
FAMILIES = [LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig]


def small(kind: Any) -> dict[str, Any]:
    """Values of its config.json."""
    if kind is Qwen3MoeConfig:
        return SMALL | EXPERTS | {"moe_intermediate_size": 48}
    return SMALL | EXPERTS if kind is MixtralConfig else SMALL


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_parameters_are_those_that_transformers_makes(kind: Any) -> None:
    made = AutoModelForCausalLM.from_config(kind(**small(kind), num_hidden_layers=3))
    shape = parse_shape(json.loads(made.config.to_json_string()))
    assert shape.parameters == sum(p.numel() for p in made.parameters())


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("shards", [1, 2])
def test_the_activations_of_a_layer_are_what_autograd_keeps(kind: Any, shards: int) -> None:
    """One process computes under autocast; several hold bfloat16 weights while they compute."""
    tokens = 256
    kept = [saved_bytes(kind, layers, shards, tokens) for layers in (2, 3)]
    shape = parse_shape({**small(kind), "model_type": kind.model_type, "num_hidden_layers": 1})
    measured = (kept[1] - kept[0]) / tokens
    assert memory.saved_layer_bytes(shape, shards) == pytest.approx(measured, rel=0.03)


def saved_bytes(kind: Any, layers: int, shards: int, tokens: int) -> int:
    """Bytes that a forward pass leaves for the backward pass, weights and their casts left out."""
    made = AutoModelForCausalLM.from_config(
        kind(**small(kind), num_hidden_layers=layers), attn_implementation="sdpa"
    )
    made.train(False)
    if shards > 1:
        made = made.to(torch.bfloat16)
    weights = {tuple(sorted(p.shape)) for p in made.parameters()}  # transposed ones too
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tuple(sorted(tensor.shape)) not in weights:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage
        return tensor

    cast = torch.autocast("cpu", torch.bfloat16, enabled=shards == 1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), cast:
        output = made(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False,
                      logits_to_keep=1)  # fmt: skip
    assert output.logits.requires_grad
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2'"),
        ({"num_experts": 8}, "num_experts=8"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        parse_shape({**CONFIGS["7b"], **change})


def plan(directory: Path, name: str, *options: str) -> Any:
    (directory / "config.json").write_text(json.dumps(CONFIGS[name]))
    return CliRunner().invoke(app, ["plan", "--model", str(directory), *options])


def test_the_command_shows_the_arithmetic_and_the_settings(tmp_path: Path) -> None:
    said = plan(tmp_path, "7b", "--gpus", "8")
    assert said.exit_code == 0
    assert "2 B x 7.62e9 / TP 1" in said.stdout
    assert "trainer.micro_batch_tokens=53248" in said.stdout
    assert "5 replicas of TP 1" in said.stdout


def test_the_command_names_the_settings_of_an_engine_on_several_gpus(tmp_path: Path) -> None:
    options = ("--gpus", "16", "--gpu-memory", "141", "--sequence-tokens", "32768")
    said = plan(tmp_path, "32b", *options, "--responses", "16")
    assert said.exit_code == 0
    assert "replicas of TP 2" in said.stdout
    assert "tail_batching.max_tensor_parallel_size=2" in said.stdout


def test_the_command_refuses_with_the_arithmetic(tmp_path: Path) -> None:
    said = plan(tmp_path, "7b", "--gpus", "1")
    assert said.exit_code == 1
    assert "does not fit into 71.20" in said.stdout
    assert "colocated: 1 GPUs for the trainer" in said.stderr


def test_the_command_names_a_file_that_it_cannot_read(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["plan", "--model", str(tmp_path), "--gpus", "8"])
    assert said.exit_code == 2
    assert "config.json cannot be read" in said.stderr
