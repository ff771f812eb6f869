"""Which rank trains which datum in which microbatch, and what a microbatch is made of."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.dispatch.packing import filler, pack, plan_microbatches
from torchtitan_rl.types import Datum

batches = given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), num_ranks=st.integers(1, 5),
                max_tokens=st.integers(1, 60))


def datum(*tokens, **loss_inputs):
    tokens = torch.tensor(tokens)
    return Datum(tokens=tokens, target_tokens=tokens + 1,
                 loss_inputs={name: torch.tensor(values) for name, values in loss_inputs.items()})


def test_the_longest_datum_goes_first_to_the_rank_with_the_fewest_tokens():
    # 5 to rank 0, 4 to rank 1, 3 to rank 1 (now 7 tokens), 2 to rank 0 (7 tokens). Neither pair fits into 6 tokens.
    assert plan_microbatches([5, 3, 4, 2], 2, 6).ranks == [[[0], [3]], [[2], [1]]]
    assert plan_microbatches([5, 3, 4, 2], 2, 7).ranks == [[[0, 3]], [[1, 2]]]


def test_a_datum_goes_into_the_fullest_microbatch_that_has_room():
    # 6 leaves 4 over and 5 leaves 5: the 3 goes beside the 6.
    assert plan_microbatches([6, 5, 3], 1, 10).ranks == [[[0, 2], [1]]]
    # 20 leaves 10 over, 16 leaves 14 and takes the 13, which leaves 1: the 1 goes there, not into the first.
    assert plan_microbatches([20, 16, 13, 1], 1, 30).ranks == [[[0], [1, 2, 3]]]


def test_a_datum_longer_than_the_cap_has_a_microbatch_of_its_own():
    assert plan_microbatches([3, 12, 3], 1, 6).ranks == [[[1], [0, 2]]]


def test_ranks_with_less_to_do_get_fillers():
    assert plan_microbatches([4], 3, 8).ranks == [[[0]], [[]], [[]]]
    assert plan_microbatches([8, 4, 4], 2, 4).ranks == [[[0], []], [[1], [2]]]
    assert plan_microbatches([], 2, 8).ranks == [[[]], [[]]]


def test_datums_of_equal_length_keep_their_order():
    assert plan_microbatches([2, 2, 2, 2], 2, 2).ranks == [[[0], [2]], [[1], [3]]]
    assert plan_microbatches([2, 2, 2, 2], 1, 4).ranks == [[[0, 1], [2, 3]]]


@settings(deadline=None, derandomize=True)
@batches
def test_every_datum_is_somewhere_exactly_once(lengths, num_ranks, max_tokens):
    ranks = plan_microbatches(lengths, num_ranks, max_tokens).ranks
    assert sorted(i for microbatches in ranks for members in microbatches for i in members) == list(range(len(lengths)))


@settings(deadline=None, derandomize=True)
@batches
def test_every_rank_has_as_many_microbatches_as_the_others_and_at_least_one(lengths, num_ranks, max_tokens):
    ranks = plan_microbatches(lengths, num_ranks, max_tokens).ranks
    assert len(ranks) == num_ranks
    (count,) = {len(microbatches) for microbatches in ranks}
    assert count >= 1
    assert any(all(microbatches) for microbatches in ranks)  # fillers match another rank; no rank waits for nothing


@settings(deadline=None, derandomize=True)
@batches
def test_microbatches_keep_to_the_cap_unless_they_are_one_datum(lengths, num_ranks, max_tokens):
    for microbatches in plan_microbatches(lengths, num_ranks, max_tokens).ranks:
        for members in microbatches:
            assert members == sorted(members)
            assert len(members) <= 1 or sum(lengths[i] for i in members) <= max_tokens


@settings(deadline=None, derandomize=True)
@batches
def test_no_two_ranks_differ_by_more_than_the_longest_datum(lengths, num_ranks, max_tokens):
    ranks = plan_microbatches(lengths, num_ranks, max_tokens).ranks
    loads = [sum(lengths[i] for members in microbatches for i in members) for microbatches in ranks]
    assert max(loads) - min(loads) <= max(lengths)


@settings(deadline=None, derandomize=True)
@batches
def test_the_same_lengths_give_the_same_plan(lengths, num_ranks, max_tokens):
    assert plan_microbatches(lengths, num_ranks, max_tokens) == plan_microbatches(list(lengths), num_ranks, max_tokens)


def test_pack_lays_datums_end_to_end():
    batch = pack([datum(5, 6, weights=[0.25, 0.5]), datum(7, weights=[1.0])])
    assert batch.tokens_T.tolist() == [5, 6, 7] and batch.target_tokens_T.tolist() == [6, 7, 8]
    assert batch.lengths == [2, 1]
    assert {name: tensor.tolist() for name, tensor in batch.loss_inputs.items()} == {"weights": [0.25, 0.5, 1.0]}


def test_pack_makes_loss_inputs_float32():
    batch = pack([datum(5, loss_mask=[True]), datum(7, loss_mask=[False])])
    assert batch.loss_inputs["loss_mask"].dtype == torch.float32
    assert batch.loss_inputs["loss_mask"].tolist() == [1.0, 0.0]


def test_pack_goes_by_the_names_of_loss_inputs_not_by_their_order():
    batch = pack([datum(5, weights=[1.0], loss_mask=[0.0]), datum(7, loss_mask=[2.0], weights=[3.0])])
    assert batch.loss_inputs["weights"].tolist() == [1.0, 3.0]
    assert batch.loss_inputs["loss_mask"].tolist() == [0.0, 2.0]


def test_datums_with_other_loss_inputs_are_refused():
    with pytest.raises(ValueError) as caught:
        pack([datum(5, weights=[1.0], advantages=[0.5]), datum(7, weights=[1.0])])
    assert str(caught.value) == (
        "datum.loss_inputs=['weights']: another datum of the call has ['advantages', 'weights']; "
        "give every datum of one call the same loss inputs")


def test_a_filler_is_one_token_that_weighs_nothing():
    batch = filler(datum(5, 6, weights=[0.5, 0.5], loss_mask=[1.0, 1.0], advantages=[3.0, 3.0]))
    assert batch.tokens_T.tolist() == [5] and batch.target_tokens_T.tolist() == [6] and batch.lengths == [1]
    assert {name: tensor.tolist() for name, tensor in batch.loss_inputs.items()} == {
        "weights": [0.0], "loss_mask": [0.0], "advantages": [0.0]}
