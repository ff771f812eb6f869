"""Who listens to a run: the recorder that the controller tells facts and spans."""

from __future__ import annotations

from collections.abc import Callable

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.inspection.watch import Watch
from torchtitan_rl.observability.display import Display
from torchtitan_rl.observability.progress import Progress
from torchtitan_rl.observability.recorder import Aside, Listener, Recorder
from torchtitan_rl.observability.run_dir import RunDir
from torchtitan_rl.observability.run_log import RunDirWriter
from torchtitan_rl.observability.status import watched

__all__ = ["recorder_of"]


def recorder_of(
    config: RunConfig, run_dir: RunDir, decode: Callable[[list[int]], str], progress: Progress | None
) -> Recorder:
    """The recorder of a run. `decode` turns tokens into text; with `progress` None nothing is displayed."""
    listeners: list[Listener] = [RunDirWriter(run_dir, decode if config.controller.record_tokens else None)]
    if config.record.health:
        listeners.append(watched(run_dir, [f"generator-{i}" for i in range(config.generator.num_replicas)]))
    if config.record.diagnose:
        listeners.append(Aside(Watch(run_dir, config.record.thresholds), name="diagnose", beat_s=1.0))
    if progress is not None:
        listeners.append(Display(progress))
    return Recorder(listeners)
