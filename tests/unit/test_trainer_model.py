"""How the trainer's model comes to its devices."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    PreTrainedConfig,
)

from services.trainer.lora import Lora
from services.trainer.model import PolicyModel
from services.trainer.model_loading import ModelNotFoundError
from tests.tiny_models import EXPERTS, tiny_config
from tests.trainer_support import VOCABULARY, make_model

CPU = torch.device("cpu")
PROMPT = torch.tensor([[1, 2, 3, 4]])


@contextlib.contextmanager
def one_of(ranks: int, rank: int) -> Iterator[DeviceMesh]:
    """The mesh as this rank sees it; of several ranks the others do not exist."""
    alone = ranks == 1
    store = dist.HashStore() if alone else FakeStore()
    dist.init_process_group("gloo" if alone else "fake", store=store, rank=rank, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone."""
    with one_of(1, 0) as mesh:
        yield mesh


def stored(directory: Path, dtype: torch.dtype, *, tied: bool = True, files: int = 1) -> Path:
    """A model whose files hold its numbers in this dtype."""
    module = AutoModelForCausalLM.from_pretrained(
        make_model(directory, tied=tied), dtype=torch.float32
    )
    (directory / "model.safetensors").unlink()
    size = sum(p.numel() for p in module.parameters()) * dtype.itemsize // files
    module.to(dtype).save_pretrained(directory, max_shard_size=size + 1000 if files > 1 else "1GB")
    assert len(list(directory.glob("*.safetensors"))) >= files
    return directory


def whole(directory: Path) -> nn.Module:
    """The model as transformers loads it in float32."""
    module = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    )
    assert isinstance(module, nn.Module)
    return module


def is_mapped(directory: Path) -> bool:
    return str(directory) in Path("/proc/self/maps").read_text(encoding="utf-8")


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
    plain = PolicyModel(directory, "float32", CPU, None, lora=lora)
    ours, theirs = dict(sharded.whole_tensors()), dict(plain.whole_tensors())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_rank_holds_its_rows_in_float32_and_nothing_else_of_the_files(
    tmp_path: Path, dtype: torch.dtype, files: int, tied: bool
) -> None:
    directory = stored(tmp_path / "model", dtype, tied=tied, files=files)
    expected = {n: p.detach().clone() for n, p in whole(directory).named_parameters()}
    gc.collect()  # which lets go of its map
    for rank in range(2):
        with one_of(2, rank) as mesh:
            module = PolicyModel(directory, "float32", CPU, mesh).module
            ours = dict(module.named_parameters())
            assert ours.keys() == expected.keys()
            for name, parameter in ours.items():
                assert isinstance(parameter, DTensor)
                rows = expected[name].chunk(2)[rank]
                local = parameter.to_local()
                assert torch.equal(local, rows), name
                padded = -(-expected[name].shape[0] // 2) * expected[name][0].numel() * 4
                assert local.untyped_storage().nbytes() == padded
    assert not is_mapped(directory)


@pytest.mark.parametrize("lora", [None, Lora(2, 4)])
def test_a_model_stored_in_half_computes_what_transformers_computes_in_float32(
    tmp_path: Path, mesh: DeviceMesh, lora: Lora | None
) -> None:
    directory = stored(tmp_path / "model", torch.bfloat16)
    expected = whole(directory)(PROMPT).logits
    adapters = []
    for policy in (
        PolicyModel(directory, "float32", CPU, None, lora=lora),
        PolicyModel(directory, "float32", CPU, mesh, lora=lora),
    ):
        assert torch.equal(policy.module(PROMPT).logits, expected)
        assert {p.dtype for p in policy.module.parameters()} == {torch.float32}
        adapters.append([tensor for name, tensor in policy._tensors() if "lora_A" in name])
    assert all(torch.equal(one, other) for one, other in zip(*adapters, strict=True))
    assert not any(torch.equal(t, t.bfloat16().float()) for t in adapters[0])  # never rounded


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_buffers_are_those_of_the_dtype_that_is_trained(
    tmp_path: Path, mesh: DeviceMesh, dtype: str
) -> None:
    """Gemma scales its embeddings by a number that bfloat16 rounds."""
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=40,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    expected = dict(plain.named_buffers())
    for place in (None, mesh):
        ours = dict(PolicyModel(tmp_path, dtype, CPU, place).module.named_buffers())
        assert ours.keys() == expected.keys()
        for name, buffer in ours.items():
            assert buffer.dtype == expected[name].dtype
            assert torch.equal(buffer, expected[name])


def test_files_of_mixed_dtypes_are_cast_without_loss(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model")
    module = whole(directory)
    next(module.parameters()).data = next(module.parameters()).data.bfloat16()
    module.save_pretrained(directory)
    with one_of(2, 0) as mesh:
        policy = PolicyModel(directory, "float32", CPU, mesh)
        for name, expected in whole(directory).named_parameters():
            parameter = policy.module.get_parameter(name)
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.to_local(), expected.detach().chunk(2)[0])


def test_a_truncated_file_is_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model")
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelNotFoundError, match=str(directory)):
        PolicyModel(directory, "float32", CPU, None)


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_compute_in_every_dtype(tmp_path: Path, family: str) -> None:
    directory = make_model(tmp_path / "model", family=family)
    words = torch.arange(12).reshape(2, 6) % VOCABULARY
    found = [
        PolicyModel(directory, dtype, torch.device("cpu"), None).logprobs(words, words[:, 1:], 0.7)
        for dtype in ("float64", "float32")
    ]
    assert found[0][0].dtype == torch.float64
    assert torch.allclose(found[0][0].float(), found[1][0], atol=1e-5)


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_a_model_whose_files_do_not_fit_its_config_is_refused(tmp_path: Path, change: str) -> None:
    """Its missing weights would be random ones, others on every rank."""
    directory = make_model(tmp_path / "model")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del tensors[name]
    else:
        name = "model.layers.2.mlp.up_proj.weight"
        tensors[name] = torch.zeros(48, 32)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelNotFoundError, match=f"{change} tensors {name}"):
        PolicyModel(directory, "float32", CPU, None)


def dense_and_sparse() -> PreTrainedConfig:
    return tiny_config("qwen3_moe", vocab_size=VOCABULARY, mlp_only_layers=[0])


def without_linear_layers() -> PreTrainedConfig:
    return GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=2, n_positions=64)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("config", [dense_and_sparse, without_linear_layers])
def test_an_adapter_that_would_be_on_other_layers_is_refused(
    tmp_path: Path, config: Callable[[], PreTrainedConfig]
) -> None:
    """peft puts one beside the experts where a dense layer has matrices of the same names."""
    AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path)
    PolicyModel(tmp_path, "float32", CPU, None)
    with pytest.raises(ModelNotFoundError, match=r"trainer\.lora_rank: 2: the model has"):
        PolicyModel(tmp_path, "float32", CPU, None, lora=Lora(2, 4))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "[]"),
        ("model.safetensors.index.json", "[]"),
        ("model.safetensors.index.json", '{"weight_map": null}'),
        ("model.safetensors.index.json", "{}"),
    ],
)
def test_files_that_are_not_what_they_should_be_are_refused(
    tmp_path: Path, file: str, text: str
) -> None:
    directory = make_model(tmp_path / "model")
    if "index" in file:
        (directory / "model.safetensors").unlink()
    (directory / file).write_text(text)
    with pytest.raises(ModelNotFoundError, match=str(directory)):
        PolicyModel(directory, "float32", CPU, None)


def test_a_model_of_another_size_than_its_config_is_refused(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    with pytest.raises(ModelNotFoundError, match=str(directory)):
        PolicyModel(directory, "float32", CPU, None)
