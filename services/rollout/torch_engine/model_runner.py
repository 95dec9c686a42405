"""Everything of an engine that lives on the device: decoder, KV cache and slot table.

The decode loop says which responses enter and leave slots; the runner computes. A slot's row of
the KV cache holds all tokens of its sequence but the last one, which the next decode step feeds.
So prefill samples nothing, and every token is sampled by `decode`, wherever its response came
from: fresh, preempted or moved. Only a draft is sampled by `verify`, all its positions in one pass:
what is taken over, with logprobs and KV, is what `decode` would have sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from rollpacker import sampling
from services.rollout.torch_engine.decoder import Decoder
from services.rollout.torch_engine.decoder_config import DecoderConfig
from services.rollout.torch_engine.kv_cache import KvCache
from services.rollout.torch_engine.sampler import Sampler
from services.rollout.torch_engine.slot_table import SlotInput, SlotLog, SlotTable
from services.rollout.torch_engine.weights import read_weights

_PREFILL_TOKENS = 4096  # padded tokens of one prefill pass
_SCORED_CELLS = 1 << 22  # logits of one piece of a draft check


@dataclass(frozen=True, slots=True)
class Prefill:
    """Slots that start with the same tokens; the last one of a sequence is not among them."""

    token_ids: tuple[int, ...]  # may be empty
    slots: tuple[int, ...]
    copy_from: int | None = None  # a slot whose row begins with these tokens


@dataclass(frozen=True, slots=True)
class DraftCheck:
    """A guess at the next tokens of a slot."""

    slot: int
    prefix: tuple[int, ...]  # what is known of the sequence; at least one token
    draft: tuple[int, ...]  # at least one token
    seed: int
    temperature: float
    is_whole: bool  # with the whole draft accepted the response has ended: it needs no row

    def __len__(self) -> int:
        """Tokens to compute: the last one of the draft is not fed."""
        return len(self.prefix) + len(self.draft) - 1


class ModelRunner:
    """One model and the state of its slots."""

    def __init__(
        self,
        directory: Path,
        config: DecoderConfig,
        *,
        slot_count: int,
        max_context_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Raises WeightsNotFoundError, InvalidRequestError."""
        self.config = config
        self.context = min(config.max_context, max_context_tokens or config.max_context)
        self._device = device
        self._decoder = Decoder(
            config,
            read_weights(directory, config),
            context=self.context,
            device=device,
            dtype=dtype,
        )
        self._cache = KvCache(
            config.layer_count, config.kv_heads, config.head_dim, device=device, dtype=dtype
        )
        self._logit_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._sampler = Sampler(config.vocab_size, device)
        self._table = SlotTable(slot_count, self._sampler, device=device, dtype=self._logit_dtype)

    @property
    def weight_bytes(self) -> int:
        """On the device, without caches."""
        return self._decoder.weight_bytes

    def swap_weights(self, directory: Path) -> None:
        """Take over other weights of the same architecture; the KV cache is dropped.

        Raises WeightsNotFoundError, InvalidRequestError; then nothing has changed.
        """
        self._decoder.swap(read_weights(directory, self.config))
        self._cache.clear()

    def start(self, prefills: Sequence[Prefill], inputs: Sequence[SlotInput]) -> None:
        """Fill the rows of the slots that `prefills` name, and set their state up."""
        pending = []
        for prefill in prefills:
            if not prefill.token_ids:
                self._cache.insert(prefill.slots, None)
            elif prefill.copy_from is not None:
                prefix = self._cache.prefix(prefill.copy_from, len(prefill.token_ids))
                self._cache.insert(prefill.slots, prefix)
            else:
                pending.append(prefill)
        pending.sort(key=lambda prefill: len(prefill.token_ids))
        for part in _batches([len(prefill.token_ids) for prefill in pending]):
            batch = pending[part]
            _, whole = self._forward([prefill.token_ids for prefill in batch])
            for prefill, kv in zip(batch, whole, strict=True):
                self._cache.insert(prefill.slots, kv[:, :, :, : len(prefill.token_ids)])
        self._table.start(inputs)

    def verify(self, checks: Sequence[DraftCheck]) -> list[SlotLog]:
        """What of each draft the weights sample too, up to the first difference.

        Fills the row of each slot, unless its response has ended with that.
        """
        found: dict[int, SlotLog] = {}
        pending = sorted(checks, key=len)
        for part in _batches([len(check) for check in pending]):
            found |= self._verify(pending[part])
        return [found[check.slot] for check in checks]

    def decode(self) -> list[int]:
        """Sample one token in every slot in use; returns the slots that met a stop token."""
        order = self._cache.order()
        tokens, positions = self._table.fed(order)
        self._cache.begin_step(positions)
        hidden = self._decoder.forward(tokens, positions, self._cache.attend)
        stopped = self._table.sample(order, self._decoder.logits(hidden))
        slots: list[int] = order[stopped].tolist()
        return slots

    def sampled_tokens(self, slots: Sequence[int], start: int, end: int) -> list[list[int]]:
        """See `SlotTable.tokens`."""
        return self._table.tokens(slots, start, end)

    def stop(self, slots: Sequence[int]) -> list[SlotLog]:
        """Free these slots; returns what each has sampled."""
        logs = self._table.logs(slots)
        self._cache.remove(slots)
        return logs

    def _forward(self, sequences: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        """One pass over sequences of similar length, padded on the right to `length`.

        Returns hidden states [count, length, hidden] and KV
        [count, layers, 2, kv_heads, length, d].
        """
        count, length = len(sequences), max(map(len, sequences))
        layers: list[Tensor] = []

        def attend(_: int, queries: Tensor, kv: Tensor) -> Tensor:
            by_sequence = kv.view(count, length, *kv.shape[1:])
            layers.append(by_sequence)
            heads = queries.view(count, length, *queries.shape[1:]).transpose(1, 2)
            keys, values = by_sequence.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(
                heads, keys, values, is_causal=True, enable_gqa=True
            )
            return mixed.transpose(1, 2).reshape(count * length, -1)

        padded = [[*tokens, *[0] * (length - len(tokens))] for tokens in sequences]
        positions = torch.arange(length, device=self._device).repeat(count)
        hidden = self._decoder.forward(
            torch.tensor(padded, device=self._device).view(-1), positions, attend
        )
        return hidden.view(count, length, -1), torch.stack(layers).permute(1, 0, 3, 4, 2, 5)

    def _verify(self, checks: Sequence[DraftCheck]) -> dict[int, SlotLog]:
        """One pass; by slot, the accepted prefix of its draft."""
        hidden, whole = self._forward([(*check.prefix, *check.draft)[:-1] for check in checks])
        tokens, logprobs, near_ties = self._score(checks, hidden)
        found, start = {}, 0
        for check, kv in zip(checks, whole, strict=True):
            count = _common_prefix(check.draft, tokens[start : start + len(check.draft)])
            accepted = slice(start, start + count)
            start += len(check.draft)
            log = SlotLog(tokens[accepted], logprobs[accepted], sum(near_ties[accepted]))
            found[check.slot] = log
            if not (check.is_whole and count == len(check.draft)):
                length = len(check.prefix) + count - 1
                self._cache.insert((check.slot,), kv[:, :, :, :length] if length else None)
        return found

    def _score(
        self, checks: Sequence[DraftCheck], hidden: Tensor
    ) -> tuple[list[int], list[float], list[bool]]:
        """What the weights sample at every position of every draft, one after the other."""
        device = self._device
        counts = torch.tensor([len(check.draft) for check in checks], device=device)
        firsts = torch.tensor([len(check.prefix) - 1 for check in checks], device=device)
        rows = torch.repeat_interleave(torch.arange(len(checks), device=device), counts)
        places = torch.arange(len(rows), device=device)
        positions = places + (firsts - counts.cumsum(0) + counts)[rows]
        states = torch.tensor([sampling.seed_state(check.seed) for check in checks], device=device)
        temperatures = torch.tensor(
            [check.temperature for check in checks], dtype=self._logit_dtype, device=device
        )
        pieces = []
        for piece in torch.split(places, max(1, _SCORED_CELLS // self.config.vocab_size)):
            row, position = rows[piece], positions[piece]
            logits = self._decoder.logits(hidden[row, position])
            sampled = self._sampler.sample(
                logits, temperatures[row, None], states[row, None], position[:, None]
            )
            pieces.append((sampled.tokens, sampled.logprobs, sampled.near_ties))
        tokens, logprobs, near_ties = (
            torch.cat(column).tolist() for column in zip(*pieces, strict=True)
        )
        return tokens, logprobs, near_ties


def _batches(lengths: Sequence[int]) -> Iterator[slice]:
    """Neighbours of similar length (`lengths` ascend) that go through one pass together."""
    start = 0
    while start < len(lengths):
        end = start + 1
        while end < len(lengths) and (end + 1 - start) * lengths[end] <= _PREFILL_TOKENS:
            end += 1
        yield slice(start, end)
        start = end


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Places until the first difference."""
    pairs = zip(left, right, strict=True)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(left))
