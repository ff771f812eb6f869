"""Reinforcement-learning post-training of language models on torchtitan, Monarch, vLLM and TorchStore.

Importing the package is fast; each name below is imported from its module when it is first used.
"""

import importlib

from torchtitan_rl import former_names
from torchtitan_rl.environment import prepare_environment

prepare_environment()
former_names.install()

_PUBLIC = {
    "Controller": "train.controller",
    "RunConfig": "config",
    "load_config": "config",
    "apply_overrides": "config",
    "to_datums": "algorithm.datums",
    "Task": "types",
    "SamplingParams": "types",
    "OptimParams": "types",
    "Datum": "types",
    "Completion": "types",
    "Rollout": "types",
    "RolloutGroup": "types",
    "plot_curve": "record.plot",
    "Progress": "record.console.progress",
    "Run": "health.run_reader",
    "tinted": "html",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'torchtitan_rl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"torchtitan_rl.{_PUBLIC[name]}"), name)
