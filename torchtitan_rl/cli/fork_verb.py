"""The verb `fork`: a run that goes on from another run's checkpoint with other settings, in a directory of its own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchtitan_rl.cli.train import add_run_arguments, train
from torchtitan_rl.record.console.notices import say

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the directory of the run to fork; nothing is written there")
    parser.add_argument("--at", type=int, required=True, metavar="STEP", help="a step with a checkpoint")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="a field with another value; may be repeated"
    )
    parser.add_argument("--name", default="", help="of the new run; default: the run's name and the step")
    parser.add_argument("--output-dir", default="", metavar="DIR", help="default: runs/NAME-DATE-TIME")
    parser.add_argument("--new-draws", action="store_true", help="draw other tasks from there on: --set seed=N")
    parser.add_argument(
        "--config",
        dest="functions",
        action="append",
        default=[],
        metavar="FILE",
        help="a file with functions of the run; may be repeated",
    )
    parser.add_argument(
        "--resume",
        choices=["auto", "latest"],
        default="",
        help="go on with the fork that --output-dir holds, else begin; latest: also where it ended for good",
    )
    add_run_arguments(parser)
    parser.set_defaults(until=None)


def run(args: argparse.Namespace) -> int:
    from torchtitan_rl.launch.liveness.restarts import attempt, leave_outcome

    if args.outcome is None:
        return _fork(args, restarted=False)
    try:
        return _fork(args, restarted=attempt(args.outcome) > 0)
    except ValueError:  # a mistake, which no restart mends
        leave_outcome(args.outcome, 1, final=True)
        raise


def _fork(args: argparse.Namespace, *, restarted: bool) -> int:
    from torchtitan_rl.config.load import load_functions
    from torchtitan_rl.train.fork import existing_fork, make_fork, plan_fork
    from torchtitan_rl.train.start import output_path

    for file in args.functions:
        load_functions(file)
    args.config = args.functions[0] if args.functions else None  # what hosts compare
    if args.resume and not args.output_dir:
        raise ValueError(f"--resume={args.resume}: needs the fork's directory; give it as --output-dir")
    if args.resume or args.outcome is not None:
        fork_config = existing_fork(Path(args.output_dir), Path(args.run), args.at, args.set)
        if fork_config is not None:
            args.resume = "auto" if restarted else args.resume or "auto"
            fork_config.output_dir = args.output_dir
            return train(args, fork_config)
    args.resume = "latest"  # of a fork that has just been made: its only checkpoint
    config, point = plan_fork(
        Path(args.run), args.at, args.set, name=args.name, output_dir=args.output_dir, new_draws=args.new_draws
    )
    config.output_dir = str(output_path(config, absolute=False))
    say(point.summary(), event="fork", to=sys.stdout)
    return train(args, config, prepare=lambda: make_fork(config, point))
