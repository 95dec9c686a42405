"""Where the prompts of a run come from: those that were added while it runs, then its data set.

The state says how many added prompts it knows and how many of these are drawn; so a step that is
repeated after a crash draws the same, whatever was added meanwhile. An added prompt is drawn once,
as a draw of epoch 0; its id is none of the data set's.

A draw that was dropped before its turn is passed over when its turn comes; from then on it has the
seeds of its launch that was not, so RequeueDraws can still bring it back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rollpacker.data.dataset import DataCursor
from rollpacker.data.errors import DataError
from rollpacker.data.rows import parse_row
from rollpacker.data.run_data import prompt_rules
from rollpacker.policy.tail_batching import RoundPlan, TailBatchingRules
from rollpacker.rpc.errors import FailedPreconditionError, InvalidArgumentError
from rollpacker.sampling import response_seeds
from rollpacker.store.records import RunState
from rollpacker.store.run_store import RunStore
from rollpacker.types import DeferredDraw, Draw, DrawId, Prompt
from services.coordinator.run_context import RunContext

_ADDED_EPOCH = 0
_log = logging.getLogger(__name__)


class PromptSource:
    """The prompts of one run."""

    def __init__(self, context: RunContext, store: RunStore) -> None:
        self._settings = context.settings
        self._data = context.data
        self._store = store
        self._added: list[Prompt] = []  # in the order in which they came
        self._added_by_id: dict[str, Prompt] = {}

    def open(self, state: RunState) -> None:
        """Refuse data in which the cursor is another place; show what the model sees, as it sees
        it: most wrong templates are found by looking. Raises FailedPreconditionError."""
        data = self._data
        if state.data_digest not in ("", data.dataset.digest):
            raise FailedPreconditionError(
                "DATA_CHANGED",
                f"the data of run {state.run_id} is not what it was at its start (now"
                f" {len(data.dataset)} prompts, digest {data.dataset.digest}, then"
                f" {state.data_digest}); put the old rows back, or start another run",
            )
        taken, _ = data.dataset.take(DataCursor.from_json(state.cursor), 1)
        if data.overlong:
            _log.warning("%d over-long prompts are left out", data.overlong)
        for _, prompt in taken:
            tokens = len(prompt.token_ids)
            _log.info("next prompt %s, %d tokens: %r", prompt.prompt_id, tokens, prompt.text)

    async def know(self, count: int) -> None:
        """Read the added prompts up to number `count`. Repeat: no effect."""
        rows = await self._store.added_prompts(len(self._added), count)
        for prompt in await asyncio.to_thread(self.parsed, [json.loads(row) for row in rows]):
            self._added.append(prompt)
            self._added_by_id[prompt.prompt_id] = prompt

    def parsed(self, rows: Sequence[Mapping[str, Any]]) -> list[Prompt]:
        """Rows of AddPrompts. Raises InvalidArgumentError naming the first row that is wrong."""
        rules = prompt_rules(self._settings)
        prompts: list[Prompt] = []
        for index, values in enumerate(rows):
            try:
                prompt = parse_row(
                    values,
                    index,
                    self._data.tokenizer,
                    rules,
                )
            except DataError as error:
                field = f"rows[{index}].{error.field}".removesuffix(".")
                raise InvalidArgumentError.field(field, error.problem) from error
            if self._in_data_set(prompt.prompt_id):
                raise InvalidArgumentError.field(
                    f"rows[{index}].prompt_id",
                    f"{prompt.prompt_id!r} is a prompt of the run's data; give it another id",
                )
            prompts.append(prompt)
        return prompts

    def domain_of(self, prompt_id: str) -> str:
        """Of any prompt of the run; "" for none."""
        added = self._added_by_id.get(prompt_id)
        return added.domain if added else self._data.dataset.domain_of(prompt_id)

    def longest(self) -> int:
        """Tokens of the longest prompt that the run samples, held-out ones included."""
        added = max((len(prompt.token_ids) for prompt in self._added), default=0)
        return max(self._data.longest_prompt(), added)

    def left(self, state: RunState) -> int:
        """Prompts that are not drawn yet, in all epochs."""
        of_data = self._data.dataset.remaining(DataCursor.from_json(state.cursor))
        dropped = sum(draw.is_ahead for draw in state.dropped)
        return state.added_known - state.added_drawn + of_data - dropped

    def ahead(self, state: RunState, draws: Collection[DrawId]) -> set[DrawId]:
        """Those of these draws that are not drawn yet."""
        of_data = self._data.dataset.ahead(DataCursor.from_json(state.cursor), draws)
        added = self._added[state.added_drawn : state.added_known]
        return of_data | {
            draw for prompt in added if (draw := DrawId(_ADDED_EPOCH, prompt.prompt_id)) in draws
        }

    def take(
        self, state: RunState, plan: RoundPlan, rules: TailBatchingRules
    ) -> tuple[list[Draw], dict[DrawId, Prompt], RunState]:
        """The draws of a round with their seeds, their prompts, and the state behind them."""
        seed, count = self._settings.seed, plan.response_count
        queued = [
            draw
            if rules.keeps_seeds
            else dataclasses.replace(
                draw, seeds=response_seeds(seed, draw.id, count, attempt=draw.level)
            )
            for draw in plan.queued
        ]
        taken, after = self._new(state, plan.new_prompts, count)
        new = [self._launched(draw, state.step, count) for draw in taken]
        draws = [*queued, *new]
        return draws, {draw.id: self._by_id(draw.prompt_id) for draw in draws}, after

    def _launched(self, draw: DrawId, step: int, response_count: int) -> Draw:
        seeds = response_seeds(self._settings.seed, draw, response_count)
        return Draw(*draw, seeds=seeds, first_step=step)

    def _new(
        self, state: RunState, count: int, response_count: int
    ) -> tuple[list[DrawId], RunState]:
        """The next draws that are not dropped; those that are have been passed over."""
        dropped = {draw.item.draw.id: draw for draw in state.dropped}
        kept: list[DrawId] = []
        while len(kept) < count:
            taken, state = self._next(state, count - len(kept))
            if not taken:
                break
            for draw in taken:
                if draw not in dropped:
                    kept.append(draw)
                    continue
                launched = self._launched(draw, state.step, response_count)
                item = DeferredDraw(launched, (0,) * response_count, (False,) * response_count)
                dropped[draw] = dataclasses.replace(dropped[draw], item=item)
        return kept, dataclasses.replace(state, dropped=tuple(dropped.values()))

    def _next(self, state: RunState, count: int) -> tuple[list[DrawId], RunState]:
        drawn = min(state.added_drawn + count, state.added_known)
        added = self._added[state.added_drawn : drawn]
        cursor = DataCursor.from_json(state.cursor)
        of_data, cursor = self._data.dataset.take(cursor, count - len(added))
        ids = [
            *(DrawId(_ADDED_EPOCH, prompt.prompt_id) for prompt in added),
            *(DrawId(epoch, prompt.prompt_id) for epoch, prompt in of_data),
        ]
        return ids, dataclasses.replace(state, cursor=cursor.to_json(), added_drawn=drawn)

    def _by_id(self, prompt_id: str) -> Prompt:
        return self._added_by_id.get(prompt_id) or self._data.dataset.by_id(prompt_id)

    def _in_data_set(self, prompt_id: str) -> bool:
        try:
            self._data.dataset.by_id(prompt_id)
        except KeyError:
            return False
        return True
