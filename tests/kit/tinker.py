"""What a Tinker server serves, over a directory and without any stack, and a trainer that computes nothing."""

import asyncio
from pathlib import Path

from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.serve.tinker.service import ServedModel
from torchtitan_rl.types import OptimStepOutput


def served(directory: Path, **fields) -> ServedModel:
    """A model of 64 tokens and as many positions that trains adapters of rank 8 and less."""
    return ServedModel(
        **{
            "base_model": "base",
            "base_dir": directory,
            "family": "qwen3",
            "vocab_size": 64,
            "context_tokens": 64,
            "trained_tokens": 64,
            "lora": LoRAConfig(rank=8, alpha=8.0),
            "adapters_apart": False,
            "end_tokens": {"eos": 1, "pad": 0},
            "write_form": lambda checkpoint, source, target: None,
        }
        | fields
    )


class Trainer:
    """Of `TrainingClient`, what adapters and a step ask for: `models` are the adapters there are, `steps` how many
    steps were taken. The gradient of the first step is not finite."""

    def __init__(self):
        self.models, self.steps = [], 0

    def add_adapter(self, name, **_):
        self.models.append(name)
        return _done(None)

    def use_adapter(self, name, **_):
        return _done(None)

    def drop_adapter(self, name):
        self.models.remove(name)
        return _done(None)

    def optim_step(self, params):
        self.steps += 1
        norm = float("nan") if self.steps == 1 else 1.0
        return _done(OptimStepOutput(grad_norm=norm, lr=params.lr, policy_version=1, skipped=False))


def _done(answer) -> asyncio.Future:
    future = asyncio.get_running_loop().create_future()
    future.set_result(answer)
    return future
