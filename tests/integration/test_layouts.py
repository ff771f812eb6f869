"""Parallel layouts of trainer and generator together give the numbers of one rank, and of each other."""

import asyncio
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.conftest import small_config
from tests.integration.helpers import random_datums
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.types import Completion, Datum, OptimParams, SamplingParams

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("forked")]

# 19 tokens; completions of different lengths leave 4, 3, 2 and at last 1 sequence to decode.
PROMPTS = [[20, 31, 27], [22, 40, 21, 14], [30, 35, 36, 39, 14], [25, 26, 27, 28, 29, 30, 14]]


def _as_datum(prompt: list[int], completion: Completion) -> Datum:
    tokens = torch.tensor(prompt + completion.tokens)
    return Datum(tokens=tokens[:-1], target_tokens=tokens[1:], loss_inputs={})


def _mismatch(generated: torch.Tensor, trained: torch.Tensor) -> tuple[float, float]:
    """(largest absolute difference, mean k3 KL) of log-probabilities of the same tokens; see `policy_metrics`."""
    difference = trained.double() - generated.double()
    return float(difference.abs().max()), float((torch.expm1(difference) - difference).mean())


async def _two_steps(config, backend="actors", export=None, transport=None):
    """Parameters and the trainer's forward at the start, exported to `export`. Then log-probabilities after two
    optimizer steps, published by `transport`: the trainer's on recorded data, the generator's on given tokens, and of
    sampled completions and the three likeliest tokens of the data both (generator's, trainer's)."""
    from torchtitan_rl.train.controller import Controller

    async with await Controller.launch(config, backend=backend) as controller:
        data = random_datums(7)
        start = await controller.trainer.parameters(), await controller.trainer.forward(data)
        if export is not None:
            await controller.trainer.save_hf_model(export, eos=1, pad=0)
        for _ in range(2):
            await controller.trainer.forward_backward(data, importance_sampling)
            await controller.trainer.optim_step(OptimParams(lr=1e-3))
        if transport is not None:
            controller.versions._transport = transport
        await controller.publish()
        output = await controller.trainer.forward(data)
        scored = await asyncio.gather(
            *(controller.generator.score([*d.tokens.tolist(), int(d.target_tokens[-1])]) for d in data)
        )
        sampled = await asyncio.gather(
            *(
                controller.generator.sample(prompt, SamplingParams(max_tokens=5 + i, seed=i))
                for i, prompt in enumerate(PROMPTS)
            )
        )
        again = await controller.trainer.forward([_as_datum(p, c) for p, c in zip(PROMPTS, sampled)])
        best = (await controller.trainer.forward(data, top_k=3)).top_logprobs
        tops = await asyncio.gather(
            *(controller.generator.score_top([*d.tokens.tolist(), int(d.target_tokens[-1])], 3) for d in data)
        )
        both = (
            torch.cat([torch.tensor(c.logprobs) for c in sampled] + [logprobs_TK.flatten() for _, logprobs_TK in tops]),
            torch.cat(
                [row[-len(c.tokens) :] for row, c in zip(again.policy_logprobs, sampled)]
                + [logprobs_TK.flatten() for logprobs_TK in best]
            ),
        )
        scored = torch.cat([torch.tensor(s) for s in scored])
        return start, torch.cat(output.policy_logprobs), scored, sampled, both


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return tmp_path_factory.mktemp("exported") / "model"


@pytest.fixture(scope="module")
def reference(loop, exported, tmp_path_factory):
    """One rank, in this process."""
    config = small_config(tmp_path_factory.mktemp("one") / "run")
    return loop.run_until_complete(_two_steps(config, "local", exported))


# Slow: test_hosts.py has dp2 with generators, test_moe.py starts dp2 from a directory.
FROM_DIRECTORY = pytest.param("dp2, from a directory", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[FROM_DIRECTORY, "tp2, from the seed"])
def laid_out(loop, reference, exported, request, tmp_path_factory):
    config = small_config(tmp_path_factory.mktemp("two") / "run", generator__tensor_parallel_degree=2)
    if request.param.startswith("dp2"):
        config.trainer.parallelism.data_parallel_shard_degree = 2
        config.model = ModelConfig(assets=str(exported), pretrained=True)  # what another run has exported
    else:
        config.trainer.parallelism.tensor_parallel_degree = 2
    return loop.run_until_complete(_two_steps(config, transport="store"))


def test_a_run_starts_from_the_weights_of_a_directory_or_of_the_seed(reference, laid_out):
    (expected, expected_output), (weights, output) = reference[0], laid_out[0]
    assert expected.keys() == weights.keys()
    assert all(torch.equal(expected[name], weights[name]) for name in expected)
    assert torch.allclose(torch.cat(output.policy_logprobs), torch.cat(expected_output.policy_logprobs), atol=1e-5)


def test_two_steps_give_the_log_probabilities_of_one_rank(reference, laid_out):
    _, trained, scored, sampled, both = laid_out
    _, expected_trained, expected_scored, expected_sampled, _ = reference
    assert (trained - expected_trained).abs().max() <= 1e-4
    assert (scored - expected_scored).abs().max() <= 1e-4
    for completion, expected in zip(sampled, expected_sampled):
        assert completion.tokens == expected.tokens
        assert torch.allclose(torch.tensor(completion.logprobs), torch.tensor(expected.logprobs), atol=1e-4)
    _agree_in_float32(trained, scored, both)


def _agree_in_float32(trained, scored, both):
    for largest, kl in (_mismatch(scored, trained), _mismatch(*both)):
        assert largest <= 1e-4 and kl <= 1e-6, (largest, kl)


def test_generator_and_trainer_agree_in_float32(reference):
    _, trained, scored, sampled, both = reference
    assert sum(map(len, PROMPTS)) % 2 == 1 and len({len(c.tokens) for c in sampled}) > 1  # odd numbers of tokens
    _agree_in_float32(trained, scored, both)


def test_a_bfloat16_generator_stays_near_the_trainer(loop, tmp_path):
    _, trained, scored, _, both = loop.run_until_complete(
        _two_steps(small_config(tmp_path / "run", generator__dtype="bfloat16"), "local")
    )
    for largest, kl in (_mismatch(scored, trained), _mismatch(*both)):
        assert 1e-4 < largest < 0.1 and kl <= 1e-3, (largest, kl)


@pytest.mark.parametrize("model_impl", ["torchtitan", "vllm"])
def test_a_head_in_float32_brings_a_bfloat16_generator_nearer(loop, exported, reference, tmp_path, model_impl):
    """With a head eight times as large logits have steps of 1/8, which is a fifth of what keeps the two apart, or more.
    Where both round all hidden states alike, as on an AMD EPYC, nothing but float32's rounding keeps them apart."""
    model = tmp_path / "model"
    shutil.copytree(exported, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= 8  # which is the head too
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    kls = []
    for float32_head in (False, True):
        config = small_config(tmp_path / "run", generator__dtype="bfloat16", generator__model_impl=model_impl)
        config.trainer.training.mixed_precision_param = "bfloat16"
        config.model = ModelConfig(assets=str(model), pretrained=True, float32_head=float32_head)
        _, trained, scored, _, both = loop.run_until_complete(_two_steps(config, "local"))
        kls.append((_mismatch(scored, trained)[1], _mismatch(*both)[1]))
    assert all(0 < narrow < max(0.8 * wide, 1e-7) for wide, narrow in zip(*kls)), kls


@pytest.mark.slow  # g++ takes a minute
def test_a_compiled_generator_says_what_an_eager_one_says_before_and_after_a_load(
    loop, reference, tmp_path, monkeypatch
):
    """The compiled code reads the weights of the second load, and is vLLM's, in the cache of this test."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # as an eager engine leaves it
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    config = small_config(tmp_path / "run", generator__compile=True, generator__max_num_batched_tokens=1024)
    _, trained, scored, sampled, both = loop.run_until_complete(_two_steps(config))
    assert list((tmp_path / "cache").rglob("torch_aot_compile/*/rank_0_0/model"))
    _, _, expected_scored, expected_sampled, _ = reference
    assert (scored - expected_scored).abs().max() <= 1e-5
    for completion, expected in zip(sampled, expected_sampled):
        assert completion.tokens == expected.tokens
        assert torch.allclose(torch.tensor(completion.logprobs), torch.tensor(expected.logprobs), atol=1e-5)
    for largest, kl in (_mismatch(scored, trained), _mismatch(*both)):
        assert largest <= 2e-5 and kl <= 1e-9, (largest, kl)
