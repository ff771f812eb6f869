"""How a generator's engine decodes where the config leaves it open: by CUDA graphs, and scheduled ahead of the device,
on a GPU and for the models that were measured there (docs/gpu/h100.md, docs/gpu/h200.md)."""

from __future__ import annotations

from torchtitan_rl import platform
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.families import DecoderShape

__all__ = ["holds_adapters", "max_num_batched_tokens", "runs_eager", "schedules_ahead"]


def holds_adapters(generator: GeneratorConfig) -> bool:
    """Whether a server's engine holds the adapters of several models side by side where nobody has said: not on a GPU,
    where an engine with slots decodes without CUDA graphs, and not where it cannot have slots."""
    return (
        platform.device_type() == "cpu"
        and generator.model_impl == "torchtitan"
        and generator.on_update == "keep"
        and not generator.compile
        and generator.enforce_eager is not False
        and generator.model_runner != "v2"
    )


def runs_eager(generator: GeneratorConfig, shape: DecoderShape) -> bool:
    """Whether the engine launches every operator by itself, `generator.enforce_eager`."""
    if generator.enforce_eager is not None:
        return generator.enforce_eager
    return not _is_measured(generator, shape)


def schedules_ahead(generator: GeneratorConfig, shape: DecoderShape) -> bool:
    """Whether the engine schedules a step while the device computes the one before, `generator.async_scheduling`."""
    if generator.async_scheduling is not None:
        return generator.async_scheduling
    return _is_measured(generator, shape) and generator.model_runner != "v1"


def max_num_batched_tokens(generator: GeneratorConfig) -> int:
    """The most tokens of an engine's iteration, at most what `max_num_seqs` sequences have: vLLM warms up with as many
    tokens as an iteration may have, shared by so many sequences. On a GPU attention reads beyond the block table of a
    sequence of more than `max_model_len`."""
    most = generator.max_num_seqs * generator.max_model_len
    return min(max(generator.max_num_batched_tokens, generator.max_model_len), most)


def _is_measured(generator: GeneratorConfig, shape: DecoderShape) -> bool:
    """Whether this is a kind of engine that has decoded by graphs and ahead on a GPU, with the right tokens."""
    return (
        platform.device_type() == "cuda"
        and generator.model_impl == "torchtitan"
        and generator.tensor_parallel_degree == 1
        and not generator.record_routing
        and not generator.max_adapters
        and not shape.state_sizes
        and (shape.experts is None or _experts_are_measured(generator))
    )


def _experts_are_measured(generator: GeneratorConfig) -> bool:
    """Whether experts are multiplied without the host, which no graph can ask, and by the runner that was measured."""
    return generator.model_runner != "v1" and not platform.experts_ask_the_host(generator.dtype)
