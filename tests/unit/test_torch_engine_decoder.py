"""The engine's decoder computes what transformers computes, and refuses what it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from services.rollout.engine import InvalidRequestError, WeightsNotFoundError
from services.rollout.torch_engine.decoder import Decoder
from services.rollout.torch_engine.decoder_config import parse_config, read_config
from services.rollout.torch_engine.weights import expected_shapes, read_weights
from tests.tiny_models import FAMILIES, VOCABULARY, save_model

LENGTH = 300  # beyond the original context of the llama3 case
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "llama": ("llama", {}),
    "llama_without_groups": ("llama", {"num_key_value_heads": 4}),
    "llama_biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama3_rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear_rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3_biased": ("qwen3", {"attention_bias": True, "head_dim": 16}),
}


def load_decoder(directory: Path, dtype: torch.dtype) -> Decoder:
    config = read_config(directory)
    return Decoder(
        config,
        read_weights(directory, config),
        context=LENGTH,
        device=torch.device("cpu"),
        dtype=dtype,
    )


def logits_of(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [tokens, vocabulary] of one sequence, by a plain causal attention."""

    def attend(_, queries, kv):
        keys, values = kv.permute(1, 2, 0, 3)
        mixed = F.scaled_dot_product_attention(
            queries.transpose(0, 1), keys, values, is_causal=True, enable_gqa=True
        )
        return mixed.transpose(0, 1).flatten(1)

    with torch.inference_mode():
        hidden = decoder.forward(tokens, torch.arange(len(tokens)), attend)
        return decoder.logits(hidden)


def reference(directory: Path, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """transformers' logits; its RMSNorm drops to float32, so float64 takes PyTorch's own."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    if dtype == torch.float64:
        for name, module in list(model.named_modules()):
            if name.endswith("norm"):
                weight, epsilon = module.weight, module.variance_epsilon
                norm = torch.nn.RMSNorm(len(weight), epsilon, dtype=dtype)
                norm.weight = weight
                model.set_submodule(name, norm)
    with torch.no_grad():
        return model(tokens[None]).logits[0]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.1)],
    ids=["float64", "float32", "bfloat16"],
)
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(tmp_path, case, dtype, tolerance):
    family, changes = CASES[case]
    directory = save_model(tmp_path, family, **changes)
    tokens = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(1))
    ours = logits_of(load_decoder(directory, dtype), tokens)
    theirs = reference(directory, tokens, dtype)
    assert ours.shape == (LENGTH, VOCABULARY)
    assert ours.std() > 0.3  # so the tolerance means something
    difference = (ours - theirs).abs()
    typical = difference.median() if dtype == torch.bfloat16 else difference.max()
    assert typical < tolerance


def test_swapped_weights_compute_what_loaded_ones_do(tmp_path):
    first, second = save_model(tmp_path / "a"), save_model(tmp_path / "b", seed=1)
    tokens = torch.arange(VOCABULARY)
    decoder = load_decoder(first, torch.float64)
    logits_of(decoder, tokens)
    with torch.inference_mode():
        decoder.swap(read_weights(second, read_config(second)))
    expected = logits_of(load_decoder(second, torch.float64), tokens)
    assert torch.equal(logits_of(decoder, tokens), expected)


def test_the_older_spelling_of_rotary_settings_means_the_same(tmp_path):
    values = json.loads((save_model(tmp_path, rope_parameters=LLAMA3) / "config.json").read_text())
    new = parse_config(values)
    scaling = values.pop("rope_parameters")
    theta = scaling.pop("rope_theta")
    assert parse_config(values | {"rope_theta": theta, "rope_scaling": scaling}) == new
    assert new.rope.kind == "llama3"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["sliding_attention"]}, "layer_types='sliding_attention'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"hidden_size": "wide"}, "hidden_size='wide'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor=None"),
        ({"rope_parameters": "steep"}, "rope_parameters='steep'"),
    ],
)
def test_an_unsupported_value_of_the_config_is_named(changes, named):
    values = FAMILIES["llama"]().to_dict() | changes
    with pytest.raises(InvalidRequestError, match="serves") as refused:
        parse_config(values)
    assert named in str(refused.value)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_missing_or_broken_config_is_no_weights(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(WeightsNotFoundError, match=r"config\.json"):
        read_config(tmp_path)


def rewritten(directory: Path, change) -> None:
    """Save the model's tensors again after `change` has edited them."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (lambda t: t.pop("model.norm.weight"), WeightsNotFoundError, "model.norm.weight"),
        (lambda t: t.update(extra=torch.ones(1)), InvalidRequestError, "extra"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(31)}),
            InvalidRequestError,
            r"model.norm.weight has shape \(31,\)",
        ),
        (lambda t: t["model.norm.weight"].fill_(torch.nan), InvalidRequestError, "not finite"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(tmp_path, change, error, named):
    directory = save_model(tmp_path)
    rewritten(directory, change)
    with pytest.raises(error, match=named):
        read_weights(directory, read_config(directory))


def test_sharded_weights_are_read_whole(tmp_path):
    directory = save_model(tmp_path / "whole")
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(directory).save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    config = read_config(sharded)
    whole, parts = read_weights(directory, config), read_weights(sharded, config)
    assert whole.keys() == parts.keys() == expected_shapes(config).keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    next(sharded.glob("*.safetensors")).unlink()
    with pytest.raises(WeightsNotFoundError, match="does not exist"):
        read_weights(sharded, config)


@pytest.mark.parametrize(
    "index", ["{", "{}", '{"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}']
)
def test_a_broken_index_of_shards_is_refused(tmp_path, index):
    directory = save_model(tmp_path)
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsNotFoundError, match=r"index\.json"):
        read_weights(directory, read_config(directory))
