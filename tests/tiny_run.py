"""A run that is small enough for tests: data, tokenizer, settings, and a random tiny Llama."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

CHARACTERS = "0123456789+=,;: "
EOS = "<eos>"


def write_tokenizer(directory: Path) -> None:
    """A character tokenizer; the stop token is the last id."""
    vocabulary = {character: index for index, character in enumerate([*CHARACTERS, EOS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=EOS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.add_special_tokens([EOS])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    eos = {"eos_token_id": vocabulary[EOS]}
    (directory / "generation_config.json").write_text(json.dumps(eos))


def write_model(directory: Path, seed: int = 0, family: str = "llama") -> None:
    """A random model of about 10,000 parameters beside its tokenizer; long answers are common."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.tiny_models import tiny_config

    torch.manual_seed(seed)
    config = tiny_config(
        family,
        vocab_size=len(CHARACTERS) + 1,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        eos_token_id=len(CHARACTERS),
        bos_token_id=None,
        initializer_range=0.3,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    write_tokenizer(directory)


def write_data(path: Path, count: int, text: str = "{i}+1=") -> None:
    """`count` additions; `text` without {i} makes all prompts the same."""
    rows = [{"prompt": text.format(i=i), "answer": str(i + 1)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_settings(directory: Path, prompts: int = 24, **sections: Any) -> dict[str, Any]:
    """Settings of a run over `prompts` prompts, as values; `sections` are merged in."""
    write_data(directory / "train.jsonl", prompts)
    values: dict[str, Any] = {
        "model": str(directory / "model"),
        "seed": 7,
        "data": {"path": str(directory / "train.jsonl")},
        "tail_batching": {
            "mode": "exact",
            "prompts_per_step": 4,
            "responses_per_prompt": 2,
            "max_deferral_age": 6,
        },
        "sampling": {"max_response_tokens": 40},
        "trainer": {"learning_rate": 1e-3, "micro_batch_tokens": 512},
    }
    for name, section in sections.items():
        known = values.get(name)
        values[name] = {**known, **section} if isinstance(known, dict) else section
    return values
