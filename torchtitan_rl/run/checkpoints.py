"""A run's checkpoint: the roles that train, the exports, and the state of the controller. The marker is written
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
    """The state of a controller in a checkpoint; the trainer roles save weights and optimizer state themselves."""

    seed: int
    step: int = 0
    """Optimizer steps of the reinforcement phase."""
    phase: str = "start-up"
    phase_step: int = 0
    """Optimizer steps of the current phase."""
    skipped_in_a_row: dict[str, int] = field(default_factory=lambda: {"policy": 0, "critic": 0})
    """Per role, the optimizer steps skipped since the last one that was taken."""
    policy_version: int = 0
    """The version published last. `policy_version`, `teacher_version` and `draws` are set as a checkpoint is
    written."""
    teacher_version: int | None = None
    """The version of the snapshot that scores for self-distillation; None without a snapshot."""
    draws: dict = field(default_factory=dict)
    """`Draws.state_dict()`: the next slot, and the state of the source of tasks."""

    def count(self, steps: dict[str, OptimStepOutput], max_skipped: int) -> None:
        """Counts one optimizer step of the policy; `steps` has the answer of each role that trained. Raises
        RuntimeError after `max_skipped` skips in a row."""
        self.step = self.phase_step = self.step + 1
        self.count_skips(steps, max_skipped)

    def count_skips(self, steps: dict[str, OptimStepOutput], max_skipped: int) -> None:
        """Counts skipped steps in a row, by role. Raises RuntimeError after `max_skipped`: the run has diverged."""
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
    """Writes a checkpoint, marker last. With `lora` the policy trains adapters, and the adapters are exported too."""
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
