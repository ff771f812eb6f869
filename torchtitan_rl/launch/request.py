"""Asking a run that goes on for other replicas or hosts, through its directory."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path

from torchtitan_rl.record import replica_request
from torchtitan_rl.record.json_lines import parsed

__all__ = ["check_going_on", "request"]

_LOOK_EVERY_S = 0.2


def request(
    run: Path,
    *,
    replicas: int | None = None,
    join: tuple[str, ...] = (),
    leave: tuple[str, ...] = (),
    timeout_s: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> int:
    """Asks a run, and waits for its answer: the number of replicas that it has then. Calls `meanwhile` now and then.
    Raises ValueError with the reason where the run does not do what was asked for or does not go on, and where no
    answer comes within `timeout_s`."""
    check_going_on(run)
    question = replica_request.ask(run, replicas=replicas, join=join, leave=leave)
    until = time.monotonic() + timeout_s
    while (answer := replica_request.answer_to(run, question)) is None:
        if time.monotonic() > until:
            raise ValueError(
                f"run={str(run)!r}: has not answered for {timeout_s:g} s and may do so later; its log and "
                f"`torchtitan-rl diagnose {shlex.quote(str(run))}` say what it does"
            )
        meanwhile()
        time.sleep(_LOOK_EVERY_S)
        check_going_on(run)
    if answer.problem:
        raise ValueError(f"{answer.problem} (the run has {answer.replicas} now)")
    return answer.replicas


def check_going_on(run: Path) -> None:
    """Raises ValueError for what is no run, and for a run that has ended or died."""
    from torchtitan_rl.health.run_reader import Run
    from torchtitan_rl.health.whereabouts import pulse, whereabouts
    from torchtitan_rl.record.run_dir import RunDir

    try:
        status = parsed((run / "status.json").read_bytes())
        ended = status.get("ended")
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"run={str(run)!r}: is no directory of a run; name one, such as runs/first") from None
    except (ValueError, AttributeError):  # of another kind than an object
        raise ValueError(
            f"run={str(run)!r}: its status.json is damaged; a run that goes on writes it anew within seconds, so try "
            "again, or begin again with --resume latest"
        ) from None
    if ended:
        raise ValueError(f"run={str(run)!r}: has {ended}; name a run that goes on")
    if pulse(whereabouts(Run(RunDir(run))), status, time.time()) == "gone":
        raise ValueError(f"run={str(run)!r}: its process is gone; begin again with --resume latest")
