"""optim_step is torch.optim.AdamW, by identities that hold for its arithmetic, without knowing the weights.

While the learning rate is 0 the parameters stay, so the gradients of several steps are known multiples of one another,
and one first step can be computed that has to move the model exactly like all of them (oracles.one_step_like).
"""

import numpy as np
import pytest
import tinker
from kit import CALM, Kit, datum, logprobs, loss_sum, moved, near, weighted
from oracles import AdamStep, one_step_like
from tinker import types

SHARP = 1e-6  # an epsilon next to which gradients are large: Adam's first step is then about lr in every coordinate


@pytest.fixture(scope="module")
def start(kit: Kit, keeper: tinker.ServiceClient, state: str) -> np.ndarray:
    return kit.probe(kit.load(keeper, state))


def data(kit: Kit, scale: float = 1.0) -> list[types.Datum]:
    return [weighted(kit.sequence(length, 20), scale * np.ones(length - 1)) for length in (12, 18)]


def walk(kit: Kit, state: str, *steps: AdamStep, **more: float) -> np.ndarray:
    """Where these steps take the saved model: log-probabilities of the probe."""
    with kit.session() as service:
        client = kit.load(service, state)
        for step in steps:
            params = {name: getattr(step, name) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")}
            kit.step(client, data(kit, step.scale), **params, **more)
        return kit.probe(client)


def test_zero_learning_rate_changes_nothing(kit: Kit, state, start) -> None:
    step = AdamStep(1.0, 0.0, weight_decay=0.5)
    assert np.array_equal(walk(kit, state, step, step), start)


def test_first_step_does_not_depend_on_betas(kit: Kit, state, stride, start) -> None:
    """Bias correction takes both betas out of the first step."""
    reached = [walk(kit, state, AdamStep(1.0, stride * CALM, *betas, CALM)) for betas in ((0.9, 0.95), (0.3, 0.6))]
    moved(reached[0], start)
    near(reached[1], reached[0], 1e-5)


def test_gradient_and_epsilon_scale_together(kit: Kit, state, stride, start) -> None:
    """lr * s g / (s |g| + s eps) is the same for every s; without s in epsilon the step is s times as long."""
    one = walk(kit, state, AdamStep(1.0, stride * CALM, eps=CALM))
    moved(one, start)
    near(walk(kit, state, AdamStep(8.0, stride * CALM, eps=8 * CALM)), one, 1e-5)
    longer = walk(kit, state, AdamStep(8.0, stride * CALM, eps=CALM))
    assert np.max(np.abs(longer - start)) > 2 * np.max(np.abs(one - start)), "a larger gradient made no longer step"


def test_small_epsilon_hides_the_size_of_the_gradient(kit: Kit, state, start) -> None:
    one, other = (walk(kit, state, AdamStep(scale, 2e-3, eps=1e-12)) for scale in (1.0, 64.0))
    moved(one, start)
    near(other, one, 1e-5)


@pytest.mark.parametrize("eps,decay", [(SHARP, 0.0), (CALM, 0.0), (SHARP, 3.0)], ids=["sharp", "calm", "decay"])
def test_five_steps_with_changing_settings(kit: Kit, state, stride, start, eps: float, decay: float) -> None:
    """Betas, epsilon, decay and gradients change; each step uses its own, as torch.optim.AdamW does."""
    lr = 5e-3 if eps == SHARP else stride * CALM
    steps = [
        AdamStep(1.0, 0.0, 0.9, 0.95, 1e-8, 0.1),
        AdamStep(2.0, 0.0, 0.8, 0.9, 1e-4, 0.0),
        AdamStep(0.5, 0.0, 0.9, 0.99, 1.0, 0.2),
        AdamStep(-0.25, 0.0, 0.5, 0.95, 1e-8, 0.0),
        AdamStep(1.5, lr, 0.7, 0.9, eps, decay),
    ]
    found = walk(kit, state, *steps)
    moved(found, start)
    near(found, walk(kit, state, one_step_like(steps)), 1e-5)


def test_decay_alone_shrinks_geometrically(kit: Kit, state, start) -> None:
    """Zero gradients: two steps of lr * decay = 0.2 leave 0.8 * 0.8 of every parameter, like one of 0.36."""
    twice = walk(kit, state, *[AdamStep(0.0, 0.1, eps=1e-8, weight_decay=2.0)] * 2)
    moved(twice, start)
    near(walk(kit, state, AdamStep(0.0, 0.1, eps=1e-8, weight_decay=3.6)), twice, 1e-5)


def test_full_decay_leaves_nothing(kit: Kit, service, state, start) -> None:
    """lr * decay = 1 with zero gradients: an adapter is gone, so the model is the base; a full model knows nothing."""
    found = walk(kit, state, AdamStep(0.0, 0.5, eps=1e-8, weight_decay=2.0))
    moved(found, start)
    client = kit.fresh(service)
    if client.get_info().is_lora is False:
        assert np.ptp(found) <= 1e-5, "all weights are zero, so all tokens are equally likely"
    else:
        near(found, kit.probe(client), 1e-5)


def test_clipping_at_a_huge_norm_is_no_clipping(kit: Kit, state, stride, start) -> None:
    step = AdamStep(1.0, stride * CALM, eps=CALM)
    free = walk(kit, state, step, grad_clip_norm=0.0)
    moved(free, start)
    near(walk(kit, state, step, grad_clip_norm=1e9), free, 1e-5)


def test_clipped_step_does_not_depend_on_the_size_of_the_gradient(kit: Kit, state, stride, start) -> None:
    """Clipped at c the gradient is c g / |g|; half of it with half the epsilon and the same lr is the same step."""
    clip = 1e-3
    one = walk(kit, state, AdamStep(1.0, 5e-3, eps=clip * 1e-2), grad_clip_norm=clip)
    moved(one, start)
    near(walk(kit, state, AdamStep(16.0, 5e-3, eps=clip * 1e-2), grad_clip_norm=clip), one, 1e-5)
    near(walk(kit, state, AdamStep(1.0, 5e-3, eps=clip / 2 * 1e-2), grad_clip_norm=clip / 2), one, 1e-5)


def drop(kit: Kit, state: str, size: float, clip: float) -> float:
    """Loss after a step of +size * gradient less that after -size * gradient, clipped: 2 size |g| |clipped g|."""
    calm, losses = CALM * 100, []
    for sign in (-1.0, 1.0):
        with kit.session() as service:
            client = kit.load(service, state)
            kit.step(client, data(kit, sign), lr=size * calm, eps=calm, grad_clip_norm=clip)
            losses.append(loss_sum(kit.wait(client.forward(data(kit), "cross_entropy"))))
    return losses[0] - losses[1]


def test_clipping_uses_the_norm_of_the_whole_gradient(kit: Kit, state, stride) -> None:
    """The loss itself measures |g|: central difference of a step along it. Clipping at |g| / 2 has to halve that."""
    size, wanted = stride / 10, 0.05
    for _ in range(6):  # a drop that is far above rounding and still proportional to the step
        free = drop(kit, state, size, 0.0)
        if wanted / 2 < free < wanted * 2:
            break
        size *= wanted / free if free > 0 else 0.1
    assert wanted / 2 < free < wanted * 2, f"loss: changes by {free:g} for a step of {size:g} of the gradient"
    norm = (free / (2 * size)) ** 0.5
    near(drop(kit, state, size, norm / 2) / free, 0.5, 0.01)
    near(drop(kit, state, size, norm * 0.8) / free, 0.8, 0.01)
    near(drop(kit, state, size, norm * 1.1) / free, 1.0, 1e-3)


def test_calls_accumulate_until_the_step(kit: Kit, service, state, stride, start) -> None:
    first, second = data(kit)
    reached = []
    for calls in ([[first, second]], [[first], [second]]):
        client = kit.load(service, state)
        for call in calls:
            kit.wait(client.forward_backward(call, "cross_entropy"))
        kit.wait(client.optim_step(types.AdamParams(learning_rate=stride * CALM, eps=CALM)))
        reached.append(kit.probe(client))
    moved(reached[0], start)
    near(reached[1], reached[0], 1e-5)


def test_forward_leaves_no_gradient(kit: Kit, service, state, stride, start) -> None:
    plain = walk(kit, state, AdamStep(1.0, stride * CALM, eps=CALM))
    client = kit.load(service, state)
    kit.wait(client.forward([weighted(kit.sequence(30, 21), 5.0 * np.ones(29))], "cross_entropy"))
    kit.step(client, data(kit), lr=stride * CALM, eps=CALM)
    moved(plain, start)
    near(kit.probe(client), plain, 1e-5)


def test_step_without_gradient_moves_nothing(kit: Kit, service, state, start) -> None:
    """As in torch, where a parameter without a gradient is left out. A server may also refuse it."""
    client = kit.load(service, state)
    try:
        kit.wait(client.optim_step(types.AdamParams(learning_rate=1e-2)))
    except tinker.RequestFailedError as error:
        assert str(error.category) == "user", error
    assert np.array_equal(kit.probe(client), start)


def test_same_seed_same_model(kit: Kit, service) -> None:
    reached = []
    for seed in (5, 5, 6):
        client = kit.fresh(service, seed=seed)
        for count in range(3):
            kit.step(client, [weighted(kit.sequence(20, 30 + count))], lr=1e-2, eps=SHARP)
        reached.append(kit.probe(client))
    near(reached[1], reached[0], 1e-6)
    if client.get_info().is_lora is not False:
        moved(reached[2], reached[0], 1e-5)


def test_gradient_of_1100_datums_is_the_sum_of_all_chunks(kit: Kit, service, state, stride, start) -> None:
    """Weights are zero but for the first and last two datums, which the SDK sends in different requests."""
    ends = [weighted(kit.sequence(10, 40 + count)) for count in range(4)]
    idle = weighted(kit.sequence(4, 44), np.zeros(3))
    reached = []
    for call in (ends, [*ends[:2], *[idle] * 1096, *ends[2:]]):
        client = kit.load(service, state)
        output = kit.step(client, call, lr=stride * CALM, eps=CALM)
        assert len(logprobs(output)) == len(call)
        reached.append(kit.probe(client))
    moved(reached[0], start)
    near(reached[1], reached[0], 1e-5)


def test_five_steps_equal_adamw_in_float64(kit: Kit, service) -> None:
    """Only where the server trains all weights: an adapter's first factors are not known from outside."""
    if kit.weights is None:
        pytest.skip("needs --weights")
    client = kit.fresh(service)
    if client.get_info().is_lora is not False:
        pytest.skip("the server trains adapters, whose first weights only it knows")
    from reference import Reference

    base = Reference(kit.weights)
    for count, clip in enumerate((0.0, 0.5, 0.0, 2.0, 0.1)):
        one = [datum(kit.sequence(16, 60 + count), weights=np.linspace(-0.5, 2, 15))]
        params = types.AdamParams(learning_rate=1e-3 * (count + 1), beta1=0.9 - count / 10, beta2=0.9 + count / 50,
                                  eps=1e-2 / (count + 1), weight_decay=0.1 * count, grad_clip_norm=clip)  # fmt: skip
        kit.wait(client.forward_backward(one, "cross_entropy"))
        kit.wait(client.optim_step(params))
        base.step(one, params)
    tokens = kit.sequence(20, 70)
    (found,) = logprobs(kit.wait(client.forward([weighted(tokens)], "cross_entropy")))
    near(found, base.logprobs(tokens.tolist()), 1e-5)
