"""The loss with the terms a config adds, and the KL as a reward, by hand."""

import math
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from torchtitan.config import ParallelismConfig

from torchtitan_rl.algorithm.corrections import truncated_sequence, truncated_token
from torchtitan_rl.algorithm.losses import gspo, importance_sampling, ppo
from torchtitan_rl.algorithm.objective import policy_objective, with_kl_reward
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
            "weights": column(0.0, 0.5, 0.25),
            "loss_mask": column(0, 1, 1),
            "advantages": column(0, 1.0, -2.0),
            "old_logprobs": column(0, -1 - math.log(2), -2.0),
            "sampling_logprobs": column(0, -1 - math.log(2) - math.log(3), -2.0),
            "reference_logprobs": column(0, -2.0, -1.0),
        },
    )


def value(**config):
    loss, metrics = policy_objective(AlgorithmConfig(**config))(inputs())
    return loss.item(), {name: float(value) for name, value in metrics.items()}


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


def test_gradients_of_every_term_by_finite_differences():
    objective = policy_objective(
        AlgorithmConfig(
            loss_fn=importance_sampling, correction_fn=truncated_token, kl_coef=0.3, kl_estimator="k3", entropy_coef=0.2
        )
    )
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
                "weights": [0.0, 1.0],
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
                "weights": mask_T * torch.rand(length),
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
