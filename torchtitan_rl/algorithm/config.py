"""Old import path of these classes, for existing config files; new files import from `torchtitan_rl.config`."""

from torchtitan_rl.config.algorithm import AlgorithmConfig, DistillConfig, SupervisedConfig

__all__ = ["AlgorithmConfig", "DistillConfig", "SupervisedConfig"]
