"""A seeded, realistic run for the tests of outputs: a ladder of two levels on simulated slots.

Prompts have long-tailed lengths. A round launches more draws than it keeps, decodes them on the
slots of two replicas, keeps those whose longest response is shortest, and defers the rest. So
records and groups agree with each other as those of a real run do.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from rollpacker.types import (
    Draw,
    FinishReason,
    PromptGroup,
    Response,
    ResponseTiming,
    RoundKind,
    ScoredResponse,
    Segment,
    StepRecord,
    Verdict,
    response_id,
)

RUN_ID = "example"
START_TIME = 1_790_000_000.0  # seconds since the Unix epoch
FACTORS = (1.75, 2.0)  # eta of levels 0 and 1
CAP = 640  # tokens
SECONDS_PER_TOKEN = 0.006
COMMIT_SECONDS = 0.03
GroupsOfStep = tuple[StepRecord, list[PromptGroup]]


@dataclass
class ExampleRun:
    """Plays a run, step by step."""

    seed: int = 0
    prompts: int = 4  # P0
    responses: int = 3  # R0
    replicas: int = 2
    slots: int = 6  # per replica
    levels: int = 2
    step: int = 0
    time: float = START_TIME
    queues: dict[int, list[Draw]] = field(default_factory=lambda: {1: [], 2: []})
    deferrals: int = 0
    next_prompt: int = 0
    trained_tokens: int = 0
    generated_tokens: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.skill = 0.16

    def steps(self, count: int) -> Iterator[GroupsOfStep]:
        """The next `count` steps."""
        for _ in range(count):
            yield self._play()

    def _play(self) -> GroupsOfStep:
        level = max([0, *(n for n in range(1, self.levels + 1) if self._ready(n))])
        kind = RoundKind.LONG if level == self.levels and level else RoundKind.SHORT
        groups = [self._group(draw) for draw in self._launch(level)]
        groups.sort(key=lambda group: group.race_key)
        kept, deferred = groups[: self.prompts], groups[self.prompts :]
        for group in deferred:
            draw = replace(group.draw, level=level + 1)
            self.queues[draw.level].append(draw)
        self.deferrals += len(deferred)
        kept, end = self._decode(kept)
        record = self._record(kind, level, kept, groups, end)
        self.step, self.time = self.step + 1, record.end_time
        self.skill += 0.02 * (0.72 - self.skill)
        return record, kept

    def _ready(self, level: int) -> bool:
        return len(self.queues[level]) >= self._launched(level)

    def _launched(self, level: int) -> int:
        factors = FACTORS[: self.levels]
        return math.ceil(self.prompts * (factors[level] if level < len(factors) else 1.0))

    def _launch(self, level: int) -> list[Draw]:
        count = self._launched(level)
        if level:
            taken, self.queues[level] = self.queues[level][:count], self.queues[level][count:]
            return taken
        return [self._new_draw() for _ in range(count)]

    def _new_draw(self) -> Draw:
        prompt_id = f"gcd-{self.next_prompt % 400:04d}"
        draw = Draw(
            epoch=self.next_prompt // 400,
            prompt_id=prompt_id,
            seeds=tuple(self.random.getrandbits(63) for _ in range(self.responses)),
            first_step=self.step,
        )
        self.next_prompt += 1
        return draw

    def _group(self, draw: Draw) -> PromptGroup:
        noise = random.Random(f"{draw.epoch}:{draw.prompt_id}")
        typical = noise.lognormvariate(3.5, 0.5)
        scored = [self._response(draw, index, typical) for index in range(len(draw.seeds))]
        mean = sum(one.reward or 0.0 for one in scored) / len(scored)
        return PromptGroup(
            run_id=RUN_ID,
            step=self.step,
            draw=draw,
            prompt_token_ids=(3, 8, 12, 5),
            responses=tuple(replace(one, advantage=(one.reward or 0.0) - mean) for one in scored),
            weight_version=self.step,
            race_key=max(len(one.response.token_ids) for one in scored),
            selection_weight=1.0 + 0.25 * draw.level,
        )

    def _response(self, draw: Draw, index: int, typical: float) -> ScoredResponse:
        noise = random.Random(draw.seeds[index])
        tail = 4 if noise.random() < 0.05 else 1
        length = min(CAP, max(1, round(typical * noise.lognormvariate(0, 0.4) * tail)))
        right = length < CAP and noise.random() < self.skill
        verdict = Verdict.CORRECT if right else noise.choice([Verdict.INCORRECT, Verdict.NO_ANSWER])
        tokens = tuple(noise.randrange(17) for _ in range(length))
        response = Response(
            response_id=response_id(RUN_ID, draw, index),
            index=index,
            token_ids=tokens,
            logprobs=tuple(-noise.expovariate(3.0) for _ in tokens),
            finish_reason=FinishReason.LENGTH if length == CAP else FinishReason.STOP,
            weight_version=self.step,
            seed=draw.seeds[index],
            segments=(Segment("assistant", length, True),),
        )
        text = "".join("0123456789,;:=ab\n"[token] for token in tokens)
        return ScoredResponse(response, 1.0 if right else 0.0, verdict=verdict, text=text)

    def _decode(self, groups: Sequence[PromptGroup]) -> tuple[list[PromptGroup], float]:
        """Give every response a slot and its times; the end is that of the last one."""
        start = self.time + 0.05
        free = [
            (start, slot, number) for number in range(self.replicas) for slot in range(self.slots)
        ]
        heapq.heapify(free)
        timed, end = [], start
        for group in groups:
            responses = []
            for one in group.responses:
                at, slot, replica = heapq.heappop(free)
                done = at + SECONDS_PER_TOKEN * len(one.response.token_ids)
                heapq.heappush(free, (done, slot, replica))
                timing = ResponseTiming(start, done, slot, f"rollout-{replica}")
                score_time = done + 0.002 + self.random.random() * 0.02
                responses.append(
                    replace(one, timing=timing, score_start_time=done, score_time=score_time)
                )
                end = max(end, done)
            timed.append(replace(group, responses=tuple(responses)))
        return timed, end

    def _record(
        self,
        kind: RoundKind,
        level: int,
        kept: Sequence[PromptGroup],
        launched: Sequence[PromptGroup],
        rollout_end: float,
    ) -> StepRecord:
        lengths = [len(one.response.token_ids) for group in kept for one in group.responses]
        cut = _tokens_cut_off(kept, launched)
        self.trained_tokens += sum(lengths)
        self.generated_tokens += sum(lengths) + cut
        train_wait = 0.12 + 2e-5 * sum(lengths)
        seconds = rollout_end - self.time + train_wait + COMMIT_SECONDS
        metrics = {
            "reward/mean": _mean_reward(kept),
            "reward/none_count": 0.0,
            "response_length/mean": sum(lengths) / len(lengths),
            **{f"response_length/p{p}": _percentile(lengths, p) for p in (50, 75, 99)},
            "response_length/max": float(max(lengths)),
            "timing_s/step": seconds,
            "timing_s/rollout": rollout_end - self.time,
            "timing_s/train_wait": train_wait,
            "timing_s/apply_weights": 0.05,
            "timing_s/commit": COMMIT_SECONDS,
            **self._tail_metrics(level, kept, launched),
            "bias/ratio": 1 - 0.3 * math.exp(-self.step / 12) + self.random.gauss(0, 0.01),
            "bias/weighed_ratio": 1 - 0.3 * math.exp(-self.step / 6),
            "perf/trained_tokens": float(self.trained_tokens),
            "perf/generated_tokens": float(self.generated_tokens),
            "perf/waste": self.generated_tokens / self.trained_tokens,
            "perf/trained_tokens_per_second": sum(lengths) / seconds,
            **self._trainer_metrics(sum(lengths)),
        }
        return StepRecord(
            step=self.step,
            round_kind=kind,
            level=level,
            start_time=self.time,
            rollout_end_time=rollout_end,
            end_time=self.time + seconds,
            weight_version=self.step + 1,
            draws=tuple(group.draw for group in kept),
            metrics=metrics,
        )

    def _tail_metrics(
        self, level: int, kept: Sequence[PromptGroup], launched: Sequence[PromptGroup]
    ) -> dict[str, float]:
        queued = [draw for queue in self.queues.values() for draw in queue]
        return {
            "tail/level": float(level),
            "tail/launched_groups": float(len(launched)),
            "tail/kept_groups": float(len(kept)),
            "tail/deferred_groups": float(len(launched) - len(kept)),
            "tail/deferrals_total": float(self.deferrals),
            "tail/queue_length": float(len(queued)),
            "tail/max_age": float(max((draw.age(self.step) for draw in queued), default=0)),
            "tail/race_wait_s": 0.02 * self.random.random(),
        }

    def _trainer_metrics(self, tokens: int) -> dict[str, float]:
        return {
            "trainer/loss": self.random.gauss(0, 0.02),
            "trainer/grad_norm": 0.4 + self.random.random() * 0.3,
            "trainer/entropy": 0.3 + 0.5 * math.exp(-self.step / 40),
            "trainer/clip_fraction": 0.002 * self.random.random(),
            "trainer/mismatch_kl": 1e-5 * (1 + self.random.random()),
            "trainer/mismatch_ratio_max": 1 + 1e-4 * self.random.random(),
            "trainer/accumulate_seconds": 1e-5 * tokens,
            "trainer/update_seconds": 0.05,
            "trainer/checkpoint_seconds": 0.02,
            "trainer/publish_seconds": 0.03,
        }


def _mean_reward(groups: Sequence[PromptGroup]) -> float:
    rewards = [one.reward or 0.0 for group in groups for one in group.responses]
    return sum(rewards) / len(rewards)


def _tokens_cut_off(kept: Sequence[PromptGroup], launched: Sequence[PromptGroup]) -> int:
    """Tokens that the deferred groups had when the race was decided."""
    key = kept[-1].race_key
    deferred = launched[len(kept) :]
    return sum(
        min(key, len(one.response.token_ids)) for group in deferred for one in group.responses
    )


def _percentile(values: Sequence[int], share: int) -> float:
    return float(sorted(values)[max(0, math.ceil(len(values) * share / 100) - 1)])
