"""A mixture of experts through the whole stack: trained expert-parallel, sampled, exported and loaded again."""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import ROOT
from tests.integration.helpers import flat, random_datums, relative_l2
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.types import OptimParams

DATA = random_datums(7)


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
    return config


async def _train(config: RunConfig, export: Path | None = None) -> dict:
    """One optimizer step from random weights, then both sides' log-probabilities of the same tokens."""
    from torchtitan_rl.run.controller import Controller

    async with await Controller.launch(config) as controller:
        await controller.trainer.forward_backward(DATA, importance_sampling)
        result = {"gradients": await controller.trainer.gradients()}
        result["step"] = await controller.trainer.optim_step(OptimParams(lr=1e-2))
        await controller.publish()
        result["weights"] = await controller.trainer.parameters()
        result |= await _score(controller)
        if export is not None:
            await controller.trainer.save_hf_model(export, eos=1, pad=0)
        return result


async def _score(controller) -> dict:
    output = await controller.trainer.forward(DATA)
    scored = await asyncio.gather(
        *(controller.generator.score([*d.tokens.tolist(), int(d.target_tokens[-1])]) for d in DATA)
    )
    return {"trained": torch.cat(output.policy_logprobs), "scored": torch.cat([torch.tensor(s) for s in scored])}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return tmp_path_factory.mktemp("moe") / "model"


@pytest.fixture(scope="module")
def expert_parallel(loop, exported, tmp_path_factory):
    return loop.run_until_complete(_train(moe_config(tmp_path_factory.mktemp("ep") / "run", dp=2, ep=2), exported))


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


@pytest.mark.parametrize(
    "layout",
    [{"generator_tp": 2}, {"tp": 2, "activation_checkpoint": "full"}],
    ids=["one rank", "tensor-parallel experts, recomputed"],
)
def test_other_layouts_give_the_gradients_of_expert_parallelism(loop, expert_parallel, layout, tmp_path):
    result = loop.run_until_complete(_train(moe_config(tmp_path / "run", **layout)))
    gradients, expected = result["gradients"], expert_parallel["gradients"]
    assert relative_l2(flat(gradients), flat(expected)) <= 1e-5
    experts = [name for name in expected if ".inner_experts." in name or ".router." in name or "ffn_norm" in name]
    assert len(experts) == 2 * 5 and all(expected[name].any() for name in experts)
    for name in experts:
        assert relative_l2(gradients[name].double(), expected[name].double()) <= 1e-5, name
    assert result["step"].grad_norm == pytest.approx(expert_parallel["step"].grad_norm, rel=1e-5)
    assert (result["scored"] - result["trained"]).abs().max() <= 1e-4


def test_a_run_starts_from_exported_experts(loop, expert_parallel, exported, tmp_path):
    from torchtitan_rl.run.controller import Controller

    async def run():
        config = moe_config(tmp_path / "run", dp=2, ep=2)
        config.model = ModelConfig(assets=str(exported), pretrained=True)
        async with await Controller.launch(config) as controller:
            return await controller.trainer.parameters(), await _score(controller)

    weights, scores = loop.run_until_complete(run())
    assert weights.keys() == expert_parallel["weights"].keys()
    assert all(torch.equal(weights[name], expert_parallel["weights"][name]) for name in weights)
    assert torch.allclose(scores["trained"], expert_parallel["trained"], atol=1e-5)
    assert (scores["scored"] - scores["trained"]).abs().max() <= 1e-4
