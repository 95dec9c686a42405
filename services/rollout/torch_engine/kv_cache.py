"""Keys and values of the running responses, in blocks of rows of equal capacity.

A running response owns one row of one block. Rows of a block are compact: active ones first, so
one attention call per block and layer covers them without a copy. When a row is full it moves to
the block of twice the capacity; so a short response never pays for the length of a long one.
Removing a row moves the last row into its place.

Invariants: a slot is in at most one block; a row holds `length(slot)` positions; what lies behind
them is finite (zeros or leftovers), because the mask multiplies it by zero. The cache holds at
most about four times the tokens that it serves (half-empty rows in half-empty blocks); an empty
block holds no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

_FIRST_CAPACITY = 64  # positions per row of the smallest block
_SHRINK = 4  # a block gives memory back when fewer than one row in four is used


@dataclass(slots=True)
class _Block:
    capacity: int
    storage: Tensor  # [layers, 2, rows, kv_heads, capacity, head_dim]
    slots: list[int] = field(default_factory=list)  # slot of each active row
    # Until rows come or go:
    first: int = 0  # place of its first row in the whole batch
    top: int = 0  # greatest base among its slots
    origins: Tensor | None = None  # [rows, 2, kv_heads]: where each key and value run begins
    # Of the current step:
    seen: int = 0  # positions that the longest row attends to
    mask: Tensor | None = None  # [rows, 1, 1, seen], added to the scores
    cells: Tensor | None = None  # where new keys and values go, as `origins`

    @property
    def span(self) -> slice:
        """Its rows in the whole batch."""
        return slice(self.first, self.first + len(self.slots))


class KvCache:
    """The keys and values of all running responses."""

    def __init__(
        self,
        layer_count: int,
        kv_heads: int,
        head_dim: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._shape = (layer_count, 2, kv_heads, head_dim)
        self._device, self._dtype = device, dtype
        self._blocks: dict[int, _Block] = {}  # by capacity, ascending
        self._block_of: dict[int, _Block] = {}
        self._base: dict[int, int] = {}  # length of a slot minus the steps done
        self._steps = 0
        self._order: Tensor | None = None

    def __len__(self) -> int:
        return len(self._base)

    @property
    def allocated_tokens(self) -> int:
        """Positions that there is memory for."""
        return sum(b.storage.shape[2] * b.capacity for b in self._blocks.values())

    def length(self, slot: int) -> int:
        """Positions held for a slot."""
        return self._base[slot] + self._steps

    def insert(self, slots: Sequence[int], prefix: Tensor | None) -> None:
        """Give each slot a row that starts with `prefix` [layers, 2, kv_heads, length, d]."""
        length = 0 if prefix is None else prefix.shape[3]
        block = self._block_for(length + 1)
        first = len(block.slots)
        self._resize(block, first + len(slots))
        if prefix is not None:
            rows = slice(first, first + len(slots))
            block.storage[:, :, rows, :, :length] = prefix[:, :, None]
        self._adopt(block, slots, length)

    def prefix(self, slot: int, length: int) -> Tensor:
        """A copy of the first positions of a slot: [layers, 2, kv_heads, length, d]."""
        block = self._block_of[slot]
        return block.storage[:, :, block.slots.index(slot), :, :length].clone()

    def remove(self, slots: Sequence[int]) -> None:
        """Forget these slots."""
        gone = set(slots)
        for block in {id(b): b for b in map(self._block_of.__getitem__, gone)}.values():
            kept = len(block.slots) - sum(slot in gone for slot in block.slots)
            holes = [row for row in range(kept) if block.slots[row] in gone]
            movers = [row for row in range(kept, len(block.slots)) if block.slots[row] not in gone]
            if holes:
                block.storage[:, :, holes] = block.storage[:, :, movers]
            for hole, mover in zip(holes, movers, strict=True):
                block.slots[hole] = block.slots[mover]
            del block.slots[kept:]
            self._resize(block, kept)
        for slot in gone:
            del self._block_of[slot], self._base[slot]
        self._order = None

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self._blocks.clear()
        self._block_of.clear()
        self._base.clear()
        self._order = None

    def order(self) -> Tensor:
        """Slots [n] in the order of rows for the next step; moves rows that are full first."""
        order = self._arranged()
        for block in list(self._blocks.values()):
            if block.top + self._steps == block.capacity:
                self._move_up(block, [s for s in block.slots if self._base[s] == block.top])
        return order if self._order is not None else self._arranged()

    def begin_step(self, positions: Tensor) -> None:
        """Prepare to add one position to every row; `positions` [n] is each row's length."""
        for block in self._blocks.values():
            assert block.origins is not None
            rows = positions[block.span][:, None, None]
            block.seen = block.top + self._steps + 1
            hidden = torch.arange(block.seen, device=self._device) > rows
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
            block.mask = mask.masked_fill_(hidden, float("-inf"))[:, None]
            block.cells = (block.origins + rows).view(-1)
        self._steps += 1

    def attend(self, layer: int, queries: Tensor, kv: Tensor) -> Tensor:
        """Add this layer's kv [n, 2, kv_heads, d] and attend: [n, query_heads * d]."""
        _, _, kv_heads, head_dim = self._shape
        # Queries that share a key are a sequence to the attention, so no key is repeated.
        grouped = queries.view(len(queries), kv_heads, -1, head_dim)
        mixed = []
        for block in self._blocks.values():
            assert block.cells is not None
            storage = block.storage[layer]
            storage.view(-1, head_dim).index_copy_(
                0, block.cells, kv[block.span].reshape(-1, head_dim)
            )
            keys, values = storage[:, : len(block.slots), :, : block.seen]
            mixed.append(
                F.scaled_dot_product_attention(
                    grouped[block.span], keys, values, attn_mask=block.mask
                )
            )
        whole = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return whole.reshape(len(queries), -1)

    def _arranged(self) -> Tensor:
        """The order of rows, and what blocks derive from it, brought up to date."""
        if self._order is None:
            self._blocks = {c: b for c, b in sorted(self._blocks.items()) if b.slots}
            order: list[int] = []
            for block in self._blocks.values():
                block.first = len(order)
                block.top = max(map(self._base.__getitem__, block.slots))
                block.origins = self._origins(block)
                order += block.slots
            self._order = torch.tensor(order, dtype=torch.int64, device=self._device)
        return self._order

    def _origins(self, block: _Block) -> Tensor:
        """Index of position 0 of each (row, key or value, head) among head_dim vectors."""
        _, two, kv_heads, _ = self._shape
        runs = torch.arange(two * block.storage.shape[2] * kv_heads, device=self._device)
        runs = runs.view(two, -1, kv_heads)[:, : len(block.slots)]
        return runs.transpose(0, 1).contiguous() * block.capacity

    def _move_up(self, block: _Block, slots: list[int]) -> None:
        rows = [block.slots.index(slot) for slot in slots]
        lengths = [self.length(slot) for slot in slots]
        held = block.storage[:, :, rows]
        self.remove(slots)
        target = self._block_for(block.capacity + 1)
        first = len(target.slots)
        self._resize(target, first + len(slots))
        target.storage[:, :, first : first + len(slots), :, : block.capacity] = held
        for slot, length in zip(slots, lengths, strict=True):
            self._adopt(target, [slot], length)

    def _adopt(self, block: _Block, slots: Sequence[int], length: int) -> None:
        block.slots.extend(slots)
        for slot in slots:
            self._block_of[slot] = block
            self._base[slot] = length - self._steps
        self._order = None

    def _block_for(self, length: int) -> _Block:
        """The block whose rows hold `length` positions with the least waste."""
        capacity = _FIRST_CAPACITY
        while capacity < length:
            capacity *= 2
        if capacity not in self._blocks:
            self._blocks[capacity] = _Block(capacity, self._zeros(capacity, 0))
        return self._blocks[capacity]

    def _resize(self, block: _Block, rows: int) -> None:
        """Have room for `rows` rows, a power of two; keep the active ones."""
        allocated = block.storage.shape[2]
        if rows <= allocated and (rows > 0 and rows * _SHRINK >= allocated):
            return
        wanted = 1 << (rows - 1).bit_length() if rows else 0
        if wanted == allocated:
            return
        storage = self._zeros(block.capacity, wanted)
        kept = min(len(block.slots), wanted)
        storage[:, :, :kept] = block.storage[:, :, :kept]
        block.storage = storage

    def _zeros(self, capacity: int, rows: int) -> Tensor:
        layers, two, kv_heads, head_dim = self._shape
        shape = (layers, two, rows, kv_heads, capacity, head_dim)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)
