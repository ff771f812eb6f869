"""Weights of ragged batches: by hand, their sum, and that splitting a batch changes nothing."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.algorithm import reference
from torchtitan_rl.algorithm.reductions import constant_length, prompt_mean, sequence_mean, token_mean

MASKS = [torch.tensor([0.0, 1.0, 1.0]), torch.tensor([1.0]), torch.tensor([0.0, 1.0])]
GROUPS = [0, 0, 1]

ragged_masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=7), min_size=1, max_size=6)


def total(weights):
    return float(sum(weight.double().sum() for weight in weights))


def test_token_mean_counts_every_trained_token_alike():
    weights = token_mean(MASKS, GROUPS)
    assert [weight.tolist() for weight in weights] == [[0.0, 0.25, 0.25], [0.25], [0.0, 0.25]]


def test_sequence_mean_counts_every_sequence_alike():
    weights = sequence_mean(MASKS, GROUPS)
    third, sixth = torch.tensor(1 / 3).item(), torch.tensor(1 / 6).item()  # as float32
    assert [weight.tolist() for weight in weights] == [[0.0, sixth, sixth], [third], [0.0, third]]


def test_prompt_mean_counts_every_group_alike():
    # Group 0 has three tokens that share a half, group 1 one that has a half to itself.
    weights = prompt_mean(MASKS, GROUPS)
    sixth = torch.tensor(1 / 6).item()
    assert [weight.tolist() for weight in weights] == [[0.0, sixth, sixth], [sixth], [0.0, 0.5]]


def test_a_sequence_without_trained_tokens_still_counts_as_a_sequence():
    weights = sequence_mean([torch.ones(2), torch.zeros(3)], [0, 1])
    assert [weight.tolist() for weight in weights] == [[0.25, 0.25], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("reduction", [token_mean, sequence_mean, prompt_mean, partial(constant_length, length=8)])
def test_a_batch_that_trains_nothing_has_zero_weights(reduction):
    weights = reduction([torch.zeros(2), torch.zeros(1)], [0, 0])
    assert [weight.tolist() for weight in weights] == [[0.0, 0.0], [0.0]]


@settings(deadline=None, derandomize=True)
@given(ragged=ragged_masks, num_groups=st.integers(1, 3))
def test_weights_sum_to_one_where_there_is_something_to_train(ragged, num_groups):
    masks = [torch.tensor(mask, dtype=torch.float32) for mask in ragged]
    groups = [index % num_groups for index in range(len(masks))]
    trains = [any(mask) for mask in ragged]
    if any(trains):
        assert total(token_mean(masks, groups)) == pytest.approx(1.0, abs=1e-6)
    # Sequences and groups without a trained token keep their share of the denominator.
    assert total(sequence_mean(masks, groups)) == pytest.approx(sum(trains) / len(masks), abs=1e-6)
    trained_groups = {group for group, trained in zip(groups, trains, strict=True) if trained}
    assert total(prompt_mean(masks, groups)) == pytest.approx(len(trained_groups) / len(set(groups)), abs=1e-6)


@settings(deadline=None, derandomize=True)
@given(ragged=ragged_masks, cut=st.integers(0, 6), seed=st.integers(0, 2**32))
def test_splitting_a_batch_changes_nothing(ragged, cut, seed):
    """Weights are there before the split, so two sums over the parts add up to the mean over the whole."""
    masks = [torch.tensor(mask, dtype=torch.float32) for mask in ragged]
    generator = torch.Generator().manual_seed(seed)
    losses = [torch.randn(len(mask), generator=generator, dtype=torch.float64) for mask in masks]
    weighted = [float((w * x).sum()) for w, x in zip(token_mean(masks, [0] * len(masks)), losses, strict=True)]
    trained = [float(x) for mask, loss in zip(ragged, losses, strict=True) for m, x in zip(mask, loss) if m]
    mean = sum(trained) / len(trained) if trained else 0.0
    assert sum(weighted[:cut]) + sum(weighted[cut:]) == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize("reduction", [token_mean, sequence_mean, prompt_mean, partial(constant_length, length=8)])
@settings(deadline=None, derandomize=True)
@given(ragged=ragged_masks)
def test_masked_tokens_weigh_exactly_nothing(reduction, ragged):
    masks = [torch.tensor(mask, dtype=torch.float32) for mask in ragged]
    for mask, weight in zip(masks, reduction(masks, [0] * len(masks)), strict=True):
        assert weight.dtype == torch.float32 and weight.shape == mask.shape
        assert (weight[mask == 0] == 0).all() and (weight[mask == 1] > 0).all()


def test_constant_length_counts_every_token_alike_whatever_the_batch_trains():
    weights = constant_length(MASKS, GROUPS, length=8)
    each = torch.tensor(1 / 24).item()
    assert [weight.tolist() for weight in weights] == [[0.0, each, each], [each], [0.0, each]]


@pytest.mark.parametrize("length", [0, -1, float("inf"), float("nan")])
def test_a_length_that_cannot_divide_is_refused(length):
    with pytest.raises(ValueError, match=f"length={length}: must be positive"):
        constant_length(MASKS, GROUPS, length=length)


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "prompt_mean", "constant_length"])
@settings(deadline=None, derandomize=True)
@given(ragged=ragged_masks, num_groups=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_weighted_sums_are_the_means_of_their_formulas(name, ragged, num_groups, seed):
    config = {"length": 5.0} if name == "constant_length" else {}
    groups = [index % num_groups for index in range(len(ragged))]
    generator = torch.Generator().manual_seed(seed)
    losses = [torch.rand(len(mask), generator=generator, dtype=torch.float64) for mask in ragged]
    expected = getattr(reference, name)([x.tolist() for x in losses], ragged, groups, **config)
    function = {
        "token_mean": token_mean,
        "sequence_mean": sequence_mean,
        "prompt_mean": prompt_mean,
        "constant_length": constant_length,
    }[name]
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        weights = function([torch.tensor(mask, dtype=dtype) for mask in ragged], groups, **config)
        ours = sum(float((w.double() * x).sum()) for w, x in zip(weights, losses, strict=True))
        assert ours == pytest.approx(expected, rel=tolerance, abs=0)
