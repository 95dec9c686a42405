"""The KV cache against a plain reference, under any sequence of rows that come, grow and go."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.torch_engine.kv_cache import KvCache

LAYERS, KV_HEADS, GROUP, DIM = 2, 2, 2, 4


class World:
    """A cache, and for each slot the keys and values [layers, 2, kv_heads, length, d] it holds."""

    def __init__(self) -> None:
        self.cache = KvCache(LAYERS, KV_HEADS, DIM, device=torch.device("cpu"), dtype=torch.float64)
        self.held: dict[int, torch.Tensor] = {}
        self.generator = torch.Generator().manual_seed(0)
        self.next_slot = 0

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def insert(self, count: int, length: int) -> None:
        slots = list(range(self.next_slot, self.next_slot + count))
        self.next_slot += count
        prefix = self.random(LAYERS, 2, KV_HEADS, length, DIM)
        self.cache.insert(slots, prefix if length else None)
        self.held.update((slot, prefix) for slot in slots)

    def copy(self, source: int) -> None:
        length = self.held[source].shape[3]
        if length:
            self.cache.insert([self.next_slot], self.cache.prefix(source, length))
            self.held[self.next_slot] = self.held[source]
            self.next_slot += 1

    def remove(self, slots: list[int]) -> None:
        self.cache.remove(slots)
        for slot in slots:
            del self.held[slot]

    def step(self) -> None:
        order = self.cache.order()
        slots = order.tolist()
        assert sorted(slots) == sorted(self.held)
        positions = torch.tensor([self.cache.length(slot) for slot in slots])
        assert positions.tolist() == [self.held[slot].shape[3] for slot in slots]
        self.cache.begin_step(positions)
        new = self.random(len(slots), LAYERS, 2, KV_HEADS, DIM)
        queries = self.random(len(slots), LAYERS, KV_HEADS * GROUP, DIM)
        for row, slot in enumerate(slots):
            self.held[slot] = torch.cat([self.held[slot], new[row, :, :, :, None]], dim=3)
        for layer in range(LAYERS):
            mixed = self.cache.attend(layer, queries[:, layer], new[:, layer])
            for row, slot in enumerate(slots):
                keys, values = self.held[slot][layer].repeat_interleave(GROUP, dim=1)
                expected = F.scaled_dot_product_attention(
                    queries[row, layer][:, None], keys, values
                )
                torch.testing.assert_close(mixed[row], expected.flatten())


ACTIONS = st.one_of(
    st.tuples(st.just("insert"), st.integers(1, 3), st.sampled_from([0, 1, 5, 62, 63, 64, 127])),
    st.tuples(st.just("copy"), st.integers(0, 20)),
    st.tuples(st.just("remove"), st.sets(st.integers(0, 20), min_size=1)),
    st.tuples(st.just("step"), st.integers(1, 4)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTIONS, max_size=15))
def test_every_row_attends_to_its_own_tokens_and_no_others(actions):
    world = World()
    for kind, *values in actions:
        slots = sorted(world.held)
        if kind == "insert":
            world.insert(*values)
        elif kind == "copy" and slots:
            world.copy(slots[values[0] % len(slots)])
        elif kind == "remove" and slots:
            world.remove(sorted({slots[choice % len(slots)] for choice in values[0]}))
        elif kind == "step" and slots:
            for _ in range(values[0]):
                world.step()
    assert len(world.cache) == len(world.held)


def test_memory_follows_the_tokens_that_are_held():
    world = World()
    world.insert(64, 60)
    for _ in range(70):
        world.step()  # all rows move to the larger block, and the smaller one is given back
    tokens = 64 * 130
    assert tokens <= world.cache.allocated_tokens <= 4 * tokens
    world.remove(sorted(world.held)[2:])
    assert world.cache.allocated_tokens <= 4 * 2 * 130
    world.step()
    world.cache.clear()
    assert world.cache.allocated_tokens == len(world.cache) == 0
