"""Packing is a pure function of the ordered groups, and loses nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.types import ASSISTANT, Segment
from services.trainer.packing import WINDOW_GROUPS, Sample, StreamPacker, make_micro_batch, pack
from tests.trainer_support import make_group, make_response, weighed


def run_packer(groups, shard_size=1, micro_batch_tokens=96, replica_count=1):
    """All windows of a step; one list of micro-batches per rank and window."""
    packer = StreamPacker(shard_size, micro_batch_tokens, replica_count)
    windows = [window for group in groups if (window := packer.add(group))]
    return packer, [*windows, *packer.flush()]


def trained_rows(batches):
    """(advantage, trained tokens) of every row, as the loss will see them."""
    return [
        (advantage.item(), tuple(targets[mask].tolist()))
        for batch in batches
        for advantage, targets, mask in zip(
            batch.advantages, batch.target_ids, batch.mask, strict=True
        )
        if mask.any()
    ]


def expected_rows(groups):
    return [
        (torch.tensor(scored.advantage).item(), scored.response.token_ids)
        for group in groups
        for scored in group.responses
        if scored.response.token_ids
    ]


@given(
    count=st.integers(0, 30),
    shard_size=st.sampled_from([1, 2, 4]),
    replica_count=st.sampled_from([1, 2, 3]),
    budget=st.integers(1, 300),
    shortest=st.integers(0, 3),
)
def test_every_response_is_in_exactly_one_micro_batch(
    count, shard_size, replica_count, budget, shortest
):
    groups = [make_group(i, lengths=(shortest, 20)) for i in range(count)]
    packer, windows = run_packer(groups, shard_size, budget, replica_count)
    batches = [batch for window in windows for rank in window for batch in rank.micro_batches]
    assert sorted(trained_rows(batches)) == sorted(expected_rows(groups))
    tokens = sum(len(s.response.token_ids) for group in groups for s in group.responses)
    assert (packer.windowed_groups, packer.trained_responses) == (count, 4 * count)
    assert packer.trained_tokens == tokens
    assert packer.trained_tokens == sum(int(batch.mask.sum()) for batch in batches)


@given(st.integers(0, 30), st.sampled_from([1, 2, 4]))
def test_group_i_goes_to_rank_i_mod_n_and_all_ranks_get_as_many_micro_batches(count, world_size):
    groups = [make_group(i) for i in range(count)]
    _, windows = run_packer(groups, world_size)
    for rank in range(world_size):
        batches = [batch for window in windows for batch in window[rank].micro_batches]
        assert sorted(trained_rows(batches)) == sorted(expected_rows(groups[rank::world_size]))
    for window in windows:
        assert len({len(part.micro_batches) for part in window}) == 1


@pytest.mark.parametrize("count", [0, 1, 2, 7, 249])
@pytest.mark.parametrize(("replica_count", "shard_size"), [(1, 4), (2, 2), (4, 1)])
def test_any_count_of_responses_fits_four_ranks(count, replica_count, shard_size):
    groups = [make_group(i, responses=1) for i in range(count)]
    packer, windows = run_packer(groups, shard_size, 96, replica_count)
    batches = [batch for window in windows for rank in window for batch in rank.micro_batches]
    assert sorted(trained_rows(batches)) == sorted(expected_rows(groups))
    assert all(len({len(part.micro_batches) for part in window}) == 1 for window in windows)
    assert packer.trained_responses == count


def test_the_last_groups_are_dealt_out_over_the_replicas_which_get_no_dummies_for_each_other():
    groups = [make_group(0, lengths=(20, 20)), make_group(1, lengths=(1, 1))]
    packer = StreamPacker(1, 30, replica_count=3)
    for group in groups:
        packer.add(group)
    (first,), (second,), (third,) = packer.flush()
    assert sorted(trained_rows(first.micro_batches)) == sorted(expected_rows(groups[:1]))
    assert sorted(trained_rows(second.micro_batches)) == sorted(expected_rows(groups[1:]))
    assert len(first.micro_batches) > len(second.micro_batches)
    assert third.micro_batches == ()


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 200))
def test_micro_batches_keep_the_budget_and_at_most_a_fifth_is_padding(lengths, budget):
    samples = [Sample((1,), (2,) * n, (-1.0,) * n, (True,) * n, 1.0, 1.0) for n in lengths]
    for batch in pack(samples, budget):
        rows = batch.input_ids.shape[0]
        assert rows == 1 or batch.padded_token_count <= budget
        assert batch.token_count >= 0.8 * batch.padded_token_count


def test_windows_are_cut_by_the_order_of_the_stream_alone():
    groups = [make_group(i) for i in range(2 * WINDOW_GROUPS + 3)]
    packer = StreamPacker(1, 96)
    cuts = [i for i, group in enumerate(groups) if packer.add(group) is not None]
    assert cuts == [WINDOW_GROUPS - 1, 2 * WINDOW_GROUPS - 1]
    ((last,),) = packer.flush()
    assert sorted(trained_rows(last.micro_batches)) == sorted(expected_rows(groups[-3:]))


def test_tokens_of_other_authors_are_read_but_not_trained():
    segments = (Segment(ASSISTANT, 2, True), Segment("tool", 1, False), Segment(ASSISTANT, 1, True))
    group = dataclasses.replace(
        make_group(0), responses=(make_response([3, 4, 5, 6], segments=segments),)
    )
    packer, ((window,),) = run_packer([group])
    (batch,) = window.micro_batches
    assert trained_rows([batch]) == [(1.0, (3, 4, 6))]
    assert batch.input_ids[0].tolist() == [*group.prompt_token_ids, 3, 4, 5]
    assert packer.trained_tokens == 3


def test_logprobs_and_mask_stand_at_the_targets_whatever_the_prompt_lengths():
    batch = make_micro_batch(
        [
            Sample((1, 2, 3), (4, 5), (-0.4, -0.5), (True, False), 1.0, 1.0),
            Sample((6,), (7, 8), (-0.7, -0.8), (True, True), -1.0, 2.5),
        ]
    )
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [6, 7, 8, 0]]
    assert batch.target_ids.tolist() == [[2, 3, 4, 5], [7, 8, 0, 0]]
    assert batch.mask.tolist() == [[False, False, True, False], [True, True, False, False]]
    assert batch.rollout_logprobs[0].tolist() == pytest.approx([0, 0, -0.4, -0.5])
    assert batch.rollout_logprobs[1].tolist() == pytest.approx([-0.7, -0.8, 0, 0])
    assert batch.advantages.tolist() == [1.0, -1.0]
    assert batch.selection_weights.tolist() == [1.0, 2.5]
    assert batch.padded_token_count == 10
    assert batch.token_count == 8


def test_a_response_without_a_reward_keeps_its_tokens_and_loses_its_advantage():
    group = dataclasses.replace(
        make_group(0), responses=(make_response([3, 4], reward=None, advantage=5.0),)
    )
    packer, ((window,),) = run_packer([group])
    assert trained_rows(window.micro_batches) == [(0.0, (3, 4))]
    assert (packer.trained_tokens, packer.trained_responses) == (2, 1)


@given(st.integers(0, 30), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_responses_carry_their_groups_selection_weight_and_those_of_weight_0_are_not_packed(
    count, shard_size, replica_count
):
    groups = weighed([make_group(i, lengths=(0, 20)) for i in range(count)])
    packer, windows = run_packer(groups, shard_size, 96, replica_count)
    batches = [batch for window in windows for rank in window for batch in rank.micro_batches]
    rows = [
        (round(weight.item(), 6), tuple(targets[mask].tolist()))
        for batch in batches
        for weight, targets, mask in zip(
            batch.selection_weights, batch.target_ids, batch.mask, strict=True
        )
        if mask.any()
    ]
    counted = [group for group in groups if group.selection_weight > 0]
    assert sorted(rows) == sorted(
        (group.selection_weight, scored.response.token_ids)
        for group in counted
        for scored in group.responses
        if scored.response.token_ids
    )
    assert (packer.windowed_groups, packer.trained_responses) == (count, 4 * len(counted))
    assert packer.trained_tokens == sum(int(batch.mask.sum()) for batch in batches)


def test_a_group_of_weight_0_has_its_place_in_a_window():
    groups = [dataclasses.replace(make_group(i), selection_weight=0.0) for i in range(9)]
    packer, (full, rest) = run_packer(groups)
    assert [window.micro_batches for window in (*full, *rest)] == [(), ()]
    assert (packer.windowed_groups, packer.trained_responses, packer.trained_tokens) == (9, 0, 0)
