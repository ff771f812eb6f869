"""LoRA on the real stack: adapters train and are checkpointed, generators get merged weights, PEFT reads the
adapters."""

import asyncio
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.conftest import small_config
from tests.integration.helpers import random_datums
from torchtitan_rl.actors.operations import GeneratorOperations
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.types import OptimParams
from torchtitan_rl.weights import checkpoint

pytestmark = pytest.mark.whole

DATA = random_datums(7)


def lora_config(output_dir, **overrides):
    return small_config(output_dir, trainer__lora=LoRAConfig(rank=4, alpha=8.0), **overrides)


async def step(controller):
    await controller.trainer.forward_backward(DATA, importance_sampling)
    gradients = await controller.trainer.gradients()
    await controller.trainer.optim_step(OptimParams(lr=1e-2))
    return gradients


async def logprobs(controller):
    """The trainer's, and after a publication the generator's, of the same tokens."""
    await controller.publish()
    output = await controller.trainer.forward(DATA)
    scored = await asyncio.gather(
        *(controller.generator.score([*d.tokens.tolist(), int(d.target_tokens[-1])]) for d in DATA)
    )
    return torch.cat(output.policy_logprobs), torch.cat([torch.tensor(s) for s in scored])


def split(state):
    adapters = {name: tensor for name, tensor in state.items() if ".lora_" in name}
    return {name: tensor for name, tensor in state.items() if name not in adapters}, adapters


@pytest.fixture(scope="module")
def trained(loop, tmp_path_factory):
    """A stack in this process after two steps, and what it was and wrote: before, after, base/, checkpoint."""
    from torchtitan_rl.train.controller import Controller

    directory = tmp_path_factory.mktemp("lora")

    async def start():
        controller = await Controller.launch(lora_config(directory / "run"), backend="local")
        await controller.trainer.save_hf_model(directory / "base", eos=1, pad=0)
        before = await controller.trainer.parameters()
        gradients = [await step(controller) for _ in range(2)]
        after = await controller.trainer.parameters()
        return SimpleNamespace(
            controller=controller,
            before=before,
            after=after,
            gradients=gradients[1],
            directory=directory,
            logprobs=await logprobs(controller),
            checkpoint=await controller.save_checkpoint(),
        )

    trained = loop.run_until_complete(start())
    yield trained
    loop.run_until_complete(trained.controller.close())


def test_adapters_alone_train(trained):
    (base, adapters), (base_after, adapters_after) = split(trained.before), split(trained.after)
    assert len(adapters) == 4 * 5 * 2 and base.keys() == base_after.keys()  # 4 blocks of 5 layers, A and B
    assert all(torch.equal(base[name], base_after[name]) for name in base)
    assert not any(torch.equal(adapters[name], adapters_after[name]) for name in adapters)
    for name, gradient in trained.gradients.items():
        assert (gradient is not None and gradient.norm() > 0) == (".lora_" in name), name


def test_the_base_is_what_the_seed_gives_without_adapters(trained):
    from torchtitan_rl.model.spec import build_spec

    torch.manual_seed(trained.controller.config.seed)
    model = build_spec(trained.controller.config.model).model.build()
    model.init_weights()
    base, adapters = split(trained.before)
    assert base.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, base[name]) for name, tensor in model.state_dict().items())
    assert all(bool(tensor.any()) == (".lora_a." in name) for name, tensor in adapters.items())


def test_generators_hold_the_merged_model(loop, trained):
    async def held():
        mesh = trained.controller.generator._replicas[0].mesh
        return (await mesh.call_each(GeneratorOperations.weights))[0]

    weights = loop.run_until_complete(held())
    base, adapters = split(trained.after)
    assert {n: (t.shape, t.dtype) for n, t in weights.items()} == {n: (t.shape, t.dtype) for n, t in base.items()}
    name = "layers.2.feed_forward.w2"
    expected = base[f"{name}.weight"] + 2.0 * adapters[f"{name}.lora_b.weight"] @ adapters[f"{name}.lora_a.weight"]
    assert torch.allclose(weights[f"{name}.weight"], expected, atol=1e-6)
    assert torch.equal(weights["layers.2.attention_norm.weight"], base["layers.2.attention_norm.weight"])
    trainer, generator = trained.logprobs
    assert (trainer - generator).abs().max() <= 1e-4


def test_a_checkpoint_holds_adapters_and_a_fingerprint_only(trained):
    from torch.distributed.checkpoint import FileSystemReader

    names = FileSystemReader(str(checkpoint.model_dir(trained.checkpoint))).read_metadata().state_dict_metadata
    assert {n for n in names if n.startswith("model.")} == {f"model.{n}" for n in split(trained.after)[1]}
    assert all(".lora_" in name for name in names)
    record = json.loads((trained.checkpoint / "lora.json").read_text())
    assert (record["rank"], record["alpha"]) == (4, 8.0) and len(record["base_xxh3"]) == 16


def test_a_checkpoint_of_another_base_is_refused(loop, trained, tmp_path):
    copy = shutil.copytree(trained.checkpoint, tmp_path / "copy")
    record = json.loads((copy / "lora.json").read_text())
    (copy / "lora.json").write_text(json.dumps(record | {"base_xxh3": "0" * 16}))
    with pytest.raises(RuntimeError, match="ValueError: checkpoint=.* belong to other base weights"):
        loop.run_until_complete(trained.controller.trainer.load_checkpoint(copy))


def test_peft_reads_the_adapters(trained):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def load(directory):
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()

    merged = load(checkpoint.hf_dir(trained.checkpoint))
    adapted = PeftModel.from_pretrained(load(trained.directory / "base"), checkpoint.adapter_dir(trained.checkpoint))
    base = load(trained.directory / "base")
    file = load_file(checkpoint.adapter_dir(trained.checkpoint) / "adapter_model.safetensors")
    held = {name.replace(".default.", "."): p for name, p in adapted.named_parameters() if ".lora_" in name}
    assert held.keys() == file.keys() and all(torch.equal(held[name], file[name]) for name in file)
    for datum in DATA:
        tokens = datum.tokens[None]
        with torch.no_grad():
            logits = adapted(tokens).logits
            assert (logits - merged(tokens).logits).abs().max() <= 1e-5
            assert (logits - base(tokens).logits).abs().max() > 1e-2
    rows = []
    with torch.no_grad():
        for datum in DATA:
            table = adapted(datum.tokens[None]).logits[0].log_softmax(-1)
            rows.append(table.gather(1, datum.target_tokens[:, None])[:, 0])
    assert (torch.cat(rows) - trained.logprobs[0]).abs().max() <= 1e-4


# Slow: above is LoRA on one rank; test_numerics.py goes on in another layout.
@pytest.mark.slow
@pytest.mark.parametrize("dp, tp", [(2, 1), (1, 2)])
def test_another_layout_continues_from_the_checkpoint(loop, trained, tmp_path, dp, tp):
    from torchtitan_rl.train.controller import Controller

    config = lora_config(
        tmp_path / "run",
        trainer__parallelism__data_parallel_shard_degree=dp,
        trainer__parallelism__tensor_parallel_degree=tp,
    )
    if dp == 2:  # the base from a directory instead of from the seed: the same weights
        config.model = ModelConfig(assets=str(trained.directory / "base"), pretrained=True)
    else:
        config.trainer.activation_checkpoint = "full"  # its wrappers change the names of modules

    async def run():
        async with await Controller.launch(config) as other:
            fresh = await other.trainer.parameters()
            await other.trainer.load_checkpoint(trained.checkpoint)
            loaded, scores = await other.trainer.parameters(), await logprobs(other)
            for controller in (trained.controller, other):
                await controller.trainer.load_checkpoint(trained.checkpoint)
                await step(controller)
            return fresh, loaded, scores, [await c.trainer.parameters() for c in (trained.controller, other)]

    fresh, loaded, (trainer, generator), (expected, stepped) = loop.run_until_complete(run())
    assert all(torch.equal(fresh[name], trained.before[name]) for name in trained.before)
    assert all(torch.equal(loaded[name], trained.after[name]) for name in trained.after)
    assert (trainer - trained.logprobs[0]).abs().max() <= 1e-4
    assert (trainer - generator).abs().max() <= 1e-4
    for name, tensor in split(expected)[1].items():
        assert not torch.equal(tensor, loaded[name])
        assert torch.allclose(stepped[name], tensor, atol=1e-4), name


def test_weights_that_were_saved_merged_are_not_merged_twice(loop, trained, tmp_path):
    """Last in this file: it leaves the stack with other weights."""
    controller = trained.controller

    async def reload():
        before = await controller.trainer.forward(DATA)
        await controller.trainer.save_hf_model(tmp_path / "merged", eos=1, pad=0)
        await controller.trainer.init_model(tmp_path / "merged")
        return before, await controller.trainer.forward(DATA)

    before, after = (torch.cat(output.policy_logprobs) for output in loop.run_until_complete(reload()))
    assert (before - after).abs().max() <= 1e-5
