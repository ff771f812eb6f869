"""The loss with the terms a config adds, and the KL as a reward, by hand."""

import math
from functools import partial
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest
import torch
from torchtitan.config import ParallelismConfig

from torchtitan_rl.algorithm.corrections import masked_sequence, masked_token, truncated_sequence, truncated_token
from torchtitan_rl.algorithm.inputs import with_inputs
from torchtitan_rl.algorithm.losses import gspo, importance_sampling, ppo
from torchtitan_rl.algorithm.objective import policy_objective
from torchtitan_rl.algorithm.reductions import constant_length, prompt_mean, sequence_mean, token_mean
from torchtitan_rl.algorithm.surrogate import data_metrics
from torchtitan_rl.algorithm.terms import with_kept_weights, with_kl_reward
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.model.spec import build_spec, training_spec
from torchtitan_rl.model.train_step import accumulate_gradients
from torchtitan_rl.types import Datum, LossInputs, Microbatch


def inputs():
    """Ratios 2 and 1 to the old policy, rho 3 and 1 of old to generator; the first token is masked."""

    def column(*values):
        return torch.tensor(values, dtype=torch.float64)

    return LossInputs(
        policy_logprobs=column(-9.0, -1.0, -2.0).requires_grad_(),
        entropy=column(math.nan, 0.5, 1.5).requires_grad_(),
        datum=torch.zeros(3, dtype=torch.long),
        num_datums=1,
        tensors={
            "token_weights": column(0.0, 0.5, 0.25),
            "loss_mask": column(0, 1, 1),
            "advantages": column(0, 1.0, -2.0),
            "old_logprobs": column(0, -1 - math.log(2), -2.0),
            "sampling_logprobs": column(0, -1 - math.log(2) - math.log(3), -2.0),
            "reference_logprobs": column(0, -2.0, -1.0),
        },
    )


def value(**config):
    """The objective, and its metrics."""
    loss, metrics = policy_objective(AlgorithmConfig(**config))(inputs())
    return loss.item(), {name: float(value) for name, value in metrics.items()}


def test_metrics_of_data_with_advantages_and_a_reference():
    batch = inputs()
    metrics = data_metrics(batch, batch.loss_mask > 0)
    # k3 of log-ratios -1 and 1 to the reference.
    assert {name: value.item() for name, value in metrics.items()} == {
        "advantage/mean": -1.0,
        "advantage/abs_max": 2.0,
        "policy/reference_kl": pytest.approx(math.exp(-1) + math.e - 2),
    }


PLAIN = -(0.5 * 2 * 1 + 0.25 * 1 * -2)


def test_without_terms_it_is_the_loss_with_its_arguments():
    assert value(loss_fn=importance_sampling) == (pytest.approx(PLAIN), {})
    assert value(loss_fn=ppo, loss_config={"clip_high": 0.5})[0] == pytest.approx(-(0.5 * 1.5 - 0.25 * 2))


def test_a_correction_multiplies_each_tokens_weight():
    loss, metrics = value(loss_fn=importance_sampling, correction_fn=truncated_token, correction_config={"cap": 2.5})
    assert loss == pytest.approx(-(2.5 * 0.5 * 2 - 0.25 * 2))
    assert metrics == {"correction/weight_mean": pytest.approx(3.5), "correction/changed_frac": 1}


@pytest.mark.parametrize(
    ("estimator", "first", "second"),
    [("k1", 1.0, -1.0), ("k2", 0.5, 0.5), ("k3", math.exp(-1) - 1 + 1, math.e - 1 - 1)],
)
def test_the_kl_is_weighed_like_the_loss(estimator, first, second):
    loss, _ = value(loss_fn=importance_sampling, kl_coef=0.1, kl_estimator=estimator)
    assert loss == pytest.approx(PLAIN + 0.1 * (0.5 * first + 0.25 * second))


@pytest.mark.parametrize(
    ("estimator", "first", "second"), [("k1", 1.0, -1.0), ("k3", math.exp(-1) - 1 + 1, math.e - 1 - 1)]
)
def test_the_kl_may_be_weighed_by_the_ratio(estimator, first, second):
    """Ratios 2 and 1, which have a gradient: of r k1 it is r (d + 1), of r k3 it is r d."""
    weighted = AlgorithmConfig(loss_fn=importance_sampling, kl_coef=0.1, kl_estimator=estimator, kl_ratio_weighted=True)
    given, plain = inputs(), inputs()
    loss, _ = policy_objective(weighted)(given)
    assert loss.item() == pytest.approx(PLAIN + 0.1 * (0.5 * 2 * first + 0.25 * second))
    (of_both,) = torch.autograd.grad(loss, given.policy_logprobs)
    (of_loss,) = torch.autograd.grad(importance_sampling(plain)[0], plain.policy_logprobs)
    extra = 1.0 if estimator == "k1" else 0.0
    expected = [0.0, 0.1 * 0.5 * 2 * (1.0 + extra), 0.1 * 0.25 * (-1.0 + extra)]
    assert (of_both - of_loss).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_weighed_by_the_ratio_the_kl_has_its_own_gradient_whoever_sampled():
    """Exactly, by summing over three tokens that another policy sampled; without the ratio it is another vector."""
    logits = torch.tensor([0.3, -1.0, 0.9], dtype=torch.float64, requires_grad=True)
    sampler, reference = (torch.tensor(x, dtype=torch.float64).log_softmax(0) for x in ([1, 0, 0], [0.5, 0.2, -0.4]))
    policy = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    tensors = {"sampling_logprobs": sampler, "reference_logprobs": reference, "token_weights": sampler.exp()}
    tensors |= {"loss_mask": torch.ones(3), "advantages": torch.zeros(3, dtype=torch.float64)}
    every = LossInputs(policy_logprobs=policy, datum=torch.zeros(3).long(), num_datums=1, tensors=tensors)
    for estimator, weighted in (("k1", True), ("k3", True), ("k2", False), ("k3", False)):
        config = AlgorithmConfig(
            loss_fn=importance_sampling, kl_coef=0.5, kl_estimator=estimator, kl_ratio_weighted=weighted
        )
        (gradient,) = torch.autograd.grad(policy_objective(config)(every)[0], logits, retain_graph=True)
        assert torch.allclose(gradient, 0.5 * wanted, rtol=1e-12) == weighted


@pytest.mark.parametrize("seed", range(5))
def test_the_weighted_kl_is_that_of_trl(seed):
    """TRL 1.16.0, trl/trainer/grpo_trainer.py, `use_bias_correction_kl=True`, `importance_sampling_level="token"`,
    `loss_type="dapo"`: k3 times the token's ratio, averaged over tokens, without the surrogate's clip."""
    data, rng = mismatched(seed), np.random.default_rng(seed)
    reference = [datum.loss_inputs["policy"] + torch.tensor(rng.uniform(-1, 1, len(datum))) for datum in data]
    data = with_inputs(data, reference_logprobs=reference)
    total, tokens = 0.0, 0
    for datum in data:
        column = {name: tensor.numpy() for name, tensor in datum.loss_inputs.items()}
        ratio = np.exp(column["policy"] - column["old_logprobs"])
        away = column["reference_logprobs"] - column["policy"]
        per_token = -ratio * column["advantages"] + 0.3 * (np.exp(away) - away - 1) * ratio
        total += (per_token * column["loss_mask"]).sum()
        tokens += column["loss_mask"].sum()
    config = AlgorithmConfig(loss_fn=importance_sampling, kl_coef=0.3, kl_ratio_weighted=True)
    loss, gradient = loss_and_gradient(data, config)
    assert loss == pytest.approx(total / tokens, rel=1e-6)
    parts = [loss_and_gradient([datum], config) for datum in data]
    assert sum(part for part, _ in parts) == pytest.approx(loss, rel=1e-12)
    assert [g for _, of_part in parts for g in of_part] == pytest.approx(gradient, rel=1e-12)


def test_the_entropy_bonus_lowers_the_loss():
    assert value(loss_fn=importance_sampling, entropy_coef=0.1)[0] == pytest.approx(PLAIN - 0.1 * (0.25 + 0.375))
    given = inputs()
    loss, _ = policy_objective(AlgorithmConfig(loss_fn=importance_sampling, entropy_coef=0.1))(given)
    assert torch.autograd.grad(loss, given.entropy)[0].tolist() == pytest.approx([0.0, -0.05, -0.025])


def test_everything_together_is_the_sum_of_its_parts_and_reads_no_masked_token():
    config = dict(loss_fn=importance_sampling, correction_fn=truncated_token, kl_coef=0.1, entropy_coef=0.1)
    given = inputs()
    loss, _ = policy_objective(AlgorithmConfig(**config))(given)
    kl = 0.1 * (0.5 * math.exp(-1) + 0.25 * (math.e - 2))
    assert loss.item() == pytest.approx(-(2 * 0.5 * 2 - 0.25 * 2) + kl - 0.1 * 0.625)
    assert torch.autograd.grad(loss, given.policy_logprobs)[0][0] == 0


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_of_every_term_by_finite_differences(weighted):
    terms = {"correction_fn": truncated_token, "kl_coef": 0.3, "kl_estimator": "k3", "entropy_coef": 0.2}
    objective = policy_objective(AlgorithmConfig(loss_fn=importance_sampling, kl_ratio_weighted=weighted, **terms))
    fixed = inputs()

    def loss(policy_logprobs, entropy):
        return objective(
            LossInputs(
                policy_logprobs=policy_logprobs, entropy=entropy, datum=fixed.datum, num_datums=1, tensors=fixed.tensors
            )
        )[0]

    entropy = torch.tensor([0.25, 0.5, 1.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, [fixed.policy_logprobs, entropy])


def test_an_objective_travels_to_the_trainer():
    config = AlgorithmConfig(loss_fn=ppo, loss_config={"clip_low": 0.1}, correction_fn=truncated_token, kl_coef=0.1)
    objective = policy_objective(config)
    assert cloudpickle.loads(cloudpickle.dumps(objective))(inputs())[0].item() == objective(inputs())[0].item()


def datum():
    return Datum(
        tokens=torch.tensor([1, 2]),
        target_tokens=torch.tensor([2, 3]),
        group=4,
        loss_inputs={
            name: torch.tensor(values)
            for name, values in {
                "token_weights": [0.0, 1.0],
                "loss_mask": [0.0, 1.0],
                "advantages": [0.0, 1.0],
                "sampling_logprobs": [0.0, -1.0],
                "reference_logprobs": [-7.0, -3.0],
            }.items()
        },
    )


def test_the_kl_as_a_reward_changes_advantages_and_nothing_else():
    (given,) = with_kl_reward([datum()], AlgorithmConfig(kl_coef=0.25, kl_estimator="k1", kl_in="reward"))
    assert given.loss_inputs["advantages"].tolist() == [0.0, 0.5] and given.group == 4
    assert given.loss_inputs["sampling_logprobs"].tolist() == [0.0, -1.0]


def test_no_kl_reward_unless_it_is_configured_as_one():
    data = [datum()]
    assert with_kl_reward(data, AlgorithmConfig(kl_coef=0.25)) is data
    assert with_kl_reward(data, AlgorithmConfig(kl_in="reward")) is data


def test_every_term_at_once_does_not_depend_on_how_datums_are_packed():
    """The gradient of a real model's parameters: three datums in one microbatch, or one in each."""
    torch.manual_seed(0)
    spec = build_spec(
        ModelConfig(
            shape=Qwen3Shape(
                vocab_size=11, dim=16, n_layers=1, n_heads=2, n_kv_heads=2, head_dim=8, hidden_dim=24, max_seq_len=16
            )
        )
    )
    view = SimpleNamespace(parallelism=ParallelismConfig(spmd_backend="partial_dtensor"))
    model = training_spec(spec, view, attention="sdpa", chunk_bytes=1024).model.build()
    model.init_weights()

    def microbatch(length):
        def column():
            return -3 + torch.rand(length)

        mask_T = torch.tensor([0.0] + [1.0] * (length - 1))
        return Microbatch(
            tokens_T=torch.randint(11, (length,)),
            target_tokens_T=torch.randint(11, (length,)),
            lengths=[length],
            loss_inputs={
                "token_weights": mask_T * torch.rand(length),
                "loss_mask": mask_T,
                "advantages": mask_T * torch.randn(()),
                "old_logprobs": column(),
                "sampling_logprobs": column(),
                "reference_logprobs": column(),
            },
        )

    apart = [microbatch(length) for length in (4, 1, 6)]  # the second has nothing to train
    together = [
        Microbatch(
            tokens_T=torch.cat([b.tokens_T for b in apart]),
            target_tokens_T=torch.cat([b.target_tokens_T for b in apart]),
            lengths=[4, 1, 6],
            loss_inputs={name: torch.cat([b.loss_inputs[name] for b in apart]) for name in apart[0].loss_inputs},
        )
    ]
    objective = policy_objective(
        AlgorithmConfig(
            loss_fn=gspo,
            loss_config={"clip_low": 5.0, "clip_high": 5.0},
            correction_fn=truncated_sequence,
            kl_coef=0.3,
            entropy_coef=0.2,
        )
    )

    def gradients(batches):
        model.zero_grad()
        result = accumulate_gradients(model, batches, objective, torch.device("cpu"))
        return result, [parameter.grad.clone() for parameter in model.parameters()]

    (one, one_grads), (other, other_grads) = gradients(together), gradients(apart)
    assert one.loss == pytest.approx(other.loss, rel=1e-5) and one.sums == pytest.approx(other.sums, rel=1e-5)
    for left, right in zip(one_grads, other_grads, strict=True):
        assert left.abs().max() > 0
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


# The denominator of a correction that rejects.


def mismatched(seed, dtype=torch.float64):
    """Datums of 1 to 6 tokens, generator and trainer up to 0.4 nats apart, old and new policy up to 0.2; some
    masked."""
    rng = np.random.default_rng(seed)
    data = []
    for index in range(8):
        length = int(rng.integers(1, 7))
        old = rng.uniform(-3, -0.5, length)
        columns = {
            "loss_mask": (rng.uniform(size=length) < 0.8).astype(float),
            "old_logprobs": old,
            "sampling_logprobs": old + rng.uniform(-0.4, 0.4, length),
            "advantages": rng.normal(size=length),
            "policy": old + rng.uniform(-0.2, 0.2, length),
        }
        tokens = torch.zeros(length, dtype=torch.long)
        tensors = {name: torch.tensor(column, dtype=dtype) for name, column in columns.items()}
        data.append(Datum(tokens=tokens, target_tokens=tokens, loss_inputs=tensors, group=index // 4, rollout=index))
    masks = [datum.loss_inputs["loss_mask"] for datum in data]
    return with_inputs(data, token_weights=token_mean(masks, [datum.group for datum in data]))


def loss_and_gradient(data, config):
    """Of the datums as one microbatch, by the policy's log-probabilities."""
    tensors = {name: torch.cat([datum.loss_inputs[name] for datum in data]) for name in data[0].loss_inputs}
    policy_T = tensors.pop("policy").clone().requires_grad_()
    lengths = torch.tensor([len(datum) for datum in data])
    loss, _ = policy_objective(config)(
        LossInputs(
            policy_logprobs=policy_T,
            entropy=torch.zeros_like(policy_T),
            datum=torch.repeat_interleave(lengths),
            num_datums=len(data),
            tensors=tensors,
        )
    )
    return loss.item(), torch.autograd.grad(loss, policy_T)[0].tolist()


def rejecting(**config):
    return AlgorithmConfig(loss_fn=importance_sampling, correction_fn=masked_sequence, **config)


def of_verl(data, lower, upper, threshold):
    """Loss of verl's decoupled mode in float64 with rollout_rs="seq_sum_k1", rollout_is="sequence" and "token-mean".

    verl/trainer/ppo/rollout_corr_helper.py: compute_rollout_rejection_mask keeps a sequence whose sum of
    -(log trainer - log generator) is within the logarithms of the bounds and takes the others out of response_mask;
    compute_rollout_correction_weights truncates the weight at `threshold`. verl/trainer/ppo/core_algos.py, agg_loss:
    the mean is over what is left of response_mask. The surrogate is not clipped here. Returns (loss, kept, rejected).
    """
    total, kept, rejected = 0.0, 0, 0
    for datum in data:
        column = {name: tensor.double().numpy() for name, tensor in datum.loss_inputs.items()}
        mask = column["loss_mask"] > 0
        log_rho = (column["old_logprobs"] - column["sampling_logprobs"])[mask].sum()
        if not np.log(lower) <= -log_rho <= np.log(upper):
            rejected += mask.sum()
            continue
        ratio = np.exp(column["policy"] - column["old_logprobs"])
        total -= (min(np.exp(log_rho), threshold) * ratio * column["advantages"])[mask].sum()
        kept += mask.sum()
    return total / max(kept, 1), kept, rejected


@pytest.mark.parametrize("seed", range(10))
def test_a_masked_sequence_with_the_kept_denominator_is_verls_seq_sum_k1(seed):
    """verl's bounds are of generator / trainer, so ours are their reciprocals; its cap does nothing from 1 / lower
    on."""
    lower, upper = 0.8, 1.5
    data = mismatched(seed)
    config = rejecting(correction_config={"low": 1 / upper, "high": 1 / lower})
    expected, kept, rejected = of_verl(data, lower, upper, threshold=1 / lower)
    loss, gradient = loss_and_gradient(with_kept_weights(data, config), config)
    assert loss == pytest.approx(expected, rel=1e-6)
    over_all, gradient_over_all = loss_and_gradient(data, config)
    assert over_all == pytest.approx(expected * kept / (kept + rejected), rel=1e-6)
    assert np.array(gradient_over_all) == pytest.approx(np.array(gradient) * kept / (kept + rejected), rel=1e-6)


def test_the_cases_above_reject_some_and_keep_some():
    counts = [of_verl(mismatched(seed), 0.8, 1.5, 1.25)[1:] for seed in range(10)]
    assert all(kept for kept, _ in counts) and sum(rejected > 0 for _, rejected in counts) >= 8


def test_what_verl_keeps_it_truncates_as_well_and_we_do_not():
    data = mismatched(0)
    config = rejecting(correction_config={"low": 0.5, "high": 2.0})
    truncated, *_ = of_verl(data, 0.5, 2.0, threshold=1.0)
    whole, *_ = of_verl(data, 0.5, 2.0, threshold=2.0)
    loss, _ = loss_and_gradient(with_kept_weights(data, config), config)
    assert loss == pytest.approx(whole, rel=1e-6) and truncated != pytest.approx(whole, rel=1e-2)


@pytest.mark.parametrize("reduction", [token_mean, sequence_mean])
def test_a_kept_denominator_does_not_depend_on_the_split_into_microbatches(reduction):
    config = rejecting(correction_config={"low": 0.8, "high": 1.25}, reduction=reduction)
    data = with_kept_weights(mismatched(1), config)
    whole, gradient = loss_and_gradient(data, config)
    for size in (1, 3):
        parts = [loss_and_gradient(data[i : i + size], config) for i in range(0, len(data), size)]
        assert sum(loss for loss, _ in parts) == pytest.approx(whole, rel=1e-12)
        assert [g for _, of_part in parts for g in of_part] == pytest.approx(gradient, rel=1e-12)


def kept_by_hand(data, low, high, per):
    """(loss, gradient) of the surrogate with masked factors in float64: the mean over what the correction keeps.

    The mean is over tokens within sequences and then over sequences, over tokens within groups and then over groups,
    or a sum over sequences times a length. A sequence or a group that loses its last token is in no mean; a sequence
    that never had one is.
    """
    sequences = []
    for datum in data:
        column = {name: tensor.double().numpy() for name, tensor in datum.loss_inputs.items()}
        trained = column["loss_mask"] > 0
        rho = np.exp((column["old_logprobs"] - column["sampling_logprobs"]) * trained)
        if per["correction"] is masked_sequence:
            rho = np.full(len(rho), np.prod(rho))
        tokens = trained & (low <= rho) & (rho <= high)
        surrogate = rho * np.exp(column["policy"] - column["old_logprobs"]) * column["advantages"]
        counts = tokens.any() or not trained.any()
        sequences.append((datum.group, tokens, surrogate, counts))
    num_sequences = sum(counts for *_, counts in sequences)
    of_group = {}
    for group, tokens, *_ in sequences:
        of_group[group] = of_group.get(group, 0) + tokens.sum()
    num_groups = len({group for group, *_, counts in sequences if counts})
    loss, gradient = 0.0, []
    for group, tokens, surrogate, _ in sequences:
        denominator = {
            "sequence_mean": max(tokens.sum(), 1) * num_sequences,
            "prompt_mean": max(of_group[group], 1) * num_groups,
            "constant_length": 12.0 * num_sequences,
        }[per["mean"]]
        of_sequence = -np.where(tokens, surrogate, 0.0) / denominator
        loss += of_sequence.sum()
        gradient += of_sequence.tolist()  # the derivative of exp(policy - old) is itself
    return loss, gradient, len(data) - num_sequences, len(of_group) - num_groups


REDUCTIONS = {
    "sequence_mean": sequence_mean,
    "prompt_mean": prompt_mean,
    "constant_length": partial(constant_length, length=12.0),
}


@pytest.mark.parametrize("correction_fn", [masked_sequence, masked_token])
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("seed", range(4))
def test_what_a_correction_empties_leaves_the_denominator_of_every_reduction(seed, name, correction_fn):
    data = mismatched(seed)
    for datum in data:
        datum.loss_inputs["loss_mask"][0] = 1.0
    for datum in data[:4]:  # one group without a token that is kept
        datum.loss_inputs["sampling_logprobs"] = datum.loss_inputs["old_logprobs"] - 3.0
    low, high = 0.8, 1.25
    config = rejecting(correction_config={"low": low, "high": high}, reduction=REDUCTIONS[name])
    config.correction_fn = correction_fn
    expected, by_hand, emptied, groups = kept_by_hand(data, low, high, {"mean": name, "correction": correction_fn})
    assert emptied >= 4 and groups >= 1
    loss, gradient = loss_and_gradient(with_kept_weights(data, config), config)
    assert loss == pytest.approx(expected, rel=1e-6) and np.array(gradient) == pytest.approx(
        np.array(by_hand), rel=1e-5
    )
    of_all = config.reduction([d.loss_inputs["loss_mask"] for d in data], [d.group for d in data])
    assert loss_and_gradient(with_inputs(data, token_weights=of_all), config)[0] != pytest.approx(loss, rel=1e-3)


def test_a_correction_that_keeps_nothing_leaves_no_weight():
    data = mismatched(0)
    for datum in data:
        datum.loss_inputs["sampling_logprobs"] = datum.loss_inputs["old_logprobs"] - 3.0
    for reduction in (token_mean, *REDUCTIONS.values()):
        config = rejecting(correction_config={"low": 0.8, "high": 1.25}, reduction=reduction)
        assert not any(datum.loss_inputs["token_weights"].any() for datum in with_kept_weights(data, config))


def test_a_sequence_that_never_trained_counts_as_without_a_correction():
    data = mismatched(0)[:3]
    data[0].loss_inputs["loss_mask"] = torch.zeros(len(data[0]))
    config = rejecting(correction_config={"low": 1e-6, "high": 1e6}, reduction=sequence_mean)
    sums = [float(datum.loss_inputs["token_weights"].sum()) for datum in with_kept_weights(data, config)]
    assert sums == pytest.approx([0.0, 1 / 3, 1 / 3])


def test_rejected_tokens_have_no_weight_and_the_others_their_mean():
    # rho 1, 4 and 1/4: masked_token keeps the first, of weight 1 in a mean of one token; the sequence has prod rho = 1.
    tensors = {
        "loss_mask": torch.ones(3),
        "token_weights": torch.full((3,), 1 / 3),
        "old_logprobs": torch.tensor([-1.0, -1.0, -1.0]),
        "sampling_logprobs": torch.tensor([-1.0, -1 - math.log(4), -1 + math.log(4)]),
    }
    tokens = torch.zeros(3, dtype=torch.long)
    data = [Datum(tokens=tokens, target_tokens=tokens, loss_inputs=tensors)]
    for correction_fn, weights in ((masked_token, [1.0, 0.0, 0.0]), (masked_sequence, [1 / 3] * 3)):
        config = AlgorithmConfig(correction_fn=correction_fn, correction_config={"low": 0.5, "high": 2.0})
        (found,) = with_kept_weights(data, config)
        assert found.loss_inputs["token_weights"].tolist() == pytest.approx(weights)
        assert found.loss_inputs["loss_mask"].tolist() == [1.0] * 3  # metrics are still of all trained tokens
