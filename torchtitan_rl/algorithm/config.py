"""The former home of these classes, for config files that name it; new ones import from `torchtitan_rl.config`."""

from torchtitan_rl.config.algorithm import AlgorithmConfig, DistillConfig, SupervisedConfig

__all__ = ["AlgorithmConfig", "DistillConfig", "SupervisedConfig"]
