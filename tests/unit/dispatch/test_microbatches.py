"""Which rank trains which datum in which microbatch, and what a microbatch is made of."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.dispatch.microbatches import filler, pack, plan_microbatches
from torchtitan_rl.types import Datum

batches = given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    num_ranks=st.integers(1, 5),
    max_tokens=st.integers(1, 60),
)


def datum(*tokens, **loss_inputs):
    tokens = torch.tensor(tokens)
    return Datum(
        tokens=tokens,
        target_tokens=tokens + 1,
        loss_inputs={name: torch.tensor(values) for name, values in loss_inputs.items()},
    )


def test_the_longest_datum_goes_first_to_the_rank_with_the_fewest_tokens():
    # 5 to rank 0, 4 to rank 1, 3 to rank 1 (now 7 tokens), 2 to rank 0 (7 tokens). Neither pair fits into 6 tokens.
    assert plan_microbatches([5, 3, 4, 2], 2, 6) == [[[0], [3]], [[2], [1]]]
    assert plan_microbatches([5, 3, 4, 2], 2, 7) == [[[0, 3]], [[1, 2]]]


def test_a_datum_goes_into_the_fullest_microbatch_that_has_room():
    # 6 leaves 4 over and 5 leaves 5: the 3 goes beside the 6.
    assert plan_microbatches([6, 5, 3], 1, 10) == [[[0, 2], [1]]]
    # 20 leaves 10 over, 16 leaves 14 and takes the 13, which leaves 1: the 1 goes there, not into the first.
    assert plan_microbatches([20, 16, 13, 1], 1, 30) == [[[0], [1, 2, 3]]]


def test_a_datum_longer_than_the_cap_has_a_microbatch_of_its_own():
    assert plan_microbatches([3, 12, 3], 1, 6) == [[[1], [0, 2]]]


def test_ranks_with_less_to_do_get_fillers():
    assert plan_microbatches([4], 3, 8) == [[[0]], [[]], [[]]]
    assert plan_microbatches([8, 4, 4], 2, 4) == [[[0], []], [[1], [2]]]
    assert plan_microbatches([], 2, 8) == [[[]], [[]]]


def test_datums_of_equal_length_keep_their_order():
    assert plan_microbatches([2, 2, 2, 2], 2, 2) == [[[0], [2]], [[1], [3]]]
    assert plan_microbatches([2, 2, 2, 2], 1, 4) == [[[0, 1], [2, 3]]]


@settings(deadline=None, derandomize=True)
@batches
def test_every_datum_is_somewhere_exactly_once(lengths, num_ranks, max_tokens):
    ranks = plan_microbatches(lengths, num_ranks, max_tokens)
    assert sorted(i for microbatches in ranks for members in microbatches for i in members) == list(range(len(lengths)))


@settings(deadline=None, derandomize=True)
@batches
def test_every_rank_has_as_many_microbatches_as_the_others_and_at_least_one(lengths, num_ranks, max_tokens):
    ranks = plan_microbatches(lengths, num_ranks, max_tokens)
    assert len(ranks) == num_ranks
    (count,) = {len(microbatches) for microbatches in ranks}
    assert count >= 1
    assert any(all(microbatches) for microbatches in ranks)  # fillers match another rank; no rank waits for nothing


@settings(deadline=None, derandomize=True)
@batches
def test_microbatches_keep_to_the_cap_unless_they_are_one_datum(lengths, num_ranks, max_tokens):
    for microbatches in plan_microbatches(lengths, num_ranks, max_tokens):
        for members in microbatches:
            assert members == sorted(members)
            assert len(members) <= 1 or sum(lengths[i] for i in members) <= max_tokens


@settings(deadline=None, derandomize=True)
@batches
def test_no_two_ranks_differ_by_more_than_the_longest_datum(lengths, num_ranks, max_tokens):
    ranks = plan_microbatches(lengths, num_ranks, max_tokens)
    loads = [sum(lengths[i] for members in microbatches for i in members) for microbatches in ranks]
    assert max(loads) - min(loads) <= max(lengths)


@settings(deadline=None, derandomize=True)
@batches
def test_the_same_lengths_give_the_same_plan(lengths, num_ranks, max_tokens):
    assert plan_microbatches(lengths, num_ranks, max_tokens) == plan_microbatches(list(lengths), num_ranks, max_tokens)


def test_pack_lays_datums_end_to_end():
    batch = pack([datum(5, 6, token_weights=[0.25, 0.5]), datum(7, token_weights=[1.0])])
    assert batch.tokens_T.tolist() == [5, 6, 7] and batch.target_tokens_T.tolist() == [6, 7, 8]
    assert batch.lengths == [2, 1]
    assert {name: tensor.tolist() for name, tensor in batch.loss_inputs.items()} == {"token_weights": [0.25, 0.5, 1.0]}


def test_pack_makes_loss_inputs_float32():
    batch = pack([datum(5, loss_mask=[True]), datum(7, loss_mask=[False])])
    assert batch.loss_inputs["loss_mask"].dtype == torch.float32
    assert batch.loss_inputs["loss_mask"].tolist() == [1.0, 0.0]


def test_pack_goes_by_the_names_of_loss_inputs_not_by_their_order():
    batch = pack([datum(5, token_weights=[1.0], loss_mask=[0.0]), datum(7, loss_mask=[2.0], token_weights=[3.0])])
    assert batch.loss_inputs["token_weights"].tolist() == [1.0, 3.0]
    assert batch.loss_inputs["loss_mask"].tolist() == [0.0, 2.0]


def test_datums_with_other_loss_inputs_are_refused():
    with pytest.raises(ValueError) as caught:
        pack([datum(5, token_weights=[1.0], advantages=[0.5]), datum(7, token_weights=[1.0])])
    assert str(caught.value) == (
        "data[1].loss_inputs=['token_weights']: data[0] of the call has ['advantages', 'token_weights']; "
        "give every datum of one call the same loss inputs"
    )


def distilled(length, num_targets, size):
    numbers = torch.arange(float(length))[:, None]
    return Datum(
        tokens=torch.arange(length),
        target_tokens=torch.arange(length)[:, None] + torch.arange(num_targets),
        loss_inputs={
            "token_weights": numbers.expand(length, num_targets),
            "loss_mask": torch.ones(length),
            "teacher_hidden": numbers.expand(length, size),
        },
    )


@settings(deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), num_targets=st.integers(1, 4), size=st.integers(1, 5)
)
def test_several_targets_and_numbers_of_a_token_are_packed_row_by_row(lengths, num_targets, size):
    data = [distilled(length, num_targets, size) for length in lengths]
    batch = pack(data)
    assert batch.lengths == lengths
    for packed, rows in (
        (batch.target_tokens_T, [d.target_tokens for d in data]),
        *((batch.loss_inputs[name], [d.loss_inputs[name] for d in data]) for name in data[0].loss_inputs),
    ):
        assert all(torch.equal(a, b) for a, b in zip(packed.split(lengths), rows, strict=True))
    empty = filler(data[0])
    assert empty.target_tokens_T.shape == (1, num_targets)
    assert {name: (tuple(x.shape), x.dtype, x.count_nonzero().item()) for name, x in empty.loss_inputs.items()} == {
        "token_weights": ((1, num_targets), torch.float32, 0),
        "loss_mask": ((1,), torch.float32, 0),
        "teacher_hidden": ((1, size), torch.float32, 0),
    }


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (distilled(2, 3, 4), "data[2].target_tokens: is (T, 3) where that of data[0] is (T, 2)"),
        (distilled(2, 2, 5), "data[2].teacher_hidden: is (T, 5) where that of data[0] is (T, 4)"),
        (
            Datum(
                tokens=torch.arange(2),
                target_tokens=torch.arange(2),
                loss_inputs={**distilled(2, 2, 4).loss_inputs, "token_weights": torch.ones(2)},
            ),
            "data[2].target_tokens: is (T,) where that of data[0] is (T, 2)",
        ),
    ],
)
def test_datums_with_other_sizes_are_refused_by_their_position(other, message):
    with pytest.raises(ValueError) as caught:
        pack([distilled(3, 2, 4), distilled(1, 2, 4), other])
    assert str(caught.value) == f"{message}; give every datum of one call as many per token"


def test_a_filler_is_one_token_that_weighs_nothing():
    batch = filler(datum(5, 6, token_weights=[0.5, 0.5], loss_mask=[1.0, 1.0], advantages=[3.0, 3.0]))
    assert batch.tokens_T.tolist() == [5] and batch.target_tokens_T.tolist() == [6] and batch.lengths == [1]
    assert {name: tensor.tolist() for name, tensor in batch.loss_inputs.items()} == {
        "token_weights": [0.0],
        "loss_mask": [0.0],
        "advantages": [0.0],
    }
