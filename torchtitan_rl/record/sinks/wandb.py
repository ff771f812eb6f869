"""Metrics as a run of Weights & Biases."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any, Literal

from torchtitan_rl.record.curves import final_evaluations, phase_of, points
from torchtitan_rl.record.plot import curve_of
from torchtitan_rl.record.recorder import Listener, Metrics
from torchtitan_rl.record.run_dir import RunDir

__all__ = ["Wandb"]


class Wandb(Listener):
    """Logs each line of metrics under the names of `record.curves`, with the config. The last evaluations
    (`final/NAME/SPLIT/...`) go into the summary, and the curve goes along as a picture, at the run's end.

    The x axis is `step`, `supervised/step` for the supervised phase and `preference/step` for the preference phase.
    The files are in `RUN/wandb`. The run's id is kept in `RUN/wandb/id`, so that a resumed run goes on as the same one;
    what it takes again is logged again, with another number as `attempt`. Raises what `wandb.init` raises, and
    RuntimeError for `online` without a key.
    """

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        attempt: int,
        *,
        project: str,
        entity: str,
        group: str,
        mode: Literal["offline", "online"],
    ) -> None:
        import wandb

        wandb.setup(wandb.Settings(silent=True))
        if mode == "online" and not wandb.login(prompt=False):  # `init` would ask for a key at the terminal
            raise RuntimeError("there is no key for online mode; run `wandb login`, or use record.wandb.mode='offline'")
        self._run_dir, self._attempt, self._image = RunDir(path), attempt, wandb.Image
        id_file = path / "wandb" / "id"
        if not id_file.exists():
            id_file.parent.mkdir(exist_ok=True)
            id_file.write_text(uuid.uuid4().hex[:8])
        self._run = wandb.init(
            project=project,
            entity=entity or None,
            group=group or None,
            name=path.resolve().name,
            id=id_file.read_text(),
            resume="allow" if mode == "online" else None,
            dir=str(path),
            mode=mode,
            config=config,
            reinit="create_new",
            # The console belongs to the run, and code and requirements to the run's directory.
            settings=wandb.Settings(console="off", silent=True, disable_code=True, x_save_requirements=False),
        )
        self._known: set[str] = set()
        """Curves whose x axis W&B has been told."""

    def metrics(self, event: Metrics) -> None:
        if values := points(event.line):
            phase = phase_of(next(iter(values)))
            step = "step" if phase == "reinforcement" else f"{phase}/step"
            for name in values.keys() - self._known:  # one by one: of two patterns that fit, W&B says not which counts
                self._run.define_metric(name, step_metric=step)
            self._known |= values.keys()
            self._run.log({**values, step: event.line["step"], "attempt": self._attempt})
        elif "stop/reason" in event.line:
            self._run.summary["stop/reason"] = event.line["stop/reason"]

    def close(self) -> None:
        for line in final_evaluations(self._run_dir.read_metrics()):
            self._run.summary.update({f"final/{name.removeprefix('eval/')}": x for name, x in points(line).items()})
        if (curve := curve_of(self._run_dir)) is not None:
            self._run.log({"curve": self._image(str(curve))})
        self._run.finish()
