"""Every loss is the public definition's: its value from the returned log-probabilities, its gradient by a step."""

import numpy as np
import pytest
import tinker
from kit import CALM, Kit, datum, logprobs, loss_sum, moved, near, weighted
from oracles import cross_entropy, policy_loss
from tinker import types

POLICY = [
    pytest.param("importance_sampling", None, id="importance_sampling"),
    pytest.param("ppo", None, id="ppo"),
    pytest.param("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.7}, id="ppo-thresholds"),
    pytest.param("cispo", None, id="cispo"),
    pytest.param("cispo", {"clip_low_threshold": 0.6, "clip_high_threshold": 1.25}, id="cispo-thresholds"),
    pytest.param("dro", None, id="dro"),
    pytest.param("dro", {"beta": 0.3}, id="dro-beta"),
]
# Log-ratios of the model to the sampler: both sides of every threshold above, none next to one.
GAPS = np.array([-0.9, -0.35, -0.1, 0.0, 0.1, 0.35, 0.9, 1.6])


@pytest.fixture(scope="module")
def reader(kit: Kit, keeper: tinker.ServiceClient, state: str) -> tinker.TrainingClient:
    """The saved model, for calls that take no step."""
    return kit.load(keeper, state)


@pytest.fixture(scope="module")
def start(kit: Kit, reader: tinker.TrainingClient) -> np.ndarray:
    return kit.probe(reader)


@pytest.fixture(scope="module")
def rollouts(kit: Kit, reader: tinker.TrainingClient) -> list[types.Datum]:
    """Six sequences, sampler's log-probabilities around the model's, advantages of both signs and zeros."""
    sequences = [kit.sequence(length, 1) for length in (6, 9, 13, 16, 20, 23)]
    scored = logprobs(kit.wait(reader.forward([weighted(tokens) for tokens in sequences], "cross_entropy")))
    rng, data = np.random.default_rng(3), []
    for tokens, logp in zip(sequences, scored, strict=True):
        advantages = rng.normal(size=len(logp)) * (rng.random(len(logp)) > 0.15)
        data.append(datum(tokens, logprobs=logp - rng.permutation(np.resize(GAPS, len(logp))), advantages=advantages))
    return data


def references(data: list[types.Datum], output: types.ForwardBackwardOutput, name: str, config: dict | None) -> list:
    """The loss of every datum in float64 from the log-probabilities the server returned."""
    found = []
    for one, logp in zip(data, logprobs(output), strict=True):
        inputs = {key: value.to_numpy() for key, value in one.loss_fn_inputs.items()}
        found.append(policy_loss(name, logp, inputs["logprobs"], inputs["advantages"], config))
    return found


def same_step(
    kit: Kit, service: tinker.ServiceClient, state: str, start: np.ndarray, size: float, first, second
) -> None:
    """Two ways to make a gradient (functions of a client) move the saved model by the same step, to 1e-5."""
    reached = []
    for make in (first, second):
        client = kit.load(service, state)
        make(client)
        kit.wait(client.optim_step(types.AdamParams(learning_rate=size * CALM, eps=CALM)))
        reached.append(kit.probe(client))
    moved(reached[1], start)
    near(reached[0], reached[1], 1e-5)


@pytest.mark.parametrize("name,config", POLICY)
def test_policy_loss_value(kit: Kit, reader, rollouts, name: str, config: dict | None) -> None:
    output = kit.wait(reader.forward(rollouts, name, config))
    near(loss_sum(output), sum(loss.value for loss in references(rollouts, output, name, config)), 1e-5)


@pytest.mark.parametrize("name,config", POLICY)
def test_policy_loss_gradient(
    kit: Kit, service, state, start, stride, rollouts, name: str, config: dict | None
) -> None:
    """The step equals that of cross-entropy with weights -dLoss/dlogp."""

    def by_name(client: tinker.TrainingClient) -> None:
        kit.wait(client.forward_backward(rollouts, name, config))

    def by_slope(client: tinker.TrainingClient) -> None:
        output = kit.wait(client.forward(rollouts, name, config))
        losses = references(rollouts, output, name, config)
        data = [types.Datum(model_input=one.model_input, loss_fn_inputs={
            "target_tokens": one.loss_fn_inputs["target_tokens"],
            "weights": (-loss.slope).astype(np.float32),
        }) for one, loss in zip(rollouts, losses, strict=True)]  # fmt: skip
        kit.wait(client.forward_backward(data, "cross_entropy"))

    same_step(kit, service, state, start, stride, by_name, by_slope)


def test_cross_entropy_value_with_weights_of_both_signs(kit: Kit, reader) -> None:
    rng = np.random.default_rng(5)
    sequences = [kit.sequence(length, 2) for length in (4, 11, 21)]
    weights = [rng.normal(size=len(tokens) - 1).astype(np.float32) for tokens in sequences]
    output = kit.wait(reader.forward_backward([weighted(*pair) for pair in zip(sequences, weights)], "cross_entropy"))
    expected = sum(cross_entropy(logp, weight).value for logp, weight in zip(logprobs(output), weights, strict=True))
    near(loss_sum(output), expected, 1e-5)


def test_loss_is_a_sum_over_tokens_and_datums(kit: Kit, reader) -> None:
    data = [weighted(kit.sequence(length, 4)) for length in (5, 17)]
    apart = [loss_sum(kit.wait(reader.forward([one], "cross_entropy"))) for one in data]
    together = loss_sum(kit.wait(reader.forward([*data, data[0]], "cross_entropy")))
    near(together, 2 * apart[0] + apart[1], 1e-5)


def test_negative_weights_turn_the_gradient(kit: Kit, service, state, stride, start) -> None:
    """Weights w and -w together leave nothing: the step is that of the rest."""
    rest, tokens = weighted(kit.sequence(15, 6)), kit.sequence(12, 6)
    weights = np.random.default_rng(6).normal(size=11)
    pair = [weighted(tokens, weights), weighted(tokens, -weights)]
    same_step(kit, service, state, start, stride,
              lambda client: kit.wait(client.forward_backward([*pair, rest], "cross_entropy")),
              lambda client: kit.wait(client.forward_backward([rest], "cross_entropy")))  # fmt: skip


def test_logprobs_come_in_input_order(kit: Kit, reader) -> None:
    lengths = [19, 3, 11, 2, 24, 7, 3, 15]
    data = [weighted(kit.sequence(length, count)) for count, length in enumerate(lengths)]
    found = logprobs(kit.wait(reader.forward(data, "cross_entropy")))
    assert [len(logp) for logp in found] == [length - 1 for length in lengths]
    for one, logp in zip(data, found, strict=True):
        near(logp, logprobs(kit.wait(reader.forward([one], "cross_entropy")))[0], 1e-5)


def test_forward_returns_the_loss_of_forward_backward(kit: Kit, reader, rollouts) -> None:
    forward = kit.wait(reader.forward(rollouts, "ppo"))
    backward = kit.wait(reader.forward_backward(rollouts, "ppo"))
    near(loss_sum(forward), loss_sum(backward), 1e-5)
    near(np.concatenate(logprobs(forward)), np.concatenate(logprobs(backward)), 1e-5)


def test_logprobs_equal_the_base_model_in_float64(kit: Kit, service) -> None:
    """A new adapter changes nothing, so a new model is the base model."""
    if kit.weights is None:
        pytest.skip("needs --weights")
    from reference import Reference

    sequences = [kit.sequence(length, 7) for length in (4, 12, 25)]
    output = kit.wait(kit.fresh(service).forward([weighted(tokens) for tokens in sequences], "cross_entropy"))
    base = Reference(kit.weights)
    for tokens, logp in zip(sequences, logprobs(output), strict=True):
        near(logp, base.logprobs(tokens.tolist()), 1e-5)
