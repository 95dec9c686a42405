"""Seeds, and the noise: MurmurHash3 x86_32 and a Gumbel transform that stays finite."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollpacker import sampling
from rollpacker.types import DrawId

WORD = 2**32 - 1
seeds = st.integers(0, sampling.MAX_SEED)
words = st.integers(0, WORD)


def murmur3_of_bytes(data: bytes, seed: int = 0) -> int:
    """MurmurHash3 x86_32 as its author describes it, over bytes; checked by published vectors."""
    h, length = seed, len(data)
    for start in range(0, length - length % 4, 4):
        k = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 % 2**32
        k = (k << 15 | k >> 17) % 2**32 * 0x1B873593 % 2**32
        h ^= k
        h = ((h << 13 | h >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    if tail := data[length - length % 4 :]:
        k = int.from_bytes(tail, "little") * 0xCC9E2D51 % 2**32
        h ^= (k << 15 | k >> 17) % 2**32 * 0x1B873593 % 2**32
    h ^= length
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def bits_of(seed: int, position: int, token_id: int) -> int:
    return sampling.noise_bits(sampling.seed_state(seed), position, token_id)


@pytest.mark.parametrize(
    ("data", "seed", "expected"),
    [
        (b"", 0, 0),
        (b"", 1, 0x514E28B7),
        (b"", 0xFFFFFFFF, 0x81F16F39),
        (b"\xff\xff\xff\xff", 0, 0x76293B50),
        (b"!Ce\x87", 0, 0xF55B516B),
        (b"!Ce\x87", 0x5082EDEE, 0x2362F9DE),
        (b"!Ce", 0, 0x7E4A8634),
        (b"!C", 0, 0xA0F7B07A),
        (b"!", 0, 0x72661CF4),
        (b"\0\0\0\0", 0, 0x2362F9DE),
        (b"aaaa", 0x9747B28C, 0x5A97808A),
        (b"Hello, world!", 0x9747B28C, 0x24884CBA),
        (b"The quick brown fox jumps over the lazy dog", 0x9747B28C, 0x2FA826CD),
    ],
)
def test_the_reference_hash_gives_the_published_vectors(data, seed, expected):
    assert murmur3_of_bytes(data, seed) == expected


@given(seeds, words, words)
def test_noise_bits_are_murmur3_of_seed_position_and_token(seed, position, token_id):
    data = seed.to_bytes(8, "little") + position.to_bytes(4, "little")
    assert bits_of(seed, position, token_id) == murmur3_of_bytes(
        data + token_id.to_bytes(4, "little")
    )


@given(seeds, words, words)
def test_ints_numpy_and_torch_give_the_same_bits_and_noise(seed, position, token_id):
    expected = bits_of(seed, position, token_id)
    array = sampling.noise_bits(
        sampling.seed_state(np.array([seed])), np.array([position]), np.array([token_id])
    )
    tensor = sampling.noise_bits(
        sampling.seed_state(torch.tensor([seed])), torch.tensor([position]), torch.tensor(token_id)
    )
    assert int(array[0]) == int(tensor[0]) == expected
    noise = float(sampling.gumbel(expected))
    assert float(sampling.gumbel(array)[0]) == pytest.approx(noise, rel=1e-14)
    assert float(sampling.gumbel(tensor, torch)[0]) == pytest.approx(noise, rel=1e-14)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0, -math.log(float(np.finfo(np.float64).max))),
        (1, -math.log(math.log(WORD))),
        (WORD // 2, -math.log(-math.log((WORD // 2) / WORD))),
        (WORD, 32 * math.log(2)),
    ],
)
def test_gumbel_is_finite_at_both_ends_of_the_hash(bits, expected):
    assert float(sampling.gumbel(bits)) == pytest.approx(expected, rel=1e-12)
    tensor = sampling.gumbel(torch.tensor([bits]), torch)
    assert tensor.dtype == torch.float64
    assert float(tensor[0]) == pytest.approx(expected, rel=1e-12)


def test_the_largest_hash_does_not_beat_its_neighbour_by_more_than_their_spacing():
    largest, next_largest = (float(sampling.gumbel(bits)) for bits in (WORD, WORD - 1))
    assert largest >= next_largest
    assert largest - next_largest < 1e-6


def test_masked_tokens_never_win_whatever_the_hash():
    scores = torch.tensor([0.0, -math.inf]) + sampling.gumbel(torch.tensor([0, WORD]), torch)
    assert int(scores.argmax()) == 0


def test_noise_is_gumbel_distributed():
    bits = sampling.noise_bits(sampling.seed_state(7), np.arange(400)[:, None], np.arange(500))
    noise = sampling.gumbel(bits)
    assert noise.mean() == pytest.approx(0.5772156649, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.03)


def test_sampling_by_noise_follows_the_softmax():
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    states = sampling.seed_state(np.arange(200_000))[:, None]
    noise = sampling.gumbel(sampling.noise_bits(states, 11, np.arange(4)))
    counts = np.bincount((np.log(probabilities) + noise).argmax(1), minlength=4)
    assert counts / counts.sum() == pytest.approx(probabilities, abs=0.005)


@given(seeds, st.text(max_size=8), st.integers(0, 9))
def test_response_seeds_fit_63_bits_and_depend_on_every_part(run_seed, prompt_id, index):
    draw = DrawId(1, prompt_id)
    seed = sampling.response_seed(run_seed, draw, index)
    assert 0 <= seed <= sampling.MAX_SEED
    others = [
        sampling.response_seed(run_seed + 1, draw, index),
        sampling.response_seed(run_seed, DrawId(2, prompt_id), index),
        sampling.response_seed(run_seed, DrawId(1, prompt_id + "x"), index),
        sampling.response_seed(run_seed, draw, index + 1),
        sampling.response_seed(run_seed, draw, index, attempt=1),
    ]
    assert seed not in others


def test_seeds_and_noise_never_change_between_releases():
    seeds_of_draw = sampling.response_seeds(0, DrawId(0, "p"), 2)
    assert seeds_of_draw == (7644607807707020034, 5199411397344003224)
    assert bits_of(123456789012345, 17, 5) == 2227681900
