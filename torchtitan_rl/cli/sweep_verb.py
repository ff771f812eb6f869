"""The verb `sweep`: settings beside each other over seeds, as forks of one parent a seed."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from torchtitan_rl.cli.controller_run import checked_backend
from torchtitan_rl.cli.verb_arguments import add_config, add_max_restarts, add_processes, configured
from torchtitan_rl.launch.slurm import STOP_BEFORE_S, add_job_options
from torchtitan_rl.record.console.notices import say

if TYPE_CHECKING:
    from torchtitan_rl.config.run import RunConfig
    from torchtitan_rl.launch.liveness.restarts import Outcome
    from torchtitan_rl.tools.sweep.arms import Arm
    from torchtitan_rl.tools.sweep.course import TrainFork, TrainParent
    from torchtitan_rl.tools.sweep.sweep_plan import Plan

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--set",
        action="append",
        required=True,
        metavar="PATH=A,B",
        help="a field and its values; repeated: every combination",
    )
    parser.add_argument("--seeds", required=True, metavar="0..4", help="one parent is trained for each; or 0,3,7")
    parser.add_argument(
        "--at", type=int, default=0, metavar="STEP", help="fork the parents here; default: 0, after the warm start"
    )
    parser.add_argument(
        "--output-dir",
        default="",
        metavar="DIR",
        help="of the sweep, by which it can go on; default: runs/NAME-sweep-DATE-TIME",
    )
    parser.add_argument(
        "--only-seeds",
        default="",
        metavar="2..3",
        help="train these of the seeds; other processes with the same directory train the others",
    )
    parser.add_argument("--keep-all", action="store_true", help="train every arm with every seed, stop none")
    parser.add_argument("--dry-run", action="store_true", help="validate everything, say what would run")
    add_max_restarts(parser, 0, "of each run that is killed or fails")
    parser.add_argument("--no-reward-check", action="store_true", help="as for train")
    add_processes(parser)
    parser.add_argument(
        "--slurm",
        action="store_true",
        help="submit an array of Slurm jobs, each of which trains one seed on a node; with --dry-run it is printed",
    )
    parser.add_argument(
        "--at-once", type=int, default=0, metavar="N", help="jobs of the array that run together; 0: all"
    )
    add_job_options(parser)


def run(args: argparse.Namespace) -> int:
    from torchtitan_rl.tools.sweep.arm_table import table_text
    from torchtitan_rl.tools.sweep.course import Interrupted, carry_out
    from torchtitan_rl.tools.sweep.sweep_plan import checkpoint_cadence, locked

    plan, seeds = _checked(args)
    say(_summary(plan), event="sweep", to=sys.stderr if args.slurm else sys.stdout)
    if args.slurm:
        return _submit(args, plan)
    if args.dry_run:
        return 0
    _make_directory(plan)
    commands = _commands(args, plan, checkpoint_cadence(plan.config, plan.at))
    try:
        with locked(plan.directory, seeds), _sigterm_between_runs():
            table = carry_out(plan, seeds, *commands)
    except Interrupted as end:
        place = shlex.quote(str(plan.directory))
        line = f"the sweep has ended with its run; go on with the same command and --output-dir {place}"
        say(line, event="stopped", level="warning")
        return int(end.args[0])
    say(table_text(table, len(plan.seeds), keep_all=plan.keep_all), event="table", to=sys.stdout)
    return 0


@contextmanager
def _sigterm_between_runs() -> Iterator[None]:
    """SIGTERM ends the sweep as one ends that a run has had: it can go on. While a run trains, its supervisor has the
    signal, and the sweep ends after it."""
    from torchtitan_rl.tools.sweep.course import Interrupted
    from torchtitan_rl.types.ends import PREEMPTED_STATUS

    def end(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted(PREEMPTED_STATUS)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _checked(args: argparse.Namespace) -> tuple[Plan, list[int]]:
    """The sweep that the arguments ask for, and the seeds that this process trains. Raises ValueError for what cannot
    be."""
    from torchtitan_rl.config.derive import settled
    from torchtitan_rl.launch.inventory import assumed_host, check_fits
    from torchtitan_rl.tools.sweep.arms import arms_of, read_seeds
    from torchtitan_rl.tools.sweep.sweep_plan import Plan, checkpoint_cadence
    from torchtitan_rl.train.start import dated
    from torchtitan_rl.validation.run import validate

    config = configured(args)
    if any(word.split("=")[0] == "--seed" for word in args.overrides):
        raise ValueError("--seed: a sweep has a parent for each of its seeds; give them as --seeds")
    job_options = {"at_once": 0, "gpus_per_host": 0, "time_limit": "", "partition": "", "account": ""}
    job_options["stop_before"] = STOP_BEFORE_S
    changed = (name for name, default in job_options.items() if getattr(args, name) != default)
    if not args.slurm and (wrong := next(changed, "")):
        raise ValueError(
            f"--{wrong.replace('_', '-')}={getattr(args, wrong)}: is for jobs of Slurm; add --slurm, or leave it out"
        )
    seeds = read_seeds(args.seeds)
    own = read_seeds(args.only_seeds, "--only-seeds") if args.only_seeds else seeds
    if unknown := sorted(set(own) - set(seeds)):
        raise ValueError(
            f"--only-seeds={args.only_seeds}: {unknown[0]} is no seed of --seeds={args.seeds}; use some of them"
        )
    checkpoint_cadence(config, args.at)
    validate(config)
    checked_backend(args, settled(config), generators_only=False)
    directory = Path(args.output_dir or dated(f"{config.name}-sweep"))

    def check_arm(arm_config: RunConfig) -> None:
        checked_backend(args, arm_config, generators_only=False)
        if args.slurm and args.backend == "actors":
            check_fits(arm_config, [assumed_host(0, args.gpus_per_host)])

    arms = arms_of(config, args.set, check=check_arm)
    plan = Plan(directory=directory, config=config, arms=arms, seeds=seeds, at=args.at, keep_all=args.keep_all)
    plan.require_own()
    return plan, own


def _make_directory(plan: Plan) -> None:
    try:
        plan.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"output_dir={str(plan.directory)!r}: cannot be made ({error.strerror}); choose another"
        ) from None
    plan.write()


def _submit(args: argparse.Namespace, plan: Plan) -> int:
    """Submits the array, or prints its batch script with --dry-run. Returns an exit status."""
    from torchtitan_rl.config.derive import settled
    from torchtitan_rl.launch.inventory import assumed_host, check_fits
    from torchtitan_rl.launch.slurm import SlurmJob, array_script, check_tools, submit

    if args.hosts or args.only_seeds:
        wrong = f"--hosts={','.join(args.hosts)}" if args.hosts else f"--only-seeds={args.only_seeds}"
        raise ValueError(f"{wrong}: is chosen for each job of the array; leave it out, or leave --slurm out")
    if args.at_once < 0:
        raise ValueError(f"--at-once={args.at_once}: must not be negative; use 0 for all jobs together")
    if args.backend == "actors":
        check_fits(settled(plan.config), [assumed_host(0, args.gpus_per_host)])
    job = SlurmJob(
        name=plan.directory.name,
        num_hosts=1,
        directory=plan.directory,
        gpus_per_host=args.gpus_per_host,
        time_limit=args.time_limit,
        stop_before_s=args.stop_before,
        partition=args.partition,
        account=args.account,
        num_tasks=len(plan.seeds),
        num_at_once=args.at_once,
    )
    text = array_script(job, _arguments(args, plan), plan.seeds)
    if args.dry_run:
        print(text)
        return 0
    check_tools()
    _make_directory(plan)
    number = submit(job, text)
    print(
        f"job {number}: submitted, {len(plan.seeds)} jobs; their output goes to {plan.directory}/slurm-{number}_*.txt, "
        f"the table to {plan.directory}/table.md; scancel {number} ends them"
    )
    return 0


def _arguments(args: argparse.Namespace, plan: Plan) -> list[str]:
    """The arguments of this sweep, for a job that trains some of its seeds."""
    arguments = [args.config, *args.overrides, "--seeds", args.seeds, "--at", str(args.at)]
    arguments += [word for choice in args.set for word in ("--set", choice)]
    arguments += ["--output-dir", str(plan.directory), "--backend", args.backend]
    arguments += ["--max-restarts", str(args.max_restarts)]
    arguments += ["--keep-all"] if args.keep_all else []
    return arguments + (["--no-reward-check"] if args.no_reward_check else [])


def _summary(plan: Plan) -> str:
    """The arms, and how many runs they are."""
    lines = [f"{plan.directory}: {len(plan.arms)} arms, {len(plan.seeds)} seeds, forked at step {plan.at}"]
    for arm in plan.arms:
        lines.append(f"  {arm.name}" + (" (the config as it is: the parents)" if arm.is_base else ""))
    if not any(arm.is_base for arm in plan.arms):
        lines.append(f"  no arm is the config as it is, so a parent ends at step {plan.at}")
    return "\n".join(lines)


def _commands(args: argparse.Namespace, plan: Plan, cadence: tuple[int, int]) -> tuple[TrainParent, TrainFork]:
    """What trains a parent, and what trains a fork: `carry_out` has their arguments."""
    from torchtitan_rl.config.python_file import loaded_files
    from torchtitan_rl.launch.liveness.restarts import supervised
    from torchtitan_rl.tools.sweep.course import log_file

    common = ["--quiet", "--resume", "auto", "--backend", args.backend]
    common += ["--hosts", ",".join(args.hosts)] if args.hosts else []
    common += ["--no-reward-check"] if args.no_reward_check else []

    def start(verb: str, arguments: list[str], directory: Path) -> Outcome:
        log = log_file(directory)
        log.parent.mkdir(exist_ok=True)
        with log.open("a", encoding="utf-8") as output:
            arguments = [*arguments, *common, "--output-dir", str(directory)]
            return supervised(verb, arguments, args.max_restarts, directory, output)

    def train_parent(seed: int, whole: bool) -> Outcome:
        every, keep_every = cadence
        arguments = [args.config, *args.overrides, "--seed", str(seed)]
        arguments += ["--controller.checkpoint-every", str(every)]
        if plan.config.controller.keep_last != -1:
            arguments += ["--controller.keep-every", str(keep_every)]
        arguments += [] if whole else ["--until", str(plan.at)]
        return start("train", arguments, plan.parent(seed))

    def train_fork(arm: Arm, seed: int) -> Outcome:
        arguments = [str(plan.parent(seed)), "--at", str(plan.at)]
        arguments += [word for file in loaded_files() for word in ("--config", file)]  # also those of overrides
        arguments += ["--name", f"{plan.config.name} {arm.name}"]
        arguments += [word for setting in arm.settings for word in ("--set", setting)]
        return start("fork", arguments, plan.run(arm, seed))

    return train_parent, train_fork
