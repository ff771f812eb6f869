"""What a run that has ended says: how good the policy became, where everything is, what to look at next."""

from __future__ import annotations

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
        accuracy = f"{before.accuracy:.3f}{before.failed_text()}"
        rows.append(("greedy accuracy before the preference phase (validation)", accuracy))
    rows.append(("greedy accuracy before reinforcement (validation)", f"{warm.accuracy:.3f}{warm.failed_text()}"))
    if warm.pass_at_k is not None:
        rows.append((f"pass@{config.pass_at_k} before reinforcement (validation)", f"{warm.pass_at_k:.3f}"))
    for name in ("validation", *config.eval_sets):
        result = report[name]
        rows.append((f"greedy accuracy after reinforcement ({name})", f"{result.accuracy:.3f}{result.failed_text()}"))
    test = report["test"]
    looked_at = "greedy accuracy after reinforcement (test, looked at once)"
    rows.append((looked_at, f"{test.accuracy:.3f}{test.failed_text()}"))
    if controller.ended_early:
        rows.append(("stopped early", controller.ended_early))
    rows.append(("curve", str(curve)))
    rows.append(("checkpoint", str(controller.run_dir.checkpoint_path(controller.state.step))))
    rows.append(("run", str(path)))
    rows.append(("look at it", next_command("view", path)))
    return rows


def next_command(verb: str, path: Path) -> str:
    """The command of a verb that looks at a run."""
    quoted = f"'{path}'" if set(str(path)) & set(" ()&;$") else str(path)
    return f"torchtitan-rl {verb} {quoted}"
