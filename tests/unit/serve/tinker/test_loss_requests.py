"""Which tokens of a request count as sampled, and what the losses make of the others."""

import math

import pytest
import torch

from torchtitan_rl.algorithm.losses import sampled_metrics
from torchtitan_rl.serve.tinker.loss_requests import datums, loss_of, value
from torchtitan_rl.serve.tinker.wire import Sequence
from torchtitan_rl.types import LossInputs

POLICY = [-3.0, -2.0, -1.0, -2.0]
WIDE = {"clip_low_threshold": 0.1, "clip_high_threshold": 10.0}


def made(name, logprobs=(0.0, 0.0, -1.2, -1.9), advantages=(0.0, 0.0, 1.0, -2.0), config=None):
    """(loss, its arguments, the datum) of a request of one sequence, by default two tokens of a prompt and two sampled
    ones."""
    loss, arguments = loss_of(name, config or {})
    inputs = {"logprobs": torch.tensor(logprobs), "advantages": torch.tensor(advantages)}
    inputs["target_tokens"] = torch.arange(len(logprobs))
    sequence = Sequence(tokens=torch.arange(len(logprobs)), inputs=inputs)
    return loss, arguments, datums([sequence], name, loss, vocab_size=64)[0]


def given(datum, mask=None):
    """What the trainer gives the loss, with `mask` in place of the datum's own."""
    tensors = datum.loss_inputs if mask is None else datum.loss_inputs | {"loss_mask": mask}
    return LossInputs(
        policy_logprobs=torch.tensor(POLICY, requires_grad=True),
        entropy=torch.tensor([8.0, 4.0, 2.0, 1.0]),
        datum=torch.zeros(len(datum), dtype=torch.long),
        num_datums=1,
        tensors=tensors,
    )


def loss_and_gradient(loss, arguments, inputs):
    total = loss.function(inputs, **arguments)[0]
    return total.item(), torch.autograd.grad(total, inputs.policy_logprobs)[0].tolist()


def test_the_ratio_of_a_sequence_is_the_mean_over_its_sampled_tokens():
    loss, arguments, datum = made("gspo", config=WIDE)
    ratio = math.exp((0.2 - 0.1) / 2)  # of the sampled tokens' log-ratios
    assert value(loss, arguments, [datum], [torch.tensor(POLICY)]) == pytest.approx(-(ratio * 1.0 + ratio * -2.0))
    assert loss_and_gradient(loss, arguments, given(datum))[1] == pytest.approx([0.0, 0.0, -ratio, 2 * ratio])


def test_metrics_are_of_sampled_tokens():
    metrics = sampled_metrics(given(made("importance_sampling")[2]))
    assert metrics["policy/entropy"] == 3.0
    assert metrics["mismatch/logprob_diff_max"].item() == pytest.approx(0.2)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro"])
def test_a_sum_over_tokens_is_that_over_every_token(name):
    loss, arguments, datum = made(name)
    expected = loss_and_gradient(loss, arguments, given(datum, mask=torch.ones(4)))
    assert loss_and_gradient(loss, arguments, given(datum)) == expected


def test_the_penalty_of_dro_is_of_prompts_too():
    loss, arguments, datum = made("dro", config={"beta": 0.1})
    penalty = 0.05 * (9.0 + 4.0 + 0.04 + 0.01)
    found, gradient = loss_and_gradient(loss, arguments, given(datum))
    assert found == pytest.approx(-(1.0 * -1.0 + -2.0 * -2.0) + penalty)
    assert gradient[:2] == pytest.approx([0.1 * -3.0, 0.1 * -2.0])


def test_a_token_of_probability_1_counts_where_it_has_an_advantage():
    mask = made("gspo", logprobs=(0.0, 0.0, -0.0, -1.0), advantages=(0.0, 0.5, 0.0, 0.0))[2].loss_inputs["loss_mask"]
    assert mask.tolist() == [0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_a_sequence_whose_numbers_are_all_zero_trains_nothing(name):
    """Its tokens may have been sampled with probability 1 and have the mean reward of their group."""
    loss, arguments, datum = made(name, logprobs=(0.0,) * 4, advantages=(0.0,) * 4)
    found, gradient = loss_and_gradient(loss, arguments, given(datum))
    assert found == 0.0 and gradient == [0.0] * 4
    assert all(math.isfinite(number) for number in sampled_metrics(given(datum)).values())
