"""What follows a bad optimizer step: its batch goes to disk, and after several in a row the run ends."""

from __future__ import annotations

import dataclasses
import logging

import torch

from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.train.role_step import RoleStep
from torchtitan_rl.types import Datum
from torchtitan_rl.types.ends import Diverged
from torchtitan_rl.types.run_state import RunState

__all__ = ["note_bad_step"]

logger = logging.getLogger(__name__)


def note_bad_step(
    run_dir: RunDir,
    state: RunState,
    roles: list[str],
    steps: dict[str, RoleStep],
    data: list[Datum],
    *,
    max_skipped: int,
) -> None:
    """Writes the datums of a step that was bad for `roles`, as dicts of their fields, for `torch.load(file)`. Raises
    Diverged when a role has had `max_skipped` bad steps in a row."""
    file = run_dir.path / "bad_steps" / f"{state.phase}-{state.phase_step:06d}.pt"
    file.parent.mkdir(exist_ok=True)
    numbers = {role: {"grad_norm": steps[role].optim.grad_norm, "loss": steps[role].loss} for role in roles}
    plain = [dataclasses.asdict(datum) for datum in data]
    torch.save({"phase": state.phase, "step": state.phase_step, "roles": numbers, "data": plain}, file)
    for role in roles:
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
