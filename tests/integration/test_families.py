"""A family with states: its trainer over layouts, and its engine beside the trainer."""

import asyncio

import pytest
import torch

from tests.integration.conftest import small_config
from tests.integration.helpers import flat, random_datums, relative_l2
from tests.integration.layouts import client, started, trainer_config
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.config.model import ModelConfig, Qwen35Shape
from torchtitan_rl.types import Datum, OptimParams, SamplingParams

pytestmark = pytest.mark.whole

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


async def numbers(trainer, calls):
    """(log-probabilities of every datum in order, gradient, parameters after a step) of datums in several calls."""
    outputs = [await trainer.forward_backward(data, importance_sampling) for data in calls]
    gradients = flat(await trainer.gradients())
    assert not (await trainer.optim_step(OptimParams(lr=1e-3))).skipped
    rows = torch.cat([row for output in outputs for row in output.policy_logprobs])
    return rows, gradients, flat(await trainer.parameters())


@pytest.fixture(scope="module")
def one_rank(loop):
    mesh, stop = started(loop, trainer_config(), model=MODEL)
    yield loop.run_until_complete(numbers(client(mesh, model=MODEL), [random_datums(12, max_len=60)]))
    stop()


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] if name == "dp2-tp2" else []) for name in LAYOUTS]
)
def test_the_numbers_of_a_trainer_with_states_do_not_depend_on_its_layout(loop, one_rank, layout):
    mesh, stop = started(loop, trainer_config(**LAYOUTS[layout]), model=MODEL)
    try:
        data = random_datums(12, max_len=60)  # 5 and 7 datums, in microbatches of at most 70 tokens
        rows, gradients, parameters = loop.run_until_complete(
            numbers(client(mesh, max_tokens=70, model=MODEL), [data[:5], data[5:]])
        )
    finally:
        stop()
    torch.testing.assert_close(rows, one_rank[0], rtol=0, atol=1e-5)
    assert relative_l2(gradients, one_rank[1]) <= 1e-5
    assert relative_l2(parameters, one_rank[2]) <= 1e-5


PROMPTS = [[20, 31, 27] * length for length in (1, 2, 7, 25, 40)] + [[22]]


@pytest.mark.parametrize(
    "backend, changes",
    [("local", {}), ("actors", {"generator__tensor_parallel_degree": 2, "generator__num_threads": 1})],
    ids=["one rank", "tp2"],
)
def test_the_engine_computes_what_the_trainer_does(loop, tmp_path, backend, changes):
    """Prompts of one to 120 tokens and completions of up to 60, more sequences than decode at once."""
    from torchtitan_rl.train.controller import Controller

    async def run():
        config = small_config(tmp_path / "run", generator__max_num_seqs=8, **changes)
        config.model.shape, config.trainer.training.seq_len = SHAPE, 256
        config.sampling.max_prompt_tokens, config.sampling.max_tokens = 128, 60
        async with await Controller.launch(config, backend=backend) as controller:
            await controller.trainer.forward_backward(random_datums(8), importance_sampling)
            await controller.trainer.optim_step(OptimParams(lr=1e-2))
            await controller.publish()
            params = [SamplingParams(max_tokens=60, ignore_eos=True, seed=seed) for seed in range(3)]
            params.append(SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.0))
            asked = [(prompt, param) for param in params for prompt in PROMPTS]
            completions = await asyncio.gather(*(controller.generator.sample(*one) for one in asked))
            documents = [torch.tensor(prompt + c.tokens) for (prompt, _), c in zip(asked, completions, strict=True)]
            data = [Datum(tokens=d[:-1], target_tokens=d[1:], loss_inputs={}) for d in documents]
            trained = (await controller.trainer.forward(data)).policy_logprobs
            likeliest = (await controller.trainer.forward(data, top_k=1)).top_logprobs
            scored = await asyncio.gather(*(controller.generator.score(d.tolist()) for d in documents))
            return asked, completions, trained, likeliest, scored

    asked, completions, trained, likeliest, scored = loop.run_until_complete(run())
    for (prompt, param), completion, ours, best, score in zip(
        asked, completions, trained, likeliest, scored, strict=True
    ):
        assert len(completion.tokens) == param.max_tokens
        torch.testing.assert_close(torch.tensor(list(score)), ours, rtol=0, atol=2e-5)
        if param.temperature:
            sampled = torch.tensor(completion.logprobs)
            torch.testing.assert_close(sampled, ours[len(prompt) - 1 :], rtol=0, atol=2e-5)
        else:  # what is drawn greedily is the likeliest token to the trainer too
            torch.testing.assert_close(ours[len(prompt) - 1 :], best[len(prompt) - 1 :, 0], rtol=0, atol=1e-6)
