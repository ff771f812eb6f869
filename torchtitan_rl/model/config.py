"""The former module of these config classes, for old config files; new files import from `torchtitan_rl.config`."""

from torchtitan_rl.config.model import ExpertsShape, ModelConfig, Qwen3Shape

__all__ = ["ExpertsShape", "ModelConfig", "Qwen3Shape"]
