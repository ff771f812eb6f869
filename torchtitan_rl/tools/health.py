"""Whether a run is well: what it is doing, what is late, what died, what was retried."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from torchtitan_rl.health.facts import duration, spans_of
from torchtitan_rl.health.rules.rule import Finding
from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.health.whereabouts import end_of, pulse, seconds_since, whereabouts
from torchtitan_rl.record.json_lines import parsed
from torchtitan_rl.record.status import FILE
from torchtitan_rl.tools.series import Series

__all__ = ["Health", "health_of"]

_OVERDUE = ("overdue", "stall")
"""Rules on what the run is doing at this moment."""
_NUM_EVENTS = 200
_OF_A_RUN = (FILE, "config.json", "metrics.jsonl", "run.lock", "rollouts")
"""Files of which a run has one at least."""


@dataclass(kw_only=True, slots=True)
class Health:
    """The health of a run at the moment of the call."""

    state: str
    """`waiting` (there is no run yet), `running`, `finished`, `stopped`, `died` (its process is gone, and it had not
    ended), `silent` (its process is there and has not reported), or `unknown` (no `status.json`)."""
    sentence: str
    """The state in a sentence."""
    status: dict[str, Any] = field(default_factory=dict)
    """What `status.json` holds; see docs/run_directory.md."""
    replicas: dict[str, str] = field(default_factory=dict)
    """Replica -> `healthy`, `starting`, or why it is out of use."""
    overdue: bool = False
    """Whether the rule `overdue` or `stall` has found something."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """The last warnings and errors, newest first."""
    counts: dict[str, int] = field(default_factory=dict)
    """Kind of event -> how often it happened."""
    num_attempts: int = 0
    missing: list[str] = field(default_factory=list)
    """What could not be read, in sentences."""

    @property
    def good(self) -> bool:
        """Whether nothing is wrong now."""
        replicas = all(health in ("healthy", "starting") for health in self.replicas.values())
        return self.state in ("running", "finished") and replicas and not self.overdue


def health_of(run: Run, series: Series, findings: Sequence[Finding] = ()) -> Health:
    """The health of a run. `series` are its metrics, `findings` what the rules find. Reads files only; raises nothing
    for files that are missing, half-written or of another version."""
    missing: list[str] = []
    status = _status(run.path, missing)
    events = _rows(run, "events", missing)
    state, sentence = _state(run, status, str(end_of(status, events).get("text") or ""), _early_end(series))
    counts = Counter(str(event.get("kind")) for event in events)
    if not run.config():
        missing.append("config.json is missing or cut off")
    if not series.phases() and not series.other_lines:
        missing.append("metrics.jsonl has no lines yet")
    if series.num_bad:
        missing.append(f"metrics.jsonl: {series.num_bad} lines are no metrics, and left out")
    return Health(
        state=state,
        sentence=sentence,
        status=status,
        replicas=_replicas(status) if state in ("running", "silent", "died") else {},
        overdue=any(finding.rule in _OVERDUE for finding in findings),
        events=events[: -_NUM_EVENTS - 1 : -1],
        counts=dict(counts),
        num_attempts=len(_rows(run, "attempts", missing)),
        missing=missing,
    )


def _status(path: Path, missing: list[str]) -> dict[str, Any]:
    try:
        status = parsed((path / "status.json").read_text(encoding="utf-8"))
        if isinstance(status, dict):
            return status
        missing.append("status.json: holds no object")
    except FileNotFoundError:
        missing.append("status.json is missing: the run is of an older version, or record.health is off")
    except (OSError, ValueError) as error:
        missing.append(f"status.json: cannot be read ({error})")
    return {}


def _early_end(series: Series) -> str:
    """The rule that ended the reinforcement phase before its last step; empty for none, and for a phase that was
    resumed and went on."""
    last_step = max(series.column("reward/mean")[0], default=0)
    reasons = [
        line.get("stop/reason") for line in series.other_lines if line["phase"] == "stop" and line["step"] >= last_step
    ]
    return str(reasons[-1]) if reasons else ""


def _state(run: Run, status: dict[str, Any], why: str, early: str) -> tuple[str, str]:
    """The state and its sentence. `why`: of an end before the last act. `early`: of a last step before the planned."""
    if not any((run.path / name).exists() for name in _OF_A_RUN):
        return "waiting", "there is no run yet; this page shows it when it begins"
    process = whereabouts(run)
    now = time.time()
    reason, age = process.ended or why, seconds_since(status.get("at"), now)
    ago = "" if age is None else f" {duration(age)} ago"
    if status.get("ended") == "finished":
        return "finished", f"finished{ago}" + (f", early: {early}" if early else "")
    if status.get("ended") or reason:
        return "stopped", f"stopped{ago}" + (f": {reason}" if reason else "")
    if age is None:
        return "unknown", "what the run is doing is not known"
    beat = pulse(process, status, now)
    if beat == "gone":
        return "died", f"its process is gone; it last reported{ago}"
    if beat == "silent":
        return "silent", f"its process (pid {process.pid}) has not reported for {duration(age)}"
    return "running", " › ".join(str(span.get("name")) for span in spans_of(status)) or "between two pieces of work"


def _replicas(status: dict[str, Any]) -> dict[str, str]:
    replicas = status.get("replicas")
    return {str(name): str(health) for name, health in replicas.items()} if isinstance(replicas, dict) else {}


def _rows(run: Run, table: str, missing: list[str]) -> list[dict[str, Any]]:
    try:
        return list(run.directory.tables[table].read())
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError, pa.ArrowException) as error:
        missing.append(f"{table}/: cannot be read ({(str(error).splitlines() or [''])[0][:200]})")
        return []
