"""Metrics as event files for TensorBoard, by TensorBoard's own writer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from torchtitan_rl.metrics import PHASES
from torchtitan_rl.record.curves import final_evaluations, phase_of, points
from torchtitan_rl.record.plot import curve_of
from torchtitan_rl.record.recorder import Listener, Metrics
from torchtitan_rl.record.run_dir import RunDir

__all__ = ["TensorBoard"]

_FLUSH_S = 5


class TensorBoard(Listener):
    """Writes `RUN/tensorboard/reinforcement`, evaluations included, `RUN/tensorboard/supervised` and
    `RUN/tensorboard/preference`: in each, x counts the steps of its phase. Tags are the names of `record.curves`.

    The config is a text at the run's beginning. The last evaluations are a text, and the curve a picture, at its end.
    Values are float32, as TensorBoard's scalars are.
    """

    def __init__(self, path: Path, config: dict[str, Any], attempt: dict[str, Any]) -> None:
        """`attempt` is the record of this start (`record.attempts`): TensorBoard forgets what an earlier attempt
        wrote of the steps that are taken again."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._run_dir = RunDir(path)
        self._writers: dict[str, EventFileWriter] = {}
        self._make_writer = lambda phase: EventFileWriter(str(path / "tensorboard" / phase), flush_secs=_FLUSH_S)
        if (path / "tensorboard").exists():
            self._purge(attempt["phase"], attempt["step"])
        else:  # a first attempt, the first one with this sink, or a fork
            self._text("config", f"```json\n{json.dumps(config, indent=1, default=str)}\n```", 0)

    def metrics(self, event: Metrics) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        line, by_phase = event.line, {}
        for name, value in points(line).items():
            by_phase.setdefault(phase_of(name), []).append(Summary.Value(tag=name, simple_value=value))
        for phase, values in by_phase.items():
            self._write(phase, line["step"], summary=Summary(value=values))

    def close(self) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        lines = self._run_dir.read_metrics()
        step = max((line["step"] for line in lines if line["phase"] == "reinforcement"), default=0)
        if final := final_evaluations(lines):
            rows = [f"| {name} | {value} |" for line in final for name, value in points(line).items()]
            self._text("final evaluation", "\n".join(["| metric | value |", "|---|---|", *rows]), step)
        if (curve := curve_of(self._run_dir)) is not None:
            image = Summary.Image(encoded_image_string=curve.read_bytes(), colorspace=3)
            self._write("reinforcement", step, summary=Summary(value=[Summary.Value(tag="curve", image=image)]))
        for writer in self._writers.values():
            writer.close()

    def _purge(self, phase: str, step: int) -> None:
        """Forgets the steps after the one that an attempt goes on from, and those of later phases."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        first = PHASES.index(phase) if phase in PHASES else 0
        kept = {phase_name: step if phase_name == PHASES[first] else -1 for phase_name in reversed(PHASES[first:])}
        for phase_name, last in kept.items():
            if (self._run_dir.path / "tensorboard" / phase_name).exists():
                self._write(phase_name, last + 1, session_log=SessionLog(status=SessionLog.START))

    def _text(self, tag: str, text: str, step: int) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._write("reinforcement", step, summary=text_pb(f"{tag}/text_summary", text))

    def _write(self, phase: str, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        if phase not in self._writers:
            self._writers[phase] = self._make_writer(phase)
        self._writers[phase].add_event(Event(wall_time=time.time(), step=step, **content))
