"""Attempts of a run: each start in the same run directory, from where it went on, and what of earlier attempts counts.

attempts/                      a table with one record per attempt
metrics.before-attempt-N.jsonl the lines that attempt N cut off metrics.jsonl: steps after the checkpoint it began from
run.lock                       locked while a run is going on; names the process
ended.json                     why the run ended, if starting it again cannot mend that
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from torchtitan_rl.record.json_lines import parsed, replace_text
from torchtitan_rl.record.run_dir import RunDir

__all__ = [
    "locked",
    "lock_file",
    "unlock",
    "begin",
    "begun",
    "attempts",
    "cut_metrics",
    "require_metrics",
    "steps_before",
    "read_evaluations",
    "read_ledger",
    "read_rollouts",
    "read_versions",
    "end_for_good",
    "reason_of_end",
    "forget_end",
]

logger = logging.getLogger(__name__)


@contextmanager
def locked(run_dir: RunDir) -> Iterator[None]:
    """Locks a run directory. The lock is kept after the block, until `unlock` or the end of this process, unless the
    block fails. Raises ValueError when the directory is locked already, and as `lock_file` does."""
    file = open(run_dir.path / "run.lock", "a+", encoding="utf-8")
    try:
        if not lock_file(file, run_dir.path):
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise ValueError(
                f"output_dir={str(run_dir.path)!r}: a run is going on there ({holder}); wait for its end or stop it, "
                "or pick another output_dir"
            )
    except ValueError:
        file.close()
        raise
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()}")
    file.flush()
    _locks[run_dir.path.absolute()] = file
    try:
        yield
    except BaseException:
        unlock(run_dir)
        raise


def lock_file(file: IO[str], output_dir: Path) -> bool:
    """Locks an open file of `output_dir` until it is closed. False: another process has locked it. Raises ValueError
    where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ValueError(
            f"output_dir={str(output_dir)!r}: its file system has no locks ({error.strerror}); give a directory on "
            "another one"
        ) from None
    return True


def unlock(run_dir: RunDir) -> None:
    """Gives a run directory free, with checksums of what the attempt wrote; a second call does nothing."""
    if (file := _locks.pop(run_dir.path.absolute(), None)) is not None:
        run_dir.note_checksums()
        file.close()


_locks: dict[Path, IO[str]] = {}
"""Run directories that this process has locked, and the open files that hold the locks."""


def begin(run_dir: RunDir, resumed_from: str | None, phase: str = "", step: int = 0) -> int:
    """Notes a new attempt: where it goes on (`phase` and `step` of the checkpoint). Returns its number, from 1.

    The record begins a part of `attempts`, as the first record of a process does in every table, because a kill may
    have cut a line of the last part.
    """
    number = len(attempts(run_dir)) + 1
    record = {
        "phase": phase,
        "resumed_from": resumed_from,
        "at": datetime.now().astimezone().isoformat(timespec="seconds"),
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }
    run_dir.attempt = number
    run_dir.tables["attempts"].rotate()
    run_dir.record("attempts", step, [record], durable=True)
    return number


def attempts(run_dir: RunDir) -> list[dict[str, Any]]:
    """The attempts so far, in order."""
    return list(run_dir.tables["attempts"].read())


def require_metrics(run_dir: RunDir, size: int) -> None:
    """Raises ValueError where metrics.jsonl is shorter than `size`, or has no end of a line there."""
    content = run_dir.metrics_file.read_bytes() if run_dir.metrics_file.exists() else b""
    advice = "put the file back as it was, or start a new run from the checkpoint's weights"
    if len(content) < size:
        raise ValueError(
            f"{run_dir.metrics_file}: has {len(content)} bytes, the checkpoint was written after {size}; {advice}"
        )
    if size and content[size - 1 : size] != b"\n":
        raise ValueError(
            f"{run_dir.metrics_file}: is not what it was at the checkpoint, no line ends after {size} bytes; {advice}"
        )


def cut_metrics(run_dir: RunDir, size: int, attempt: int) -> int:
    """Cuts metrics.jsonl back to `size` bytes, and keeps what was cut in a file of its own. Returns the number of lines
    cut. `require_metrics` comes first."""
    content = run_dir.metrics_file.read_bytes() if run_dir.metrics_file.exists() else b""
    if tail := content[size:]:
        aside = run_dir.path / f"metrics.before-attempt-{attempt}.jsonl"
        aside.write_bytes(tail)
        run_dir.checksums.replace(aside)
        run_dir.checksums.cut(run_dir.metrics_file, size)
        os.truncate(run_dir.metrics_file, size)
    return tail.count(b"\n")


def read_ledger(run_dir: RunDir) -> Iterator[dict[str, Any]]:
    """The records of draws that count, in order: of attempts before a later one went on from an earlier step, only the
    draws that had ended by that step."""
    begins, records = begun(run_dir), list(run_dir.tables["ledger"].read())
    ended = {(record["attempt"], record["draw"]): record["step"] for record in records if record["event"] != "admitted"}
    for record in records:
        step = record["step"]
        if record["event"] == "admitted":  # by its end: batches before it may turn out to have fewer steps than planned
            step = ended.get((record["attempt"], record["draw"]), step + 1)
        if all(step <= bound for attempt, bound in begins.items() if attempt > record["attempt"]):
            yield record


def read_rollouts(run_dir: RunDir, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """The records of all rollouts that count, in order: without those of an attempt after the step from which a later
    attempt went on. Such rollouts did not train the policy that the run ended with. `columns` are those to read, `step`
    and `attempt` among them; None: all."""
    return _counting(run_dir, "rollouts", columns)


def read_evaluations(run_dir: RunDir) -> Iterator[dict[str, Any]]:
    """The records of the table `evaluations` that count, in order; see `read_rollouts`. An attempt at the run that goes
    on from a step evaluates that step again where its checkpoint was written before the evaluation: of the records of a
    set and split at one step, those of the newest attempt count. Of an attempt at a task that was made twice at one
    step the last record counts."""
    records = list(_counting(run_dir, "evaluations"))
    newest: dict[tuple, int] = {}
    last: dict[tuple, dict[str, Any]] = {}
    for record in records:
        evaluation = record["step"], record["name"], record["split"]
        newest[evaluation] = max(record["attempt"], newest.get(evaluation, 0))
        last[*evaluation, record["task_index"], record["sample"]] = record
    for record in records:
        evaluation = record["step"], record["name"], record["split"]
        is_last = last[*evaluation, record["task_index"], record["sample"]] is record
        if is_last and newest[evaluation] == record["attempt"]:
            yield record


def read_versions(run_dir: RunDir) -> Iterator[dict[str, Any]]:
    """The records of all publications that count, in order; see `read_rollouts`."""
    return _counting(run_dir, "versions")


def _counting(run_dir: RunDir, table: str, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    begins = begun(run_dir)
    for record in run_dir.tables[table].read(columns):
        if all(record["step"] <= step for later, step in begins.items() if later > record["attempt"]):
            yield record


def begun(run_dir: RunDir) -> dict[int, int]:
    """Attempt -> steps of the reinforcement phase before it. What an earlier attempt recorded after that step does not
    count."""
    return {attempt["attempt"]: steps_before(attempt) for attempt in attempts(run_dir)}


def steps_before(attempt: dict[str, Any]) -> int:
    """Steps of the reinforcement phase before an attempt; its record has the step of the phase that it began in."""
    return attempt["step"] if attempt["phase"] == "reinforcement" else 0


def end_for_good(run_dir: RunDir, reason: str) -> None:
    """Notes that starting the run again cannot mend what ended it."""
    try:
        replace_text(run_dir.path / "ended.json", json.dumps({"reason": reason}, indent=1))
    except OSError as error:  # the caller's own error is the one to see
        logger.warning("ended.json: could not be written (%s); --resume auto would start this run again", error)


def reason_of_end(run_dir: RunDir) -> str:
    """What `end_for_good` noted; empty if nothing."""
    file = run_dir.path / "ended.json"
    try:
        return parsed(file.read_text(encoding="utf-8"))["reason"] if file.exists() else ""
    except (ValueError, KeyError, TypeError):
        return f"{file.name} does not say, it was cut off; the log does"


def forget_end(run_dir: RunDir) -> None:
    """Removes what `end_for_good` noted."""
    (run_dir.path / "ended.json").unlink(missing_ok=True)
