"""Who listens to a run: the recorder that the controller tells facts and spans."""

from __future__ import annotations

from collections.abc import Callable

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.observability.display import Display
from torchtitan_rl.observability.progress import Progress
from torchtitan_rl.observability.recorder import Listener, Recorder
from torchtitan_rl.observability.run_dir import RunDir
from torchtitan_rl.observability.run_log import RunDirWriter
from torchtitan_rl.run.sinks import sinks_of
from torchtitan_rl.validation.batches import compares_siblings

__all__ = ["recorder_of"]


def recorder_of(
    config: RunConfig, run_dir: RunDir, decode: Callable[[list[int]], str], progress: Progress | None
) -> Recorder:
    """The recorder of a run. `decode` turns tokens into text; with `progress` None nothing is displayed."""
    listeners: list[Listener] = []
    if config.record.timeline:
        from torchtitan_rl.observability.timeline.recording import phases_of

        listeners += phases_of(run_dir.path / "timeline")
    listeners += [RunDirWriter(run_dir, decode if config.controller.record_tokens else None)]
    if progress is not None:
        listeners.append(Display(progress, compares_siblings(config)))
    listeners += sinks_of(config, run_dir)
    return Recorder(listeners)
