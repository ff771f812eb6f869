"""A timeline as a file that Perfetto opens: Chrome's trace event format, in JSON."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchtitan_rl.tools.timeline.reading import Timeline, TimelineSpan

__all__ = ["events", "write"]


def events(timeline: Timeline) -> list[dict[str, Any]]:
    """The trace's events: a process of the trace for each of the run, and as many tracks for each of its threads as
    spans that overlap need, since the events of one track must lie in each other or apart. Times are microseconds from
    the first span."""
    first = min((piece.start for process in timeline.processes for piece in process.pieces), default=0)
    events: list[dict[str, Any]] = []
    for index, process in enumerate(timeline.processes, 1):
        events.append(_meta("process_name", index, 0, name=f"{process.name} ({process.pid})"))
        events.append(_meta("process_sort_index", index, 0, sort_index=index))
        for track, (name, pieces) in enumerate(_tracks(process.pieces), 1):
            events.append(_meta("thread_name", index, track, name=name))
            events.append(_meta("thread_sort_index", index, track, sort_index=track))
            for piece in pieces:
                event = {"ph": "X", "pid": index, "tid": track, "name": piece.name, "cat": piece.kind}
                event |= {"ts": (piece.start - first) / 1000, "dur": (piece.end - piece.start) / 1000}
                events.append(event | {"args": piece.more})
    return events


def write(timeline: Timeline, file: Path) -> int:
    """Writes the trace to `file`, compressed where the name ends in `.gz`. Returns the number of events."""
    trace_events = events(timeline)
    text = json.dumps({"traceEvents": trace_events, "displayTimeUnit": "ms"}, separators=(",", ":")).encode()
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    return len(trace_events)


def _meta(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}


def _tracks(pieces: Iterable[TimelineSpan]) -> list[tuple[str, list[TimelineSpan]]]:
    """(name, pieces in order) of each track: phases, work and waits of a thread apart, the phases first."""
    tracks: list[tuple[str, str, list[TimelineSpan], list[int]]] = []
    order = {"phase": 0, "work": 1, "wait": 2}
    for piece in sorted(pieces, key=lambda p: (order.get(p.kind, 1), p.start, -p.end)):
        for thread, kind, placed, open_until in tracks:
            if (thread, kind) != (piece.thread, piece.kind):
                continue
            while open_until and open_until[-1] <= piece.start:
                open_until.pop()
            if not open_until or piece.end <= open_until[-1]:
                placed.append(piece)
                open_until.append(piece.end)
                break
        else:
            tracks.append((piece.thread, piece.kind, [piece], [piece.end]))
    return [(f"{thread}: {kind}", placed) for thread, kind, placed, _ in tracks]
