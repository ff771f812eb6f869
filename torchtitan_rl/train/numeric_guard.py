"""What follows a bad optimizer step: its batch goes to disk, and after several in a row the run ends."""

from __future__ import annotations

import dataclasses
import logging
import math

import torch

from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.train.role_step import RoleStep
from torchtitan_rl.types import Datum
from torchtitan_rl.types.ends import Diverged
from torchtitan_rl.types.run_state import RunState

__all__ = ["count_step"]

logger = logging.getLogger(__name__)


def count_step(
    run_dir: RunDir, state: RunState, steps: dict[str, RoleStep], data: list[Datum], *, max_skipped: int
) -> None:
    """Counts an optimizer step of each role of `steps` in `state`. Where the step of a role was bad, that is skipped or
    with a loss that is not finite, writes its datums as dicts of their fields, for `torch.load(file)`. Raises Diverged
    when a role has had `max_skipped` bad steps in a row."""
    if "policy" in steps:
        state.policy_version = steps["policy"].optim.policy_version
    bad = [role for role, step in steps.items() if step.optim.skipped or not math.isfinite(step.loss)]
    for role in steps:
        state.skipped_in_a_row[role] = state.skipped_in_a_row[role] + 1 if role in bad else 0
    if not bad:
        return
    file = run_dir.path / "bad_steps" / f"{state.phase}-{state.phase_step:06d}.pt"
    file.parent.mkdir(exist_ok=True)
    numbers = {role: {"grad_norm": steps[role].optim.grad_norm, "loss": steps[role].loss} for role in bad}
    plain = [dataclasses.asdict(datum) for datum in data]
    torch.save({"phase": state.phase, "step": state.phase_step, "roles": numbers, "data": plain}, file)
    for role in bad:
        in_a_row, optim, loss = state.skipped_in_a_row[role], steps[role].optim, steps[role].loss
        kind = "step_skipped" if optim.skipped else "loss_not_finite"
        logger.warning(
            "%s: a step of the %s, optim/grad_norm=%s, loss=%s; its batch is in %s",
            *(kind.replace("_", " "), role, optim.grad_norm, loss, file),
            extra={"event": kind, "who": role},
        )
        if in_a_row >= max_skipped:
            raise Diverged(
                f"optim/grad_norm={optim.grad_norm}, loss={loss}: {in_a_row} optimizer steps of the {role} in a row "
                f"were skipped or had no finite loss; lower the learning rate, or look at the batches in {file.parent}"
            )
