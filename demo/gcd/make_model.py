"""Makes the warm-started model of the demo: `python demo/gcd/make_model.py [DIRECTORY]`.

A small Llama learns from demonstrations, in two phases:

1. full traces: it learns to subtract until the numbers meet;
2. mixed: six of ten demonstrations skip the trace and jump to the answer, so that the model
   mostly guesses, and guesses badly. That is what reinforcement learning starts from.

Seeded, on one thread. The model that the repository ships was made with other lengths of the phases
(1200 and 80 steps), so this makes one of the same kind and not the same file. Some minutes on an
idle core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import task
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

SEED = 0
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
VOCABULARY = (PAD, BOS, EOS, *task.CHARACTERS)
IGNORED = -100  # label of tokens that are not learned


@dataclass(frozen=True)
class Phase:
    """One phase of the warm start."""

    steps: int
    peak_learning_rate: float  # of AdamW; warmed up over 20 steps, then a half cosine to zero
    guess_share: float  # of demonstrations that skip the trace
    batch: int = 64


PHASES = (Phase(1500, 3e-3, 0.0), Phase(80, 1e-3, 0.6))


def make_tokenizer() -> Tokenizer:
    """One token per character; a text begins with BOS."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}))
    tokenizer.add_special_tokens([PAD, BOS, EOS])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    bos_id = VOCABULARY.index(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, bos_id)]
    )
    return tokenizer


def make_model() -> LlamaForCausalLM:
    """Random weights, 0.5 million parameters."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=VOCABULARY.index(PAD),
        bos_token_id=VOCABULARY.index(BOS),
        eos_token_id=VOCABULARY.index(EOS),
    )
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


def length(pair: tuple[int, int]) -> int:
    """Characters of the pair's trace."""
    return len(task.trace_text(*pair))


def batches(phase: Phase, generator: random.Random) -> Iterator[list[tuple[str, str]]]:
    """Endless batches of (prompt, response), each of pairs with traces of similar lengths."""
    pairs = task.random_pairs(generator, held_out=False)
    while True:
        pool = sorted(itertools.islice(pairs, 16 * phase.batch), key=length)
        chunks = [pool[i : i + phase.batch] for i in range(0, len(pool), phase.batch)]
        generator.shuffle(chunks)
        for chunk in chunks:
            yield [
                (
                    task.prompt_text(a, b),
                    task.guess_text(generator)
                    if generator.random() < phase.guess_share
                    else task.trace_text(a, b),
                )
                for a, b in chunk
            ]


def collate(
    tokenizer: Tokenizer, demonstrations: list[tuple[str, str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, [batch, longest]; only the response is learned."""
    rows, labels = [], []
    for prompt, response in demonstrations:
        prompt_ids = tokenizer.encode(prompt).ids
        response_ids = tokenizer.encode(response, add_special_tokens=False).ids
        response_ids.append(VOCABULARY.index(EOS))
        rows.append(torch.tensor(prompt_ids + response_ids))
        labels.append(torch.tensor([IGNORED] * len(prompt_ids) + response_ids))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True), pad(labels, batch_first=True, padding_value=IGNORED)


def train(model: LlamaForCausalLM, tokenizer: Tokenizer, phase: Phase, seed: int) -> None:
    """Run one phase in place."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=phase.peak_learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / phase.steps)),
    )
    demonstrations = batches(phase, random.Random(seed))
    for step, batch in enumerate(itertools.islice(demonstrations, phase.steps)):
        token_ids, labels = collate(tokenizer, batch)
        # Padding stands on the right and is not learned, so causal attention needs no mask.
        logits = model(input_ids=token_ids).logits[:, :-1]
        loss = functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == phase.steps - 1:
            print(
                f"guess share {phase.guess_share}: step {step}, loss {loss.item():.4f}", flush=True
            )


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the warm-started gcd model.")
    parser.add_argument("directory", type=Path, nargs="?", default=Path(__file__).parent / "model")
    directory = parser.parse_args().directory
    torch.set_num_threads(1)
    tokenizer, model = make_tokenizer(), make_model()
    for number, phase in enumerate(PHASES):
        train(model, tokenizer, phase, SEED + number)
    save(model, tokenizer, directory)
    print(f"wrote {directory}")


if __name__ == "__main__":
    main()
