"""Reward workers, their sandboxes and the whole service are killed while a run is graded by code.

The tiny model writes programs: some of its tokens are fenced blocks, right and wrong ones, that
take a moment to run. Whatever is killed, each step must complete with every reward that an
undisturbed run gets: a sandbox that dies is trouble of the service, never a verdict.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from tests.integration import processes
from tests.integration.real_runs import Moment, RealStack, running_stack, write_rows
from tests.tiny_run import run_settings, write_tokenizer

pytestmark = pytest.mark.timeout(600)

PROMPTS, STEPS = 12, 3
WORK = "import time\nwhile time.process_time() < 0.04: pass\n"
BLOCKS = [f"\n```python\n{WORK}print({answer})\n```\n" for answer in (1, 1, 2, "'x'")]


def write_programmer(directory: Path) -> None:
    """A random model whose tokens are digits, signs and whole programs."""
    write_tokenizer(directory)
    words = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab()
    end = max(words.values())
    vocabulary = {word: index for word, index in words.items() if index < end - len(BLOCKS)}
    for number, block in enumerate(BLOCKS):
        vocabulary[" " * number + block] = end - len(BLOCKS) + number
    vocabulary["<eos>"] = end
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=end + 1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        eos_token_id=end,
        bos_token_id=None,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def settings(directory: Path) -> dict[str, Any]:
    values = run_settings(
        directory,
        PROMPTS,
        reward={"grader": "code", "attempts": 10},
        sampling={"max_response_tokens": 12},
    )
    rows = [
        {"prompt": f"{i}+1=", "reference": {"tests": [["", "1\n"]]}, "grader": "code"}
        for i in range(PROMPTS)
    ]
    write_rows(directory / "train.jsonl", rows)
    return values


async def kill_below(real: RealStack, what: bytes) -> bool:
    """kill -9 a process of the reward service whose command holds `what`; whether there was one."""
    real.note_processes()
    for pid, _ in processes.descendants(await real.pid("reward-0")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if what in command:
                os.kill(pid, signal.SIGKILL)
                return True
        except (FileNotFoundError, ProcessLookupError):
            continue
    return False


async def test_kills_of_sandboxes_workers_and_service_cost_no_reward(tmp_path: Path) -> None:
    write_programmer(tmp_path / "model")
    values = settings(tmp_path)
    async with running_stack(tmp_path) as real:
        expected = await real.run("undisturbed", values)
        rewards = {each[4] for step in expected.responses for group in step for each in group}
        assert rewards == {0.0, 1.0}
        await real.start("disturbed", values, held=True)
        killed = 0
        for step in range(STEPS - 1):
            await real.reach("disturbed", Moment(step, 0))
            for what in (b"bwrap", b"inside.main", b"grading_worker\0--open"):
                while not (hit := await kill_below(real, what)):
                    if (await real.moment("disturbed")).step > step:
                        break  # it pauses there
                killed += hit
        await real.kill("reward-0")
        assert killed >= STEPS
        await real.succeeded("disturbed")
        trace = await real.trace("disturbed")
        assert trace.responses == expected.responses
        assert trace.schedule == expected.schedule
        steps = await real.steps("disturbed")
        assert all(step.metrics["reward/none_count"] == 0 for step in steps)
