"""The data that flows through a run, from a task to an optimizer step, under one name."""

from torchtitan_rl.types.calls import (
    ForwardBackwardOutput,
    Microbatch,
    OptimParams,
    OptimStepOutput,
    RankOutput,
    add_sum,
    mean_metrics,
    num_trained,
)
from torchtitan_rl.types.completions import MIN_TEMPERATURE, NEUTRAL, WITHOUT_ADAPTERS, Request, SamplingParams, Scores
from torchtitan_rl.types.data import Completion, Datum, LossFunction, LossInputs, Rollout, RolloutGroup, Task, Turn
from torchtitan_rl.types.reward_bounds import A_REWARD, MAX_REWARD, is_float32, is_reward
from torchtitan_rl.types.routing import Routing

__all__ = [
    "A_REWARD",
    "MAX_REWARD",
    "is_float32",
    "is_reward",
    "Task",
    "SamplingParams",
    "MIN_TEMPERATURE",
    "NEUTRAL",
    "WITHOUT_ADAPTERS",
    "Request",
    "Scores",
    "Completion",
    "Turn",
    "Rollout",
    "RolloutGroup",
    "Datum",
    "Routing",
    "LossInputs",
    "LossFunction",
    "Microbatch",
    "RankOutput",
    "OptimParams",
    "ForwardBackwardOutput",
    "OptimStepOutput",
    "add_sum",
    "mean_metrics",
    "num_trained",
]
