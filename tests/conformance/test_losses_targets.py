"""Cross-entropy with several targets per position, dense and sparse, and losses of the client's own."""

import numpy as np
import pytest
import tinker
import torch
from kit import CALM, Kit, datum, logprobs, loss_sum, moved, near, weighted
from oracles import cross_entropy
from tinker import types

WIDTH = 6


@pytest.fixture(scope="module")
def reader(kit: Kit, keeper: tinker.ServiceClient, state: str) -> tinker.TrainingClient:
    return kit.load(keeper, state)


@pytest.fixture(scope="module")
def several(kit: Kit) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A sequence [14], targets [13, WIDTH] and weights [13, WIDTH] of both signs, most of them zero.

    An entry whose weight is zero has token 0, and no other has, so that the sparse form names the same entries.
    """
    rng = np.random.default_rng(8)
    tokens = kit.sequence(14, 8)
    weights = (rng.normal(size=(13, WIDTH)) * (rng.random((13, WIDTH)) < 0.3)).astype(np.float32)
    targets = np.where(weights != 0, rng.integers(1, kit.vocabulary, weights.shape), 0)
    return tokens, targets, weights


def sparse(tokens: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> types.Datum:
    inputs = {
        "target_tokens": types.TensorData.from_torch_sparse(torch.as_tensor(targets)),
        "weights": types.TensorData.from_torch_sparse(torch.as_tensor(weights)),
    }
    assert all(one.sparse_crow_indices is not None for one in inputs.values())
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)


def columns(tokens: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> list[types.Datum]:
    """The same as WIDTH datums with one target per position."""
    return [datum(tokens, target_tokens=targets[:, k], weights=weights[:, k]) for k in range(WIDTH)]


def test_dense_targets_value_and_logprobs(kit: Kit, reader, several) -> None:
    tokens, targets, weights = several
    output = kit.wait(reader.forward([datum(tokens, target_tokens=targets, weights=weights)], "cross_entropy"))
    (logp,) = logprobs(output)
    apart = logprobs(kit.wait(reader.forward(columns(*several), "cross_entropy")))
    near(logp, np.stack(apart, axis=1), 1e-5)
    near(loss_sum(output), cross_entropy(logp, weights).value, 1e-5)


def test_sparse_targets_value_and_logprobs(kit: Kit, reader, several) -> None:
    _, _, weights = several
    output = kit.wait(reader.forward([sparse(*several)], "cross_entropy"))
    (logp,) = logprobs(output)
    apart = np.stack(logprobs(kit.wait(reader.forward(columns(*several), "cross_entropy"))), axis=1)
    assert logp.shape == weights.shape
    near(logp[weights != 0], apart[weights != 0], 1e-5)
    near(loss_sum(output), cross_entropy(apart, weights).value, 1e-5)


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_gradient_of_several_targets(kit: Kit, service, state, stride, reader, several, form: str) -> None:
    tokens, targets, weights = several
    together = sparse(*several) if form == "sparse" else datum(tokens, target_tokens=targets, weights=weights)
    reached = []
    for data in ([together], columns(*several)):
        client = kit.load(service, state)
        kit.step(client, data, lr=stride * CALM, eps=CALM)
        reached.append(kit.probe(client))
    moved(reached[1], kit.probe(reader))
    near(reached[0], reached[1], 1e-5)


def test_dense_and_one_target_in_one_call(kit: Kit, reader, several) -> None:
    """Datums of different widths come back in order, each in its own shape."""
    tokens, targets, weights = several
    data = [weighted(tokens), datum(tokens, target_tokens=targets, weights=weights), weighted(tokens[:5])]
    shapes = [logp.shape for logp in logprobs(kit.wait(reader.forward(data, "cross_entropy")))]
    assert shapes == [(13,), (13, WIDTH), (4,)]


def test_probabilities_of_all_tokens_sum_to_one(kit: Kit, reader) -> None:
    if not kit.vocabulary_known:
        pytest.skip("needs --weights or --tokens")
    targets = np.tile(np.arange(kit.vocabulary), (3, 1))
    one = datum(kit.sequence(4, 9), target_tokens=targets, weights=np.ones_like(targets, dtype=np.float32))
    (logp,) = logprobs(kit.wait(reader.forward([one], "cross_entropy")))
    near(np.exp(logp).sum(axis=1), np.ones(3), 1e-5)


@pytest.mark.parametrize("form", ["function", "handle"])
def test_custom_loss_equals_its_analytic_weights(kit: Kit, service, state, stride, reader, form: str) -> None:
    """Loss 0.3 * (logp - a)**2 + exp(logp), summed: cross-entropy with weights -(0.6 * (logp - a) + exp(logp))."""
    data = [datum(kit.sequence(length, 12), advantages=np.linspace(-4, -1, length - 1)) for length in (8, 19)]

    def loss(logprobs, advantages):
        total = (0.3 * (logprobs - advantages) ** 2 + logprobs.exp()).sum()
        return total, {"custom/mine:sum": total}

    def of_all(given, scores):
        return sum(loss(logp, one.loss_fn_inputs["advantages"].to_torch())[0] for one, logp in zip(given, scores)), {}

    ranks = {"logprobs": 1, "advantages": 1}
    own = of_all if form == "function" else kit.wait(service.create_custom_loss(loss, input_ranks=ranks))
    client = kit.load(service, state)
    output = client.forward_backward_custom(data, own)
    step = client.optim_step(types.AdamParams(learning_rate=stride * CALM, eps=CALM))
    output, _ = kit.wait(output), kit.wait(step)

    scores = logprobs(output)
    wanted = [one.loss_fn_inputs["advantages"].to_numpy().astype(np.float64) for one in data]
    near(loss_sum(output), sum((0.3 * (p - a) ** 2 + np.exp(p)).sum() for p, a in zip(scores, wanted)), 1e-5)
    other = kit.load(service, state)
    slopes = [-(0.6 * (p - a) + np.exp(p)) for p, a in zip(scores, wanted, strict=True)]
    kit.step(other, [datum(kit.sequence(n, 12), weights=w) for n, w in zip((8, 19), slopes)], stride * CALM, eps=CALM)
    reached = kit.probe(other)
    moved(reached, kit.probe(reader))
    near(kit.probe(client), reached, 1e-5)
