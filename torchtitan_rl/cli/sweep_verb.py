"""The verb `sweep`: settings beside each other over seeds, as forks of one parent a seed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl.cli.controller_run import checked_backend
from torchtitan_rl.cli.verb_arguments import add_config, add_processes, configured
from torchtitan_rl.record.console.notices import say

if TYPE_CHECKING:
    from torchtitan_rl.tools.sweep.arms import Arm
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
    parser.add_argument("--output-dir", default="", metavar="DIR", help="of the sweep; default: runs/NAME-DATE-TIME")
    parser.add_argument("--keep-all", action="store_true", help="train every arm with every seed, stop none")
    parser.add_argument("--dry-run", action="store_true", help="validate everything, say what would run")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="N", help="of each run that is killed or fails")
    parser.add_argument("--no-reward-check", action="store_true", help="as for train")
    add_processes(parser)


def run(args: argparse.Namespace) -> int:
    from torchtitan_rl.config.derive import settled
    from torchtitan_rl.tools.sweep.arm_table import table_text
    from torchtitan_rl.tools.sweep.arms import arms_of, read_seeds
    from torchtitan_rl.tools.sweep.course import Interrupted, carry_out
    from torchtitan_rl.tools.sweep.sweep_plan import Plan, checkpoint_cadence, locked
    from torchtitan_rl.train.start import dated
    from torchtitan_rl.validation.run import validate

    config = configured(args)
    if any(word.split("=")[0] == "--seed" for word in args.overrides):
        raise ValueError("--seed: a sweep has a parent for each of its seeds; give them as --seeds")
    if args.max_restarts < 0:
        raise ValueError(f"--max-restarts={args.max_restarts}: must not be negative; use 0 for none")
    seeds, cadence = read_seeds(args.seeds), checkpoint_cadence(config, args.at)
    validate(config)
    checked_backend(args, settled(config), generators_only=False)
    directory = Path(args.output_dir or dated(f"{config.name}-sweep"))
    arms = arms_of(config, args.set)
    plan = Plan(directory=directory, config=config, arms=arms, seeds=seeds, at=args.at, keep_all=args.keep_all)
    plan.require_own()
    say(_summary(plan), event="sweep", to=sys.stdout)
    if args.dry_run:
        return 0
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output_dir={str(directory)!r}: cannot be made ({error.strerror}); choose another") from None
    with locked(directory):
        plan.write()
        try:
            table = carry_out(plan, *_commands(args, plan, cadence))
        except Interrupted as end:
            say(f"the sweep has ended with its run; go on with the same command and --output-dir {directory}",
                event="stopped", level="warning")  # fmt: skip
            return int(end.args[0])
    say(table_text(table, len(seeds)), event="table", to=sys.stdout)
    return 0


def _summary(plan: Plan) -> str:
    """The arms, and how many runs they are."""
    lines = [f"{plan.directory}: {len(plan.arms)} arms, {len(plan.seeds)} seeds, forked at step {plan.at}"]
    for arm in plan.arms:
        lines.append(f"  {arm.name}" + (" (the config as it is: the parents)" if arm.is_base else ""))
    if not any(arm.is_base for arm in plan.arms):
        lines.append(f"  no arm is the config as it is, so a parent ends at step {plan.at}")
    return "\n".join(lines)


def _commands(
    args: argparse.Namespace, plan: Plan, cadence: tuple[int, int]
) -> tuple[Callable[[int, bool], int], Callable[[Arm, int], int]]:
    """What trains a parent, and what trains a fork: `carry_out` has their arguments."""
    from torchtitan_rl.launch.liveness.restarts import run_with_restarts
    from torchtitan_rl.tools.sweep.course import log_file

    common = ["--quiet", "--resume", "auto", "--backend", args.backend]
    common += ["--hosts", ",".join(args.hosts)] if args.hosts else []
    common += ["--no-reward-check"] if args.no_reward_check else []

    def start(verb: str, arguments: list[str], directory: Path) -> int:
        log = log_file(directory)
        log.parent.mkdir(exist_ok=True)
        with log.open("a", encoding="utf-8") as output:
            arguments = [*arguments, *common, "--output-dir", str(directory)]
            return run_with_restarts(verb, arguments, args.max_restarts, directory, output)

    def train_parent(seed: int, whole: bool) -> int:
        every, keep_every = cadence
        arguments = [args.config, *args.overrides, "--seed", str(seed)]
        arguments += ["--controller.checkpoint-every", str(every)]
        if plan.config.controller.keep_last != -1:
            arguments += ["--controller.keep-every", str(keep_every)]
        arguments += [] if whole else ["--until", str(plan.at)]
        return start("train", arguments, plan.parent(seed))

    def train_fork(arm: Arm, seed: int) -> int:
        arguments = [str(plan.parent(seed)), "--at", str(plan.at), "--config", args.config]
        arguments += ["--name", f"{plan.config.name} {arm.name}"]
        arguments += [word for setting in arm.settings for word in ("--set", setting)]
        return start("fork", arguments, plan.run(arm, seed))

    return train_parent, train_fork
