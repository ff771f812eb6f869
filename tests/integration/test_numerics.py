"""Gradients and updates do not depend on how the work was laid out: real meshes, no generator.

There is no padded mode to compare with the packed one: datums are always packed. What padding there is, is all here:
attention's buckets, TP's filling up to a multiple of its size (odd token counts), and fillers where data-parallel
ranks have fewer microbatches than others. A budget of one token gives every datum a microbatch of its own.
"""

import dataclasses
import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.integration.helpers import distillation_datums, flat, random_datums, relative_l2, siblings
from tests.integration.layouts import (
    a_launcher,
    client,
    local_trainers,
    recorded_batches,
    replay,
    started,
    trainer_config,
)
from torchtitan_rl.algorithm.losses import cross_entropy, importance_sampling, ppo, reverse_kl
from torchtitan_rl.dispatch.shared_plan import PrefixCost
from torchtitan_rl.types import OptimParams

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("forked")]

EVERYTHING = 10**6
LAYOUTS = {
    "dp2": dict(dp=2),
    "tp2": dict(tp=2),
    "dp2-tp2": dict(dp=2, tp=2),
    "replicate2": dict(replicate=2),
    "replicate2-dp2": dict(replicate=2, dp=2),
    "selective": dict(activation_checkpoint="selective"),
    "full": dict(activation_checkpoint="full"),
}
FOUR_RANKS = ("dp2-tp2", "replicate2-dp2")
"""Slow: four ranks on two cores. Each of the two parallelisms has a layout of its own that is not."""
DISTILLED = ["dp2", "tp2", "dp2-tp2"]
ONE_RANK = ["selective", "full"]


def marked(layouts):
    return [pytest.param(name, marks=[pytest.mark.slow] if name in FOUR_RANKS else []) for name in layouts]


async def ten_steps(trainer, path, save=False):
    """The update of ten recorded batches; afterwards everything is as it was."""
    if save:
        await trainer.save_checkpoint(path)
    await trainer.reset_optimizer()
    update, _ = await replay(trainer, recorded_batches(10))
    await trainer.load_checkpoint(path, optimizer=False)
    return flat(update)


@pytest.fixture(scope="module")
def here(loop, tmp_path_factory):
    """Starts trainers of one rank, in this process."""
    with local_trainers(loop, tmp_path_factory.mktemp("logs")) as start:
        yield start


@pytest.fixture(scope="module")
def one_rank(loop, here, tmp_path_factory):
    """(mesh, its update over ten batches, a checkpoint of its initial weights)."""
    mesh = here(trainer_config(), own_teacher=True)
    path = tmp_path_factory.mktemp("initial")
    return mesh, loop.run_until_complete(ten_steps(client(mesh), path, save=True)), path


@pytest.fixture(scope="module")
def launcher(loop):
    """Has a store, which takes as long to start as a trainer: one for all layouts."""
    launcher = a_launcher()
    loop.run_until_complete(launcher.start_store())
    yield launcher
    loop.run_until_complete(launcher.stop())


@pytest.fixture(scope="module", params=marked(LAYOUTS))
def laid_out(loop, here, launcher, request):
    if request.param in ONE_RANK:
        yield here(trainer_config(**LAYOUTS[request.param]))
        return
    mesh, stop = started(
        loop, trainer_config(**LAYOUTS[request.param]), own_teacher=request.param in DISTILLED, launcher=launcher
    )
    yield mesh
    stop()


async def gradient(trainer, calls, loss_fn):
    """(log-probabilities of all calls' datums in order, gradient); what has accumulated is dropped again."""
    outputs = [await trainer.forward_backward(data, loss_fn) for data in calls]
    gradients = flat(await trainer.gradients())
    assert not (await trainer.optim_step(OptimParams(lr=0.0))).skipped
    return [row for output in outputs for row in output.policy_logprobs], gradients


def check_gradient(loop, mesh, one_mesh, data, seed, budget, num_calls, loss_fn):
    """The data shuffled and dealt to several calls, against one microbatch on one rank."""
    order = random.Random(seed).sample(range(len(data)), len(data))
    calls = [order[start::num_calls] for start in range(min(num_calls, len(data)))]
    rows, expected = loop.run_until_complete(gradient(client(one_mesh), [data], loss_fn))
    got_rows, got = loop.run_until_complete(
        gradient(client(mesh, budget), [[data[i] for i in call] for call in calls], loss_fn)
    )
    assert expected.norm() > 0
    assert relative_l2(got, expected) <= 1e-5
    for index, row in zip([i for call in calls for i in call], got_rows, strict=True):
        torch.testing.assert_close(row, rows[index], rtol=0, atol=1e-5)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    num=st.integers(1, 9),
    max_len=st.integers(1, 20),
    seed=st.integers(0, 2**32),
    budget=st.one_of(st.just(1), st.integers(2, 60), st.just(EVERYTHING)),
    num_calls=st.integers(1, 4),
    loss_fn=st.sampled_from([importance_sampling, ppo]),
)
@example(num=1, max_len=1, seed=0, budget=1, num_calls=1, loss_fn=ppo)  # fewer datums than ranks, one odd token
@example(num=7, max_len=15, seed=1, budget=1, num_calls=1, loss_fn=importance_sampling)  # a microbatch each
@example(num=7, max_len=15, seed=2, budget=EVERYTHING, num_calls=7, loss_fn=importance_sampling)  # a call each
def test_a_gradient_is_that_of_one_rank_and_one_microbatch(
    loop, laid_out, one_rank, num, max_len, seed, budget, num_calls, loss_fn
):
    data = random_datums(num, seed=seed, min_len=1, max_len=max_len)
    check_gradient(loop, laid_out, one_rank[0], data, seed, budget, num_calls, loss_fn)


def reverse_kl_by_the_mask(inputs):
    """The same for data whose weights are for several targets a token."""
    return reverse_kl(
        dataclasses.replace(inputs, tensors={"token_weights": inputs.loss_mask, "loss_mask": inputs.loss_mask})
    )


@pytest.mark.parametrize("laid_out", marked(DISTILLED), indirect=True)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    num=st.integers(1, 9),
    max_len=st.integers(1, 20),
    seed=st.integers(0, 2**32),
    num_targets=st.integers(1, 5),
    budget=st.one_of(st.just(1), st.integers(2, 60)),
    num_calls=st.integers(1, 4),
    loss_fn=st.sampled_from([cross_entropy, reverse_kl_by_the_mask]),
)
@example(num=1, max_len=1, seed=0, num_targets=1, budget=1, num_calls=1, loss_fn=reverse_kl_by_the_mask)
@example(num=7, max_len=15, seed=1, num_targets=3, budget=1, num_calls=2, loss_fn=reverse_kl_by_the_mask)
@example(num=7, max_len=15, seed=2, num_targets=3, budget=EVERYTHING, num_calls=1, loss_fn=cross_entropy)
def test_a_gradient_of_distillation_is_that_of_one_rank_and_one_microbatch(
    loop, laid_out, one_rank, num, max_len, seed, num_targets, budget, num_calls, loss_fn
):
    data = distillation_datums(num, seed=seed, dim=64, num_targets=num_targets, min_len=1, max_len=max_len)
    check_gradient(loop, laid_out, one_rank[0], data, seed, budget, num_calls, loss_fn)


@pytest.mark.parametrize("laid_out", ["dp2"], indirect=True)
@pytest.mark.parametrize("budget", [EVERYTHING, 40], ids=["one microbatch", "groups cut in parts"])
def test_siblings_that_compute_their_prompt_once_have_the_gradient_of_whole_datums(loop, laid_out, one_rank, budget):
    data = siblings([5, 2, 1])  # a group in several parts, and one without siblings
    trainer = client(laid_out, budget, prefix_cost=PrefixCost(pair=0.0, group=0.0))
    rows, expected = loop.run_until_complete(gradient(client(one_rank[0]), [data], ppo))
    got_rows, got = loop.run_until_complete(gradient(trainer, [data], ppo))

    async def shared_frac():
        return (await trainer.forward(data)).metrics["prompt/shared_frac"]

    assert loop.run_until_complete(shared_frac()) > 0.3
    assert relative_l2(got, expected) <= 1e-5
    for row, got_row in zip(rows, got_rows, strict=True):
        torch.testing.assert_close(got_row, row, rtol=0, atol=1e-5)


@pytest.mark.parametrize("laid_out", marked(DISTILLED), indirect=True)
def test_the_likeliest_tokens_and_hidden_states_are_those_of_one_rank(loop, laid_out, one_rank):
    data = random_datums(7, seed=3)

    # 40 of 67 tokens are more than a TP rank has rows, 34 and 33; one rank says all 67.
    async def both():  # in the loop: a call made outside it leaves Monarch's context behind for other tests
        return (
            await client(laid_out, 20).forward(data, top_k=40, hidden=True),
            await client(one_rank[0]).forward(data, top_k=67, hidden=True),
        )

    here, there = loop.run_until_complete(both())
    for index, datum in enumerate(data):
        tokens, logprobs, states = here.top_tokens[index], here.top_logprobs[index], here.hidden[index]
        assert tokens.shape == logprobs.shape == (len(datum), 40) and states.shape == (len(datum), 64)
        torch.testing.assert_close(states, there.hidden[index], rtol=0, atol=1e-4)
        torch.testing.assert_close(logprobs, there.top_logprobs[index][:, :40], rtol=0, atol=1e-5)
        # Each token once and with its own log-probability: two that differ by less than rounding may change places.
        assert (tokens.sort().values.diff() > 0).all()
        by_token = torch.zeros(len(datum), 67).scatter(1, there.top_tokens[index], there.top_logprobs[index])
        torch.testing.assert_close(by_token.gather(1, tokens), logprobs, rtol=0, atol=1e-5)


def test_ten_steps_change_the_parameters_as_on_one_rank(loop, laid_out, one_rank):
    _, expected, path = one_rank
    update = loop.run_until_complete(ten_steps(client(laid_out), path))
    assert relative_l2(update, expected) <= 1e-3


def test_a_checkpoint_of_one_rank_goes_on_in_any_layout(loop, laid_out, one_rank, tmp_path):
    """With the optimizer's state: the third step of either is the same, and not that of a fresh optimizer."""
    _, _, initial = one_rank
    batches = recorded_batches(3)

    async def run():
        one, other = client(one_rank[0]), client(laid_out)
        await one.load_checkpoint(initial)
        await replay(one, batches[:2])
        await one.save_checkpoint(tmp_path / "two-steps")
        await other.load_checkpoint(tmp_path / "two-steps")
        third, _ = await replay(other, batches[2:])
        expected, _ = await replay(one, batches[2:])
        await other.load_checkpoint(tmp_path / "two-steps", optimizer=False)
        await other.reset_optimizer()
        fresh, _ = await replay(other, batches[2:])
        for trainer in (one, other):
            await trainer.load_checkpoint(initial)
        return flat(third), flat(expected), flat(fresh)

    third, expected, fresh = loop.run_until_complete(run())
    assert relative_l2(third, expected) <= 1e-3 < 0.1 < relative_l2(fresh, expected)


def test_scoring_between_backward_and_step_leaves_the_gradient_whole(loop, laid_out):
    """FSDP keeps parameters gathered after a forward without a backward; they must not hide the optimizer's."""
    trainer, data = client(laid_out), random_datums(5)

    async def norm(score: bool):
        await trainer.forward_backward(data, importance_sampling)
        if score:
            await trainer.forward(data)
        gradients = await trainer.gradients()
        assert all(gradient is not None for gradient in gradients.values())
        return (await trainer.optim_step(OptimParams(lr=0.0))).grad_norm

    assert loop.run_until_complete(norm(True)) == loop.run_until_complete(norm(False)) > 0


def test_whole_moments_are_those_of_the_gradient(loop, laid_out):
    trainer, params = client(laid_out), OptimParams(lr=0.0, betas=(0.9, 0.99), max_grad_norm=1e6)

    async def run():
        await trainer.reset_optimizer()
        assert await trainer.moments() == {}
        await trainer.forward_backward(random_datums(5), importance_sampling)
        gradients = await trainer.gradients()
        await trainer.optim_step(params)
        moments = await trainer.moments()
        await trainer.optim_step(params)  # without a gradient: those that were read are a copy
        return gradients, moments

    gradients, moments = loop.run_until_complete(run())
    assert moments.keys() == gradients.keys()
    for name, (first, second) in moments.items():
        torch.testing.assert_close(first, 0.1 * gradients[name])
        torch.testing.assert_close(second, 0.01 * gradients[name] ** 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_compiled_model_has_the_same_gradient(loop, one_rank, tp):
    # One microbatch: on a CPU every new pattern of attention's buckets is compiled anew.
    mesh, stop = started(loop, trainer_config(compile__enable=True, tp=tp))
    try:
        data = random_datums(7, seed=0, min_len=1, max_len=15)
        check_gradient(loop, mesh, one_rank[0], data, 0, EVERYTHING, 1, importance_sampling)
    finally:
        stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiling_does_not_give_up_on_ragged_data(loop):
    async def run(trainer):
        for index in range(13):  # the ninth pattern of attention's buckets comes with the last
            num, max_len = [1, 3, 6, 10, 16, 24][index % 6], [3, 10, 20, 40, 60][index % 5]
            data = random_datums(num, seed=index, min_len=1, max_len=max_len)
            await trainer.forward_backward(data, importance_sampling)
            assert not (await trainer.optim_step(OptimParams(lr=0.0))).skipped

    mesh, stop = started(loop, trainer_config(compile__enable=True))
    try:
        loop.run_until_complete(run(client(mesh)))
    finally:
        stop()
