"""Changes of a minibatch by statistics of all its tokens: by hand, in float64, and as verl computes them."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from tests.unit.algorithm.test_objective import loss_and_gradient, mismatched
from torchtitan_rl.algorithm.inputs import with_inputs
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.algorithm.minibatch_statistics import clip_cov, covariances, kl_cov, top_entropy
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.types import Datum

IMPORTANCE = AlgorithmConfig(loss_fn=importance_sampling)


def datum(mask, advantages, old, batch=None, **fields):
    columns = {"loss_mask": mask, "advantages": advantages, "old_logprobs": old, "batch_logprobs": batch or old}
    columns["sampling_logprobs"] = old
    tensors = {name: torch.tensor(row, dtype=torch.float64) for name, row in columns.items()}
    tokens = torch.arange(len(mask))
    tensors["token_weights"] = tensors["loss_mask"] / 4
    return Datum(tokens=tokens, target_tokens=tokens, loss_inputs=tensors, **fields)


def advantages(data):
    return [part.loss_inputs["advantages"].tolist() for part in data]


# Trained: A = 3, -1, -1, -1 with mean 0; log pi = -1, -5, -1, -1 with mean -2. Covariances 3, 3, -1, -1.
BY_HAND = [
    datum([0, 1, 1], [9.0, 3.0, -1.0], [9.0, -1.0, -5.0], [0.0, -1.5, -4.0], rollout=0),
    datum([1, 1], [-1.0, -1.0], [-1.0, -1.0], [-2.0, -1.0], rollout=1),
]


def test_covariances_by_hand():
    assert [row.tolist() for row in covariances(BY_HAND)] == [[-math.inf, 3.0, 3.0], [-1.0, -1.0]]


def test_clip_cov_by_hand():
    assert advantages(clip_cov(BY_HAND, fraction=0.5)) == [[9.0, 0.0, 0.0], [-1.0, -1.0]]
    one = advantages(clip_cov(BY_HAND, fraction=0.49))  # 1.96 tokens: one
    assert one in ([[9.0, 0.0, -1.0], [-1.0, -1.0]], [[9.0, 3.0, 0.0], [-1.0, -1.0]])
    assert one == advantages(clip_cov(BY_HAND))  # at least one
    assert advantages(clip_cov(BY_HAND, low=3.0)) == advantages(clip_cov(BY_HAND, high=3.0)) == advantages(BY_HAND)
    both = {str(advantages(clip_cov(BY_HAND, seed=seed))) for seed in range(20)}
    assert len(both) == 2


def test_kl_cov_by_hand():
    # log pi of the two, less that before the batch: 0.5 and -1.
    assert advantages(kl_cov(BY_HAND, fraction=0.5, coef=0.25)) == [[9.0, 2.75, -0.75], [-1.0, -1.0]]
    one = advantages(kl_cov(BY_HAND, coef=2.0))
    assert one in ([[9.0, 1.0, -1.0], [-1.0, -1.0]], [[9.0, 3.0, 1.0], [-1.0, -1.0]])
    # Of all four, the third by 1 and the last by 0, which pays nothing.
    assert advantages(kl_cov(BY_HAND, fraction=1.0)) == [[9.0, 2.0, 0.0], [-2.0, -1.0]]


@pytest.mark.parametrize("function", [clip_cov, kl_cov])
def test_edges(function):
    masked = [datum([0, 0], [1.0, 2.0], [-1.0, -2.0])]
    assert advantages(function(masked)) == advantages(masked)
    alone = [datum([1], [2.0], [-1.0])]  # a covariance of 0
    assert advantages(function(alone)) == advantages(alone)
    function(BY_HAND, fraction=1.0)
    assert BY_HAND[0].loss_inputs["advantages"].tolist() == [9.0, 3.0, -1.0]  # the data stay
    for fraction in (0.0, -0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match=r"fraction=.*must be above 0 and at most 1"):
            function(BY_HAND, fraction=fraction)


def test_arguments_that_cannot_be():
    with pytest.raises(ValueError, match=r"low=5.0: is not below high=5.0"):
        clip_cov(BY_HAND, low=5.0)
    for coef in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"coef=.*must be positive and finite"):
            kl_cov(BY_HAND, coef=coef)


def with_entropy(data, seed=0):
    """The data with entropies of the policy just before the step, some of them equal; a masked token has any."""
    rng = np.random.default_rng(seed)
    rows = [torch.tensor(rng.integers(0, 12, len(part)) / 4, dtype=torch.float64) for part in data]
    return with_batch_start(with_inputs(data, old_entropy=rows))


def with_batch_start(data):
    """The data with the policy before the batch, which the generator stands for: any other policy would do."""
    return with_inputs(data, batch_logprobs=[part.loss_inputs["sampling_logprobs"] for part in data])


FUNCTIONS = [partial(clip_cov, fraction=0.2, low=0.1), partial(kl_cov, fraction=0.3, coef=0.5)]
FUNCTIONS += [partial(top_entropy, fraction=0.3)]
IDS = ["clip_cov", "kl_cov", "top_entropy"]


@pytest.mark.parametrize("function", FUNCTIONS, ids=IDS)
@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_datums_changes_nothing(function, seed):
    data = with_entropy(mismatched(seed), seed)
    expected = advantages(function(data))
    assert expected != advantages(data)
    assert expected == advantages(function(data))  # again the same
    assert advantages(function(data[::-1]))[::-1] == expected
    order = np.random.default_rng(seed).permutation(len(data)).tolist()
    shuffled = advantages(function([data[i] for i in order]))
    assert shuffled == [expected[i] for i in order]


@pytest.mark.parametrize("function", FUNCTIONS, ids=IDS)
@pytest.mark.parametrize("size", [1, 3])
def test_a_split_of_the_answer_changes_neither_sum_nor_gradient(function, size):
    data = with_entropy(at_the_step(0), seed=1)
    changed = function(data)
    loss, gradient = loss_and_gradient(changed, IMPORTANCE)
    parts = [loss_and_gradient(changed[i : i + size], IMPORTANCE) for i in range(0, len(changed), size)]
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-12)
    assert [x for part in parts for x in part[1]] == pytest.approx(gradient, rel=1e-12)
    alone = [part for i in range(0, len(data), size) for part in function(data[i : i + size])]
    assert advantages(alone) != advantages(changed)  # of a microbatch alone it would choose others


# verl/trainer/ppo/core_algos.py, on (sequences, longest).


def at_the_step(seed):
    """Datums of which the policy is the old one, as just before a step."""
    data = with_batch_start(mismatched(seed))
    return with_inputs(data, policy=[part.loss_inputs["old_logprobs"].clone() for part in data])


def columns(data):
    longest = max(len(part) for part in data)
    rows = {}
    for name in ("advantages", "loss_mask", "policy", "batch_logprobs"):
        rows[name] = torch.zeros(len(data), longest, dtype=torch.float64)
        for row, part in zip(rows[name], data, strict=True):
            row[: len(part)] = part.loss_inputs[name]
    return rows


def covariances_of_verl(rows):
    mask = rows["loss_mask"] > 0
    away = [rows[name] - rows[name][mask].mean() for name in ("advantages", "policy")]
    return torch.where(mask, away[0] * away[1], -torch.inf), mask


def candidates_of_verl(rows, low, high):
    """compute_policy_loss_clip_cov, at a ratio of 1, where nothing is clipped: (candidates, how many are chosen)."""
    covariance, mask = covariances_of_verl(rows)
    return (covariance < high) & (covariance > low) & mask, mask.sum().item()


def kl_cov_of_verl(rows, fraction, coef):
    """compute_policy_loss_kl_cov with token-mean: the gradient by the policy. The surrogate's ratio is to the policy
    just before the step, the distance of the penalty to the policy before the batch, verl's old policy."""
    covariance, mask = covariances_of_verl(rows)
    policy = rows["policy"].clone().requires_grad_()
    terms = -rows["advantages"] * (policy - policy.detach()).exp()
    chosen = torch.topk(covariance.flatten(), max(1, int(mask.sum() * fraction))).indices
    penalty = torch.zeros(covariance.numel(), dtype=torch.float64).index_fill(0, chosen, coef).view_as(covariance)
    loss = (terms + penalty * (policy - rows["batch_logprobs"]).abs())[mask].mean()
    return torch.autograd.grad(loss, policy)[0][mask]


def trained(data, values):
    mask = torch.cat([part.loss_inputs["loss_mask"] for part in data]) > 0
    return torch.tensor(values, dtype=torch.float64)[mask]


@pytest.mark.parametrize("seed", range(10))
def test_kl_cov_has_the_gradient_of_verl(seed):
    data = at_the_step(seed)
    expected = kl_cov_of_verl(columns(data), 0.3, 0.5)
    _, gradient = loss_and_gradient(kl_cov(data, fraction=0.3, coef=0.5), IMPORTANCE)
    assert trained(data, gradient).tolist() == pytest.approx(expected.tolist(), rel=1e-10, abs=1e-14)
    _, plain = loss_and_gradient(data, IMPORTANCE)
    assert plain != gradient
    first = with_inputs(data, batch_logprobs=[part.loss_inputs["old_logprobs"] for part in data])
    expected = kl_cov_of_verl(
        columns(with_inputs(first, policy=[d.loss_inputs["old_logprobs"] for d in data])), 0.3, 0.5
    )
    assert trained(data, plain).tolist() == pytest.approx(expected.tolist(), rel=1e-10, abs=1e-14)
    assert advantages(kl_cov(first, fraction=0.3, coef=0.5)) == advantages(data)  # |.| has the subgradient 0 there


@pytest.mark.parametrize("seed", range(10))
def test_clip_cov_chooses_among_the_candidates_of_verl(seed):
    data, low, high = at_the_step(seed), 0.1, 2.0
    rows = columns(data)
    candidates, num_trained = candidates_of_verl(rows, low, high)
    weight = 1 / num_trained
    for fraction in (0.1, 0.3, 1.0):
        changed = clip_cov(data, fraction=fraction, low=low, high=high)
        dropped = (columns(changed)["advantages"] == 0) & (rows["loss_mask"] > 0)
        assert (dropped <= candidates).all()
        assert dropped.sum() == min(max(int(fraction * num_trained), 1), candidates.sum())
        loss, gradient = loss_and_gradient(changed, IMPORTANCE)
        corr = torch.where(dropped, 0.0, 1.0)  # verl multiplies terms by it; the mean is over all trained tokens
        expected = -(rows["advantages"] * corr)[rows["loss_mask"] > 0] * weight
        assert trained(data, gradient).tolist() == pytest.approx(expected.tolist(), rel=1e-10, abs=1e-14)
        assert loss == pytest.approx(expected.sum().item(), rel=1e-10)
    assert candidates.any()


def test_every_candidate_is_as_likely():
    part = datum([1] * 4, [3.0, 3.0, -3.0, -3.0], [-1.0, -1.0, -3.0, -3.0])  # covariances 3
    counts = torch.zeros(4)
    for seed in range(2000):
        counts += clip_cov([part], seed=seed)[0].loss_inputs["advantages"] == 0
    assert counts.sum() == 2000 and ((counts - 500).abs() < 100).all()  # five deviations


@pytest.mark.parametrize("function", FUNCTIONS, ids=IDS)
def test_float32_agrees(function):
    for seed in range(5):
        exact = advantages(function(with_entropy(mismatched(seed))))
        rounded = function(with_entropy(mismatched(seed, torch.float32)))
        assert {part.loss_inputs["advantages"].dtype for part in rounded} == {torch.float32}
        for row, expected in zip(advantages(rounded), exact, strict=True):
            assert row == pytest.approx(expected, rel=1e-5)


# Entropy.


def test_top_entropy_by_hand():
    # Trained: 0.1, 0.2, 0.3, 0.4; the masked token has the highest of all.
    rows = [torch.tensor([9.0, 0.1, 0.4]), torch.tensor([0.2, 0.3])]
    data = with_inputs(BY_HAND, old_entropy=rows)
    assert advantages(top_entropy(data)) == [[9.0, 0.0, -1.0], [0.0, 0.0]]
    assert advantages(top_entropy(data, fraction=0.5)) == [[9.0, 0.0, -1.0], [0.0, -1.0]]
    assert advantages(top_entropy(data, fraction=1.0)) == advantages(BY_HAND)
    equal = with_inputs(BY_HAND, old_entropy=[torch.full((3,), 0.7), torch.full((2,), 0.7)])
    assert advantages(top_entropy(equal)) == advantages(BY_HAND)
    masked = with_inputs([datum([0, 0], [1.0, 2.0], [-1.0, -2.0])], old_entropy=[torch.ones(2)])
    assert advantages(top_entropy(masked)) == advantages(masked)
    for fraction in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match=r"fraction=.*must be above 0 and at most 1, .*; use 0\.2"):
            top_entropy(data, fraction=fraction)


def test_a_quantile_that_is_a_token_is_not_moved_by_rounding():
    for num in (11, 21, 101, 1001):
        data = [datum([1] * num, [1.0] * num, [-1.0] * num)]
        data = with_inputs(data, old_entropy=[torch.arange(num, dtype=torch.float32)])
        for tenths in range(1, 11):  # (1 - fraction) x (num - 1) is whole, but not in floating point
            assert sum(advantages(top_entropy(data, fraction=tenths / 10))[0]) == (num - 1) // 10 * tenths + 1


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_top_entropy_keeps_the_tokens_of_the_authors(fraction, seed):
    """Shenzhi-Wang/Beyond-the-80-20-Rule-RLVR, get_global_entropy_top_mask: the fraction x N tokens of highest entropy,
    rounded up. Its mean is over the kept tokens, so with a token mean the gradient is N / kept times the one here."""
    data = at_the_step(seed)
    rng = np.random.default_rng(seed)
    data = with_inputs(data, old_entropy=[torch.tensor(rng.random(len(part))) for part in data])  # none equal
    mask = torch.cat([part.loss_inputs["loss_mask"] for part in data]) > 0
    entropy = torch.cat([part.loss_inputs["old_entropy"] for part in data])[mask]
    kept = torch.topk(entropy, max(1, math.ceil(round(fraction * len(entropy), 6)))).indices
    gradient = -trained(data, [x for row in advantages(data) for x in row]) / len(kept)  # at a ratio of 1
    expected = torch.zeros_like(gradient).index_copy(0, kept, gradient[kept])
    mine = trained(data, loss_and_gradient(top_entropy(data, fraction=fraction), IMPORTANCE)[1])
    common = mine != 0
    # A quantile between two tokens lies above the lower one, which counts among the authors' where N x fraction does.
    assert (expected[common] != 0).all() and (expected != 0).sum() - common.sum() in (0, 1)
    scaled = mine[common] * len(entropy) / len(kept)
    assert scaled.tolist() == pytest.approx(expected[common].tolist(), rel=1e-10)


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_top_entropy_is_the_mask_of_trl(fraction, seed):
    """trl/trainer/grpo_trainer.py, get_high_entropy_mask with threshold 1 - top_entropy_quantile: the mask
    multiplies the terms of the surrogate, and the mean stays over all tokens."""
    data = with_entropy(at_the_step(seed), seed)
    mask = torch.cat([part.loss_inputs["loss_mask"] for part in data]).numpy() > 0
    entropy = torch.cat([part.loss_inputs["old_entropy"] for part in data]).numpy()
    kept = entropy >= np.quantile(entropy[mask], 1 - fraction)
    terms = np.concatenate([part.loss_inputs["advantages"].numpy() for part in data])
    expected = np.where(mask & kept, -terms / mask.sum(), 0.0)
    loss, gradient = loss_and_gradient(top_entropy(data, fraction=fraction), IMPORTANCE)
    assert gradient == pytest.approx(expected.tolist(), rel=1e-10, abs=1e-14)
    assert loss == pytest.approx(expected.sum(), rel=1e-10)
    backwards = advantages(top_entropy(data[::-1], fraction=fraction))[::-1]
    assert backwards == advantages(top_entropy(data, fraction=fraction))
