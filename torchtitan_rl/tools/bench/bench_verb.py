"""`torchtitan-rl bench SUBJECT ...`: this package beside the fastest that the same machine does by other means."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from torchtitan_rl import platform
from torchtitan_rl.record.console.notices import say
from torchtitan_rl.tools.bench import generation, memory_use, scaling, stepping, syncing, training
from torchtitan_rl.tools.bench.machine import (
    CannotMeasure,
    check_compiler,
    check_counts_memory,
    check_device,
    check_memory,
    trl_versions,
)
from torchtitan_rl.tools.bench.measurement import Measurement
from torchtitan_rl.tools.bench.short_form import SHORT_TRAINING, worse_than_stored
from torchtitan_rl.tools.bench.starting import STARTUP, WHOLE, measure_start, quickstart_of
from torchtitan_rl.tools.bench.workload import DTYPES, LENGTHS, LONGEST, SHAPES, SIZES, Workload

__all__ = ["add_arguments", "run"]

_FAMILY, _SIZE = ("qwen3",), "3m"
_REPEATS, _SHORT_REPEATS = 5, 3
_PROMPTS, _SHORT_PROMPTS = 16, 8
_BATCH = ("prompts", "group_size", "fixed_tokens")
"""Arguments that change the batch."""
_WITH_MODEL = ("generate", "train", "sync", "step", "scale", "memory")
_READ_BY = {
    "size": (_SIZE, _WITH_MODEL),
    "dtypes": (DTYPES, _WITH_MODEL),
    "lengths": (LENGTHS, ("generate", "train", "step")),
    "floors": (None, ("generate", "train")),
    "against": ("", ("startup", "quickstart")),
    "floor_python": ("", ("step",)),
}
"""Argument -> its default, and the subjects that it changes."""


class Result(Protocol):
    """What has been measured."""

    def as_data(self) -> dict[str, Any]: ...

    def lines(self) -> list[str]: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subjects", nargs="+", metavar="SUBJECT", help=", ".join(_SUBJECTS))
    parser.add_argument("--size", choices=SIZES, default=_SIZE, help=f"of the model; default: {_SIZE}")
    parser.add_argument(
        "--family",
        type=_of(tuple(SHAPES)),
        default=_FAMILY,
        metavar="F,...",
        help=f"of generate, of {','.join(SHAPES)}, measured in turn; default: {_FAMILY[0]}",
    )
    parser.add_argument(
        "--floors",
        type=_of(tuple(generation.FLOORS)),
        metavar="F,...",
        help="of generate and train; default: eager, and compiled where there is a C++ compiler",
    )
    parser.add_argument(
        "--lengths",
        type=_of(LENGTHS),
        default=LENGTHS,
        metavar="L,...",
        help="of generate, train and step; default: fixed,skewed",
    )
    parser.add_argument("--prompts", type=int, metavar="N", help=f"of generate and train; default: {_PROMPTS}")
    parser.add_argument(
        "--group-size", type=int, metavar="N", help="of generate and train: completions of a prompt; default: 8"
    )
    parser.add_argument(
        "--fixed-tokens",
        type=int,
        metavar="N",
        help="of generate and train: tokens of a completion where lengths are fixed; default: 64",
    )
    parser.add_argument("--dtypes", type=_of(DTYPES), default=DTYPES, metavar="D,...", help="default: float32,bfloat16")
    parser.add_argument("--repeats", type=int, metavar="N", help=f"of every side; default: {_REPEATS}")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: what this machine has")
    parser.add_argument(
        "--short",
        action="store_true",
        help="generate and train in two minutes, 3m, float32; compares with stored ratios",
    )
    parser.add_argument(
        "--against", default="", metavar="DIR", help="startup or quickstart of another checkout, in turn with this one"
    )
    parser.add_argument(
        "--floor-python", default="", metavar="FILE", help="for step: the Python of an environment that has TRL"
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
        if "compiled" in args.floors and {"generate", "train"} & set(args.subjects):
            check_compiler()
        if "memory" in args.subjects:
            check_counts_memory(args.device)
        if "step" in args.subjects:
            note(f"the floor of step: {trl_versions(args.floor_python)}")
        for subject, workloads in _jobs(args):
            if workloads:
                check_memory(subject, workloads, floors=_floors(args))
    except CannotMeasure as error:
        say(f"error: {error}", event="error", level="error")
        return 2
    signal.signal(signal.SIGTERM, _exit)  # sides and temporary files go before this process does
    if not args.json:
        print(f"{args.device}, {platform.num_cores()} threads a process, {args.repeats} repeats", flush=True)
    results: list[Result] = []
    worse: list[str] = []
    try:
        for subject, workloads in _jobs(args):
            measured = _measured(subject, workloads, args, note)
            results += measured
            if not args.json:  # as soon as it is known: a time limit may end the next subject
                for result in measured:
                    print("\n".join(result.lines()), flush=True)
        if args.short:
            worse = worse_than_stored([result for result in results if isinstance(result, Measurement)])
    finally:  # a subject that fails, or a time limit, loses none that was measured before
        if args.json:
            data = {"device": args.device, "threads": platform.num_cores(), "repeats": args.repeats}
            data |= {"measurements": [result.as_data() for result in results], "worse": worse}
            print(json.dumps(data, indent=1), flush=True)
    for line in worse:
        say(f"error: {line}", event="error", level="error")
    return 1 if worse else 0


def _exit(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def _settle(args: argparse.Namespace) -> None:
    """Fills in what was not given. Raises ValueError for arguments that do not go together."""
    if unknown := [subject for subject in args.subjects if subject not in _SUBJECTS]:
        raise ValueError(f"subject={unknown[0]!r}: there is no such bench; use {', '.join(_SUBJECTS)}")
    if args.short:
        if left_out := [subject for subject in args.subjects if subject not in ("generate", "train")]:
            raise ValueError(f"--short: has no stored ratio for {left_out[0]}; use it with generate and train")
        if args.size != _SIZE or args.dtypes != DTYPES or args.lengths != LENGTHS:
            raise ValueError("--short: says size, dtypes and lengths itself; leave --size, --dtypes, --lengths out")
        if args.family != _FAMILY or args.floors:
            raise ValueError("--short: has stored ratios of Qwen3 and vLLM eager; leave --family and --floors out")
    for name, (default, readers) in _READ_BY.items():
        if (value := getattr(args, name)) != default and not set(readers) & set(args.subjects):
            flag, text = "--" + name.replace("_", "-"), ",".join(value) if isinstance(value, tuple) else repr(value)
            raise ValueError(f"{flag}={text}: is for {', '.join(readers)}; name one of these, or leave it out")
    if args.short:
        args.dtypes, args.floors = ("float32",), ("eager",)
    if args.against:
        quickstart_of(args.against)
    if args.subjects != ["generate"]:
        if args.family != _FAMILY:
            raise ValueError(f"--family={','.join(args.family)}: is for generate alone; name no other subject")
    for family in args.family:
        if args.size not in SHAPES[family]:
            raise ValueError(f"--family={family}: has no size {args.size}; use {', '.join(SHAPES[family])}")
    for name in _BATCH:
        value, flag = getattr(args, name), "--" + name.replace("_", "-")
        if value is None:
            continue
        if args.short or any(subject not in ("generate", "train") for subject in args.subjects):
            raise ValueError(f"{flag}={value}: is for generate and train without --short; name no other subject")
        if value < 1:
            raise ValueError(f"{flag}={value}: must be at least 1")
    if args.fixed_tokens is not None and args.fixed_tokens > LONGEST:
        raise ValueError(f"--fixed-tokens={args.fixed_tokens}: must be at most {LONGEST}, the longest completion")
    args.floors = args.floors or (("eager",) if platform.missing_compiler() else tuple(generation.FLOORS))
    args.repeats = args.repeats if args.repeats is not None else _SHORT_REPEATS if args.short else _REPEATS
    if args.repeats < 1:
        raise ValueError(f"--repeats={args.repeats}: must be at least 1")
    args.device = args.device or platform.device_type()


def _jobs(args: argparse.Namespace) -> Iterator[tuple[str, list[Workload]]]:
    """The subjects in the order of the command, with the workloads that are measured in turn. Those that run the
    quickstart have none."""
    for subject in dict.fromkeys(args.subjects):
        if subject in ("startup", "quickstart"):
            yield subject, []
            continue
        prompts = _SHORT_PROMPTS if args.short else max(scaling.NUM_GROUPS) if subject == "scale" else _PROMPTS
        batch = {"num_prompts": args.prompts or prompts}
        if args.group_size is not None:
            batch["group_size"] = args.group_size
        if args.fixed_tokens is not None:
            batch["fixed_tokens"] = args.fixed_tokens
        for dtype in args.dtypes:
            shapes = [SHAPES[family][args.size] for family in args.family]
            yield subject, [Workload(size=args.size, shape=shape, dtype=dtype, **batch) for shape in shapes]


def _floors(args: argparse.Namespace) -> list[str]:
    return [generation.FLOORS[floor] for floor in args.floors]


def _measured(
    subject: str, workloads: list[Workload], args: argparse.Namespace, note: Callable[[str], None]
) -> Sequence[Result]:
    job = " ".join([subject, *(f"{workload.size} {workload.dtype}" for workload in workloads[:1])])
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-", ignore_cleanup_errors=True) as scratch:
        return _SUBJECTS[subject](workloads, args, Path(scratch), lambda text: note(f"{job}: {text}"))


# What measures a subject: workloads, arguments of the command, a directory, and what tells how far it is -> results.


def _generate(workloads, args, scratch, note) -> Sequence[Result]:
    return generation.measure_generation(workloads, args.lengths, args.repeats, scratch, note, floors=_floors(args))


def _train(workloads, args, scratch, note) -> Sequence[Result]:
    lengths = SHORT_TRAINING if args.short else args.lengths
    return training.measure_training(
        workloads[0], lengths, args.repeats, scratch, note, compiled="compiled" in args.floors
    )


def _sync(workloads, args, scratch, note) -> Sequence[Result]:
    return syncing.measure_sync(workloads[0], args.repeats, scratch, note)


def _step(workloads, args, scratch, note) -> Sequence[Result]:
    return stepping.measure_steps(workloads[0], args.lengths, args.repeats, scratch, note, python=args.floor_python)


def _scale(workloads, args, scratch, note) -> Sequence[Result]:
    return [scaling.measure_scale(workloads[0], args.repeats, scratch, note)]


def _memory(workloads, args, scratch, note) -> Sequence[Result]:
    return [memory_use.measure_memory(workloads[0], args.repeats, scratch, note)]


def _startup(workloads, args, scratch, note) -> Sequence[Result]:
    return [measure_start(STARTUP, args.against, args.repeats, note)]


def _quickstart(workloads, args, scratch, note) -> Sequence[Result]:
    return [measure_start(WHOLE, args.against, args.repeats, note)]


_SUBJECTS: dict[str, Callable[..., Sequence[Result]]] = {
    "generate": _generate,
    "train": _train,
    "sync": _sync,
    "step": _step,
    "scale": _scale,
    "memory": _memory,
    "startup": _startup,
    "quickstart": _quickstart,
}


def _of(choices: tuple[Any, ...]) -> Callable[[str], tuple[Any, ...]]:
    """What reads a list of some of the choices, parted by commas."""

    def read(text: str) -> tuple[Any, ...]:
        items = tuple(dict.fromkeys(filter(None, text.split(","))))
        if not items or set(items) - set(choices):
            raise argparse.ArgumentTypeError(f"{text!r}: write some of {','.join(choices)}")
        return items

    return read
