"""Watches a run for alarms: keeps its newest records, tells the log when one begins or ends."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque

from rollpacker.policy.alarms import PREFIX, WINDOW, raised_alarms
from rollpacker.store.run_store import RunStore
from rollpacker.types import StepRecord

_log = logging.getLogger(__name__)


class AlarmWatch:
    """The rules are pure (`rollpacker.policy.alarms`); this remembers what they look at."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._records: deque[StepRecord] = deque(maxlen=WINDOW)
        self._raised: set[str] = set()

    async def checked(self, record: StepRecord) -> StepRecord:
        """The record of the next step, with a metric for each alarm that holds after it."""
        if not self._records or self._records[-1].step != record.step - 1:
            await self._restart(record.step)
        self._records.append(_slim(record))
        raised = {alarm.name: alarm for alarm in raised_alarms(tuple(self._records))}
        for name, alarm in raised.items():
            if name not in self._raised:
                _log.warning("alarm %s from step %d on: %s", name, record.step, alarm.text)
        for name in self._raised - raised.keys():
            _log.info("alarm %s is over at step %d", name, record.step)
        self._raised = set(raised)
        metrics = {**record.metrics, **{PREFIX + name: 1.0 for name in raised}}
        return dataclasses.replace(record, metrics=metrics)

    async def _restart(self, step: int) -> None:
        """The run goes on at `step`: after a start, or a rewind."""
        self._records.clear()
        newest_first = await self._store.records_before(step, WINDOW)
        self._records.extendleft(_slim(record) for record in newest_first)
        self._raised = {alarm.name for alarm in raised_alarms(tuple(self._records))}


def _slim(record: StepRecord) -> StepRecord:
    return dataclasses.replace(record, draws=())
