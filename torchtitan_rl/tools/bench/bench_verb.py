"""`torchtitan-rl bench SUBJECT ...`: this package beside the fastest that the same machine does by other means."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from torchtitan_rl import platform
from torchtitan_rl.record.console.notices import say
from torchtitan_rl.tools.bench import generation, syncing, training
from torchtitan_rl.tools.bench.machine import CannotMeasure, check_device, check_memory
from torchtitan_rl.tools.bench.measurement import Measurement
from torchtitan_rl.tools.bench.short_form import SHORT_TRAINING, worse_than_stored
from torchtitan_rl.tools.bench.starting import StartMeasurement, measure_start
from torchtitan_rl.tools.bench.workload import DTYPES, LENGTHS, SHAPES, Workload

__all__ = ["add_arguments", "run"]

SUBJECTS = ("generate", "train", "sync", "startup")
_REPEATS, _SHORT_REPEATS = 5, 3
_PROMPTS, _SHORT_PROMPTS = 16, 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subjects", nargs="+", metavar="SUBJECT", help=", ".join(SUBJECTS))
    parser.add_argument("--size", choices=SHAPES, default="3m", help="of the model; default: 3m")
    parser.add_argument("--lengths", type=_of(LENGTHS), default=LENGTHS, metavar="L,...", help="default: fixed,skewed")
    parser.add_argument("--dtypes", type=_of(DTYPES), default=DTYPES, metavar="D,...", help="default: float32,bfloat16")
    parser.add_argument("--repeats", type=int, metavar="N", help=f"of every side; default: {_REPEATS}")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: what this machine has")
    parser.add_argument(
        "--short",
        action="store_true",
        help="generate and train in two minutes, 3m, float32; compares with stored ratios",
    )
    parser.add_argument(
        "--against", default="", metavar="DIR", help="startup of another checkout, in turn with this one"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    """Returns 2 where this machine cannot measure what was asked for, 1 where a ratio of the short form is worse than
    the stored one, else 0."""
    _settle(args)
    began = time.monotonic()

    def note(text: str) -> None:
        if not args.quiet:
            say(f"{time.monotonic() - began:5.0f} s  {text}", event="stage", to=sys.stderr)

    try:
        check_device(args.device)
        for subject, workload in _workloads(args):
            check_memory(subject, workload, compiled=not args.short and not platform.missing_compiler())
    except CannotMeasure as error:
        say(f"error: {error}", event="error", level="error")
        return 2
    signal.signal(signal.SIGTERM, _exit)  # sides and temporary files go before this process does
    measurements: list[Measurement] = []
    for subject, workload in _workloads(args):
        measurements += _measured(subject, workload, args, note)
    starts: list[StartMeasurement] = []
    if "startup" in args.subjects:
        starts.append(measure_start(args.against, args.repeats, note))
    worse = worse_than_stored(measurements) if args.short else []
    if args.json:
        data = {"device": args.device, "threads": platform.num_cores(), "repeats": args.repeats}
        measured = [measurement.as_data() for measurement in measurements] + [start.as_data() for start in starts]
        json.dump(data | {"measurements": measured, "worse": worse}, sys.stdout, indent=1)
        print()
    else:
        print(f"{args.device}, {platform.num_cores()} threads a process, {args.repeats} repeats")
        for lines in [measurement.lines() for measurement in measurements] + [start.lines() for start in starts]:
            print("\n".join(lines))
    for line in worse:
        say(f"error: {line}", event="error", level="error")
    return 1 if worse else 0


def _exit(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def _settle(args: argparse.Namespace) -> None:
    """Fills in what was not given. Raises ValueError for arguments that do not go together."""
    if unknown := [subject for subject in args.subjects if subject not in SUBJECTS]:
        raise ValueError(f"subject={unknown[0]!r}: there is no such bench; use {', '.join(SUBJECTS)}")
    if args.short:
        if left_out := [subject for subject in args.subjects if subject not in ("generate", "train")]:
            raise ValueError(f"--short: has no stored ratio for {left_out[0]}; use it with generate and train")
        if args.size != "3m" or args.dtypes != DTYPES or args.lengths != LENGTHS:
            raise ValueError("--short: says size, dtypes and lengths itself; leave --size, --dtypes, --lengths out")
        args.dtypes = ("float32",)
    if args.against and "startup" not in args.subjects:
        raise ValueError(f"--against={args.against!r}: is for startup; name that subject, or leave it out")
    args.repeats = args.repeats if args.repeats is not None else _SHORT_REPEATS if args.short else _REPEATS
    if args.repeats < 1:
        raise ValueError(f"--repeats={args.repeats}: must be at least 1")
    args.device = args.device or platform.device_type()


def _workloads(args: argparse.Namespace) -> Iterator[tuple[str, Workload]]:
    """The subjects that have sides beside each other, with what those are given, in the order of the command."""
    for subject in dict.fromkeys(args.subjects):
        if subject != "startup":
            for dtype in args.dtypes:
                prompts = _SHORT_PROMPTS if args.short else _PROMPTS
                yield subject, Workload(size=args.size, shape=SHAPES[args.size], dtype=dtype, num_prompts=prompts)


def _measured(
    subject: str, workload: Workload, args: argparse.Namespace, note: Callable[[str], None]
) -> list[Measurement]:
    def note_here(text: str) -> None:
        note(f"{subject} {workload.size} {workload.dtype}: {text}")

    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-", ignore_cleanup_errors=True) as directory:
        scratch = Path(directory)
        if subject == "generate":
            compiled = not args.short and not platform.missing_compiler()
            return generation.measure_generation(
                workload, args.lengths, args.repeats, scratch, note_here, compiled=compiled
            )
        if subject == "train":
            lengths = SHORT_TRAINING if args.short else args.lengths
            return training.measure_training(workload, lengths, args.repeats, scratch, note_here)
        return syncing.measure_sync(workload, args.repeats, scratch, note_here)


def _of(choices: tuple[Any, ...]) -> Callable[[str], tuple[Any, ...]]:
    """What reads a list of some of the choices, parted by commas."""

    def read(text: str) -> tuple[Any, ...]:
        items = tuple(dict.fromkeys(filter(None, text.split(","))))
        if not items or set(items) - set(choices):
            raise argparse.ArgumentTypeError(f"{text!r}: write some of {','.join(choices)}")
        return items

    return read
