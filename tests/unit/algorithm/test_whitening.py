"""Advantages whitened over a batch's trained tokens: by hand, in float64, and as verl, TRL and OpenRLHF have it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.rollouts import group, rollout, turn
from torchtitan_rl.algorithm.advantages import reinforce
from torchtitan_rl.algorithm.whitening import whitened
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.train.step import training_data


def tensors(rows, dtype=torch.float64):
    return [torch.tensor(row, dtype=dtype) for row in rows]


def rows(advantages, masks):
    return [row.tolist() for row in whitened(tensors(advantages), tensors(masks))]


def test_the_mean_is_over_tokens_and_masked_ones_are_none():
    # Trained: 1, 1, 1, 5. Mean 2, squares 1, 1, 1, 9: variance 3.
    root = math.sqrt(3)
    ours = rows([[1.0, 1.0, 77.0], [1.0, 5.0]], [[1, 1, 0], [1, 1]])
    assert ours[0] == pytest.approx([-1 / root, -1 / root, 0.0]) and ours[1] == pytest.approx([-1 / root, 3 / root])


def test_equal_advantages_one_token_and_none():
    assert rows([[0.3, 0.1 + 0.2], [0.3]], [[1, 1], [1]]) == [[0.0, 0.0], [0.0]]
    assert rows([[4.0]], [[1]]) == [[0.0]] and rows([[4.0, 5.0]], [[0, 0]]) == [[0.0, 0.0]]


batches = st.lists(
    st.lists(st.tuples(st.floats(-5, 5).map(lambda x: round(x, 3)), st.booleans()), min_size=1, max_size=6),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, derandomize=True)
@given(batch=batches, random=st.randoms(use_true_random=False))
def test_it_is_its_formula_in_any_order(batch, random):
    advantages, masks = [[x for x, _ in row] for row in batch], [[m for _, m in row] for row in batch]
    trained = [x for row in batch for x, m in row if m]
    average = math.fsum(trained) / max(1, len(trained))
    deviation = math.sqrt(math.fsum((x - average) ** 2 for x in trained) / max(1, len(trained)))
    equal = not trained or max(trained) - min(trained) <= 1e-6 * max(map(abs, trained))
    expected = [[(x - average) / deviation if m and not equal else 0.0 for x, m in row] for row in batch]
    ours = rows(advantages, masks)
    for row, by_formula in zip(ours, expected, strict=True):
        assert row == pytest.approx(by_formula, rel=1e-10, abs=1e-10)
    order = random.sample(range(len(batch)), len(batch))
    shuffled = rows([advantages[i] for i in order], [masks[i] for i in order])
    for row, i in zip(shuffled, order, strict=True):
        assert row == pytest.approx(ours[i], rel=1e-9, abs=1e-9)


def masked_whiten_of_verl(values, mask):
    """verl/utils/torch_functional.py, masked_whiten, as TRL's PPO has it: unbiased variance, 1e-8 beside it."""
    trained = values[mask]
    return np.where(mask, (values - trained.mean()) / np.sqrt(trained.var(ddof=1) + 1e-8), 0.0)


def normalized_of_openrlhf(values, mask):
    """OpenRLHF, advantages over all tokens: the variance divides by n and is 1e-8 at least."""
    trained = values[mask]
    return np.where(mask, (values - trained.mean()) / np.sqrt(max(trained.var(), 1e-8)), 0.0)


def test_against_those_who_whiten():
    rng = np.random.default_rng(0)
    for shape in ((1, 3), (4, 7), (32, 20)):
        values, mask = rng.normal(size=shape), rng.random(shape) < 0.7
        mask[:, :2] = True
        ours = np.array(rows(values.tolist(), mask.tolist()))
        assert ours == pytest.approx(normalized_of_openrlhf(values, mask), rel=1e-10, abs=1e-12)
        count = mask.sum()
        unbiased = masked_whiten_of_verl(values, mask) * math.sqrt(count / (count - 1))
        assert ours == pytest.approx(unbiased, rel=1e-6)


async def test_a_batch_of_training_data_is_whitened_as_a_whole():
    # Two rollouts of two tokens and one of one: advantages 1, 1, 0, 0, 3, so the mean is 1 and the variance 6/5.
    groups = [
        group(rollout("a", turn([1], [2, 3]), reward=1.0), rollout("b", turn([1], [2, 3]), reward=0.0)),
        group(rollout("c", turn([1], [2]), reward=3.0), id="0/1"),
    ]
    config = AlgorithmConfig(advantage_fn=reinforce, whiten_advantages=True)
    data = await training_data(groups, {"policy": None}, config)
    root = math.sqrt(6 / 5)
    expected = [[0.0, 0.0], [-1 / root, -1 / root], [2 / root]]
    for datum, row in zip(data, expected, strict=True):
        assert datum.loss_inputs["advantages"].tolist() == pytest.approx(row)
        assert datum.loss_inputs["advantages"].dtype == torch.float32
    assert [made.advantages for made in groups] == [[1.0, 0.0], [3.0]]  # what the estimator said
    config.whiten_advantages = False
    data = await training_data(groups, {"policy": None}, config)
    assert [datum.loss_inputs["advantages"].tolist() for datum in data] == [[1.0, 1.0], [0.0, 0.0], [3.0]]
