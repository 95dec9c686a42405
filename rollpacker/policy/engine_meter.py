"""How fast the engines decode, from the events of the rounds themselves.

A replica gives each of its running responses one token per decode step, and a step with n of them
and K tokens of KV takes base + n * per_sequence + K * per_kv_token seconds. So a response that ends
says how many steps its replica has made since it was launched, and each end gives one equation for
the time since the end before it:

    seconds = base * steps + per_sequence * (sum of n) + per_kv_token * (sum of K)

Of all equations only the sums of products are kept (`SpeedSums`): the run's state holds them, and
older rounds fade from them. What did not advance with the others (it was preempted, or waited for a
slot) ends after fewer steps than its replica has made, and gives no equation. Prefill, the check of
drafts and whatever else slows a round down are in the measured seconds. Accepted drafts are known
when a response ends, so until then the KV that they fill is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from rollpacker.policy.commands import AbortGroup, Command, LaunchGroup
from rollpacker.policy.events import (
    Event,
    GroupInterrupted,
    ReplicaJoined,
    ReplicaLost,
    ResponseFinished,
)
from rollpacker.types import DrawId

_TERMS = 3  # steps, running responses, KV tokens
_PAIRS = tuple((row, column) for row in range(_TERMS) for column in range(row, _TERMS))


@dataclass(frozen=True, slots=True)
class SpeedSums:
    """Sums over equations: what a least-squares fit needs of them."""

    equations: float = 0.0
    products: tuple[float, ...] = (0.0,) * len(_PAIRS)  # of two terms, in the order of `_PAIRS`
    targets: tuple[float, ...] = (0.0,) * _TERMS  # of a term and the seconds

    def add(self, terms: tuple[float, float, float], seconds: float) -> SpeedSums:
        """With one equation more."""
        return SpeedSums(
            self.equations + 1.0,
            tuple(
                old + terms[row] * terms[column]
                for old, (row, column) in zip(self.products, _PAIRS, strict=True)
            ),
            tuple(old + term * seconds for old, term in zip(self.targets, terms, strict=True)),
        )

    def faded(self, share: float, newer: SpeedSums) -> SpeedSums:
        """`share` of these and all of the newer ones."""
        return SpeedSums(
            share * self.equations + newer.equations,
            tuple(share * a + b for a, b in zip(self.products, newer.products, strict=True)),
            tuple(share * a + b for a, b in zip(self.targets, newer.targets, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class DecodeSeconds:
    """Of one decode step."""

    base: float
    per_sequence: float
    per_kv_token: float


def decode_seconds(sums: SpeedSums) -> DecodeSeconds | None:
    """The fit with no negative part that explains the seconds best; None where nothing does."""
    best, explained = None, 0.0
    for size in range(1, _TERMS + 1):
        for chosen in combinations(range(_TERMS), size):
            found = _solved(sums, chosen)
            if found is None or min(found) < 0.0:
                continue
            gain = sum(
                value * sums.targets[term] for value, term in zip(found, chosen, strict=True)
            )
            if gain > explained:
                parts = [0.0] * _TERMS
                for value, term in zip(found, chosen, strict=True):
                    parts[term] = value
                best, explained = DecodeSeconds(*parts), gain
    return best


def _solved(sums: SpeedSums, chosen: tuple[int, ...]) -> list[float] | None:
    """The normal equations of some terms, by elimination; None where they are not independent."""
    product = dict(zip(_PAIRS, sums.products, strict=True))
    scale = [product[term, term] ** 0.5 for term in chosen]
    if min(scale) <= 0.0:
        return None
    rows = [
        [product[min(a, b), max(a, b)] / (scale[i] * scale[j]) for j, b in enumerate(chosen)]
        + [sums.targets[a] / scale[i]]
        for i, a in enumerate(chosen)
    ]
    count = len(chosen)
    for place in range(count):
        pivot = rows[place][place]
        if pivot < 1e-9:
            return None
        rows[place] = [value / pivot for value in rows[place]]
        for other in range(count):
            if other != place:
                factor = rows[other][place]
                rows[other] = [
                    a - factor * b for a, b in zip(rows[other], rows[place], strict=True)
                ]
    return [rows[place][count] / scale[place] for place in range(count)]


@dataclass(slots=True)
class _Replica:
    """How many steps it has made, as the last end of a response told."""

    at: float  # of that end, or of a launch behind which it was idle
    steps: float = 0.0
    steps_per_second: float = 0.0
    running: int = 0
    starts: float = 0.0  # sum of the steps at which what runs was launched

    def steps_at(self, at: float) -> float:
        """At the pace of the last equation."""
        return self.steps + (at - self.at) * self.steps_per_second


@dataclass(slots=True)
class _Group:
    """A running group: where, and the step of its launch by index."""

    replica_id: str
    starts: dict[int, float]


class EngineMeter:
    """Is told each event of a round and what the round answered."""

    def __init__(self, prompt_tokens: float) -> None:
        """`prompt_tokens`: of a prompt, on average."""
        self.prompt_tokens = prompt_tokens
        self.sums = SpeedSums()
        self.weight_kv_tokens = 0  # as the replicas tell it
        self._capacities: dict[str, int] = {}  # KV tokens, of every replica that joined
        self._replicas: dict[str, _Replica] = {}
        self._groups: dict[DrawId, _Group] = {}
        self._launches: Counter[DrawId] = Counter()

    @property
    def replicas(self) -> int:
        """Those that took part."""
        return len(self._capacities)

    @property
    def kv_capacity(self) -> int:
        """Tokens that the smallest replica holds; 0: not known, no limit."""
        return min(self._capacities.values(), default=0)

    @property
    def moved(self) -> frozenset[DrawId]:
        """Groups that were launched again: what these carry are not only drafts of old weights."""
        return frozenset(draw for draw, count in self._launches.items() if count > 1)

    def handled(self, event: Event, commands: Sequence[Command]) -> None:
        """The round was told this, and asked for that."""
        match event:
            case ReplicaJoined(_, name, _, kv_budget_tokens):
                self._capacities[name] = kv_budget_tokens
                self.weight_kv_tokens = event.weight_kv_tokens or self.weight_kv_tokens
            case ResponseFinished():
                self._ended(event)
            case ReplicaLost(_, name):
                self._replicas.pop(name, None)
                lost = [draw for draw, group in self._groups.items() if group.replica_id == name]
                for draw in lost:
                    del self._groups[draw]
            case GroupInterrupted(_, draw, name):
                if draw in self._groups and self._groups[draw].replica_id == name:
                    self._stopped(draw)
        for command in commands:
            match command:
                case LaunchGroup(draw, name, indices):
                    self._launched(event.at, draw, name, indices)
                case AbortGroup(draw):
                    self._stopped(draw)

    def _launched(self, at: float, draw: DrawId, name: str, indices: tuple[int, ...]) -> None:
        replica = self._replicas.setdefault(name, _Replica(at))
        if not replica.running:
            replica.at = at
        start = replica.steps_at(at)
        replica.running += len(indices)
        replica.starts += start * len(indices)
        self._groups[draw] = _Group(name, dict.fromkeys(indices, start))
        self._launches[draw] += 1

    def _stopped(self, draw: DrawId) -> None:
        group = self._groups.pop(draw, None)
        if group is not None:
            replica = self._replicas[group.replica_id]
            replica.running -= len(group.starts)
            replica.starts -= sum(group.starts.values())

    def _ended(self, event: ResponseFinished) -> None:
        group = self._groups.get(event.draw)
        if group is None or event.index not in group.starts:
            return  # late news of a replica that was lost
        replica = self._replicas[group.replica_id]
        start = group.starts.pop(event.index)
        steps = start + event.tokens - event.carried_tokens
        made, seconds = steps - replica.steps, event.at - replica.at
        if made > 0.0:
            middle = self.prompt_tokens + steps - made / 2.0
            kv_tokens = max(0.0, replica.running * middle - replica.starts)
            terms = (made, made * replica.running, made * kv_tokens)
            self.sums = self.sums.add(terms, seconds)
            replica.at, replica.steps = event.at, steps
            replica.steps_per_second = made / seconds if seconds > 0.0 else 0.0
        replica.running -= 1
        replica.starts -= start
