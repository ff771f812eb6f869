"""gpt-oss and DeepSeek-V3 through the whole stack: their own parts in trainer layouts, engines and exports."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.conftest import small_config
from tests.integration.helpers import random_datums, relative_l2
from tests.integration.layouts import client, trainer_mesh
from tests.kit.view import VIEW
from tests.unit.families.test_families import perturbed, reference_logprobs
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.config.model import DeepseekV3Shape, ExpertsShape, GptOssShape, ModelConfig
from torchtitan_rl.families.rope import YarnScaling
from torchtitan_rl.model.files import assets_dir, write_model_dir
from torchtitan_rl.model.spec import build_spec, training_spec
from torchtitan_rl.types import OptimParams, SamplingParams
from torchtitan_rl.weights.hf import write_hf_dir

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("forked")]

SIZES = dict(vocab_size=64, dim=64, n_layers=3, n_heads=4, head_dim=32, hidden_dim=48, max_seq_len=64)
SIZES |= dict(experts=ExpertsShape(num_experts=4, top_k=2))
SHAPES = {
    "gpt-oss": GptOssShape(
        **SIZES,
        n_kv_heads=2,
        sliding_window=5,
        swiglu_limit=0.5,
        rope_scaling=YarnScaling(factor=4.0, original_max_seq_len=8, truncate=False),
    ),
    "deepseek-v3": DeepseekV3Shape(
        **SIZES, n_kv_heads=4, rotated_dim=8, value_dim=24, kv_lora_rank=20, dense_hidden_dim=80, route_scale=2.5
    ),
}
DATA = random_datums(7, max_len=40)
PROMPTS = [[20, 31, 27], [22, 40, 21, 14, 3, 9, 11], [25] * 12]


@pytest.fixture(scope="module", params=SHAPES)
def shape(request):
    return SHAPES[request.param]


@pytest.fixture(scope="module")
def directory(shape, tmp_path_factory):
    """A model whose every parameter matters: no bias and no sink is 0."""
    path, config = tmp_path_factory.mktemp("start") / "model", ModelConfig(assets="chars", shape=shape)
    spec = training_spec(build_spec(config), VIEW, attention="sdpa", chunk_bytes=2**20)
    model = spec.model.build()
    torch.manual_seed(0)
    model.init_weights()
    write_model_dir(path, shape, assets_dir(config), eos=1, pad=0)
    write_hf_dir(perturbed(model).state_dict(), spec.state_dict_adapter(spec.model, None), path)
    return path


def config_of(directory, output_dir, *, dp=1, generator_tp=1):
    config = small_config(output_dir, generator__tensor_parallel_degree=generator_tp)
    config.model = ModelConfig(assets=str(directory), pretrained=True)
    config.trainer.parallelism.data_parallel_shard_degree = dp
    config.trainer.activation_checkpoint = "none" if dp == 1 else "selective"
    return config


def tokens_of(datum):
    return [*datum.tokens.tolist(), int(datum.target_tokens[-1])]


def transformers_scores(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.cat([reference_logprobs(model, torch.tensor([tokens_of(datum)]))[0] for datum in DATA])


async def _step(trainer):
    await trainer.forward_backward(DATA, importance_sampling)
    gradients = await trainer.gradients()
    return {"gradients": gradients, "step": await trainer.optim_step(OptimParams(lr=1e-2))}


async def _score(controller):
    output = await controller.trainer.forward(DATA)
    scored = await asyncio.gather(*(controller.generator.score(tokens_of(datum)) for datum in DATA))
    sampled = await asyncio.gather(
        *(controller.generator.sample(prompt, SamplingParams(max_tokens=12, seed=len(prompt))) for prompt in PROMPTS)
    )
    return {
        "trained": torch.cat(output.policy_logprobs),
        "scored": torch.cat([torch.tensor(s) for s in scored]),
        "sampled": sampled,
    }


async def _run(config, backend, export):
    from torchtitan_rl.train.controller import Controller

    async with await Controller.launch(config, backend=backend) as controller:
        await controller.publish()
        before = await _score(controller)
        step = await _step(controller.trainer)
        await controller.publish()
        await controller.trainer.save_hf_model(export, eos=1, pad=0)
        return {"before": before, "after": await _score(controller), "export": export} | step


@pytest.fixture(scope="module")
def one_rank(loop, directory, tmp_path_factory):
    path = tmp_path_factory.mktemp("one")
    return loop.run_until_complete(_run(config_of(directory, path / "run"), "local", path / "export"))


def test_trainer_and_engine_give_the_log_probabilities_of_transformers(directory, one_rank):
    for when, where in (("before", directory), ("after", one_rank["export"])):
        expected = transformers_scores(where)
        assert (one_rank[when]["trained"] - expected).abs().max() <= 2e-5
        assert (one_rank[when]["scored"] - expected).abs().max() <= 2e-5


def test_sampled_tokens_have_the_log_probabilities_of_transformers(one_rank):
    """Tokens after the first come one at a time from a cache, beyond the window."""
    model = AutoModelForCausalLM.from_pretrained(one_rank["export"], attn_implementation="eager", dtype=torch.float32)
    for prompt, completion in zip(PROMPTS, one_rank["after"]["sampled"], strict=True):
        with torch.no_grad():
            expected = reference_logprobs(model.eval(), torch.tensor([prompt + completion.tokens]))[0]
        expected = expected[-len(completion.tokens) :]
        assert len(expected) > 1
        assert (torch.tensor(completion.logprobs) - expected).abs().max() <= 2e-5


def _same_gradients(gradients, expected):
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.any(), name
        assert relative_l2(gradients[name].double(), gradient.double()) <= 1e-5, name


def test_two_shards_and_two_engine_ranks_give_the_numbers_of_one(loop, directory, one_rank, tmp_path):
    config = config_of(directory, tmp_path / "run", dp=2, generator_tp=2)
    result = loop.run_until_complete(_run(config, "actors", tmp_path / "export"))
    for when in ("before", "after"):
        assert (result[when]["trained"] - one_rank[when]["trained"]).abs().max() <= 1e-5
        assert (result[when]["scored"] - one_rank[when]["trained"]).abs().max() <= 2e-5
        for completion, expected in zip(result[when]["sampled"], one_rank[when]["sampled"], strict=True):
            assert completion.tokens == expected.tokens
    _same_gradients(result["gradients"], one_rank["gradients"])


def test_tensor_parallelism_gives_the_gradients_of_one_rank(loop, shape, directory, one_rank, tmp_path):
    config = config_of(directory, tmp_path / "run")
    config.trainer.activation_checkpoint = "full"
    config.trainer.parallelism.tensor_parallel_degree, config.trainer.num_threads = 2, 1

    async def run():
        model = ModelConfig(assets=str(directory), shape=shape)
        async with trainer_mesh(config.trainer, model) as mesh:
            trainer = client(mesh, model=model)
            await trainer.init_model(directory)
            return await _step(trainer)

    result = loop.run_until_complete(run())
    _same_gradients(result["gradients"], one_rank["gradients"])
    assert result["step"].grad_norm == pytest.approx(one_rank["step"].grad_norm, rel=1e-5)
