"""A family whose layers keep states: its trainer over layouts, and its engine beside the trainer."""

import asyncio

import pytest
import torch

from tests.integration.conftest import small_config
from tests.integration.helpers import flat, random_datums, relative_l2
from tests.integration.layouts import client, trainer_config, trainer_mesh
from tests.integration.test_on_update import across_a_pull, gaps
from torchtitan_rl import platform
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.config.model import ModelConfig, Qwen35Shape
from torchtitan_rl.model.shape import kv_bytes_per_token, state_bytes
from torchtitan_rl.types import Datum, OptimParams, SamplingParams

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("forked")]

SHAPE = Qwen35Shape(
    vocab_size=67,
    dim=64,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    head_dim=32,
    hidden_dim=96,
    max_seq_len=256,
    n_key_heads=2,
    n_value_heads=4,
    key_head_dim=16,
    value_head_dim=32,
)
MODEL = ModelConfig(assets="chars", shape=SHAPE)
LAYOUTS = {
    "dp2": dict(dp=2),
    "tp2": dict(tp=2),
    "dp2-tp2": dict(dp=2, tp=2),
    "full": dict(activation_checkpoint="full"),
}
DATA = random_datums(12, max_len=60)


async def numbers(layout, max_tokens, calls):
    """(log-probabilities of every datum in order, gradient, parameters after a step) of datums in several calls."""
    async with trainer_mesh(trainer_config(**layout), MODEL) as mesh:
        trainer = client(mesh, max_tokens=max_tokens, model=MODEL)
        outputs = [await trainer.forward_backward(data, importance_sampling) for data in calls]
        gradients = flat(await trainer.gradients())
        assert not (await trainer.optim_step(OptimParams(lr=1e-3))).skipped
        rows = torch.cat([row for output in outputs for row in output.policy_logprobs])
        return rows, gradients, flat(await trainer.parameters())


@pytest.fixture(scope="module")
def one_rank(loop):
    return loop.run_until_complete(numbers({}, 10**6, [DATA]))


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] if name == "dp2-tp2" else []) for name in LAYOUTS]
)
def test_the_numbers_of_a_trainer_with_states_do_not_depend_on_its_layout(loop, one_rank, layout):
    """Nor on how 5 and 7 datums are packed into microbatches of at most 70 tokens."""
    rows, gradients, parameters = loop.run_until_complete(numbers(LAYOUTS[layout], 70, [DATA[:5], DATA[5:]]))
    torch.testing.assert_close(rows, one_rank[0], rtol=0, atol=1e-5)
    assert relative_l2(gradients, one_rank[1]) <= 1e-5
    assert relative_l2(parameters, one_rank[2]) <= 1e-5


# The engine.

PROMPTS = [[20, 31, 27] * length for length in (1, 2, 7, 25, 40)] + [[22]]
SAMPLED = [SamplingParams(max_tokens=60, ignore_eos=True, seed=seed) for seed in range(3)]
GREEDY = SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.0)
ASKED = [(prompt, params) for params in (*SAMPLED, GREEDY) for prompt in PROMPTS]


def config_of(output_dir, **changes):
    config = small_config(output_dir, **changes)
    config.model.shape, config.trainer.training.seq_len = SHAPE, 256
    config.sampling.max_prompt_tokens, config.sampling.max_tokens = 128, 60
    config.generator.max_model_len = 256
    return config


async def take_step(controller):
    await controller.trainer.forward_backward(DATA, importance_sampling)
    await controller.trainer.optim_step(OptimParams(lr=1e-2))


async def sampled(controller, asked):
    return await asyncio.gather(*(controller.generator.sample(*one) for one in asked))


async def check(controller, asked, completions):
    """Log-probabilities of sampled tokens, and of all tokens scored at once, are those of the trainer now."""
    documents = [torch.tensor(prompt + c.tokens) for (prompt, _), c in zip(asked, completions, strict=True)]
    data = [Datum(tokens=d[:-1], target_tokens=d[1:], loss_inputs={}) for d in documents]
    trained = (await controller.trainer.forward(data)).policy_logprobs
    likeliest = (await controller.trainer.forward(data, top_k=1)).top_logprobs
    scores = await asyncio.gather(*(controller.generator.score(d.tolist()) for d in documents))
    for (prompt, params), completion, ours, best, score in zip(asked, completions, trained, likeliest, scores):
        ours, best = (row[len(prompt) - 1 :] for row in (ours, best))
        assert len(completion.tokens) == params.max_tokens
        torch.testing.assert_close(torch.tensor(list(score))[len(prompt) - 1 :], ours, rtol=0, atol=2e-5)
        if params.temperature:
            torch.testing.assert_close(torch.tensor(completion.logprobs), ours, rtol=0, atol=2e-5)
        else:  # what is drawn greedily is the likeliest token to the trainer too
            torch.testing.assert_close(ours, best[:, 0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "backend, asked, changes",
    [
        ("local", ASKED, {"roles__colocation": "all"}),
        ("actors", ASKED[-12:], {"generator__tensor_parallel_degree": 2, "generator__num_threads": 1}),
    ],
    ids=["one rank that sleeps", "tp2"],
)
def test_the_engine_computes_what_the_trainer_does(loop, tmp_path, backend, asked, changes):
    """Prompts of one to 120 tokens and completions of up to 60, three times as many as decode at once; twice, because
    the second time a place holds what other weights left there."""
    from torchtitan_rl.train.controller import Controller

    async def run():
        config = config_of(tmp_path / "run", generator__max_num_seqs=len(asked) // 3, **changes)
        async with await Controller.launch(config, backend=backend) as controller:
            for _ in range(2):
                await take_step(controller)
                await controller.publish()
                await check(controller, asked, await sampled(controller, asked))

    loop.run_until_complete(run())


def test_a_prompt_that_is_cut_has_the_numbers_of_a_whole_one(loop, tmp_path, monkeypatch):
    """As on a GPU: an iteration of 256 tokens computes the end of one prompt and the beginning of the next. Scoring
    draws no random number, which is why a CPU may cut these prompts."""
    from torchtitan_rl.train.controller import Controller

    monkeypatch.setattr(platform, "can_cut_prompts", lambda: True)
    draw = torch.Generator().manual_seed(0)
    documents = [torch.randint(3, 60, (length,), generator=draw) for length in (200, 150, 180, 90, 240)]

    async def run():
        config = config_of(tmp_path / "run", generator__max_num_batched_tokens=256)
        async with await Controller.launch(config, backend="local") as controller:
            await controller.publish()
            scores = await asyncio.gather(*(controller.generator.score(d.tolist()) for d in documents))
            data = [Datum(tokens=d[:-1], target_tokens=d[1:], loss_inputs={}) for d in documents]
            return scores, (await controller.trainer.forward(data)).policy_logprobs

    scores, trained = loop.run_until_complete(run())
    torch.testing.assert_close([torch.tensor(list(s)) for s in scores], trained, rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def local(loop, tmp_path_factory):
    """An engine whose cache holds few sequences: others wait, or lose their place and begin again."""
    from torchtitan_rl.train.controller import Controller

    config = config_of(tmp_path_factory.mktemp("states") / "run")
    sequence = state_bytes(config.generator, SHAPE) + 256 * kv_bytes_per_token(config.generator, SHAPE)
    config.generator.kv_cache_gib = 4 * sequence / 2**30
    controller = loop.run_until_complete(Controller.launch(config, backend="local"))
    yield controller
    loop.run_until_complete(controller.close())


def test_a_cache_of_a_few_places_gives_the_same_numbers(loop, local):
    async def run():
        await local.publish()
        await check(local, ASKED, await sampled(local, ASKED))

    loop.run_until_complete(run())


def test_requests_that_are_recomputed_have_states_of_the_new_weights(loop, local):
    old, new, completions, _, scores = across_a_pull(loop, local, "recompute")
    assert any(set(completion.policy_versions) == {old, new} for completion in completions)
    assert gaps(completions, scores, new).max() <= 2e-5


def test_requests_that_keep_their_states_go_on_with_what_the_old_weights_read(loop, local):
    _, new, completions, _, scores = across_a_pull(loop, local, "keep")
    assert gaps(completions, scores, new).max() > 1e-3
