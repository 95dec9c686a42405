"""From prompt groups in stream order to micro-batches: a pure function of the ordered groups.

Groups are collected in stream order into *windows* of a fixed number of groups per rank of a
replica. A full window is packed at once, for one replica, group i of it for rank i mod n; the last,
partial one only when the step finishes, dealt out over all replicas. So what is packed with what
depends on the order of the stream and the numbers of ranks and replicas alone, never on when a
group arrived.

Inside a window each rank's responses are sorted by length and packed greedily, longest first,
into micro-batches of at most `micro_batch_tokens` padded tokens of which at most a fifth is
padding. A response that is longer than the budget has a micro-batch of its own. All ranks get
the same number of micro-batches per window (they are in lockstep): the shorter lists are filled
up with dummies, which train nothing. A response without trainable tokens needs no forward pass;
it is counted, and that is all. A group whose selection weight is 0 has its place in a window and
nothing else: its responses are neither packed nor counted. Replicas are not in lockstep and get no
dummies for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rollpacker.types import PromptGroup, ScoredResponse

WINDOW_GROUPS = 8  # per rank
_PADDING_SHARE = 0.2  # of a micro-batch's padded tokens, at most


@dataclass(frozen=True, slots=True)
class Sample:
    """A response that is to be trained, with its prompt."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    trainable: tuple[bool, ...]
    advantage: float
    selection_weight: float  # of its group; above 0

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward pass: B responses, padded on the right to L tokens.

    The model reads `input_ids`; its last K logits are compared with `target_ids`. Everything of
    shape [B, K] is aligned with the targets. Tensors are made on the CPU.
    """

    input_ids: Tensor  # [B, L - 1] int64
    target_ids: Tensor  # [B, K] int64
    rollout_logprobs: Tensor  # [B, K] float32
    mask: Tensor  # [B, K] bool: the trained tokens
    advantages: Tensor  # [B] float32
    selection_weights: Tensor  # [B] float32
    token_count: int  # without padding; 0 for a dummy

    def to(self, device: torch.device) -> MicroBatch:
        """The same one with its tensors on another device."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            target_ids=self.target_ids.to(device),
            rollout_logprobs=self.rollout_logprobs.to(device),
            mask=self.mask.to(device),
            advantages=self.advantages.to(device),
            selection_weights=self.selection_weights.to(device),
        )

    @property
    def padded_token_count(self) -> int:
        """B * L, or 0 for a dummy."""
        rows, columns = self.input_ids.shape
        return rows * (columns + 1) if self.token_count else 0


@dataclass(frozen=True, slots=True)
class Window:
    """What one rank does next: a list of micro-batches as long as every other rank's."""

    micro_batches: tuple[MicroBatch, ...]


@dataclass
class StreamPacker:
    """Takes the groups of a step in stream order and gives out windows for a replica's ranks."""

    shard_size: int  # ranks of a replica
    micro_batch_tokens: int
    replica_count: int = 1
    trained_tokens: int = 0  # of the groups taken so far whose selection weight is not 0
    trained_responses: int = 0
    windowed_groups: int = 0  # of all taken so far, in windows
    _waiting: list[PromptGroup] = field(default_factory=list)

    def add(self, group: PromptGroup) -> list[Window] | None:
        """Take the next group. When it has filled a window: that window, an item per rank."""
        self._waiting.append(group)
        if group.selection_weight > 0:
            self.trained_responses += len(group.responses)
            self.trained_tokens += sum(_trainable_count(scored) for scored in group.responses)
        if len(self._waiting) < WINDOW_GROUPS * self.shard_size:
            return None
        return self._window(self._take_waiting())

    def flush(self) -> list[list[Window]]:
        """The groups that wait, as a last window per replica, each with an item per rank; it may
        hold no micro-batch at all."""
        groups, count = self._take_waiting(), self.replica_count
        return [self._window(groups[replica::count]) for replica in range(count)]

    def _take_waiting(self) -> list[PromptGroup]:
        groups, self._waiting = self._waiting, []
        self.windowed_groups += len(groups)
        return groups

    def _window(self, groups: Sequence[PromptGroup]) -> list[Window]:
        packed = [
            pack(_samples(groups[rank :: self.shard_size]), self.micro_batch_tokens)
            for rank in range(self.shard_size)
        ]
        count = max(map(len, packed))
        return [Window((*batches, *[_dummy()] * (count - len(batches)))) for batches in packed]


def pack(samples: Iterable[Sample], micro_batch_tokens: int) -> list[MicroBatch]:
    """Longest first, equal lengths in the order given."""
    batches: list[MicroBatch] = []
    row: list[Sample] = []
    filled = 0
    for sample in sorted(samples, key=len, reverse=True):
        padded = (len(row) + 1) * len(row[0] if row else sample)
        unfilled = padded - filled - len(sample)
        if row and (padded > micro_batch_tokens or unfilled > _PADDING_SHARE * padded):
            batches.append(make_micro_batch(row))
            row, filled = [], 0
        row.append(sample)
        filled += len(sample)
    if row:
        batches.append(make_micro_batch(row))
    return batches


def make_micro_batch(samples: Sequence[Sample]) -> MicroBatch:
    """Pad samples to one length. Each has at least one prompt token and one response token."""
    length = max(map(len, samples))
    first = min(len(sample.prompt_token_ids) for sample in samples)  # the first target
    rows, targets = len(samples), length - first
    token_ids = torch.zeros(rows, length, dtype=torch.int64)
    logprobs = torch.zeros(rows, targets)
    mask = torch.zeros(rows, targets, dtype=torch.bool)
    for row, sample in enumerate(samples):
        token_ids[row, : len(sample)] = torch.tensor(sample.prompt_token_ids + sample.token_ids)
        place = slice(len(sample.prompt_token_ids) - first, len(sample) - first)
        logprobs[row, place] = torch.tensor(sample.rollout_logprobs)
        mask[row, place] = torch.tensor(sample.trainable)
    return MicroBatch(
        input_ids=token_ids[:, :-1].contiguous(),
        target_ids=token_ids[:, first:].contiguous(),
        rollout_logprobs=logprobs,
        mask=mask,
        advantages=torch.tensor([sample.advantage for sample in samples]),
        selection_weights=torch.tensor([sample.selection_weight for sample in samples]),
        token_count=sum(map(len, samples)),
    )


def _dummy() -> MicroBatch:
    """One token that is not trained: keeps a rank in lockstep with the others."""
    return MicroBatch(
        input_ids=torch.zeros(1, 1, dtype=torch.int64),
        target_ids=torch.zeros(1, 1, dtype=torch.int64),
        rollout_logprobs=torch.zeros(1, 1),
        mask=torch.zeros(1, 1, dtype=torch.bool),
        advantages=torch.zeros(1),
        selection_weights=torch.zeros(1),
        token_count=0,
    )


def _samples(groups: Iterable[PromptGroup]) -> list[Sample]:
    return [
        Sample(
            prompt_token_ids=group.prompt_token_ids,
            token_ids=scored.response.token_ids,
            rollout_logprobs=scored.response.logprobs,
            trainable=_trainable(scored),
            advantage=scored.advantage if scored.reward is not None else 0.0,
            selection_weight=group.selection_weight,
        )
        for group in groups
        if group.selection_weight > 0
        for scored in group.responses
        if _trainable_count(scored) > 0
    ]


def _trainable(scored: ScoredResponse) -> tuple[bool, ...]:
    return tuple(
        segment.trainable
        for segment in scored.response.segments
        for _ in range(segment.token_count)
    )


def _trainable_count(scored: ScoredResponse) -> int:
    return sum(s.token_count for s in scored.response.segments if s.trainable)
