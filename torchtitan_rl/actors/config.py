"""The former module of these config classes, for old config files; new files import from `torchtitan_rl.config`."""

from torchtitan_rl.config.actors import AdamWConfig, GeneratorConfig, LoRAConfig, TrainerConfig, WeightSyncConfig

__all__ = ["AdamWConfig", "GeneratorConfig", "LoRAConfig", "TrainerConfig", "WeightSyncConfig"]
