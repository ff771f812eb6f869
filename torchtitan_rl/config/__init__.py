"""A run's configuration: one dataclass tree, one file per run, overrides from the shell.

`import torchtitan_rl.config as rl` gives a config file every config class except the Config of a task family.
"""

from torchtitan_rl.config.algorithm import (
    AlgorithmConfig,
    DistillConfig,
    EntropyControlConfig,
    FilterConfig,
    ScheduleConfig,
    SupervisedConfig,
)
from torchtitan_rl.config.load import apply_overrides, load_config
from torchtitan_rl.config.meshes import AdamWConfig, GeneratorConfig, LoRAConfig, TrainerConfig, WeightSyncConfig
from torchtitan_rl.config.model import (
    DeepseekV3Shape,
    ExpertsShape,
    GptOssShape,
    Llama3Shape,
    ModelConfig,
    Qwen2Shape,
    Qwen3Shape,
    Qwen35Shape,
)
from torchtitan_rl.config.preference import PreferenceConfig
from torchtitan_rl.config.record import RecordConfig, WandbConfig
from torchtitan_rl.config.resolve import flat, function_name, resolved
from torchtitan_rl.config.run import (
    COLOCATION,
    ControllerConfig,
    EvalSetConfig,
    RewardModelConfig,
    RoleConfig,
    RolesConfig,
    RunConfig,
    SamplingConfig,
)
from torchtitan_rl.config.sampling import AlteredSampling
from torchtitan_rl.config.stopping import StopConfig

__all__ = [
    "COLOCATION",
    "AdamWConfig",
    "AlgorithmConfig",
    "AlteredSampling",
    "ControllerConfig",
    "DeepseekV3Shape",
    "DistillConfig",
    "EntropyControlConfig",
    "EvalSetConfig",
    "ExpertsShape",
    "FilterConfig",
    "GeneratorConfig",
    "GptOssShape",
    "Llama3Shape",
    "LoRAConfig",
    "ModelConfig",
    "PreferenceConfig",
    "Qwen2Shape",
    "Qwen35Shape",
    "Qwen3Shape",
    "RecordConfig",
    "RewardModelConfig",
    "RoleConfig",
    "RolesConfig",
    "RunConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "StopConfig",
    "SupervisedConfig",
    "TrainerConfig",
    "WandbConfig",
    "WeightSyncConfig",
    "apply_overrides",
    "flat",
    "function_name",
    "load_config",
    "resolved",
]
