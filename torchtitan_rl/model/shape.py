"""The sizes of a configured model, from a shape, a flavour or a config.json, and of its cache."""

from __future__ import annotations

import math

from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.families import DecoderShape, Qwen3Shape
from torchtitan_rl.model.files import read_shape

__all__ = ["resolve_shape", "kv_bytes_per_token", "state_bytes"]


def resolve_shape(config: ModelConfig) -> DecoderShape:
    """Sizes of the configured model. Raises ValueError for no sizes, for two sources of sizes, for a family that is no
    class of shapes, and for a config.json that cannot be read."""
    if config.family is not None:
        _check_family(config)
    if config.flavor is None:
        return read_shape(config)
    if config.shape is not None:
        raise ValueError(f"model.flavor={config.flavor!r}: model.shape is set too; keep one of them")
    return Qwen3Shape.of_flavor(config.flavor)


def _check_family(config: ModelConfig) -> None:
    """Raises ValueError for a family that is no class of shapes, and for one that no config.json is read with."""
    family = config.family
    if not (isinstance(family, type) and issubclass(family, DecoderShape)):
        raise ValueError(
            f"model.family={family!r}: is no class of shapes; give a subclass of DecoderShape (docs/families.md), or "
            "leave it out for a family of this package"
        )
    for name in ("shape", "flavor"):
        if getattr(config, name) is not None:
            raise ValueError(
                f"model.family={family.__qualname__}: reads the config.json of model.assets, and model.{name} gives "
                "the sizes already; keep one of them"
            )


def kv_bytes_per_token(config: GeneratorConfig, shape: DecoderShape) -> int:
    """Bytes that keys and values of a token take on one generator rank, in all layers that have them."""
    itemsize = 4 if config.dtype == "float32" else 2
    numbers = 2 * shape.num_attention_layers * shape.n_kv_heads * shape.head_dim
    return numbers * itemsize // config.tensor_parallel_degree


def state_bytes(config: GeneratorConfig, shape: DecoderShape) -> int:
    """Bytes of a sequence's states on one generator rank, in all layers that have them, whatever the sequence's length:
    the inputs of convolutions in the model's dtype, the rest in float32."""
    if not shape.state_sizes:
        return 0
    inputs, *states = (math.prod(size) for size in shape.state_sizes)
    layer = inputs * (4 if config.dtype == "float32" else 2) + 4 * sum(states)
    return (shape.n_layers - shape.num_attention_layers) * layer // config.tensor_parallel_degree
