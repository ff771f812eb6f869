"""A version that a generator cannot load is the fault of who asks for it: the replica serves what it served before."""

import asyncio

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.conftest import small_config
from torchtitan_rl.train.controller import Controller
from torchtitan_rl.types import WITHOUT_ADAPTERS, OptimParams, SamplingParams

pytestmark = pytest.mark.whole

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPT = [20, 31, 27, 44, 14]
OF_FILE = WITHOUT_ADAPTERS - 1
"""A version that no trainer publishes, and that is not the base's."""


@pytest.fixture(scope="module")
def controller(loop, tmp_path_factory):
    config = small_config(tmp_path_factory.mktemp("refused") / "run")
    controller = loop.run_until_complete(Controller.launch(config, backend="local"))
    loop.run_until_complete(controller.publish())
    yield controller
    loop.run_until_complete(controller.close())


def reshaped(tensors):
    tensors["norm.weight"] = tensors["norm.weight"][:-1].clone()


def one_missing(tensors):
    del tensors["layers.0.attention.wo.weight"]


def other_dtype(tensors):
    tensors["norm.weight"] = tensors["norm.weight"].double()


def untied(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1


def not_finite(tensors):
    tensors["norm.weight"][0] = torch.nan


async def _held_and_answers(controller):
    weights, said = await controller.generator.weights(), await controller.generator.sample(PROMPT, GREEDY)
    return weights, said.tokens, set(said.policy_versions)


async def _same_as_before(controller, before, run):
    """Runs what is refused; returns the refusal, after a check that nothing has changed."""
    with pytest.raises((ValueError, RuntimeError)) as refusal:
        await run
    weights, tokens, versions = await asyncio.wait_for(_held_and_answers(controller), 60)
    assert (tokens, versions) == before[1:] and weights.keys() == before[0].keys()
    assert all(torch.equal(weights[name], before[0][name]) for name in weights)
    assert controller.generator.health() == {"generator-0": "healthy"}
    return refusal.value


@pytest.mark.parametrize(
    "damage, said",
    [
        (reshaped, "norm.weight has shape"),
        (one_missing, "layers.0.attention.wo.weight is held but not published"),
        (other_dtype, "norm.weight has dtype"),
        (untied, "lm_head.weight differs from the tensor that it is tied to"),
        (not_finite, "norm.weight has a NaN or an infinity"),
    ],
)
def test_a_damaged_file_fails_the_request_that_asks_for_it(loop, controller, tmp_path, damage, said):
    async def run():
        version, file = controller.policy_version, tmp_path / "weights.safetensors"
        await controller.versions.save(version, file)
        tensors = load_file(file)
        damage(tensors)
        save_file(tensors, file)
        before = await _held_and_answers(controller)

        async def asked():
            await controller.versions.publish_file(OF_FILE, file, "test")
            try:
                await controller.generator.sample(PROMPT, GREEDY, policy_version=OF_FILE)
            finally:
                await controller.versions.release(OF_FILE, "test")

        error = await _same_as_before(controller, before, asked())
        assert isinstance(error, ValueError) and said in str(error)
        assert controller.versions.holders() == {version: ["generator-0", "newest"]}

    loop.run_until_complete(run())


@pytest.mark.parametrize("flying", [0, 8])
def test_a_version_that_fails_half_loaded_gives_way_to_the_one_before(loop, controller, flying):
    """Requests in the engine stand still until the version before is whole again, and then go on with it."""

    async def run():
        engine = controller.launcher._generators[0].engine
        load, failing = engine.model.load_weights, ["layers.1.feed_forward.w2.weight"]

        def fails_once(weights):
            tensors = dict(weights)
            if failing:  # what comes before this tensor is new already
                tensors[failing.pop()] = "no tensor"
            return load(tensors.items())

        params = SamplingParams(max_tokens=50, ignore_eos=True, seed=0)
        whole = await controller.generator.sample([5], params)
        before = await _held_and_answers(controller)
        served = controller.policy_version
        await controller.trainer.optim_step(OptimParams(lr=1e-2))
        engine.model.load_weights = fails_once
        answers = [asyncio.ensure_future(controller.generator.sample([5], params)) for _ in range(flying)]
        await asyncio.sleep(0.03)
        error = await _same_as_before(controller, before, controller.publish())
        assert "the engine cannot load it (" in str(error) and controller.policy_version == served
        for answer in await asyncio.gather(*answers):
            assert (answer.tokens, set(answer.policy_versions)) == (whole.tokens, {served})
        assert await controller.publish() == served + 1  # the same version, whole this time
        assert controller.policy_version == served + 1

    loop.run_until_complete(run())
