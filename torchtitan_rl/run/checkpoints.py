"""A run's checkpoint: what every role saves, the exports, and the state of the controller, whose marker is written
last."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.model.files import pad_token_id
from torchtitan_rl.run.policy_weights import PolicyWeights
from torchtitan_rl.types import OptimStepOutput
from torchtitan_rl.weights import checkpoint

__all__ = ["RunState", "save"]


@dataclass(kw_only=True, slots=True)
class RunState:
    """What a controller must know to go on where it was, besides what its meshes save themselves."""

    seed: int
    step: int = 0
    """Optimizer steps of the reinforcement phase."""
    phase: str = "start-up"
    phase_step: int = 0
    """Optimizer steps of the current phase."""
    skipped_in_a_row: dict[str, int] = field(default_factory=lambda: {"policy": 0, "critic": 0})
    """Optimizer steps of each role that were skipped since the last that was not."""
    policy_version: int = 0
    """The version that was published last. This and the next two are filled in as a checkpoint is written."""
    teacher_version: int | None = None
    """The version that scores for self-distillation; None: no version does."""
    draws: dict = field(default_factory=dict)
    """Where the draws and their source of tasks stand."""

    def count(self, steps: dict[str, OptimStepOutput], max_skipped: int) -> None:
        """Counts one optimizer step, by the role's answer each. Raises RuntimeError after `max_skipped` skips in a
        row."""
        self.step = self.phase_step = self.step + 1
        self.count_skips(steps, max_skipped)

    def count_skips(self, steps: dict[str, OptimStepOutput], max_skipped: int) -> None:
        """Counts skipped steps in a row; too many mean that the run has diverged."""
        for role, optim in steps.items():
            skipped = self.skipped_in_a_row[role] = self.skipped_in_a_row[role] + 1 if optim.skipped else 0
            if skipped >= max_skipped:
                raise RuntimeError(
                    f"optim/grad_norm={optim.grad_norm}: {skipped} optimizer steps of the {role} in a row were "
                    "skipped; lower the learning rate, or look at the rewards and log-probabilities of the last "
                    "rollouts"
                )


async def save(
    path: Path, state: RunState, roles: dict[str, TrainingClient], weights: PolicyWeights, tokenizer, *, lora: bool
) -> None:
    """Writes everything a later run needs, marker last. With `lora` the policy trains adapters, which are exported
    too."""
    checkpoint.begin(path)
    await roles["policy"].save_checkpoint(path)
    if "critic" in roles:
        await roles["critic"].save_checkpoint(path / "critic")
    await roles["policy"].save_hf_model(
        checkpoint.hf_dir(path), eos=tokenizer.eos_token_id, pad=pad_token_id(tokenizer)
    )
    if lora:
        await roles["policy"].save_adapter(checkpoint.adapter_dir(path))
    await weights.save_teacher(checkpoint.teacher_file(path))
    checkpoint.write_state(path, dataclasses.asdict(state))
