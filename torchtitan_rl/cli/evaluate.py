"""The verb `eval`: the accuracy of a checkpoint on a split, and on the config's evaluation sets."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl.cli import exit_status
from torchtitan_rl.cli.controller_run import checked_backend, run_controller
from torchtitan_rl.cli.verb_arguments import add_checkpoint, add_config, add_processes, configured

if TYPE_CHECKING:
    from torchtitan_rl.config.run import RunConfig
    from torchtitan_rl.train.controller import Controller

__all__ = ["add_arguments", "evaluate", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_processes(parser)
    add_checkpoint(parser)
    parser.add_argument("--split", default="validation", choices=["train", "validation", "test"], help="of the task")
    parser.add_argument("--num-tasks", type=int, help="the first so many of the split; default: the config's")
    parser.add_argument(
        "--pass-rates", metavar="FILE", help="write how often each task was passed, which tasks.pass_rate_filter reads"
    )


def run(args: argparse.Namespace) -> int:
    from torchtitan_rl.config.derive import settled
    from torchtitan_rl.validation.run import validate

    config = configured(args)
    validate(config)
    config = settled(config)
    checked_backend(args, config, generators_only=True)
    return exit_status.end_with(evaluate(args, config))


async def evaluate(args: argparse.Namespace, config: RunConfig) -> int:
    """Prints the accuracies of a checkpoint. Returns the exit status."""
    from torchtitan_rl.record.console.progress import Progress
    from torchtitan_rl.tasks.pass_rate_filter import write_pass_rates
    from torchtitan_rl.train.controller import Controller
    from torchtitan_rl.train.start import dated
    from torchtitan_rl.weights.checkpoint import hf_weights
    from torchtitan_rl.weights.origin import origin

    weights, source = hf_weights(Path(args.checkpoint)), origin(Path(args.checkpoint))
    config.output_dir, prefix = config.output_dir or dated(f"eval-{config.name}"), source.text and f"{source.text}: "
    if args.num_tasks is not None and args.num_tasks < 1:
        raise ValueError(f"--num-tasks={args.num_tasks}: must be at least 1")
    if args.pass_rates is not None:
        file = Path(args.pass_rates).absolute()
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ValueError(f"--pass-rates={args.pass_rates}: cannot be written; give a file in a directory that can")

    async def body(controller: Controller) -> None:
        controller.state.step = source.step or 0
        result = await controller.evaluate(args.split, num_tasks=args.num_tasks, pass_at_k=config.controller.pass_at_k)
        print(f"{prefix}{args.split} accuracy {result.accuracy:.4f}{result.failed_text()}")
        if args.pass_rates is not None:
            write_pass_rates(args.pass_rates, result.pass_rates)
        for name, result in (await controller.evaluate_sets()).items():
            print(f"{prefix}{name} {result.split} accuracy {result.accuracy:.4f}{result.failed_text()}")

    return await run_controller(
        args,
        partial(Controller.launch, config, progress=Progress(quiet=args.quiet), hf_weights=weights),
        body,
        config.output_dir,
    )
