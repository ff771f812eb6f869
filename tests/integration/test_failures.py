"""Two generators of two ranks on one host; then the engine's thread of one rank dies, and its process may live on."""

import asyncio
import time

import pytest
import torch

from tests.integration.conftest import answers_of, small_config
from tests.integration.helpers import gone
from torchtitan_rl.actors.operations import GeneratorOperations, WorkerProcess
from torchtitan_rl.model.files import assets_dir, write_model_dir
from torchtitan_rl.types import Request, SamplingParams

# test_layouts.py has a replica of two ranks, test_replicas.py an engine's thread that dies.
pytestmark = pytest.mark.slow
PROMPTS = [[20 + i, 31, 27, 44 - i, 14][: 2 + i % 4] for i in range(8)]


def _random_model(config, directory):
    """Random weights as transformers initialises them; the model, and its directory on disk."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_model_dir(directory, config.model.shape, assets_dir(config.model), eos=1, pad=0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    model.save_pretrained(directory)
    return model


@pytest.fixture(scope="module")
def stack(loop, tmp_path_factory):
    """(transformers' model, its directory, a controller with two replicas of two ranks that hold it)."""
    from torchtitan_rl.train.controller import Controller

    directory = tmp_path_factory.mktemp("failures")
    config = small_config(directory / "run", generator__num_replicas=2, generator__tensor_parallel_degree=2)
    model = _random_model(config, directory / "model")
    controller = loop.run_until_complete(Controller.launch(config, hf_weights=directory / "model"))
    yield model, str(directory / "model"), controller
    start = time.monotonic()
    loop.run_until_complete(controller.close())
    assert time.monotonic() - start < 15, "the generators that were left did not stop"


def _sample(controller, **params):
    return asyncio.gather(
        *(
            controller.generator.sample(prompt, SamplingParams(max_tokens=8, seed=i, ignore_eos=True, **params))
            for i, prompt in enumerate(PROMPTS)
        ),
        return_exceptions=True,
    )


def test_two_replicas_of_two_ranks_side_by_side_give_the_tokens_of_the_whole_model(loop, stack):
    model, _, controller = stack

    async def run():
        requests = [
            Request(prompt, SamplingParams(max_tokens=8, seed=i, ignore_eos=True)) for i, prompt in enumerate(PROMPTS)
        ]
        # At the same time: ranks that shared memory with those of another engine would add up each other's numbers.
        both = await asyncio.gather(*(answers_of(replica, requests) for replica in controller.generator._replicas))
        return both, await _sample(controller), await _sample(controller, temperature=0.0)

    (first, second), routed, greedy = loop.run_until_complete(run())
    for completions in (second, routed):
        assert [c.tokens for c in completions] == [c.tokens for c in first]
        for completion, expected in zip(completions, first):
            assert torch.allclose(torch.tensor(completion.logprobs), torch.tensor(expected.logprobs), atol=1e-5)
    for prompt, sampled, likeliest in zip(PROMPTS, first, greedy):
        assert likeliest.tokens == _logprobs(model, prompt, likeliest.tokens).argmax(-1).tolist()
        logprobs = _logprobs(model, prompt, sampled.tokens).gather(1, torch.tensor(sampled.tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(sampled.logprobs), logprobs, atol=1e-4)


def _logprobs(model, prompt, tokens):
    """Of every token of the vocabulary at each position of the completion."""
    with torch.no_grad():
        return model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]


def test_a_following_ranks_engine_thread_dies_and_the_other_replica_serves_its_requests(loop, stack):
    _, directory, controller = stack
    mesh = controller.generator._replicas[1].mesh

    async def run():
        before = await _sample(controller)
        await mesh.call_rank(0, GeneratorOperations.fetch_hf, directory, 7)
        leader = await mesh.call_rank(0, WorkerProcess.pid)
        with pytest.raises(RuntimeError):  # the other rank has nothing to load: it ends, and rank 0 waits for its word
            await mesh.call_rank(0, GeneratorOperations.load, 7)
        start = time.monotonic()
        after = await _sample(controller)
        took = time.monotonic() - start
        await gone(leader)  # it would wait for the other rank, and spin
        return before, after, took

    before, after, took = loop.run_until_complete(run())
    assert [c.tokens for c in after] == [c.tokens for c in before]
    assert took < 15
    health = controller.generator.health()
    assert health["generator-0"] == "healthy" and "its process died" in health["generator-1"]


def test_the_leading_ranks_engine_thread_dies_and_calls_name_every_replica(loop, stack):
    _, directory, controller = stack
    mesh = controller.generator._replicas[0].mesh

    async def run():
        await mesh.call_rank(1, GeneratorOperations.fetch_hf, directory, 7)
        with pytest.raises(RuntimeError, match=r"generator-0-0.load: .* the engine has stopped: KeyError\(7\)"):
            await mesh.call_rank(0, GeneratorOperations.load, 7)
        await mesh.call_rank(0, WorkerProcess.pid)  # the process lives
        return await _sample(controller)

    for error in loop.run_until_complete(run()):
        assert isinstance(error, RuntimeError)
        assert "generator-0-0.sample: RuntimeError: the engine has stopped: KeyError(7)" in str(error)
        assert "generator-1: generator-1-" in str(error)
