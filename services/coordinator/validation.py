"""Held-out evaluation: the same rollout and reward services, never the race.

A measurement of a set is a round in which every prompt wins, and, with `validation.greedy`, a
second one of one greedy response each. Their seeds belong to epochs of their own and do not change,
so measurements of one run differ by the weights alone. They happen between steps: before the first
one, every `validation.interval` steps, after the last one, and when RunEvaluation asks (`request`).
Weights that were measured are not measured again.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial

from rollpacker.policy.round import Round
from rollpacker.policy.tail_batching import RoundPlan, TailBatchingRules
from rollpacker.rpc.errors import FailedPreconditionError
from rollpacker.sampling import response_seeds
from rollpacker.types import (
    Draw,
    DrawId,
    EngineSpec,
    Prompt,
    PromptGroup,
    RoundKind,
    SamplingParameters,
)
from services.coordinator.command_runner import CommandRunner
from services.coordinator.held_out_scores import held_out_scores
from services.coordinator.replicas import ReplicaSet
from services.coordinator.reward_client import RewardClient
from services.coordinator.round_context import RoundContext
from services.coordinator.run_context import RunContext
from services.coordinator.step_files import in_thread

# The noise of two tokens is at most 29 apart: divided by this, only logits closer than 3e-4 can
# change places. Engines that truncate nothing have no other way to be greedy.
GREEDY_TEMPERATURE = 1e-5


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """Scores of one set of weights."""

    weight_version: int
    scores: Mapping[str, Mapping[str, float]]  # by held-out set; see held_out_scores


class Validator:
    """Measures weights on the held-out sets of a run."""

    def __init__(self, context: RunContext) -> None:
        """`use` comes before the first measurement."""
        self._context = context
        self._settings = context.settings.validation
        self._request: asyncio.Future[Measurement] | None = None
        self.newest: Measurement | None = None  # of this process

    def use(self, rewards: RewardClient, sampling: SamplingParameters) -> None:
        """Measure so from now on: as training rounds sample, but for the temperature."""
        self._rewards = rewards
        self._sampling = dataclasses.replace(sampling, temperature=self._settings.temperature)

    @property
    def is_requested(self) -> bool:
        """Whether somebody waits for a measurement."""
        return self._request is not None

    async def request(self) -> Measurement:
        """The next measurement between steps; whoever asks before it shares it.

        Raises FailedPreconditionError: the run has no held-out set, or ended before.
        """
        if not self._context.data.validation:
            raise FailedPreconditionError(
                "NO_HELD_OUT_SET",
                "the run has no held-out set; start one with data.validation_path or"
                " validation.sets",
            )
        if self._request is None:
            self._request = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._request)

    def refuse_request(self) -> None:
        """The run has ended: nobody measures any more."""
        if self._request is not None:
            self._request.set_exception(
                FailedPreconditionError("RUN_NOT_ACTIVE", "the run ended before the measurement")
            )
            self._request.exception()  # retrieved, also when nobody waits any more
            self._request = None

    async def measure(self, weight_version: int, weights_uri: str) -> None:
        """Record the scores of these weights, and tell whoever asked. Repeat: no effect."""
        spec = EngineSpec(self._context.run_id, weight_version, weights_uri)
        scores = {
            name: await self._measured(spec, number, name, prompts)
            for number, (name, prompts) in enumerate(self._context.data.validation.items())
        }
        self.newest = Measurement(weight_version, scores)
        if self._request is not None:
            self._request.set_result(self.newest)
            self._request = None

    async def _measured(
        self, spec: EngineSpec, number: int, name: str, prompts: Sequence[Prompt]
    ) -> Mapping[str, float]:
        outputs, version = self._context.outputs, spec.weight_version
        known = outputs.validation_values(version, name)
        if known is not None:
            return known
        count = self._settings.responses_per_prompt
        sampled = await self._sample(spec, _draws(-1 - 2 * number, prompts), self._sampling, count)
        greedy: Sequence[PromptGroup] = ()
        if self._settings.greedy:
            sampling = dataclasses.replace(self._sampling, temperature=GREEDY_TEMPERATURE)
            greedy = await self._sample(spec, _draws(-2 - 2 * number, prompts), sampling, 1)
        scores = held_out_scores(sampled, greedy, count)
        await in_thread(partial(outputs.write_validation, version, name, scores))
        return scores

    async def _sample(
        self,
        spec: EngineSpec,
        prompts: Mapping[DrawId, Prompt],
        sampling: SamplingParameters,
        count: int,
    ) -> list[PromptGroup]:
        """`count` responses to every prompt, scored."""
        seed = self._context.settings.seed
        draws = [Draw(*draw, seeds=response_seeds(seed, draw, count)) for draw in prompts]
        plan = RoundPlan(
            step=spec.weight_version,
            kind=RoundKind.LONG,
            level=0,
            queued=(),
            new_prompts=len(draws),
            keep=len(draws),
            response_count=count,
        )
        context = RoundContext(
            run_id=self._context.run_id,
            step=spec.weight_version,
            fence=self._context.fence,
            weight_version=spec.weight_version,
            sampling=sampling,
            draws={draw.id: draw for draw in draws},
            prompts=prompts,
            tokenizer=self._context.data.tokenizer,
        )
        replicas = ReplicaSet(
            self._context.workers,
            spec,
            self._context.fence,
            needs_replay=False,
            group_count=len(draws),
            response_count=count,
        )
        round_ = Round(TailBatchingRules(len(draws), count), plan, draws)
        runner = CommandRunner(round_, context, replicas, self._rewards, _ignore, _no_progress)
        return (await runner.run()).groups


def _draws(epoch: int, prompts: Sequence[Prompt]) -> dict[DrawId, Prompt]:
    """Draws of an epoch below 0, which no training draw has."""
    return {DrawId(epoch, prompt.prompt_id): prompt for prompt in prompts}


async def _ignore(group: PromptGroup) -> None:
    """Held-out groups are not trained."""


def _no_progress(round_: Round) -> None:
    """Nobody watches."""
