"""The draws of one round: those of its plan, and new prompts that take the place of flat groups.

The k-th new prompt of a round is always the k-th behind the run's state, whoever asks for it and
when: so a round that is run again after a crash launches the same draws.
"""

from __future__ import annotations

import dataclasses

from rollpacker.policy.tail_batching import RoundPlan, TailBatchingRules
from rollpacker.store.records import RunState
from rollpacker.types import Draw
from services.coordinator.prompt_source import PromptSource


class RoundDraws:
    """Grows while the round runs; `state` is behind the last prompt taken."""

    def __init__(
        self, source: PromptSource, state: RunState, plan: RoundPlan, rules: TailBatchingRules
    ) -> None:
        self._source = source
        self._plan = plan
        self._rules = rules
        draws, self.prompts, self.state = source.take(state, plan, rules)
        self.draws = {draw.id: draw for draw in draws}  # in launch order

    def more(self, count: int) -> list[Draw]:
        """The next `count` prompts as draws; fewer at the end of the data."""
        plan = dataclasses.replace(self._plan, queued=(), new_prompts=count)
        draws, prompts, self.state = self._source.take(self.state, plan, self._rules)
        self.prompts.update(prompts)
        self.draws.update((draw.id, draw) for draw in draws)
        return draws
