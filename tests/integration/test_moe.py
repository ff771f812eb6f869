"""A mixture of experts through the whole stack: trained expert-parallel, sampled, exported and loaded again."""

import asyncio
import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.conftest import ROOT
from tests.integration.helpers import flat, random_datums, relative_l2
from tests.integration.layouts import client, trainer_mesh
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.types import OptimParams, Routing, SamplingParams

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("forked")]

DATA = random_datums(7)


def _any_experts(num_tokens: int, seed: int) -> torch.Tensor:
    """Two different experts of eight for each token, in each of two layers."""
    draw = torch.rand(num_tokens, 2, 8, generator=torch.Generator().manual_seed(seed))
    return draw.argsort(-1)[..., :2].to(torch.uint8)


REPLAYED = [
    dataclasses.replace(datum, routing=Routing(experts=_any_experts(len(datum), seed), replayed=True))
    for seed, datum in enumerate(DATA)
]
"""The same data, sent to experts that no router would have chosen."""


def moe_config(
    output_dir: Path,
    *,
    dp: int = 1,
    tp: int = 1,
    ep: int = 1,
    generator_tp: int = 1,
    activation_checkpoint: str = "none",
) -> RunConfig:
    """configs/moe_debug.py with a smaller model, a load-balancing bias, and this layout."""
    config = load_config(str(ROOT / "configs" / "moe_debug.py"))
    config.output_dir = str(output_dir)
    shape = config.model.shape
    shape.dim, shape.n_layers, shape.hidden_dim = 64, 2, 48
    shape.experts.load_balance_coeff = 0.01
    parallel = config.trainer.parallelism
    parallel.data_parallel_shard_degree, parallel.tensor_parallel_degree, parallel.expert_parallel_degree = dp, tp, ep
    config.trainer.activation_checkpoint = activation_checkpoint
    config.generator.tensor_parallel_degree = generator_tp
    config.controller.call_timeout_s = config.controller.sample_timeout_s = 120
    config.algorithm.expert_routing, config.generator.max_model_len = "replay", 320  # two blocks of the cache, and more
    return config


async def _step(trainer) -> dict:
    await trainer.forward_backward(DATA, importance_sampling)
    gradients = await trainer.gradients()
    return {"gradients": gradients, "step": await trainer.optim_step(OptimParams(lr=1e-2))}


async def _replay(trainer) -> dict:
    """Log-probabilities, gradients and metrics of `REPLAYED`. Leaves no gradient."""
    output = await trainer.forward_backward(REPLAYED, importance_sampling)
    gradients = await trainer.gradients()
    await trainer.begin_model(0)
    return {"logprobs": torch.cat(output.policy_logprobs), "gradients": gradients, "metrics": output.metrics}


async def _sampled_twice(controller) -> list:
    """A long prompt is completed twice: the second time the prefix cache has the prompt's first blocks."""
    prompt = [int(token) for token in torch.arange(290) % 60]
    return [await controller.generator.sample(prompt, SamplingParams(max_tokens=8, seed=1)) for _ in range(2)]


async def _train(controller) -> dict:
    """One optimizer step, then both sides' log-probabilities of the same tokens."""
    result = await _step(controller.trainer)
    await controller.publish()
    return result | {"weights": await controller.trainer.parameters()} | await _score(controller)


async def _score(controller) -> dict:
    output = await controller.trainer.forward(DATA)
    scored = await asyncio.gather(
        *(controller.generator.score([*d.tokens.tolist(), int(d.target_tokens[-1])]) for d in DATA)
    )
    return {"trained": torch.cat(output.policy_logprobs), "scored": torch.cat([torch.tensor(s) for s in scored])}


@pytest.fixture(scope="module")
def one_rank(loop, tmp_path_factory):
    """In this process: a step from random weights, and the directories with the weights before and after it."""
    from torchtitan_rl.train.controller import Controller

    directory = tmp_path_factory.mktemp("moe")

    async def run():
        async with await Controller.launch(moe_config(directory / "run"), backend="local") as controller:
            await controller.trainer.save_hf_model(directory / "before", eos=1, pad=0)
            replayed = await _replay(controller.trainer)
            result = await _train(controller) | {"replayed": replayed, "twice": await _sampled_twice(controller)}
            await controller.trainer.save_hf_model(directory / "after", eos=1, pad=0)
            return result | {"before": directory / "before", "after": directory / "after"}

    return loop.run_until_complete(run())


@pytest.fixture(scope="module")
def expert_parallel(loop, one_rank, tmp_path_factory):
    """Starts from the weights after one rank's step, exports them, and makes that step itself."""
    from torchtitan_rl.train.controller import Controller

    directory = tmp_path_factory.mktemp("ep")
    config = moe_config(directory / "run", dp=2, ep=2, generator_tp=2)
    config.model = ModelConfig(assets=str(one_rank["after"]), pretrained=True)

    async def run():
        async with await Controller.launch(config) as controller:
            loaded = {"weights": await controller.trainer.parameters()} | await _score(controller)
            await controller.trainer.save_hf_model(directory / "again", eos=1, pad=0)
            await controller.trainer.init_model(one_rank["before"])
            replayed = await _replay(controller.trainer)
            result = await _train(controller) | {"replayed": replayed, "twice": await _sampled_twice(controller)}
            return result | {"loaded": loaded, "again": directory / "again"}

    return loop.run_until_complete(run())


def test_generator_and_trainer_agree(expert_parallel):
    # Lengths of 2 to 14 tokens, odd ones included.
    assert (expert_parallel["scored"] - expert_parallel["trained"]).abs().max() <= 1e-4


def test_the_load_balancing_bias_moves_once_per_step(expert_parallel):
    # One step adds 0.01 x the sign of (mean tokens - an expert's tokens), less its mean over the experts.
    biases = [tensor for name, tensor in expert_parallel["weights"].items() if name.endswith("expert_bias_E")]
    assert len(biases) == 2
    for bias_E in biases:
        assert bias_E.dtype == torch.float32 and bias_E.any() and abs(float(bias_E.mean())) < 1e-7
        steps_E = (bias_E - bias_E.min()) / 0.01
        assert torch.allclose(steps_E, steps_E.round(), atol=1e-4) and steps_E.max() <= 2.0001


def _same_step(result, expected):
    gradients, expected_gradients = result["gradients"], expected["gradients"]
    assert relative_l2(flat(gradients), flat(expected_gradients)) <= 1e-5
    experts = [n for n in expected_gradients if ".inner_experts." in n or ".router." in n or "ffn_norm" in n]
    assert len(experts) == 2 * 5 and all(expected_gradients[name].any() for name in experts)
    for name in experts:
        assert relative_l2(gradients[name].double(), expected_gradients[name].double()) <= 1e-5, name
    assert result["step"].grad_norm == pytest.approx(expected["step"].grad_norm, rel=1e-5)


def _same_replay(result, expected):
    """Replay on one layout gives the log-probabilities and gradients of another; every token went to its experts."""
    one, other = result["replayed"], expected["replayed"]
    assert (one["logprobs"] - other["logprobs"]).abs().max() <= 1e-5
    assert relative_l2(flat(one["gradients"]), flat(other["gradients"])) <= 1e-5
    gates = [name for name in other["gradients"] if name.endswith("router.gate.weight")]
    assert len(gates) == 2 and all(other["gradients"][name].any() for name in gates)
    for name in gates:
        assert relative_l2(one["gradients"][name].double(), other["gradients"][name].double()) <= 1e-5, name
    for name in ("mismatch/expert_agreement_frac", "mismatch/expert_choice_frac"):
        assert one["metrics"][name] == pytest.approx(other["metrics"][name], abs=1e-6)
    assert one["metrics"]["mismatch/expert_agreement_frac"] == pytest.approx(1.0)
    assert one["metrics"]["mismatch/expert_choice_frac"] < 0.5


def test_replayed_experts_act_alike_on_every_layout(one_rank, expert_parallel):
    _same_replay(expert_parallel, one_rank)
    plain = {name: g for name, g in one_rank["gradients"].items() if name.endswith("router.gate.weight")}
    assert all(not torch.allclose(g, one_rank["replayed"]["gradients"][name]) for name, g in plain.items())


@pytest.mark.parametrize("layout", ["one_rank", "expert_parallel"])
def test_a_prompt_in_the_prefix_cache_has_its_experts(layout, request):
    first, second = request.getfixturevalue(layout)["twice"]
    assert first.tokens == second.tokens and first.routed_experts.shape == (290 + 8 - 1, 2, 2)
    assert first.routed_experts.dtype == torch.uint8 and (first.routed_experts < 8).all()
    assert (first.routed_experts[..., 0] != first.routed_experts[..., 1]).all()
    assert torch.equal(first.routed_experts.sort(-1).values, second.routed_experts.sort(-1).values)


def test_expert_parallelism_gives_the_gradients_of_one_rank(one_rank, expert_parallel):
    assert (one_rank["scored"] - one_rank["trained"]).abs().max() <= 1e-4
    assert (expert_parallel["scored"] - expert_parallel["trained"]).abs().max() <= 1e-4
    _same_step(expert_parallel, one_rank)


def test_so_do_tensor_parallel_experts_that_are_recomputed(loop, one_rank, tmp_path):
    config = moe_config(tmp_path / "run", tp=2, activation_checkpoint="full")
    config.trainer.num_threads = 1

    async def run():
        async with trainer_mesh(config.trainer, config.model) as mesh:
            trainer = client(mesh, model=config.model)
            await trainer.init_model(one_rank["before"])
            return {"replayed": await _replay(trainer)} | await _step(trainer)

    result = loop.run_until_complete(run())
    _same_step(result, one_rank)
    _same_replay(result, one_rank)


def test_a_run_starts_from_exported_experts(one_rank, expert_parallel):
    expected, loaded = one_rank, expert_parallel["loaded"]
    assert loaded["weights"].keys() == expected["weights"].keys()
    assert all(torch.equal(loaded["weights"][name], expected["weights"][name]) for name in expected["weights"])
    assert any(expected["weights"][name].any() for name in expected["weights"] if name.endswith("expert_bias_E"))
    assert torch.allclose(loaded["trained"], expected["trained"], atol=1e-5)
    assert (loaded["scored"] - loaded["trained"]).abs().max() <= 1e-4


def test_experts_on_several_ranks_are_exported_whole(one_rank, expert_parallel):
    again, expected = (load_file(path / "model.safetensors") for path in (expert_parallel["again"], one_rank["after"]))
    assert again.keys() == expected.keys() and all(torch.equal(again[name], expected[name]) for name in expected)
