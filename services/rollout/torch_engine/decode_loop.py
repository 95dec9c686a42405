"""One engine, synchronously: `step` moves every running response one token on.

    submit -> waiting -> admit: prefill into the KV cache -> step, step, ... -> result
                 ^----------- preempt: tokens to the host, KV dropped ----'

The scheduler decides, the runner computes, the loop carries responses between them. The prefix
of a group is computed once and copied; a response that starts later copies it from a sibling's
row while one is there. A draft is checked at admission, in one pass; a response that ends with it
never decodes.

Events that can be foreseen (a response reaches its cap, a group is due for progress) stand in a
calendar by step number; so a step's own Python work does not grow with the number of responses.
Not thread-safe: `TorchEngine` calls it from its one thread.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from rollpacker.placement.shape import weight_kv_tokens
from rollpacker.types import EngineStats, FinishReason
from services.rollout.engine import (
    EngineError,
    GenerationProgress,
    GenerationRequest,
    GenerationResult,
    InvalidRequestError,
)
from services.rollout.torch_engine.decoder_config import read_config
from services.rollout.torch_engine.model_runner import DraftCheck, ModelRunner, Prefill
from services.rollout.torch_engine.responses import Event, Group, ResponseState, useful_draft
from services.rollout.torch_engine.scheduler import Scheduler
from services.rollout.torch_engine.slot_table import SlotInput


class DecodeLoop:
    """The responses of one engine, from submission to result."""

    def __init__(
        self,
        *,
        slot_count: int,
        kv_budget_tokens: int,
        max_context_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        holds: Callable[[int], None] | None = None,
    ) -> None:
        """`max_context_tokens` 0 means the model's own. `holds`: see TorchEngine."""
        self._scheduler = Scheduler(slot_count, kv_budget_tokens)
        self._max_context = max_context_tokens
        self._device, self._dtype = device, dtype
        self._holds = holds or (lambda _: None)
        self._runner: ModelRunner | None = None
        self._weight_kv_tokens = 0  # of the weights that it holds
        self._arrivals = 0
        self._generated_tokens = 0
        self._responses: dict[str, ResponseState] = {}
        self._caps: defaultdict[int, list[ResponseState]] = defaultdict(list)
        self._checks: defaultdict[int, list[Group]] = defaultdict(list)

    @property
    def limits(self) -> tuple[int, int]:
        """Positions of a sequence and size of the vocabulary; zeros without weights."""
        runner = self._runner
        return (runner.context, runner.config.vocab_size) if runner else (0, 0)

    @property
    def step_count(self) -> int:
        """Steps so far."""
        return self._scheduler.step

    def load_weights(self, directory: Path) -> None:
        """See `Engine.load_weights`."""
        self._refuse_while_busy("load weights")
        config = read_config(directory)
        if self._runner is not None and self._runner.config == config:
            self._runner.swap_weights(directory)
            return
        self._runner = ModelRunner(
            directory,
            config,
            slot_count=self._scheduler.slot_count,
            max_context_tokens=self._max_context,
            device=self._device,
            dtype=self._dtype,
        )
        self._weight_kv_tokens = weight_kv_tokens(directory)
        self._holds(self._runner.weight_bytes)

    def release(self) -> None:
        """See `Engine.release`."""
        self._refuse_while_busy("release memory")
        self._runner = None
        self._weight_kv_tokens = 0
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        self._holds(0)

    def submit(
        self,
        requests: Sequence[GenerationRequest],
        progress_interval: int,
        emit: Callable[[Event], None],
    ) -> None:
        """Queue the responses of one prompt; `emit` gets their results and progress."""
        if self._runner is None:
            raise EngineError("the engine serves no weights; load some first")
        names = [request.request_id for request in requests]
        if len(set(names)) < len(names) or not self._responses.keys().isdisjoint(names):
            raise InvalidRequestError("request_id", f"one of {names} is running already")
        group = Group(emit, progress_interval)
        for request in requests:
            response = ResponseState(
                request=request,
                group=group,
                arrival=self._arrivals,
                token_ids=list(request.carried_token_ids),
                logprobs=list(request.carried_logprobs),
                near_ties=request.carried_near_ties,
                draft=useful_draft(request),
            )
            self._arrivals += 1
            group.responses.append(response)
            self._responses[request.request_id] = response
            self._scheduler.submit(response)

    def abort(self, request_ids: Sequence[str]) -> list[GenerationResult]:
        """See `Engine.abort`."""
        names = dict.fromkeys(request_ids)
        found = [self._responses[name] for name in names if name in self._responses]
        for response in found:
            if not response.running:
                self._scheduler.withdraw(response)
        self._let_go([response for response in found if response.running])
        return [self._end(response, FinishReason.INTERRUPTED) for response in found]

    def abort_all(self) -> None:
        """Abort every response."""
        self.abort(list(self._responses))

    def step(self) -> bool:
        """Preempt, admit, decode one token each, hand out what ended. False: nothing to do."""
        plan = self._scheduler.plan()
        if plan.preempted:
            self._take_back(plan.preempted)
            for response in plan.preempted:
                self._scheduler.submit(response)
        if plan.admitted:
            self._admit(plan.admitted)
        if self._runner is None or not self._scheduler.running_count:
            return bool(plan.admitted)  # their drafts ended them: others may wait
        stopped = self._runner.decode()
        self._generated_tokens += self._scheduler.running_count
        self._scheduler.advance()
        self._finish(stopped)
        self._report_progress()
        return True

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        scheduler = self._scheduler
        return EngineStats(
            preemption_count=scheduler.preemption_count,
            kv_cache_usage=min(1.0, scheduler.held_tokens / scheduler.kv_budget_tokens),
            running_response_count=scheduler.running_count,
            waiting_response_count=scheduler.waiting_count,
            gpu_count=int(self._device.type == "cuda"),
            kv_budget_tokens=scheduler.kv_budget_tokens,
            slot_count=scheduler.slot_count,
            generated_token_count=self._generated_tokens,
            context_tokens=self.limits[0],
            max_context_tokens=self._max_context,
            weight_kv_tokens=self._weight_kv_tokens,
        )

    def _refuse_while_busy(self, what: str) -> None:
        if self._responses:
            raise EngineError(
                f"cannot {what} while {len(self._responses)} responses run; abort them first"
            )

    def _admit(self, admitted: Sequence[ResponseState]) -> None:
        assert self._runner is not None
        step, now = self._scheduler.step, time.time()
        for response in admitted:
            response.start_time = response.start_time or now
        fresh = [response for response in admitted if not response.draft]
        self._check_drafts([response for response in admitted if response.draft])
        started = [response for response in admitted if response.running]
        if not started:
            return
        self._runner.start(self._prefills(fresh), [_slot_input(each) for each in started])
        for response in started:
            self._caps[step + response.room].append(response)
            group = response.group
            if group.reported_step < 0:
                group.reported_step = step
            if not group.check_pending:
                group.check_pending = True
                self._checks[step + 1].append(group)

    def _check_drafts(self, drafted: Sequence[ResponseState]) -> None:
        """Take over what the weights confirm; end the responses that end with it."""
        assert self._runner is not None
        reasons = [response.end_of_draft for response in drafted]
        logs = self._runner.verify(
            [
                DraftCheck(
                    slot=response.slot,
                    prefix=response.sequence,
                    draft=response.draft,
                    seed=response.request.seed,
                    temperature=response.request.temperature,
                    is_whole=reason is not None,
                )
                for response, reason in zip(drafted, reasons, strict=True)
            ]
        )
        for response, reason, log in zip(drafted, reasons, logs, strict=True):
            is_whole = len(log.token_ids) == len(response.draft)
            self._scheduler.drop_draft(response, log.token_ids)
            response.logprobs += log.logprobs
            response.near_ties += log.near_ties
            if is_whole and reason is not None:
                self._scheduler.leave(response)
                self._end(response, reason)

    def _prefills(self, admitted: Sequence[ResponseState]) -> list[Prefill]:
        """What to compute: the fresh responses of a group share one prefill."""
        fresh: defaultdict[Group, list[ResponseState]] = defaultdict(list)
        prefills = []
        for response in admitted:
            if response.token_ids:
                prefills.append(Prefill(response.sequence[:-1], (response.slot,)))
            else:
                fresh[response.group].append(response)
        for group, responses in fresh.items():
            slots = tuple(response.slot for response in responses)
            prefills.append(
                Prefill(responses[0].sequence[:-1], slots, self._slot_with_prompt(group))
            )
        return prefills

    def _slot_with_prompt(self, group: Group) -> int | None:
        """A slot whose row begins with the group's prompt already."""
        for sibling in group.responses:
            if sibling.running and sibling.admitted_step < self._scheduler.step:
                return sibling.slot
        return None

    def _take_back(self, responses: Sequence[ResponseState]) -> None:
        """Bring the tokens of responses that left their slots to the host; drop their KV."""
        assert self._runner is not None
        logs = self._runner.stop([response.slot for response in responses])
        for response, log in zip(responses, logs, strict=True):
            response.token_ids += log.token_ids
            response.logprobs += log.logprobs
            response.near_ties += log.near_ties

    def _let_go(self, responses: Sequence[ResponseState]) -> None:
        for response in responses:
            self._scheduler.leave(response)
        if responses:
            self._take_back(responses)

    def _finish(self, stopped_slots: Sequence[int]) -> None:
        step = self._scheduler.step
        ended = dict.fromkeys(stopped_slots, FinishReason.STOP)
        for response in self._caps.pop(step, ()):
            if response.running and response.admitted_step + response.room == step:
                ended.setdefault(response.slot, FinishReason.LENGTH)
        if ended:
            finished = [each for each in self._scheduler.running() if each.slot in ended]
            self._let_go(finished)
            for response in finished:
                self._end(response, ended[response.slot])

    def _end(self, response: ResponseState, reason: FinishReason) -> GenerationResult:
        del self._responses[response.request.request_id]
        now = time.time()
        result = GenerationResult(
            request_id=response.request.request_id,
            token_ids=tuple(response.token_ids),
            logprobs=tuple(response.logprobs),
            finish_reason=reason,
            carried_token_count=response.carried_tokens,
            near_tie_count=response.near_ties,
            slot=response.slot,
            start_time=response.start_time or now,
            end_time=now,
            accepted_draft_tokens=response.accepted_tokens,
        )
        response.group.emit(result)
        return result

    def _report_progress(self) -> None:
        step = self._scheduler.step
        for group in self._checks.pop(step, ()):
            group.check_pending = False
            if not any(response.running for response in group.responses):
                continue
            longest = max(response.response_tokens(step) for response in group.responses)
            gained = max(longest - group.reported_tokens, step - group.reported_step)
            if gained >= group.progress_interval:
                group.reported_tokens, group.reported_step, gained = longest, step, 0
                group.emit(self._progress(group, longest))
            group.check_pending = True
            self._checks[step + group.progress_interval - gained].append(group)

    def _progress(self, group: Group, longest: int) -> GenerationProgress:
        step = self._scheduler.step
        return GenerationProgress(
            longest_response_tokens=longest,
            total_response_tokens=sum(each.response_tokens(step) for each in group.responses),
            carried_response_tokens=sum(each.carried_tokens for each in group.responses),
            new_token_ids=self._untold_tokens(group),
        )

    def _untold_tokens(self, group: Group) -> dict[str, tuple[int, ...]]:
        """What the open responses of a group gained since the last progress; now it is told."""
        assert self._runner is not None
        step = self._scheduler.step
        running = [response for response in group.responses if response.running]
        start = min((response.untold_from for response in running), default=0)
        end = max((response.sampled(step) for response in running), default=0)
        slots = [response.slot for response in running]
        rows = self._runner.sampled_tokens(slots, start, end) if running else []
        sampled = dict(zip(slots, rows, strict=True))
        found = {}
        for response in group.responses:
            name = response.request.request_id
            if name not in self._responses:
                continue
            tokens = response.token_ids[response.told_tokens :]
            if response.running:
                row = sampled[response.slot]
                tokens += row[response.untold_from - start : response.sampled(step) - start]
            if tokens:
                found[name] = tuple(tokens)
                response.told_tokens += len(tokens)
        return found


def _slot_input(response: ResponseState) -> SlotInput:
    request, sequence = response.request, response.sequence
    return SlotInput(
        slot=response.slot,
        last_token=sequence[-1],
        position=len(sequence) - 1,
        seed=request.seed,
        temperature=request.temperature,
        stop_token_ids=request.stop_token_ids,
        token_room=response.room,
    )
