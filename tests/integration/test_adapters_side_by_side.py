"""Adapters of several versions in one engine: each request is answered as by an engine whose weights have its adapters
merged in, whoever is in the batch beside it. In one process, an engine for each family in turn."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import anthropic
import openai
import pytest
import torch
from safetensors.torch import load_file

from scripts.gpu_checks.engines import random_weights, started, untrained_dir
from tests.integration.conftest import ROOT, small_config
from tests.integration.helpers import random_datums
from tests.unit.families.shapes import SHAPES
from torchtitan_rl.actors.operations import GeneratorOperations
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.config.meshes import GeneratorConfig, LoRAConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.model.lora import merge, whole_adapters
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.schedule import engine_files, read_schedule, schedule_of
from torchtitan_rl.serve.run_gateway import Address, serving
from torchtitan_rl.tools.audit import audit
from torchtitan_rl.tools.certify.lora_checks import adapters_of
from torchtitan_rl.types import WITHOUT_ADAPTERS, OptimParams, Request, SamplingParams

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("forked")]

FAMILIES = ["qwen3", "llama3", "qwen2", "qwen3-moe", "gpt-oss-plain", "qwen3_5"]
SLOTS = 3


def merged(base, adapters, shape, lora):
    """The base's tensors with adapters merged in, by the functions with which trainers merge."""
    unscaled = {
        name: tensor * (lora.rank / lora.alpha) if name.endswith(".lora_b.weight") else tensor
        for name, tensor in adapters.items()
    }
    by_weight = whole_adapters(base | unscaled, shape.n_kv_heads, lora)
    assert by_weight.keys() <= base.keys()
    return {name: merge(name, tensor, by_weight) for name, tensor in base.items()}


def answers(engine, requests):
    return [future.result(120) for future in engine.submit(requests)]


def drawn(engine, seed, scale=0.3):
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.empty(shape).normal_(0, scale, generator=draw).to(dtype)
        for name, (shape, dtype) in engine.adapter_specs.items()
    }


def load(engine, version, slot, tensors, base):
    engine.stage_adapters(version, tensors, base)
    return engine.load_adapters(version, slot).result(120)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_request_is_answered_with_its_own_adapters(tmp_path, family):
    shape, lora = SHAPES[family], adapters_of(SHAPES[family])
    model = ModelConfig(shape=shape, assets="chars")
    directory, base = untrained_dir(tmp_path, model), random_weights(model, "float32")
    config = GeneratorConfig(
        dtype="float32", max_model_len=96, max_num_seqs=32, kv_cache_gib=0.25, max_adapters=SLOTS, adapters=lora
    )
    draw = torch.Generator().manual_seed(0)
    # Of very different lengths: their tokens are not multiplied side by side, those of the decoding after it are.
    prompts = [torch.randint(3, 60, (length,), generator=draw).tolist() for length in (2, 71, 9, 30, 5, 17, 3, 40)]
    versions = [WITHOUT_ADAPTERS, 11, 12, 11, 13, 12, 13, WITHOUT_ADAPTERS]
    with started(config, directory) as engine:
        none = {name: tensor * (".lora_a." in name) for name, tensor in drawn(engine, 9).items()}  # version 0 has B = 0
        adapters = {version: drawn(engine, version) for version in (11, 12, 13)}
        for slot, version in enumerate((11, 12, 13)):
            load(engine, version, slot, adapters[version], ("base", base))
        requests = [Request(prompt, None, adapter=v) for prompt, v in zip(prompts, versions, strict=True)]
        together = answers(engine, requests)
        sampled = answers(
            engine,
            [
                Request(prompt, SamplingParams(max_tokens=20, seed=i, ignore_eos=True), adapter=v)
                for i, (prompt, v) in enumerate(zip(prompts, versions, strict=True))
            ],
        )
        assert [set(c.policy_versions) for c in sampled] == [{v} for v in versions]
        rescored = answers(
            engine, [Request([*r.tokens, *c.tokens], None, adapter=r.adapter) for r, c in zip(requests, sampled)]
        )
        for request, completion, scores in zip(requests, sampled, rescored, strict=True):
            assert torch.allclose(
                torch.tensor(completion.logprobs), torch.tensor(scores[len(request.tokens) - 1 :]), atol=2e-5
            )
        # The reference: the same engine with other bases, into which the adapters are merged, and none in the slot.
        apart = dict(zip((id(r) for r in requests), together, strict=True))
        for version in (11, 12, 13):
            load(engine, 0, 0, none, (f"merged {version}", merged(base, adapters[version], shape, lora)))
            of_version = [request for request in requests if request.adapter == version]
            expected = answers(engine, [Request(request.tokens, None, adapter=0) for request in of_version])
            for request, scores in zip(of_version, expected, strict=True):
                difference = (torch.tensor(apart[id(request)]) - torch.tensor(scores)).abs().max()
                assert difference <= 2e-5, (version, difference)
        load(engine, 0, 0, none, ("base", base))
        of_base = answers(engine, [Request(request.tokens, None, adapter=0) for request in requests])
        for request, alone, beside in zip(requests, of_base, together, strict=True):
            gap = (torch.tensor(alone) - torch.tensor(beside)).abs().max()
            if request.adapter == WITHOUT_ADAPTERS:
                assert gap <= 2e-5
            else:
                assert gap > 1e-2, "the adapters do nothing"


def test_a_slot_is_loaded_while_requests_of_other_slots_go_on(tmp_path):
    shape, lora = SHAPES["qwen3"], LoRAConfig(rank=4, alpha=8.0)
    model = ModelConfig(shape=shape, assets="chars")
    directory, base = untrained_dir(tmp_path, model), random_weights(model, "float32")
    config = GeneratorConfig(
        dtype="float32", max_model_len=96, max_num_seqs=32, kv_cache_gib=0.25, max_adapters=SLOTS, adapters=lora
    )
    request = Request([5, 6, 7], SamplingParams(max_tokens=80, seed=3, ignore_eos=True), adapter=1)
    with started(config, directory) as engine:
        load(engine, 1, 0, drawn(engine, 1), ("base", base))
        (alone,) = answers(engine, [request])
        (flying,) = engine.submit([request])
        for version in range(2, 12):
            load(engine, version, 1 + version % 2, drawn(engine, version), None)
        assert not flying.done(), "it ended before the loads"
        assert flying.result(120).tokens == alone.tokens
        (other,) = answers(engine, [Request([5, 6, 7], request.params, adapter=11)])
        assert other.tokens != alone.tokens, "the prefix cache of other adapters was read"
        refused = drawn(engine, 20)
        refused.pop(next(iter(refused)))
        assert "cannot load its adapters" in str(load(engine, 20, 2, refused, None))
        (again,) = answers(engine, [request])
        assert again.tokens == alone.tokens


DATA = random_datums(7)


async def step(controller):
    await controller.trainer.forward_backward(DATA, importance_sampling)
    await controller.trainer.optim_step(OptimParams(lr=1e-2))


async def scores(controller, version=None):
    rows = await asyncio.gather(
        *(
            controller.generator.score([*d.tokens.tolist(), int(d.target_tokens[-1])], policy_version=version)
            for d in DATA
        )
    )
    return torch.cat([torch.tensor(row) for row in rows])


SAID = [{"role": "user", "content": "sort dbca"}]


async def check_that_the_base_answers(controller, versions):
    """`base` in each dialect, in the company of `policy@N`: with the log-probabilities that it scores alone."""
    async with serving(controller, Address(port=0), quiet=True) as gateway:
        chat = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="-", max_retries=0, timeout=120)
        messages = anthropic.AsyncAnthropic(base_url=gateway.url, api_key="-", max_retries=0, timeout=120)
        models = [model.id for model in (await chat.models.list()).data]
        assert models[:2] == ["policy", "base"] and {f"policy@{version}" for version in versions} <= {*models}

        async def by_chat(model, **more):
            body = {"return_token_ids": True, "return_policy_versions": True, "seed": 5}
            return await chat.chat.completions.create(
                model=model, messages=SAID, max_tokens=16, logprobs=True, extra_body=body, **more
            )

        async def by_responses(model):
            include = ["message.output_text.logprobs"]
            return await chat.responses.create(
                model=model, input=SAID, max_output_tokens=16, include=include, extra_body={"seed": 5}
            )

        async def by_messages(model):
            return await messages.messages.create(
                model=model, messages=SAID, max_tokens=16, extra_body={"temperature": 0}
            )

        names = ["base", "policy", *(f"policy@{version}" for version in versions)]
        async with chat, messages:
            chats = await asyncio.gather(*map(by_chat, names))
            drawn, greedy, item, message = await asyncio.gather(
                by_chat("base"), by_chat("base", temperature=0), by_responses("base"), by_messages("base")
            )
        assert [answer.model for answer in chats] == names
        choice = chats[0].choices[0]
        assert set(choice.policy_versions) == {WITHOUT_ADAPTERS} and choice.token_ids == drawn.choices[0].token_ids
        logprobs = torch.tensor([each.logprob for each in choice.logprobs.content])
        whole = [*chats[0].prompt_token_ids, *choice.token_ids]
        alone = torch.tensor(await controller.generator.score(whole, policy_version=WITHOUT_ADAPTERS))
        assert (logprobs - alone[-len(logprobs) :]).abs().max() <= 2e-5
        of_policy = torch.tensor(await controller.generator.score(whole))
        assert (logprobs - of_policy[-len(logprobs) :]).abs().max() > 1e-2, "the adapters do nothing"
        assert (item.model, item.output_text) == ("base", choice.message.content)
        of_items = torch.tensor([each.logprob for each in item.output[0].content[0].logprobs])
        assert (of_items - logprobs).abs().max() <= 2e-5
        assert (message.model, message.content[0].text) == ("base", greedy.choices[0].message.content)


@pytest.mark.parametrize("layout", ["one rank", "two shards and two engine ranks, by the store"])
def test_a_run_publishes_adapters_and_serves_any_version(loop, tmp_path, layout):
    from torchtitan_rl.train.controller import Controller

    overrides = {}
    if layout != "one rank":
        overrides = dict(
            trainer__parallelism__data_parallel_shard_degree=2,
            generator__tensor_parallel_degree=2,
            weight_sync__transport="store",
        )
    config = small_config(
        tmp_path / "run", trainer__lora=LoRAConfig(rank=4, alpha=8.0), generator__max_adapters=3, **overrides
    )

    async def run():
        async with await Controller.launch(config) as controller:
            rows, base_row = {}, torch.cat((await controller.trainer.forward(DATA)).policy_logprobs)  # B = 0
            for _ in range(3):
                await step(controller)
                version = await controller.publish()
                controller.versions.pin(version, "test")
                rows[version] = torch.cat((await controller.trainer.forward(DATA)).policy_logprobs)
            assert (await scores(controller, WITHOUT_ADAPTERS) - base_row).abs().max() <= 2e-5
            if layout == "one rank":
                await check_that_the_base_answers(controller, list(rows))
            manifest = controller.versions.manifest(version)
            newest = await scores(controller)
            pinned = await asyncio.gather(*(scores(controller, v) for v in rows))
            mesh = controller.generator._replicas[0].mesh
            base = (await mesh.call_each(GeneratorOperations.weights))[0]
            return rows, newest, dict(zip(rows, pinned, strict=True)), manifest, base, await trainer_base(controller)

    async def trainer_base(controller):
        return {n: t for n, t in (await controller.trainer.parameters()).items() if ".lora_" not in n}

    rows, newest, pinned, manifest, base, expected_base = loop.run_until_complete(run())
    assert all(".lora_" in name for name in manifest.entries) and manifest.base.startswith("base-")
    if layout == "one rank":
        assert base.keys() == expected_base.keys()
        assert all(torch.equal(base[name], tensor) for name, tensor in expected_base.items()), "the base moved"
    assert len({float(row.sum()) for row in rows.values()}) == 3
    assert (newest - rows[max(rows)]).abs().max() <= 2e-5
    for version, row in rows.items():
        assert (pinned[version] - row).abs().max() <= 2e-5, version


SMALL = """
import sys
sys.path.append({configs!r})
import quickstart
import torchtitan_rl.config as rl

def config():
    config = quickstart.config()
    config.supervised.num_steps, config.supervised.batch_size = 2, 8
    config.algorithm.tasks_per_step, config.algorithm.group_size = 4, 4
    config.controller.num_steps, config.controller.eval_every, config.controller.checkpoint_every = 8, 3, 2
    config.controller.eval_tasks = config.controller.test_tasks = 8
    config.controller.pass_at_k, config.controller.keep_last = 0, -1
    config.generator.max_num_seqs, config.generator.num_spares, config.generator.max_adapters = 64, 0, 2
    config.trainer.lora, config.trainer.optimizer.lr = rl.LoRAConfig(rank=4, alpha=8.0), 1e-2
    return config
"""


def killed(arguments, marker):
    """Starts the command, and kills it with SIGKILL once the file `marker` is there."""
    command = [sys.executable, "-m", "torchtitan_rl.cli", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 200
        while not marker.exists():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        assert process.poll() is None, "it ended before it was killed"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


def adapter(path):
    return load_file(path / "checkpoints" / "step-8" / "adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize("lag", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_run_that_was_killed_goes_on_and_is_replayed_to_the_last_bit(tmp_path, here, lag):
    file, path, whole = tmp_path / "small.py", tmp_path / "run", tmp_path / "whole"
    file.write_text(SMALL.format(configs=str(ROOT / "configs")))
    train = ["train", str(file), "--algorithm.max-policy-lag", str(lag), "--backend", "local", "--output-dir"]
    killed([*train, str(path)], path / "checkpoints" / "step-2" / "COMPLETE")
    ended = here(*train, str(path), "--resume", "auto")
    assert ended.returncode == 0, ended.stderr
    arguments = ["--verify", "--backend", "local", "--output-dir", str(tmp_path / "replay")]
    replayed = here("replay", str(path), *arguments)
    assert replayed.returncode == 0 and "the same: " in replayed.stdout, (replayed.stdout, replayed.stderr)
    entries = list(read_schedule(engine_files(schedule_of(path, 2))[0]))
    loads = [(entry.version, entry.slot) for entry in entries if entry.version is not None]
    assert len(loads) >= 5 and {slot for _, slot in loads} == {0, 1}
    sampled = {version for entry in entries for version in entry.adapters}
    assert len(sampled) >= 5 and sampled <= {version for version, _ in loads}
    counts, problems = audit(RunDir(path))
    assert not problems and counts["attempts"] == 2 and counts["trained"] == 32
    if lag == 0:
        assert here(*train, str(whole)).returncode == 0
        first, second = adapter(whole), adapter(path)
        assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
