"""Held-out evaluation: the same rollout and reward services, never the race.

A measurement is a round in which every prompt wins. Its seeds belong to an epoch of their own and
do not change, so measurements of one run differ by the weights alone.
"""

from __future__ import annotations

import dataclasses
import statistics

from rollpacker.policy.round import Round
from rollpacker.policy.tail_batching import RoundPlan, TailBatchingRules
from rollpacker.sampling import response_seeds
from rollpacker.types import Draw, DrawId, EngineSpec, PromptGroup, RoundKind, SamplingParameters
from services.coordinator.command_runner import CommandRunner
from services.coordinator.replicas import ReplicaSet
from services.coordinator.reward_client import RewardClient
from services.coordinator.round_context import RoundContext
from services.coordinator.run_context import RunContext

_EPOCH = -1
_NAME = "held_out"


class Validator:
    """Measures weights on the held-out prompts of a run."""

    def __init__(
        self, context: RunContext, rewards: RewardClient, sampling: SamplingParameters
    ) -> None:
        settings = context.settings.validation
        self._context = context
        self._rewards = rewards
        self._sampling = dataclasses.replace(sampling, temperature=settings.temperature)
        count = settings.responses_per_prompt
        self._prompts = {DrawId(_EPOCH, p.prompt_id): p for p in context.data.validation}
        self._draws = [
            Draw(*draw, seeds=response_seeds(context.settings.seed, draw, count))
            for draw in self._prompts
        ]

    async def measure(self, weight_version: int, weights_uri: str) -> None:
        """Record accuracy and mean length of these weights. Repeat: no effect."""
        outputs = self._context.outputs
        if not self._draws or outputs.has_validation(weight_version, _NAME):
            return
        groups = await self._sample(EngineSpec(self._context.run_id, weight_version, weights_uri))
        responses = [scored for group in groups for scored in group.responses]
        rewards = [scored.reward for scored in responses if scored.reward is not None]
        lengths = [len(scored.response.token_ids) for scored in responses]
        values = {"count": float(len(rewards)), "response_tokens": statistics.fmean(lengths)}
        if rewards:
            values["accuracy"] = statistics.fmean(rewards)
        outputs.write_validation(weight_version, _NAME, values)

    async def _sample(self, spec: EngineSpec) -> list[PromptGroup]:
        count = self._context.settings.validation.responses_per_prompt
        rules = TailBatchingRules(len(self._draws), count)
        plan = RoundPlan(
            step=spec.weight_version,
            kind=RoundKind.LONG,
            level=0,
            queued=(),
            new_prompts=len(self._draws),
            keep=len(self._draws),
            response_count=count,
        )
        context = RoundContext(
            run_id=self._context.run_id,
            step=spec.weight_version,
            fence=self._context.fence,
            weight_version=spec.weight_version,
            sampling=self._sampling,
            draws={draw.id: draw for draw in self._draws},
            prompts=self._prompts,
            tokenizer=self._context.data.tokenizer,
        )
        replicas = ReplicaSet(
            self._context.workers,
            spec,
            self._context.fence,
            needs_replay=False,
            group_count=len(self._draws),
            response_count=count,
        )
        runner = CommandRunner(
            Round(rules, plan, self._draws), context, replicas, self._rewards, _ignore, _no_progress
        )
        return (await runner.run()).groups


async def _ignore(group: PromptGroup) -> None:
    """Held-out groups are not trained."""


def _no_progress(round_: Round) -> None:
    """Nobody watches."""
