"""What a run that has ended says: how good the policy became, where everything is, what to look at next."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl.train.evaluation import Evaluation

if TYPE_CHECKING:
    from torchtitan_rl.train.controller import Controller

__all__ = ["next_command", "summary_rows"]


def summary_rows(controller: Controller, report: dict[str, Evaluation], curve: Path) -> list[tuple[str, str]]:
    """(what, value) of a run that has trained; `report` is what `Controller.train` returned."""
    config, path, warm = controller.config.controller, controller.run_dir.path, report["warm start"]
    rows = []
    if (before := report.get("before preference")) is not None:
        rows.append(("greedy accuracy before the preference phase (validation)", _accuracy(before)))
    if config.num_steps:
        rows.append(("greedy accuracy before reinforcement (validation)", _accuracy(warm)))
    if warm.pass_at_k is not None:
        phase = "before reinforcement" if config.num_steps else "at the end"
        rows.append((f"pass@{config.pass_at_k} {phase} (validation)", f"{warm.pass_at_k:.3f}"))
    phase = "after reinforcement" if config.num_steps else "at the end"
    for name in config.evaluation_names:
        rows.append((f"greedy accuracy {phase} ({name})", _accuracy(report[name])))
    rows.append((f"greedy accuracy {phase} (test, looked at once)", _accuracy(report["test"])))
    if controller.ended_early:
        rows.append(("stopped early", controller.ended_early))
    rows.append(("curve", str(curve)))
    rows.append(("checkpoint", str(controller.run_dir.checkpoint_path(controller.state.step))))
    rows.append(("run", str(path)))
    rows.append(("look at it", next_command("view", path)))
    return rows


def _accuracy(evaluation: Evaluation) -> str:
    return f"{evaluation.accuracy:.3f}{evaluation.failed_text()}"


def next_command(verb: str, path: Path) -> str:
    """The command of a verb that looks at a run."""
    return shlex.join(["torchtitan-rl", verb, str(path)])
