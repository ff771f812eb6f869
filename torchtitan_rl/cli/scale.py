"""The verb `scale`: another number of generator replicas for a run that goes on."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from torchtitan_rl.record import replica_request
from torchtitan_rl.record.console.notices import say

__all__ = ["add_arguments", "run"]

_LOOK_EVERY_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the directory of a run that goes on")
    parser.add_argument("--replicas", type=int, required=True, metavar="N", help="how many replicas it is to have")
    parser.add_argument(
        "--timeout-s", type=float, default=600.0, help="how long to wait for the answer (default: %(default)g)"
    )


def run(args: argparse.Namespace) -> int:
    """Asks a run, waits for what it answers, and prints that. Returns 1 where the number is not what was asked for."""
    directory = Path(args.run)
    if args.replicas < 1:
        raise ValueError(f"--replicas={args.replicas}: a run needs a generator; use at least 1")
    check_going_on(directory)
    request, until = replica_request.ask(directory, args.replicas), time.monotonic() + args.timeout_s
    while (answer := replica_request.answer_to(directory, request)) is None:
        if time.monotonic() > until:
            raise ValueError(
                f"run={args.run!r}: has not answered for {args.timeout_s:g} s and may do so later; its log and "
                f"`torchtitan-rl diagnose {args.run}` say what it does"
            )
        time.sleep(_LOOK_EVERY_S)
        check_going_on(directory)
    if answer.problem:
        raise ValueError(f"{answer.problem} (the run has {answer.replicas} now)")
    say(f"{args.run}: replicas of the generator: {answer.replicas}", event="scaled")
    return 0


def check_going_on(directory: Path) -> None:
    """Raises ValueError for what is no run, and for a run that has ended or died."""
    from torchtitan_rl.health.run_reader import Run
    from torchtitan_rl.health.whereabouts import pulse, whereabouts
    from torchtitan_rl.record.run_dir import RunDir

    try:
        status = json.loads((directory / "status.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"run={str(directory)!r}: is no directory of a run; name one, such as runs/first") from None
    if status["ended"]:
        raise ValueError(f"run={str(directory)!r}: has {status['ended']}; name a run that goes on")
    if pulse(whereabouts(Run(RunDir(directory))), status, time.time()) == "gone":
        raise ValueError(f"run={str(directory)!r}: its process is gone; begin again with --resume latest")
