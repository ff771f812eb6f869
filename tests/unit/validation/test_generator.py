"""What the engine would refuse once it has started is refused before."""

import shutil

import pytest
import torch

from tests.kit.refusal import refusal
from tests.kit.run_config import run_config
from tests.unit.families.shapes import LATENT, SIZES
from torchtitan_rl.config.meshes import GeneratorConfig, LoRAConfig
from torchtitan_rl.families import DeepseekV3Shape, Qwen2Shape
from torchtitan_rl.model.decoding import holds_adapters
from torchtitan_rl.validation.run import check_local, validate


def test_a_head_that_attention_on_a_cpu_cannot_compute(monkeypatch):
    config = run_config()
    config.model.shape.head_dim = 16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal(validate, config) == (
        "model.shape.head_dim=16: the generator's attention on a CPU has no kernel for it; use one of 32, 64, 80, 96, "
        "112, 128, 160, 192, 224, 256, 512"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    validate(config)


def test_an_iteration_has_a_token_for_every_sequence():
    config = run_config()
    config.generator.max_num_batched_tokens, config.generator.max_num_seqs = 40, 41
    assert refusal(validate, config) == (
        "generator.max_num_batched_tokens=40: is less than generator.max_num_seqs=41, and each of these sequences "
        "decodes a token in one iteration; raise it, or lower max_num_seqs"
    )
    config.generator.max_num_batched_tokens = 1  # prompts of max_model_len=32 fit in any case
    config.generator.max_num_seqs = 32
    validate(config)


@pytest.mark.parametrize(("has_gpu", "blocks_of_tokens"), [(False, 2 * 128), (True, 3 * 16)])
def test_the_cache_holds_the_blocks_of_a_sequence_and_an_empty_one(monkeypatch, has_gpu, blocks_of_tokens):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    config = run_config()  # max_model_len=32
    shape = config.model.shape
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        per_token = 2 * shape.n_layers * shape.n_kv_heads * shape.head_dim * itemsize
        config.generator.dtype = dtype
        config.generator.kv_cache_gib = blocks_of_tokens * per_token / 2**30
        validate(config)
        config.generator.kv_cache_gib = (blocks_of_tokens - 0.5) * per_token / 2**30
        message = refusal(validate, config)
        assert f": holds {blocks_of_tokens - 1} tokens of {per_token} bytes a rank, and one sequence of" in message
        assert f"generator.max_model_len=32 needs {blocks_of_tokens}, in blocks of" in message
        config.generator.kv_cache_gib = float(message.partition("use at least ")[2].partition(",")[0])
        validate(config)
    for nothing in (0.0, -1.0, float("nan")):
        config.generator.kv_cache_gib = nothing
        assert "use at least" in refusal(validate, config)


def test_vllms_own_model_is_refused_where_it_computes_another(monkeypatch):
    config = run_config()
    config.generator.model_impl = "vllm"
    config.model.shape = Qwen2Shape(**SIZES | {"vocab_size": 64})
    assert refusal(validate, config) == (
        "generator.model_impl='vllm': vLLM's own Qwen2 makes every head of size dim / n_heads = 16, not of "
        "model.shape.head_dim=32; use 'torchtitan'"
    )
    config.model.shape = Qwen2Shape(**SIZES | {"vocab_size": 64, "dim": 128})
    validate(config)
    config.model.shape = DeepseekV3Shape(**LATENT | {"vocab_size": 64})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal(validate, config) == (
        "generator.model_impl='vllm': on a CPU vLLM's own DeepSeek-V3 rotates most query heads by wrong positions or "
        "not at all, because its kernel takes heads for tokens; use 'torchtitan'"
    )
    config.generator.model_impl = "torchtitan"
    validate(config)


def test_an_engine_that_cannot_be_compiled(monkeypatch):
    config = run_config()
    config.generator.compile = True
    validate(config)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(shutil, "which", lambda name: None)
        patch.setenv("CXX", "c++-13")
        assert refusal(validate, config) == (
            "generator.compile=True: torch compiles for a CPU with a C++ compiler, and PATH has none of c++-13, g++, "
            "clang++; install one, or use False"
        )
        patch.setattr(torch.cuda, "is_available", lambda: True)
        validate(config)
    config.generator.model_impl = "vllm"
    assert refusal(validate, config) == (
        "generator.compile=True: is for torchtitan's model, and vLLM compiles its own with "
        "generator.enforce_eager=False; use False"
    )
    config.generator.model_impl = "torchtitan"
    config.generator.tensor_parallel_degree = 2
    assert refusal(validate, config) == (
        "generator.compile=True: is not tested with generator.tensor_parallel_degree=2, whose ranks add up within the "
        "compiled code; use 1, or compile=False"
    )


def test_a_range_of_replicas():
    config = run_config()
    config.generator.num_replicas, config.generator.max_replicas = 2, 2
    validate(config)
    config.generator.max_replicas = 1
    assert refusal(validate, config).startswith(
        "generator.max_replicas=1: is less than generator.num_replicas=2, with which the run begins"
    )
    config.generator.max_replicas, config.roles.colocation = 4, "all"
    assert "the number of replicas is fixed; use 'none'" in refusal(validate, config)
    config.roles.colocation, config.generator.num_replicas = "none", 1
    assert "backend='local' has one engine" in refusal(check_local, config)


def test_slots_for_adapters():
    config = run_config()
    config.generator.max_adapters = 4
    assert refusal(validate, config) == (
        "generator.max_adapters=4: nothing trains adapters; set trainer.lora, or leave max_adapters out"
    )
    config.trainer.lora = LoRAConfig()
    validate(config)
    config.generator.max_adapters = 1
    assert "new adapters are loaded beside those that requests go on with; use 2 or more" in refusal(validate, config)
    config.generator.max_adapters = 2
    for name, value, reason in (
        ("model_impl", "vllm", "vLLM's own model has no slots for them"),
        ("enforce_eager", False, "not in a CUDA graph; use True"),
        ("model_runner", "v2", "use 'v1'"),
        ("on_update", "wait", "a request keeps the adapters that it began with; use 'keep'"),
    ):
        before = getattr(config.generator, name)
        setattr(config.generator, name, value)
        message = refusal(validate, config)
        assert message.startswith(f"generator.{name}={value!r}: with generator.max_adapters=2, ") and reason in message
        setattr(config.generator, name, before)
    validate(config)


def test_slots_for_adapters_have_a_runner_that_does_not_schedule_ahead(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = run_config()
    config.trainer.lora, config.generator.max_adapters, config.generator.async_scheduling = LoRAConfig(), 2, True
    assert refusal(validate, config) == (
        "generator.async_scheduling=True: with generator.max_adapters=2, vLLM's V1 model runner serves, which draws "
        "tokens by numbers that are a step old then; use False, or max_adapters=0"
    )


def test_slots_are_for_the_adapters_that_train():
    config = run_config()
    config.trainer.lora, config.generator.adapters = LoRAConfig(rank=16), LoRAConfig(rank=16, alpha=1.0)
    assert refusal(validate, config) == (
        "generator.adapters: with generator.max_adapters=0 an engine has no room for adapters; set max_adapters, or "
        "leave adapters out"
    )
    config.generator.max_adapters = 4
    validate(config)
    config.generator.adapters.rank = 8
    assert refusal(validate, config) == (
        "generator.adapters.rank=8: is not that of the adapters that train, trainer.lora.rank=16; leave "
        "generator.adapters out, which takes trainer.lora"
    )
    config.generator.adapters = LoRAConfig(rank=16, target_modules=["q_proj"])
    assert refusal(validate, config).startswith("generator.adapters.target_modules=['q_proj']: is not that of the")


def test_a_servers_generator_holds_adapters_where_it_can(monkeypatch):
    for device, fields, holds in (
        ("cpu", {}, True),
        ("cuda", {}, False),
        ("cpu", {"model_impl": "vllm"}, False),
        ("cpu", {"compile": True}, False),
        ("cpu", {"on_update": "wait"}, False),
    ):
        monkeypatch.setattr("torchtitan_rl.platform.device_type", lambda device=device: device)
        assert holds_adapters(GeneratorConfig(**fields)) == holds, (device, fields)
