"""The former home of these classes, for config files that name it; new ones import from `torchtitan_rl.config`."""

from torchtitan_rl.config.actors import AdamWConfig, GeneratorConfig, LoRAConfig, TrainerConfig, WeightSyncConfig

__all__ = ["AdamWConfig", "GeneratorConfig", "LoRAConfig", "TrainerConfig", "WeightSyncConfig"]
