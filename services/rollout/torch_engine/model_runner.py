"""Everything of an engine that lives on the device: decoder, KV cache and slot table.

The decode loop says which responses enter and leave slots; the runner computes. A slot's row of
the KV cache holds all tokens of its sequence but the last one, which the next decode step feeds.
So prefill samples nothing, and every token is sampled by `decode`, wherever its response came
from: fresh, preempted or moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from services.rollout.torch_engine.decoder import Decoder
from services.rollout.torch_engine.decoder_config import DecoderConfig
from services.rollout.torch_engine.kv_cache import KvCache
from services.rollout.torch_engine.slot_table import SlotInput, SlotLog, SlotTable
from services.rollout.torch_engine.weights import read_weights

_PREFILL_TOKENS = 4096  # padded tokens of one prefill pass


@dataclass(frozen=True, slots=True)
class Prefill:
    """Slots that start with the same tokens; the last one of a sequence is not among them."""

    token_ids: tuple[int, ...]  # may be empty
    slots: tuple[int, ...]
    copy_from: int | None = None  # a slot whose row begins with these tokens


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
        self._table = SlotTable(
            slot_count,
            config.vocab_size,
            device=device,
            dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        )

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
        while pending:
            count = 1
            while count < len(pending) and _padded(pending, count + 1) <= _PREFILL_TOKENS:
                count += 1
            self._prefill(pending[:count])
            del pending[:count]
        self._table.start(inputs)

    def decode(self) -> list[int]:
        """Sample one token in every slot in use; returns the slots that met a stop token."""
        order = self._cache.order()
        tokens, positions = self._table.fed(order)
        self._cache.begin_step(positions)
        hidden = self._decoder.forward(tokens, positions, self._cache.attend)
        stopped = self._table.sample(order, self._decoder.logits(hidden))
        slots: list[int] = order[stopped].tolist()
        return slots

    def stop(self, slots: Sequence[int]) -> list[SlotLog]:
        """Free these slots; returns what each has sampled."""
        logs = self._table.logs(slots)
        self._cache.remove(slots)
        return logs

    def _prefill(self, prefills: Sequence[Prefill]) -> None:
        """One forward pass over sequences of similar length, padded on the right."""
        count, length = len(prefills), len(prefills[-1].token_ids)
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

        padded = [
            [*prefill.token_ids, *[0] * (length - len(prefill.token_ids))] for prefill in prefills
        ]
        positions = torch.arange(length, device=self._device).repeat(count)
        self._decoder.forward(torch.tensor(padded, device=self._device).view(-1), positions, attend)
        whole = torch.stack(layers).permute(1, 0, 3, 4, 2, 5)
        for prefill, kv in zip(prefills, whole, strict=True):
            self._cache.insert(prefill.slots, kv[:, :, :, : len(prefill.token_ids)])


def _padded(prefills: Sequence[Prefill], count: int) -> int:
    """Tokens that one pass over the first `count` of these, sorted by length, computes."""
    return count * len(prefills[count - 1].token_ids)
