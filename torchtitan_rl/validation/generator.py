"""Checks of a run's `generator` section against its model: settings that vLLM would refuse only after its start or at
its first sample."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from torchtitan_rl import platform
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.model.shape import kv_bytes_per_token, state_bytes
from torchtitan_rl.validation.fields import check_fields
from torchtitan_rl.validation.trainer import check_experts_kernel

__all__ = [
    "cache_bytes",
    "check_adapters",
    "check_alone",
    "check_engine",
    "check_generator_of_experts",
    "check_own_model",
    "check_replicas",
]


def check_own_model(generator: GeneratorConfig, shape: DecoderShape) -> None:
    """Raises ValueError for vLLM's own model of a family where it is another model, and for experts."""
    if generator.model_impl != "vllm":
        return
    if fault := shape.own_model_fault(platform.device_type()):
        raise ValueError(f"generator.model_impl='vllm': {fault}; use 'torchtitan'")
    if shape.experts is not None:
        raise ValueError("generator.model_impl='vllm': is for dense models only; use 'torchtitan'")


def check_replicas(config: RunConfig) -> None:
    """Raises ValueError for a range of replicas that is none, and where their number cannot change."""
    generator, colocation = config.generator, config.roles.colocation
    if (most := generator.max_replicas) is None:
        return
    if most < generator.num_replicas:
        raise ValueError(
            f"generator.max_replicas={most}: is less than generator.num_replicas={generator.num_replicas}, with which "
            "the run begins; raise it, or leave it out"
        )
    if colocation != "none":
        raise ValueError(
            f"generator.max_replicas={most}: with roles.colocation={colocation!r} the number of replicas is fixed; use "
            "'none', or leave max_replicas out"
        )


def check_adapters(config: RunConfig) -> None:
    """Raises ValueError for slots for adapters that nothing fills, that the engine cannot have, or that are of other
    adapters than those that train."""
    generator = config.generator
    if not (slots := generator.max_adapters):
        if generator.adapters is not None:
            raise ValueError(
                "generator.adapters: with generator.max_adapters=0 an engine has no room for adapters; set "
                "max_adapters, or leave adapters out"
            )
        return
    if config.trainer.lora is None:
        raise ValueError(
            f"generator.max_adapters={slots}: nothing trains adapters; set trainer.lora, or leave max_adapters out"
        )
    if slots == 1:
        raise ValueError(
            "generator.max_adapters=1: new adapters are loaded beside those that requests go on with; use 2 or more, "
            "or 0 to merge adapters into the weights"
        )
    by_host = "which adapters a step needs is decided on the host"
    for name, is_refused, reason in (
        ("model_impl", generator.model_impl == "vllm", "vLLM's own model has no slots for them; use 'torchtitan'"),
        ("compile", generator.compile, f"{by_host}, not in compiled code; use False"),
        ("enforce_eager", generator.enforce_eager is False, f"{by_host}, not in a CUDA graph; use True"),
        ("model_runner", generator.model_runner == "v2", "vLLM's V1 model runner tells requests apart; use 'v1'"),
        (
            "async_scheduling",
            generator.async_scheduling,
            "vLLM's V1 model runner serves, which draws tokens by numbers that are a step old then; use False",
        ),
        ("on_update", generator.on_update != "keep", "a request keeps the adapters that it began with; use 'keep'"),
    ):
        if is_refused:
            raise ValueError(
                f"generator.{name}={getattr(generator, name)!r}: with generator.max_adapters={slots}, {reason}, or "
                "max_adapters=0"
            )
    room, trained = generator.adapters, config.trainer.lora
    assert room is not None  # `settled` takes what nobody has said from trainer.lora
    for name, ours, theirs in (
        ("rank", room.rank, trained.rank),
        ("target_modules", sorted(set(room.target_modules)), sorted(set(trained.target_modules))),
    ):
        if ours != theirs:
            raise ValueError(
                f"generator.adapters.{name}={ours!r}: is not that of the adapters that train, trainer.lora.{name}="
                f"{theirs!r}; leave generator.adapters out, which takes trainer.lora"
            )


def check_engine(generator: GeneratorConfig, shape: DecoderShape) -> None:
    """Raises ValueError for a head, a batch or a cache that the generator's engine cannot work with."""
    if (dims := platform.head_dims()) and shape.head_dim not in dims:
        raise ValueError(
            f"model.shape.head_dim={shape.head_dim}: the generator's attention on a CPU has no kernel for it; use one "
            f"of {', '.join(map(str, dims))}"
        )
    tokens = max(generator.max_num_batched_tokens, generator.max_model_len)
    if tokens < generator.max_num_seqs:
        raise ValueError(
            f"generator.max_num_batched_tokens={generator.max_num_batched_tokens}: is less than generator.max_num_seqs="
            f"{generator.max_num_seqs}, and each of these sequences decodes a token in one iteration; raise it, or "
            "lower max_num_seqs"
        )
    if generator.kv_cache_gib == math.inf:
        raise ValueError("generator.kv_cache_gib=inf: must be finite; give the size in GiB")
    _check_cache(generator, shape)
    if generator.compile:
        _check_compiled(generator, shape)
    if shape.state_sizes and generator.model_impl == "torchtitan" and generator.enforce_eager is False:
        raise ValueError(
            f"generator.enforce_eager=False: layers of a {shape.name} lay out each step's requests on the host, which "
            "a CUDA graph cannot capture; use True"
        )
    if generator.async_scheduling and (fault := _fault_of_scheduling_ahead(generator)):
        raise ValueError(f"generator.async_scheduling=True: {fault}; use False")


def check_alone(generator: GeneratorConfig, shape: DecoderShape, flags: Mapping[str, str]) -> None:
    """Checks a generator that a verb starts without a run. Raises ValueError for what its fields, its engine or
    experts refuse. `flags` has the verb's flag, by the name of the field."""
    try:
        check_fields(generator, "generator.")
        if shape.experts is not None:
            check_experts_kernel("generator.dtype", generator.dtype, generator.tensor_parallel_degree, shape)
        check_engine(generator, shape)
    except ValueError as error:
        message = str(error)
        for field, flag in flags.items():
            message = re.sub(rf"(generator\.)?\b{field}\b", flag, message)
        raise ValueError(message) from None


def cache_bytes(generator: GeneratorConfig, shape: DecoderShape) -> int:
    """Bytes of the smallest cache of a rank: the blocks of the longest sequence, and the one that vLLM keeps empty."""
    block = platform.cache_block_size()
    tokens = (math.ceil(generator.max_model_len / block) + 1) * block
    return state_bytes(generator, shape) + kv_bytes_per_token(generator, shape) * tokens


def _check_cache(generator: GeneratorConfig, shape: DecoderShape) -> None:
    """Raises ValueError for a cache below `cache_bytes`."""
    per_token, states = kv_bytes_per_token(generator, shape), state_bytes(generator, shape)
    block, needed = platform.cache_block_size(), cache_bytes(generator, shape)
    tokens = (needed - states) // per_token
    if not generator.kv_cache_gib * 2**30 >= needed:
        capacity = max(0, int((max(0.0, generator.kv_cache_gib) * 2**30 - states) / per_token))  # max(0, NaN) is 0
        raise ValueError(
            f"generator.kv_cache_gib={generator.kv_cache_gib:g}: holds {capacity} tokens of {per_token} bytes a rank"
            f"{f' beside {states} bytes of states' if states else ''}, and one sequence of generator.max_model_len="
            f"{generator.max_model_len} needs {tokens}, in blocks of {block} of which vLLM keeps one empty; use at "
            f"least {_rounded_up(needed / 2**30):g}, or lower max_model_len"
        )


def _rounded_up(number: float) -> float:
    """The next number with three digits."""
    decimals = 2 - math.floor(math.log10(number))
    return math.ceil(number * 10.0**decimals) / 10.0**decimals


def _fault_of_scheduling_ahead(generator: GeneratorConfig) -> str:
    """Why an engine cannot schedule a step while the one before runs; empty when it can."""
    if platform.device_type() == "cpu":
        return "a CPU computes a step before it schedules the next"
    if generator.model_runner == "v1" or generator.record_routing:
        return "vLLM's V1 model runner draws tokens by numbers that are a step old then"
    if generator.tensor_parallel_degree > 1:
        return f"is not tested with generator.tensor_parallel_degree={generator.tensor_parallel_degree}"
    return ""


def _check_compiled(generator: GeneratorConfig, shape: DecoderShape) -> None:
    """Raises ValueError for an engine that cannot be compiled."""
    if generator.model_impl == "vllm":
        raise ValueError(
            "generator.compile=True: is for torchtitan's model, and vLLM compiles its own with "
            "generator.enforce_eager=False; use False"
        )
    if generator.tensor_parallel_degree > 1:
        raise ValueError(
            f"generator.compile=True: is not tested with generator.tensor_parallel_degree="
            f"{generator.tensor_parallel_degree}, whose ranks add up within the compiled code; use 1, or compile=False"
        )
    if shape.state_sizes:
        raise ValueError(
            f"generator.compile=True: layers of a {shape.name} lay out each step's requests on the host, which a "
            "compiled graph cannot do; use False"
        )
    if shape.experts is not None:
        raise ValueError(
            f"generator.compile=True: torch's compiler knows the matrix product of a {shape.name}'s experts in "
            "bfloat16 alone, and that is not tested; use False"
        )
    if fault := platform.missing_compiler():
        raise ValueError(f"generator.compile=True: {fault}; install one, or use False")


def check_generator_of_experts(config: RunConfig, shape: DecoderShape) -> None:
    """Raises ValueError for generators or adapters that do not work with a mixture of experts."""
    check_experts_kernel("generator.dtype", config.generator.dtype, config.generator.tensor_parallel_degree, shape)
    if config.generator.enforce_eager is False and platform.experts_ask_the_host(config.generator.dtype):
        raise ValueError(
            f"generator.enforce_eager=False: experts in {config.generator.dtype} are multiplied on this GPU with "
            "the host's help, which a CUDA graph cannot capture; use True"
        )
    for target in config.trainer.lora.target_modules if config.trainer.lora is not None else ():
        if target in ("gate_proj", "up_proj", "down_proj"):
            raise ValueError(
                f"trainer.lora.target_modules={target!r}: experts of a mixture have no adapters; use "
                "qkv_proj and o_proj"
            )
