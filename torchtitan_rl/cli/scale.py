"""The verb `scale`: another number of generator replicas, or other hosts, for a run that goes on."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from torchtitan_rl.record.console.notices import say

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the directory of a run that goes on")
    wish = parser.add_mutually_exclusive_group(required=True)
    wish.add_argument("--replicas", type=int, metavar="N", help="how many replicas it is to have")
    wish.add_argument(
        "--join",
        type=_workers,
        metavar="HOSTS",
        help="workers tcp://HOST:PORT,..., whose hosts bring replicas: as many as their GPUs carry, without GPUs one",
    )
    wish.add_argument("--leave", type=_workers, metavar="HOSTS", help="joined hosts that leave it, with their replicas")
    parser.add_argument(
        "--timeout-s", type=float, default=600.0, help="how long to wait for the answer (default: %(default)g)"
    )


def _workers(text: str) -> tuple[str, ...]:
    workers = tuple(filter(None, text.split(",")))
    if not workers:
        raise argparse.ArgumentTypeError(f"{text!r} names no worker; write tcp://HOST:PORT,...")
    return workers


def run(args: argparse.Namespace) -> int:
    """Asks a run, waits for what it answers, and prints that. Returns 1 where it does not do what was asked for."""
    from torchtitan_rl.launch.addresses import split
    from torchtitan_rl.launch.request import request

    if args.replicas is not None and args.replicas < 1:
        raise ValueError(f"--replicas={args.replicas}: a run needs a generator; use at least 1")
    if not 0 < args.timeout_s < math.inf:
        raise ValueError(f"--timeout-s={args.timeout_s:g}: must be positive and finite; use seconds")
    join, leave = args.join or (), args.leave or ()
    for worker in (*join, *leave):
        split(worker)
    number = request(Path(args.run), replicas=args.replicas, join=join, leave=leave, timeout_s=args.timeout_s)
    say(f"{args.run}: replicas of the generator: {number}", event="scaled")
    return 0
