"""The verb `train`: warm start, reinforcement, evaluation, checkpoints."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl.cli import exit_status
from torchtitan_rl.cli.controller_run import checked_backend, run_controller
from torchtitan_rl.cli.verb_arguments import (
    add_address,
    add_config,
    add_processes,
    add_restarts,
    address,
    configured,
    without_restarts,
)
from torchtitan_rl.record.console.notices import say

if TYPE_CHECKING:
    from torchtitan_rl.config.run import RunConfig
    from torchtitan_rl.launch.backend import Backend

__all__ = ["add_arguments", "add_run_arguments", "run", "train"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--resume",
        default="",
        metavar="latest|auto|DIR",
        help="go on from the newest checkpoint in --output-dir (auto: or begin), or from a run or checkpoint",
    )
    parser.add_argument(
        "--until",
        type=int,
        metavar="STEP",
        help="write a checkpoint after this step of reinforcement and end with status 75, to be forked or resumed",
    )
    add_run_arguments(parser)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """What every verb takes that trains: how its run is started and looked at."""
    add_restarts(parser, 0, "begin again from the newest checkpoint, at most N times, when the run is killed or fails")
    parser.add_argument("--dry-run", action="store_true", help="validate everything, start nothing")
    parser.add_argument(
        "--no-reward-check",
        action="store_true",
        help="do not call the reward on two made-up completions first, as for one that costs money",
    )
    parser.add_argument("--profile", metavar="STEPS", help="torch.profiler's traces, such as 3,5-6")
    parser.add_argument("--serve", type=int, metavar="PORT", help="serve the run's newest version meanwhile")
    add_address(parser, "serve-")
    add_processes(parser)
    parser.add_argument("--json-logs", action="store_true", help="every line of the console is a JSON object")


def run(args: argparse.Namespace) -> int:
    from torchtitan_rl.launch.liveness.restarts import attempt, leave_outcome

    if args.outcome is None:
        return train(args, configured(args))
    if attempt(args.outcome):
        args.resume = "auto"
    try:
        return train(args, configured(args))
    except ValueError:  # a mistake, which under torchrun nobody has looked for before
        leave_outcome(args.outcome, 1, final=True)
        raise


def train(args: argparse.Namespace, config: RunConfig, prepare: Callable[[], object] | None = None) -> int:
    """Checks a config and trains. `prepare` is called once everything is checked, and not in a dry run."""
    from torchtitan_rl.config.derive import settled
    from torchtitan_rl.config.record import steps_of
    from torchtitan_rl.launch.liveness.restarts import leave_outcome
    from torchtitan_rl.validation.run import advice, validate

    if args.profile is not None:
        config.record.profile.steps = steps_of(args.profile)
    validate(config)
    config.controller.check_reward &= not args.no_reward_check
    for line in advice(config):
        say(f"warning: {line}", event="advice", level="warning")
    for line in _uncertified(config):
        say(f"info: {line}", event="certificate")
    _check_until(args.until, config)
    config = settled(config)
    backend = checked_backend(args, config, generators_only=False)
    if (served_at := address(args, args.serve, args.serve_host)) is not None:
        served_at.check("--serve-host")
    if args.dry_run:
        if prepare is None:
            _check_directory(args, config)
        return _dry_run(args, config, backend)
    if prepare is not None:
        prepare()
    if args.max_restarts:
        return _train_with_restarts(args, config)
    if args.outcome is None:
        return exit_status.end_with(_train(args, config))
    return exit_status.end_with(_train(args, config), lambda code: leave_outcome(args.outcome, code, final=args.final))


def _check_until(until: int | None, config: RunConfig) -> None:
    """Raises ValueError for a step of `--until` after which the run makes no checkpoint before its end."""
    if until is None:
        return
    num_steps, per_batch = config.controller.num_steps, config.algorithm.steps_per_batch
    if not 0 <= until < num_steps or until % per_batch:
        multiples = "" if per_batch == 1 else f", a multiple of the {per_batch} steps of a batch"
        raise ValueError(
            f"--until={until}: must be from 0 to below controller.num_steps={num_steps}{multiples}; use such a step, "
            "or leave it out"
        )


def _uncertified(config: RunConfig) -> list[str]:
    """What to say of the model directories that the config names: nothing is certified of a model whose sizes are not
    those of its directory."""
    from torchtitan_rl.model.files import BUILTIN_ASSETS
    from torchtitan_rl.tools.certify.certificate import missing_certificate

    models = [model for _, model in config.trainers().values()]
    own = [model for model in models if model.assets not in BUILTIN_ASSETS and model.shape is None and not model.flavor]
    lines = [missing_certificate(Path(model.assets).expanduser()) for model in own]
    return sorted(set(filter(None, lines)))


def _check_directory(args: argparse.Namespace, config: RunConfig) -> None:
    """Raises ValueError where the run's directory has nothing to go on from, or has a run and is to have a new one."""
    from torchtitan_rl.record.run_dir import require_unused
    from torchtitan_rl.train.resume import find

    begins = not args.resume or find(config, args.resume) is None
    if begins and config.output_dir:
        require_unused(Path(config.output_dir))


def _dry_run(args: argparse.Namespace, config: RunConfig, backend: Backend) -> int:
    """Says whether a valid config can run on this machine. Starts nothing."""
    from torchtitan_rl.launch.addresses import split
    from torchtitan_rl.launch.inventory import check_fits, local_host
    from torchtitan_rl.launch.preflight import busy_problem, host_problem, memory_problem
    from torchtitan_rl.train.evaluation import look_at_data
    from torchtitan_rl.validation.rewards import check_reward

    for worker in args.hosts:
        if worker != "job":
            split(worker)  # refuses what is no address
    # A dry run connects to no other host: it takes each host to be like this machine.
    hosts = [local_host(worker) for worker in args.hosts] or [local_host()]
    check_fits(config, hosts)
    if problem := memory_problem(config, hosts):
        raise ValueError(problem)
    family, unread = look_at_data(config)
    if not unread:
        asyncio.run(check_reward(config, family))
    say(f"{args.config or args.run}: valid; nothing was started", event="valid", to=sys.stdout)
    # Problems of this machine now, not of the config: a dry run only reports them.
    for missing in (backend.missing_weights(config), host_problem(hosts[0]), busy_problem(config, hosts), unread):
        if missing:
            say(f"still needed: {missing}", event="needed", level="warning", to=sys.stdout)
    return 0


def _train_with_restarts(args: argparse.Namespace, config: RunConfig) -> int:
    """The verb under `launch.liveness.restarts`."""
    from torchtitan_rl.launch.liveness.restarts import run_with_restarts
    from torchtitan_rl.train.resume import place
    from torchtitan_rl.train.start import output_path

    arguments, directory = without_restarts(args.argv[args.argv.index(args.verb) + 1 :]), config.output_dir
    if not directory:
        directory = str(place(config, args.resume)[0] if args.resume else output_path(config, absolute=False))
    arguments += ["--output-dir", directory]  # the same one for every attempt
    return run_with_restarts(args.verb, arguments, args.max_restarts, directory)


async def _train(args: argparse.Namespace, config: RunConfig) -> int:
    from torchtitan_rl.cli.summary import summary_rows
    from torchtitan_rl.launch.demand import scaled_by_demand
    from torchtitan_rl.launch.liveness.watchdog import alive
    from torchtitan_rl.launch.on_request import scaled_on_request
    from torchtitan_rl.record.console.json_progress import JsonProgress
    from torchtitan_rl.record.console.progress import Progress
    from torchtitan_rl.record.plot import plot_curve
    from torchtitan_rl.serve.run_gateway import serving
    from torchtitan_rl.train.controller import Controller

    progress = (JsonProgress if args.json_logs else Progress)(quiet=args.quiet)
    served_at = address(args, args.serve, args.serve_host)

    async def body(controller: Controller) -> None:
        scaled = scaled_on_request(controller.replicas, controller.joined_hosts, controller.run_dir.path)
        followed = scaled_by_demand(controller.replicas, controller.generator, config.generator)
        async with scaled, followed, serving(controller, served_at, quiet=args.quiet):
            report = await controller.train(until=args.until)
        curve = controller.run_dir.path / "curve.png"
        plot_curve(controller.run_dir.read_metrics(), curve)
        progress.final_table(summary_rows(controller, report, curve))

    with alive(config.controller.hang_timeout_s):
        return await run_controller(
            args,
            partial(Controller.launch, config, progress=progress, resume_from=args.resume),
            body,
            config.output_dir,
        )
