"""The former home of these classes, for config files that name it; new ones import from `torchtitan_rl.config`."""

from torchtitan_rl.config.model import ExpertsShape, ModelConfig, Qwen3Shape

__all__ = ["ExpertsShape", "ModelConfig", "Qwen3Shape"]
