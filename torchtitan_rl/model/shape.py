"""The sizes of a configured model, from a shape, a flavour or a config.json."""

from __future__ import annotations

from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.model.files import read_shape

__all__ = ["resolve_shape"]


def resolve_shape(config: ModelConfig) -> Qwen3Shape:
    """Sizes of the configured model. Raises ValueError for no sizes, for two sources of sizes, and for a config.json
    that cannot be read."""
    if config.flavor is None:
        return read_shape(config)
    if config.shape is not None:
        raise ValueError(f"model.flavor={config.flavor!r}: model.shape is set too; keep one of them")
    from torchtitan_rl.model.spec import flavor_shape  # imports torchtitan's model, which takes seconds

    return flavor_shape(config.flavor)
