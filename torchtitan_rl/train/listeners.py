"""Who listens to a run: the recorder of the controller's events and spans."""

from __future__ import annotations

from collections.abc import Callable

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.health.watch import HealthWatch
from torchtitan_rl.record.background import BackgroundListener
from torchtitan_rl.record.console.display import Display
from torchtitan_rl.record.console.json_progress import JsonProgress
from torchtitan_rl.record.console.progress import Progress
from torchtitan_rl.record.recorder import Listener, Recorder
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.run_dir_writer import RunDirWriter
from torchtitan_rl.record.status import watched
from torchtitan_rl.train.metric_sinks import sinks_of

__all__ = ["recorder_of"]


def recorder_of(
    config: RunConfig,
    run_dir: RunDir,
    decode: Callable[[list[int]], str],
    progress: Progress | JsonProgress | None,
    *,
    debugger: bool = False,
) -> Recorder:
    """The recorder of a run. `decode` turns tokens into text; with `progress` None nothing is displayed. With
    `debugger` nobody watches the run's health: a run that stands at a breakpoint is not stuck."""
    record, listeners, status = config.record, list[Listener](), list[Listener]()
    if record.timeline:
        from torchtitan_rl.record.timeline.recording import phases_of

        listeners += phases_of(run_dir.path / "timeline")
    listeners.append(RunDirWriter(run_dir, decode if config.controller.record_tokens else None))
    if record.health and not debugger:
        status.append(watched(run_dir, [f"generator-{i}" for i in range(config.generator.num_replicas)]))
    if record.diagnose and not debugger:
        listeners.append(
            BackgroundListener(
                HealthWatch(run_dir, record.thresholds), name="diagnose", events=HealthWatch.EVENTS, beat_s=1.0
            )
        )
    if progress is not None:
        listeners.append(Display(progress))
    return Recorder([*listeners, *sinks_of(config, run_dir), *status])
