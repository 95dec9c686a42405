"""One rollout round of a run: its replicas, request values and log, around CommandRunner."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from statistics import fmean

from rollpacker.data.run_data import RunData
from rollpacker.policy.engine_meter import EngineMeter
from rollpacker.policy.round import Round
from rollpacker.policy.scale_down import ScaleDown, ScaleDownRules
from rollpacker.policy.tail_batching import RoundPlan, TailBatchingRules
from rollpacker.round_log import RoundArguments, RoundLog
from rollpacker.settings import RunSettings
from rollpacker.store.draft_store import DraftStore
from rollpacker.store.records import RunState
from rollpacker.store.sample_stream import SampleStream
from rollpacker.types import EngineSpec, PromptGroup, SamplingParameters
from services.coordinator.command_runner import CommandRunner
from services.coordinator.expected_lengths import expected_tokens
from services.coordinator.ladder_planning import selection_of
from services.coordinator.parallelism import ParallelismPlanner, ServedCounts
from services.coordinator.progress import RoundProgress
from services.coordinator.replicas import ReplicaSet
from services.coordinator.reward_client import RewardClient
from services.coordinator.round_context import RoundContext
from services.coordinator.round_draws import RoundDraws
from services.coordinator.round_result import RoundResult
from services.coordinator.run_context import RunContext
from services.coordinator.step_files import in_thread


class RoundRunner:
    """Runs the rounds of one run. `use` comes before the first."""

    def __init__(self, context: RunContext, drafts: DraftStore) -> None:
        self._context = context
        self._drafts = drafts
        tail = context.settings.tail_batching
        self._sizes = (
            ParallelismPlanner(tail.tensor_parallel_size, tail.max_tensor_parallel_size)
            if tail.max_tensor_parallel_size and tail.mode != "auto"
            else None
        )
        self._served = ServedCounts()

    def use(
        self,
        settings: RunSettings,
        rules: TailBatchingRules,
        sampling: SamplingParameters,
        rewards: RewardClient,
    ) -> None:
        """These hold from the next round on."""
        self._settings = settings
        self._rules = rules
        self._sampling = sampling
        self._rewards = rewards

    async def run(
        self,
        state: RunState,
        planned: RoundPlan,
        draws: RoundDraws,
        restored: Sequence[PromptGroup],
        stream: SampleStream,
    ) -> RoundResult:
        """The round of a step, to its end; `restored` groups stand in the stream already."""
        context = await self._round_context(state, planned, draws)
        spec = self._spec(state, planned)
        replicas = ReplicaSet(
            self._context.workers,
            spec,
            self._context.fence,
            needs_replay=self._rules.keeps_seeds and self._rules.levels > 0,
            group_count=len(draws.draws),
            response_count=planned.response_count,
            expected_count=self._served.expected(spec.tensor_parallel_size),
        )

        cap = self._sampling.max_response_tokens
        launched = list(draws.draws.values())
        expected = expected_tokens(state, launched, draws.prompts, cap)

        def on_progress(round_: Round) -> None:
            self._context.on_progress(RoundProgress.of_round(round_, planned, "rollout"))

        prompt_tokens = fmean(len(prompt.token_ids) for prompt in draws.prompts.values())
        arguments = RoundArguments(
            self._rules, planned, tuple(launched), expected, prompt_tokens, cap
        )
        log = RoundLog(arguments)
        remembers = self._settings.tail_batching.mode == "auto" or self._rules.selection_weights
        meter = EngineMeter(prompt_tokens) if remembers else None
        runner = CommandRunner(
            arguments.make(),
            context,
            replicas,
            self._rewards,
            stream.append,
            on_progress,
            self._scale_down_of(state),
            [log.handled, *([meter.handled] if meter else [])],
            draws.more,
            rebalances=self._settings.tail_batching.resolved_rebalance,
        )
        started = time.monotonic()
        result = await runner.run(restored)
        log.rewarded(result.rewards)
        await in_thread(partial(self._context.outputs.write_round, state.step, log.lines))
        ready = replicas.first_ready_at or started
        self._served.served(spec.tensor_parallel_size, replicas.served_count)
        if self._sizes:
            self._sizes.applied(spec.tensor_parallel_size, replicas.slowest_apply_seconds)
            self._sizes.after_round(planned.kind, result.preemptions, result.finish.rollout_seconds)
        return dataclasses.replace(
            result,
            apply_seconds=max(0.0, ready - started),
            tensor_parallel_size=spec.tensor_parallel_size,
            meter=meter,
        )

    async def _round_context(
        self, state: RunState, planned: RoundPlan, draws: RoundDraws
    ) -> RoundContext:
        tail = self._settings.tail_batching
        return RoundContext(
            run_id=self._context.run_id,
            step=state.step,
            fence=self._context.fence,
            weight_version=state.weight_version,
            sampling=self._sampling,
            draws=draws.draws,
            prompts=draws.prompts,
            tokenizer=self._context.data.tokenizer,
            drafts=await self._drafts.load([draw.id for draw in planned.queued]),
            carry_over_max_tokens=tail.carry_over_max_tokens if self._rules.keeps_seeds else 0,
            selection=selection_of(state) if self._rules.selection_weights else None,
        )

    def _spec(self, state: RunState, planned: RoundPlan) -> EngineSpec:
        """The step's weights, at the size that preemptions decide or that the level has."""
        size = self._rules.tensor_parallel_size(planned.level)
        if self._sizes:
            size = self._sizes.size(planned.kind)
        return EngineSpec(
            self._context.run_id,
            state.weight_version,
            state.weights_uri,
            tensor_parallel_size=size,
        )

    def _scale_down_of(self, state: RunState) -> ScaleDown | None:
        """What may release replicas of a round; None: the run does not."""
        tail = self._settings.tail_batching
        if not tail.scale_down:
            return None
        cap = self._sampling.max_response_tokens
        rules = ScaleDownRules(idle_only=tail.scale_down_rule == "idle")
        return ScaleDown(rules, state.totals.trained_lengths, cap)


def sampling_parameters(settings: RunSettings, data: RunData) -> SamplingParameters:
    """How training rounds sample; stop tokens default to the model's."""
    sampling = settings.sampling
    return SamplingParameters(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_response_tokens=sampling.max_response_tokens,
        stop_token_ids=sampling.stop_token_ids or data.tokenizer.eos_token_ids,
    )
