"""Losses, KL estimators and corrections against reference.py, which is written from the papers alone."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.algorithm import reference
from torchtitan_rl.algorithm import corrections, kl, losses
from torchtitan_rl.types import LossInputs

LOSSES = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low": 0.2, "clip_high": 0.28},
    "cispo": {},
    "dro": {"beta": 0.1},
    "gspo": {"clip_low": 0.3, "clip_high": 0.4},
    "sapo": {},
    "gmpo": {},
    "dppo_tv": {},
    "dppo_kl": {"tau": 1e-3},
}
CASES = [
    *LOSSES.items(),
    ("ppo", {"dual_clip": 3.0}),
    ("ppo", {"clip_high": 0.5, "dual_clip": 1.25}),
    ("gspo", {}),
    ("cispo", {"clip_low": 0.5, "clip_high": 0.28}),
    ("sapo", {"tau_pos": 0.5, "tau_neg": 3.0}),
    ("dppo_tv", {"delta_low": 0.01, "delta_high": 0.3, "cap": 3.0, "tau": 1e-3}),
    ("dppo_kl", {"delta_low": 0.01, "delta_high": 0.3, "cap": 3.0}),
    ("gmpo", {"log_clip_low": 0.1, "log_clip_high": 2.0}),
    ("gmpo", {"log_clip_low": math.inf, "log_clip_high": math.inf}),
]
SAMPLED = [*(name for name in LOSSES if name != "cross_entropy"), "vespo"]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

ragged = st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=5)


def over_ragged_batches(test):
    test = example(ragged=[[False], [True, False]], seed=1, spread=1.0)(test)
    test = example(ragged=[[True]], seed=0, spread=10.0)(test)
    test = given(ragged=ragged, seed=st.integers(0, 2**32), spread=st.sampled_from([0.0, 0.1, 1.0, 10.0]))(test)
    return settings(deadline=None, derandomize=True, max_examples=40)(test)


def batch(ragged, seed, spread, dtype):
    """Sequences for the reference: log-ratios up to `spread`, one sign of advantage per sequence, values of `dtype`."""
    rng = np.random.default_rng(seed)

    def rounded(values):
        return torch.tensor(np.asarray(values), dtype=dtype).double().tolist()

    sequences = []
    for mask in ragged:
        policy = np.array(rounded(rng.uniform(-12, -0.01, len(mask))))
        sign = rng.choice([-1.0, 1.0])
        sequences.append(
            {
                "mask": list(map(float, mask)),
                "policy": policy.tolist(),
                "old": rounded(policy + rng.uniform(-spread, spread, len(mask))),
                "sampling": rounded(policy + rng.uniform(-spread, spread, len(mask)) / 10),
                "advantage": rounded(sign * rng.uniform(0.1, 2, len(mask))),
                "weight": rounded(np.array(mask) * rng.uniform(0.1, 1, len(mask))),
            }
        )
    return sequences


def packed(sequences, dtype):
    """The same as LossInputs, every tensor with gradient."""

    def column(name):
        return torch.tensor([x for s in sequences for x in s[name]], dtype=dtype).requires_grad_()

    return LossInputs(
        policy_logprobs=column("policy"),
        entropy=torch.zeros(sum(len(s["mask"]) for s in sequences), dtype=dtype),
        datum=torch.repeat_interleave(torch.tensor([len(s["mask"]) for s in sequences])),
        num_datums=len(sequences),
        tensors={
            "token_weights": column("weight"),
            "loss_mask": column("mask").detach(),
            "advantages": column("advantage"),
            "sampling_logprobs": column("sampling"),
            "old_logprobs": column("old"),
        },
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("name", "config"), CASES)
@over_ragged_batches
def test_losses(name, config, dtype, ragged, seed, spread):
    sequences = batch(ragged, seed, spread, dtype)
    formula = partial(getattr(reference, name), **config)
    loss, _ = getattr(losses, name)(packed(sequences, dtype), **config)
    # Relative to the sum without cancellation between sequences, or within a token of two terms (dro).
    positive = [{**s, "advantage": list(map(abs, s["advantage"]))} for s in sequences]
    scale = sum(max(abs(formula([s])), abs(formula([p]))) for s, p in zip(sequences, positive, strict=True))
    assert abs(loss.item() - formula(sequences)) <= TOLERANCE[dtype] * scale


@pytest.mark.parametrize(("name", "config"), CASES)
@over_ragged_batches
def test_masked_tokens_have_exactly_no_gradient(name, config, ragged, seed, spread):
    inputs = packed(batch(ragged, seed, spread, torch.float32), torch.float32)
    (gradient_T,) = torch.autograd.grad(getattr(losses, name)(inputs, **config)[0], inputs.policy_logprobs)
    assert (gradient_T[inputs.loss_mask == 0] == 0).all()


@pytest.mark.parametrize("garbage", [3e38, -3e38, -1e20, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", SAMPLED)
def test_masked_garbage_reaches_neither_loss_nor_gradient(name, garbage):
    def answer(masked_policy, masked_old):
        sequences = [
            {
                "mask": [0, 1, 1],
                "policy": [masked_policy, -1.0, -2.0],
                "old": [masked_old, -1.1, -1.8],
                "sampling": [masked_old, -1.0, -2.0],
                "advantage": [0.0, 1.0, 1.0],
                "weight": [0.0, 0.5, 0.25],
            }
        ]
        inputs = packed(sequences, torch.float32)
        loss, metrics = getattr(losses, name)(inputs)
        (gradient_T,) = torch.autograd.grad(loss, inputs.policy_logprobs)
        assert gradient_T[0] == 0
        return loss.item(), gradient_T.tolist(), {key: float(value) for key, value in metrics.items()}

    ordinary = answer(-1.0, -1.0)
    assert answer(garbage, -1.0) == answer(-1.0, garbage) == answer(garbage, garbage) == ordinary


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("log_ratio", [30.0, -30.0, 1e4, -1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_log_ratios_beyond_twenty_stay_finite(name, log_ratio, advantage):
    policy = min(-1.0, log_ratio - 1.0)
    inputs = packed(
        [
            {
                "mask": [1, 1],
                "policy": [policy] * 2,
                "old": [policy - log_ratio] * 2,
                "sampling": [0.0] * 2,
                "advantage": [advantage] * 2,
                "weight": [0.5] * 2,
            }
        ],
        torch.float32,
    )
    loss, _ = getattr(losses, name)(inputs)
    (gradient_T,) = torch.autograd.grad(loss, inputs.policy_logprobs)
    assert loss.isfinite() and gradient_T.isfinite().all()
    if name == "importance_sampling":  # held at e^20 or e^-20, without gradient
        assert loss.item() == pytest.approx(-advantage * math.exp(math.copysign(20, log_ratio)), rel=1e-6)
        assert gradient_T.tolist() == [0.0, 0.0]


# Two sequences of log-ratios away from the kinks of every loss (0.8, 1.28; for cispo all beyond its bounds, where its
# factor is a constant and finite differences see what the stopped gradient leaves). The last token is masked.
SMOOTH = [
    (0.5, 1.0),
    (0.9, 1.0),
    (1.1, 1.0),
    (1.6, 1.0),
    (0.5, -0.5),
    (0.9, -0.5),
    (1.1, -0.5),
    (1.6, -0.5),
    (1.3, 0.0),
]
BEYOND = [
    (5.5, 1.0),
    (7.0, 1.0),
    (5.4, 1.0),
    (5.6, 1.0),
    (5.7, -0.5),
    (5.9, -0.5),
    (5.5, -0.5),
    (5.6, -0.5),
    (5.3, 0.0),
]


@pytest.mark.parametrize(
    ("name", "config"),
    # gspo and gmpo stop a gradient inside their ratios, which finite differences see; their gradients are tested
    # against `gspo_token_gradient` below and in test_sequence_losses.py.
    [
        *((name, config) for name, config in LOSSES.items() if name not in ("gspo", "gmpo")),
        ("ppo", {"dual_clip": 1.45}),
    ],
)
def test_gradients_by_finite_differences(name, config):
    ratios = BEYOND if name == "cispo" else SMOOTH
    policy = [-1.0 - 0.1 * t for t in range(9)]
    rows = [{"mask": [1] * 4, "rows": slice(0, 4)}, {"mask": [1] * 4 + [0], "rows": slice(4, 9)}]
    sequences = [
        {
            "mask": row["mask"],
            "policy": policy[row["rows"]],
            "sampling": policy[row["rows"]],
            "old": [p - math.log(ratio) for p, (ratio, _) in zip(policy[row["rows"]], ratios[row["rows"]])],
            "advantage": [a for _, a in ratios[row["rows"]]],
            "weight": [0.2 + 0.1 * t for t in range(len(row["mask"]))],
        }
        for row in rows
    ]
    sequences[1]["weight"][4] = 0.0
    fixed = packed(sequences, torch.float64)

    def loss(policy_logprobs, weights, advantages):
        tensors = {**fixed.tensors, "token_weights": weights, "advantages": advantages}
        if name == "cross_entropy":
            weights = tensors["token_weights"] = weights * fixed.loss_mask  # it looks at nothing else
        return getattr(losses, name)(
            LossInputs(policy_logprobs=policy_logprobs, datum=fixed.datum, num_datums=2, tensors=tensors), **config
        )[0]

    assert torch.autograd.gradcheck(loss, [fixed.policy_logprobs, fixed.token_weights, fixed.advantages])


def test_cispo_keeps_the_gradient_of_a_clipped_token():
    # Ratios 8 (held at 5) and 1/2 (not held: no lower bound); the gradient is the factor alone, not the ratio's.
    inputs = packed(
        [
            {
                "mask": [1, 1],
                "policy": [-1.0, -1.0],
                "old": [-1 - math.log(8), -1 + math.log(2)],
                "sampling": [0, 0],
                "advantage": [3.0, -1.0],
                "weight": [0.5, 1.0],
            }
        ],
        torch.float64,
    )
    loss, metrics = losses.cispo(inputs)
    assert loss.item() == pytest.approx(0.5 * 5 * 3 - 0.5)
    assert torch.autograd.grad(loss, inputs.policy_logprobs)[0].tolist() == pytest.approx([-0.5 * 5 * 3, 0.5])
    assert metrics["policy/clip_frac"] == 1


@pytest.mark.parametrize(
    ("lowest", "highest", "config", "source"),
    [
        (0.0, 5.0, {}, "SkyRL, skyrl/backends/skyrl_train/utils/ppo_utils.py, compute_policy_loss_cispo: 1 + 4.0"),
        (0.0, 5.0, {}, "TRL, trl/trainer/grpo_trainer.py, loss_type='cispo' with the recommended epsilon_high=5.0"),
        (0.8, 1.2, {"clip_low": 0.2, "clip_high": 0.2}, "verl, verl/trainer/ppo/core_algos.py, clip_ratio=0.2"),
        (0.0, 4.0, {"clip_high": 3.0}, "Tinker, tinker-docs.thinkingmachines.ai/tinker/losses/cispo, given thresholds"),
    ],
)
@over_ragged_batches
def test_cispo_against_others_with_their_bounds(lowest, highest, config, source, ragged, seed, spread):
    """-clip(ratio, lowest, highest) x A x log pi, the factor without gradient, so A x factor is the gradient."""
    sequences = batch(ragged, seed, spread, torch.float64)
    inputs = packed(sequences, torch.float64)
    loss, _ = losses.cispo(inputs, **config)
    column = {name: np.array([x for s in sequences for x in s[name]]) for name in sequences[0]}
    factor = np.exp(column["policy"] - column["old"]).clip(lowest, highest) * column["weight"] * column["advantage"]
    scale = abs(factor * column["policy"]).sum()
    assert abs(loss.item() + (factor * column["policy"]).sum()) <= 1e-12 * scale
    (gradient_T,) = torch.autograd.grad(loss, inputs.policy_logprobs)
    assert gradient_T.tolist() == pytest.approx((-factor).tolist(), rel=1e-12, abs=0)


def test_gspo_has_one_ratio_per_sequence_and_equal_advantages_the_same_gradient():
    # Ratios 2 and 1/2 have the geometric mean 1: neither clipped nor different. Alone, 4 is clipped.
    inputs = packed(
        [
            {
                "mask": [0, 1, 1],
                "policy": [-9.0, -1, -1],
                "old": [0.0, -1 - math.log(2), -1 + math.log(2)],
                "sampling": [0] * 3,
                "advantage": [0, 2.0, 2.0],
                "weight": [0, 0.25, 0.25],
            },
            {
                "mask": [1],
                "policy": [-1.0],
                "old": [-1 - math.log(4)],
                "sampling": [0],
                "advantage": [1.0],
                "weight": [0.5],
            },
        ],
        torch.float64,
    )
    loss, metrics = losses.gspo(inputs, clip_low=0.1, clip_high=0.1)
    assert loss.item() == pytest.approx(-(0.25 * 2 + 0.25 * 2 + 0.5 * 1.1))
    assert torch.autograd.grad(loss, inputs.policy_logprobs)[0].tolist() == pytest.approx([0, -0.5, -0.5, 0])
    assert metrics["policy/clip_frac"] == 1


def gspo_token_gradient(sequences, clip_low, clip_high):
    """GSPO-token by the log-probabilities in float64: -w_t x A_t x s where the surrogate is not clipped, else 0.

    As verl (verl/trainer/ppo/core_algos.py, compute_policy_loss_gspo), SkyRL
    (skyrl/backends/skyrl_train/utils/ppo_utils.py, gspo_policy_loss) and TRL's GSPO-token
    (trl/experimental/gspo_token/grpo_trainer.py) have it: log s_t = log pi_t - sg[log pi_t] + sg[mean log-ratio].
    """
    gradient = []
    for sequence in sequences:
        mask = np.array(sequence["mask"], dtype=bool)
        log_ratio = (np.array(sequence["policy"]) - np.array(sequence["old"]))[mask]
        s = np.exp(log_ratio.mean()) if mask.any() else 1.0
        advantage, weight = np.array(sequence["advantage"]), np.array(sequence["weight"])
        clipped = ((advantage > 0) & (s > 1 + clip_high)) | ((advantage < 0) & (s < 1 - clip_low))
        gradient += np.where(mask & ~clipped, -weight * advantage * s, 0.0).tolist()
    return gradient


@pytest.mark.parametrize("clip", [(3e-4, 4e-4), (0.3, 0.4), (0.99, 100.0)])
@over_ragged_batches
def test_gspo_has_the_gradient_of_gspo_token(clip, ragged, seed, spread):
    sequences = batch(ragged, seed, spread, torch.float64)
    rng = np.random.default_rng(seed)
    for sequence in sequences:  # signs that differ within a sequence
        sequence["advantage"] = rng.normal(size=len(sequence["mask"])).tolist()
    inputs = packed(sequences, torch.float64)
    loss, _ = losses.gspo(inputs, clip_low=clip[0], clip_high=clip[1])
    (gradient_T,) = torch.autograd.grad(loss, inputs.policy_logprobs)
    assert gradient_T.tolist() == pytest.approx(gspo_token_gradient(sequences, *clip), rel=1e-10, abs=1e-300)


def gspo_of_the_sequence(inputs, clip_low, clip_high):
    """GSPO of the sequence (equation 5 of the paper): the gradient goes through the mean of all its log-ratios."""
    log_ratio_T = losses.masked_difference(inputs, inputs.policy_logprobs, inputs.old_logprobs)
    lengths_B = losses.datum_sums(inputs, inputs.loss_mask).clamp(min=1.0)
    ratio_T = (losses.datum_sums(inputs, log_ratio_T) / lengths_B).exp()[inputs.datum]
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    return -(inputs.token_weights * torch.minimum(ratio_T * inputs.advantages, clipped_T * inputs.advantages)).sum()


@over_ragged_batches
def test_gspo_has_the_gradient_of_the_sequence_where_a_sequence_has_one_advantage(ragged, seed, spread):
    sequences = batch(ragged, seed, spread, torch.float64)
    for sequence in sequences:
        sequence["advantage"] = [sequence["advantage"][0]] * len(sequence["mask"])
        sequence["weight"] = [0.125 * bool(mask) for mask in sequence["mask"]]
    inputs = packed(sequences, torch.float64)
    loss, _ = losses.gspo(inputs, clip_low=0.3, clip_high=0.4)
    of_sequence = gspo_of_the_sequence(inputs, 0.3, 0.4)
    gradients = [torch.autograd.grad(x, inputs.policy_logprobs)[0] for x in (loss, of_sequence)]
    assert loss.item() == pytest.approx(of_sequence.item(), rel=1e-12)
    assert torch.allclose(*gradients, rtol=1e-12, atol=0)


def test_advantages_that_cancel_within_a_sequence_train():
    inputs = packed(
        [
            {
                "mask": [1] * 4,
                "policy": [-1.0] * 4,
                "old": [-1.0] * 4,
                "sampling": [-1.0] * 4,
                "advantage": [1.0, 0.0, 0.0, -1.0],
                "weight": [0.25] * 4,
            }
        ],
        torch.float64,
    )
    (gradient_T,) = torch.autograd.grad(losses.gspo(inputs)[0], inputs.policy_logprobs)
    assert gradient_T.tolist() == [-0.25, 0.0, 0.0, 0.25]


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "grad"),
    [
        (4.0, -1.0, -3.0, 0.0),  # a cost beyond three times the advantage is held
        (2.0, -1.0, -2.0, 2.0),  # less is not
        (4.0, 1.0, 1.2, 0.0),  # nothing new for a positive advantage
        (0.5, -1.0, -0.8, 0.0),
    ],
)
def test_a_dual_clip_bounds_what_a_negative_advantage_costs(ratio, advantage, objective, grad):
    inputs = packed(
        [
            {
                "mask": [1],
                "policy": [-1.0],
                "old": [-1 - math.log(ratio)],
                "sampling": [0],
                "advantage": [advantage],
                "weight": [1.0],
            }
        ],
        torch.float64,
    )
    loss, metrics = losses.ppo(inputs, dual_clip=3.0)
    assert loss.item() == pytest.approx(-objective)
    assert torch.autograd.grad(loss, inputs.policy_logprobs)[0].item() == pytest.approx(grad)
    assert metrics["policy/clip_frac"] == (grad == 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(losses.ppo, clip_high=-0.1), "clip_high=-0.1: must not be negative"),
        (partial(losses.ppo, clip_low=-0.5, clip_high=0.2), "clip_low=-0.5: the bounds .* = 1.5 and .* = 1.2 cross"),
        (partial(losses.gspo, clip_high=math.nan), "clip_low=0.0003: the bounds"),
        (partial(losses.ppo, dual_clip=1.0), "dual_clip=1.0: must be above 1"),
        (partial(losses.dro, beta=0.0), "beta=0.0: must be positive"),
        (partial(losses.sapo, tau_pos=0.0), "tau_pos=0.0: must be positive and finite"),
        (partial(losses.sapo, tau_neg=math.inf), "tau_neg=inf: must be positive and finite"),
        (partial(losses.vespo, k_pos=-1.0), "k_pos=-1.0: must be finite and not negative"),
        (partial(losses.vespo, lambda_neg=0.0), "lambda_neg=0.0: must be positive and finite"),
        (partial(losses.dppo_tv, delta_low=-0.1), "delta_low=-0.1: must not be negative"),
        (partial(losses.dppo_kl, delta_high=math.nan), "delta_high=nan: must not be negative"),
        (partial(losses.dppo_tv, cap=1.0), "cap=1.0: must be above 1"),
        (partial(losses.dppo_kl, tau=-1.0), "tau=-1.0: must be finite and not negative"),
        (partial(losses.gmpo, log_clip_low=-0.1), "log_clip_low=-0.1: must not be negative"),
        (partial(losses.gmpo, log_clip_high=math.nan), "log_clip_high=nan: must not be negative"),
        (partial(losses.value_loss, clip=0.0), "clip=0.0: must be positive"),
    ],
)
def test_hyperparameters_that_make_no_sense_are_refused(call, message):
    inputs = packed(
        [{"mask": [1], "policy": [-1.0], "old": [-1.0], "sampling": [0], "advantage": [1], "weight": [1]}],
        torch.float32,
    )
    with pytest.raises(ValueError, match=message):
        call(inputs)


# KL estimators.


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
@settings(deadline=None, derandomize=True)
@given(d=st.floats(-10, 10, allow_subnormal=False))
@example(d=0.0)
@example(d=1e-4)
@example(d=-1e-6)
def test_kl_estimators(name, dtype, d):
    difference_T = torch.tensor([d], dtype=dtype)
    expected = getattr(reference, name)(difference_T.double().item())
    smallest = 1e-300 if dtype == torch.float64 else 1e-37  # what the square of a smaller number is rounded to
    assert getattr(kl, name)(difference_T).item() == pytest.approx(expected, rel=TOLERANCE[dtype], abs=smallest)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_gradients_of_kl_estimators_by_finite_differences(name):
    difference_T = torch.tensor([-3.0, -0.1, 0.0, 0.2, 4.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(getattr(kl, name), [difference_T])


def test_k1_and_k3_have_the_kl_as_their_mean_k2_its_gradient_and_k3_that_of_the_other_way_round():
    """Exactly, by summing over a distribution of three tokens."""
    logits = torch.tensor([0.3, -1.0, 0.9], dtype=torch.float64, requires_grad=True)
    policy, reference_ = logits.log_softmax(0), torch.tensor([0.5, 0.2, -0.4], dtype=torch.float64).log_softmax(0)
    divergence = (policy.exp() * (policy - reference_)).sum()
    sampled = policy.detach().exp()  # how often each token is sampled
    means = {name: (sampled * getattr(kl, name)(policy - reference_)).sum() for name in ("k1", "k2", "k3")}
    assert means["k1"].item() == pytest.approx(divergence.item(), rel=1e-12)
    assert means["k3"].item() == pytest.approx(divergence.item(), rel=1e-12)
    (wanted,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    (wanted_of_k3,) = torch.autograd.grad((reference_.exp() * (reference_ - policy)).sum(), logits, retain_graph=True)
    for name, expected in (("k2", wanted), ("k3", wanted_of_k3)):
        (gradient,) = torch.autograd.grad(means[name], logits, retain_graph=True)
        assert torch.allclose(gradient, expected, rtol=1e-10)
    assert not torch.allclose(wanted, wanted_of_k3, rtol=0.1)
    (gradient,) = torch.autograd.grad(means["k1"], logits)
    assert gradient.abs().max() < 1e-15  # why it is refused as a loss


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
@pytest.mark.parametrize("d", [100.0, -100.0, 1e20, -1e20])
def test_kl_estimators_stay_finite_beyond_twenty(name, d):
    difference_T = torch.tensor([d], requires_grad=True)
    kl_T = getattr(kl, name)(difference_T)
    kl_T.sum().backward()
    assert kl_T.isfinite() and difference_T.grad.item() == 0.0


def test_a_kl_reward_is_taken_off_the_tokens_own_advantage():
    advantages_T = kl.penalized(
        torch.tensor([0.0, 1.0, 1.0]),
        torch.tensor([0.0, 1.0, 1.0]),
        torch.tensor([0.0, -1.0, -2.0]),
        torch.tensor([math.nan, -1.5, -1.5]),
        coef=0.5,
    )
    assert advantages_T.tolist() == [0.0, 0.75, 1.25]


def test_as_a_reward_only_k1_has_the_gradient_of_the_kl():
    """Exactly, by summing over six tokens near the reference: what holds the policy must be the KL's own gradient.

    A reward is a constant: verl takes `kl_penalty` off `token_level_scores` (verl/trainer/ppo/ray_trainer.py,
    apply_kl_penalty), and the policy gradient is then E[k x grad log pi], here by the logits.
    """
    logits = np.array([0.3, -1.0, 0.9, 0.2, -0.4, 0.6])
    policy = np.exp(logits) / np.exp(logits).sum()
    reference_ = np.exp(logits + [0.0, 0.08, 0.0, 0.01, 0.0, -0.01])
    reference_ /= reference_.sum()
    d = np.log(policy) - np.log(reference_)
    divergence = (policy * d).sum()
    assert 0.0001 < divergence < 0.0002
    right = policy * (d - divergence)  # of sum pi (log pi - log ref) by the logits of a softmax
    score = np.eye(6) - policy  # row v: the gradient of log pi(v) by the logits
    gradient = {}
    for name in ("k1", "k2", "k3"):
        rewards_T = kl.penalized(
            torch.zeros(6, dtype=torch.float64),
            torch.ones(6),
            torch.tensor(np.log(policy)),
            torch.tensor(np.log(reference_)),
            coef=1.0,
        )
        values = -rewards_T.numpy() if name == "k1" else np.array([getattr(reference, name)(x) for x in d])
        gradient[name] = (policy * values) @ score

    def cosine(left, other):
        return left @ other / np.linalg.norm(left) / np.linalg.norm(other)

    assert gradient["k1"] == pytest.approx(right, rel=1e-10, abs=1e-15)
    for name in ("k2", "k3"):
        assert cosine(gradient[name], right) < -0.7  # and away from the reference
        assert 0.01 < np.linalg.norm(gradient[name]) / np.linalg.norm(right) < 0.04


# Corrections.


KINDS = [
    ("truncated", "token", {"high": 1.1}),
    ("truncated", "sequence", {"high": 1.2}),
    ("masked", "token", {"low": 0.9, "high": 1.15}),
    ("masked", "sequence", {"low": 0.5, "high": 1.5}),
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kind", "level", "bounds"), KINDS)
@settings(deadline=None, derandomize=True, max_examples=40)
@given(ragged=ragged, seed=st.integers(0, 2**32))
def test_corrections(kind, level, bounds, dtype, ragged, seed):
    sequences = batch(ragged, seed, 1.0, dtype)
    function = getattr(corrections, f"{kind}_{level}")
    config = {"cap": bounds["high"]} if kind == "truncated" else bounds
    factor_T, metrics = function(packed(sequences, dtype), **config)
    expected = [x for row in reference.correction(sequences, kind, level, **bounds) for x in row]
    assert not factor_T.requires_grad
    assert factor_T.tolist() == pytest.approx(expected, rel=TOLERANCE[dtype])
    trained = [x for x, m in zip(expected, (m for s in sequences for m in s["mask"])) if m]
    assert float(metrics["correction/weight_mean"]) == pytest.approx(sum(trained), rel=TOLERANCE[dtype])


def test_what_is_truncated_or_masked_is_counted_per_token():
    # rho 2, 1/2, and of the second datum 4; the masked first token counts nowhere.
    sequences = [
        {
            "mask": [0, 1, 1],
            "policy": [0, 0, 0],
            "old": [5.0, math.log(2), -math.log(2)],
            "sampling": [0] * 3,
            "advantage": [0] * 3,
            "weight": [0, 1, 1],
        },
        {"mask": [1], "policy": [0], "old": [math.log(4)], "sampling": [0], "advantage": [0], "weight": [1]},
    ]
    for function, config, factors, changed in (
        (corrections.truncated_token, {"cap": 1.5}, [1.0, 1.5, 0.5, 1.5], 2),
        (corrections.truncated_sequence, {"cap": 1.5}, [1.0, 1.0, 1.0, 1.5], 1),
        (corrections.masked_token, {"low": 0.75, "high": 3.0}, [1.0, 2.0, 0.0, 0.0], 2),
        (corrections.masked_sequence, {"low": 0.75, "high": 3.0}, [1.0, 1.0, 1.0, 0.0], 1),
    ):
        factor_T, metrics = function(packed(sequences, torch.float64), **config)
        assert factor_T.tolist() == pytest.approx(factors) and metrics["correction/changed_frac"] == changed


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(corrections.truncated_token, cap=0.0), "cap=0.0: must be positive"),
        (partial(corrections.truncated_sequence, cap=math.inf), "cap=inf: must be positive and finite"),
        (partial(corrections.masked_token, low=5.0, high=0.5), "low=5.0: the bounds 5 and 0.5 .* cross"),
        (partial(corrections.masked_sequence, low=1.5, high=2.0), "low=1.5: a weight of 1, .* is outside"),
    ],
)
def test_bounds_that_cross_or_pass_nothing_are_refused(call, message):
    inputs = packed(
        [{"mask": [1], "policy": [-1.0], "old": [-1.0], "sampling": [0], "advantage": [1], "weight": [1]}],
        torch.float32,
    )
    with pytest.raises(ValueError, match=message):
        call(inputs)
