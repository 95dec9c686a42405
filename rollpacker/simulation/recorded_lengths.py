"""The response lengths of a real run as a workload, and how far its deferred responses drifted.

`RUN_DIR/samples` has every trained response; a draw stands where it was first launched. The logs of
the rounds (`RUN_DIR/rounds`) also have the responses that finished in a group that lost: the same
response, by its seed, under the weights of an earlier step. The share that came out with the same
length again, by the steps between, is the coupling c(age) of the workload.

A response that has changed, and one that the run never sampled (mode `paper` launches more), is
drawn from its siblings: the recorded responses to the same prompt. So prompts keep their character.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollpacker.simulation.recorded_run import RecordedRound, recorded_rounds
from rollpacker.simulation.workload import Floats, Ints, RecordedWorkload, by_age
from rollpacker.types import DrawId

_LEAST_PAIRS = 30  # of an age, for its coupling to count


class RecordedLengthsError(ValueError):
    """A run directory without the lengths of a run; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Coupling:
    """Responses that finished in two rounds so many steps apart."""

    age: int
    pairs: int
    same_share: float  # came out with the same length
    correlation: float  # of the two lengths


@dataclass(frozen=True, slots=True)
class RecordedLengths:
    """What a run says about its lengths."""

    rows: tuple[tuple[int, ...], ...]  # tokens of each response, by draw in launch order
    cap: int  # max_response_tokens
    prompts_per_step: int
    responses_per_prompt: int
    mode: str
    coupling: tuple[Coupling, ...]  # by age; empty where the run deferred too little

    @property
    def prompt_correlation(self) -> float:
        """Share of the variance of log lengths that lies between prompts; 0 for one response."""
        logs = [[math.log(tokens) for tokens in row] for row in self.rows if len(row) > 1]
        if not logs:
            return 0.0
        within = float(np.mean([np.var(row, ddof=1) for row in logs]))
        means = float(np.var([np.mean(row) for row in logs], ddof=1)) if len(logs) > 1 else 0.0
        between = max(0.0, means - within / float(np.mean([len(row) for row in logs])))
        return between / (between + within) if between + within > 0 else 0.0

    def coupling_at(self, age: int) -> float:
        """The measured c(age); between measured ages as `by_age` has it. 1 where none is."""
        table = {c.age: c.same_share for c in self.coupling if c.pairs >= _LEAST_PAIRS}
        return by_age({0: 1.0} | table, age)

    def workload(self, seed: int = 0) -> ResampledWorkload:
        """As the simulator takes it."""
        return ResampledWorkload(self.rows, self.responses_per_prompt, seed)


class ResampledWorkload(RecordedWorkload):
    """See the top of the file. A function of the recording and the seed alone."""

    def __init__(self, rows: Sequence[Sequence[int]], responses: int, seed: int) -> None:
        width = 2 * responses
        generator = np.random.Generator(np.random.PCG64([seed, 41]))
        self._changes: Floats = generator.random((len(rows), width))
        self._seed = seed
        self._recorded = rows
        self._fresh: dict[int, Ints] = {}
        filled = self._resampled(0, width)
        for place, row in enumerate(rows):
            filled[place, : len(row)] = row
        self.first_lengths = filled
        super().__init__(filled.tolist())

    def lengths(self, number: int, coupling: float = 1.0, launch: int = 0) -> list[int]:
        """Tokens of each response of a draw in its `launch`-th launch."""
        if coupling >= 1.0 or launch == 0:
            return super().lengths(number)
        if launch not in self._fresh:
            self._fresh[launch] = self._resampled(launch, self.first_lengths.shape[1])
        kept = self._changes[number] < coupling
        found: list[int] = np.where(
            kept, self.first_lengths[number], self._fresh[launch][number]
        ).tolist()
        return found

    def _resampled(self, launch: int, width: int) -> Ints:
        generator = np.random.Generator(np.random.PCG64([self._seed, 43, launch]))
        picked: NDArray[np.int64] = np.array(
            [generator.choice(np.array(row), width) for row in self._recorded], dtype=np.int64
        )
        return picked


def read_lengths(directory: Path) -> RecordedLengths:
    """Of a run directory. Raises RecordedLengthsError naming what is missing."""
    try:
        described = json.loads((directory / "run.json").read_text())
    except OSError as error:
        raise RecordedLengthsError(
            f"{directory}/run.json: {error.strerror}; name the directory of a run"
        ) from error
    tail, sampling = (described["settings"][name] for name in ("tail_batching", "sampling"))
    rows = tuple(_rows(directory))
    if not rows:
        raise RecordedLengthsError(f"{directory}/samples: no trained response; has a step ended?")
    return RecordedLengths(
        rows=rows,
        cap=sampling["max_response_tokens"],
        prompts_per_step=tail["prompts_per_step"],
        responses_per_prompt=tail["responses_per_prompt"],
        mode=described["mode"],
        coupling=measured_coupling(_rounds(directory)),
    )


def _rows(directory: Path) -> Iterator[tuple[int, ...]]:
    """By draw, in the order (epoch, first launch, training)."""
    lengths: dict[tuple[int, str], list[int]] = defaultdict(list)
    launched: dict[tuple[int, str], int] = {}
    for sample in _samples(directory):
        if sample["index"] is None:
            continue
        draw = sample["draw"]
        key = (draw["epoch"], draw["prompt_id"])
        lengths[key].append(sample["token_count"])
        launched[key] = draw["first_step"]
    for key in sorted(lengths, key=lambda key: (key[0], launched[key])):  # stable
        yield tuple(lengths[key])


def _samples(directory: Path) -> Iterator[dict[str, Any]]:
    for path in sorted((directory / "samples").glob("step_*.jsonl")):
        for line in path.read_text().split("\n")[:-1]:  # what follows the last newline is torn
            yield json.loads(line)


def _rounds(directory: Path) -> list[RecordedRound]:
    return recorded_rounds(directory) if any((directory / "rounds").glob("*.jsonl")) else []


def measured_coupling(rounds: Sequence[RecordedRound]) -> tuple[Coupling, ...]:
    """By age, from the responses that finished in more than one round."""
    first: dict[tuple[DrawId, int], tuple[int, int]] = {}
    pairs: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for round_ in rounds:
        step = round_.logged.arguments.plan.step
        for key, tokens in round_.tokens.items():
            launched, before = first.setdefault(key, (step, tokens))
            if step > launched:
                pairs[step - launched].append((before, tokens))
    return tuple(_coupling(age, pairs[age]) for age in sorted(pairs))


def _coupling(age: int, pairs: Sequence[tuple[int, int]]) -> Coupling:
    before, after = np.array(pairs, dtype=float).T
    varies = before.std() > 0 and after.std() > 0
    correlation = float(np.corrcoef(before, after)[0, 1]) if varies else 0.0
    return Coupling(age, len(pairs), float(np.mean(before == after)), correlation)


def coupling_rows(recorded: RecordedLengths) -> Iterator[Mapping[str, Any]]:
    """The report's first rows: the workload, then its coupling by age."""
    tokens = np.array([tokens for row in recorded.rows for tokens in row])
    yield {
        "figure": "recorded_lengths",
        "mode": recorded.mode,
        "draws": len(recorded.rows),
        "responses": len(tokens),
        "cap": recorded.cap,
        "p50": int(np.percentile(tokens, 50)),
        "p99": int(np.percentile(tokens, 99)),
        "longest": int(tokens.max()),
        "prompt_correlation": round(recorded.prompt_correlation, 3),
    }
    for item in recorded.coupling:
        values = dataclasses.asdict(item)
        yield {"figure": "coupling"} | {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in values.items()
        }
