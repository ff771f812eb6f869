"""The verb `replay`: takes the steps of a recorded run again, by its schedule, into a new directory."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torchtitan_rl.cli import exit_status
from torchtitan_rl.cli.controller_run import checked_backend, run_controller

if TYPE_CHECKING:
    from torchtitan_rl.config.run import RunConfig
    from torchtitan_rl.launch.attach import Hosts
    from torchtitan_rl.train.controller import Controller
    from torchtitan_rl.train.influence import Influence
    from torchtitan_rl.train.recorded_attempt import RecordedAttempt

__all__ = ["add_arguments", "run"]

_SHOWN = 5
"""Batches at either end of the order by influence that are printed."""

_NAMES = {"device": "device", "processor": "processor", "cores": "cores", "torch": "torch", "vllm": "vLLM"}
"""Of an environment, what the numbers of a run depend on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run directory with a schedule")
    parser.add_argument(
        "--from", dest="first", type=int, metavar="STEP", help="a step with a checkpoint; default: where the run began"
    )
    parser.add_argument("--to", dest="last", type=int, metavar="STEP", help="the last step; default: the run's")
    parser.add_argument("--verify", action="store_true", help="compare with the record and name the first difference")
    parser.add_argument(
        "--influence",
        action="store_true",
        help="say which batches taught what the batches around them teach, and which undid it",
    )
    parser.add_argument(
        "--window", type=int, default=3, metavar="N", help="batches on either side that it is measured by (default: 3)"
    )
    parser.add_argument("--elsewhere", action="store_true", help="although versions, processor or cores differ")
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="a file with functions of the run"
    )
    parser.add_argument("--output-dir", default="", help="default: runs/replay-NAME-DATE-TIME")
    parser.add_argument(
        "--backend",
        choices=["actors", "local"],
        default="actors",
        help="actors: processes of their own; local: all in this one, for a debugger",
    )


def run(args: argparse.Namespace) -> int:
    from torchtitan_rl.config.load import load_functions
    from torchtitan_rl.train.recorded_attempt import recorded_attempt

    if args.window < 1:
        raise ValueError(f"--window={args.window}: is no number of batches; use at least 1")
    recorded = recorded_attempt(Path(args.run), first=args.first, last=args.last)
    if not args.elsewhere:
        _check_environment(recorded)
    for file in args.config:
        load_functions(file)  # under the name that config.json has
    config = _config(recorded, args.output_dir)
    args.hosts = []
    checked_backend(args, config, generators_only=False)
    return exit_status.end_with(_replay(args, config, recorded))


def _check_environment(recorded: RecordedAttempt) -> None:
    """Raises ValueError for a machine on which numbers are rounded otherwise than on that of the run."""
    from torchtitan_rl.record.schedule import environment

    before = recorded.environment
    now = environment("", shares_cores=False)
    differ = [
        f"{word} {before.get(name)!r}, here {now[name]!r}"
        for name, word in _NAMES.items()
        if before.get(name) != now[name]
    ]
    if differ:
        raise ValueError(
            f"run={str(recorded.run)!r}: ran with {'; '.join(differ)}: numbers are rounded otherwise here; replay it "
            "where it ran, or with --elsewhere to see where it parts"
        )


def _config(recorded: RecordedAttempt, output_dir: str) -> RunConfig:
    """The run's config, with as many threads as its processes had and with no cadence of the clock's."""
    from torchtitan_rl.config.recorded import recorded_config
    from torchtitan_rl.launch.threads import side_by_side
    from torchtitan_rl.train.recorded_attempt import check_company
    from torchtitan_rl.train.start import dated
    from torchtitan_rl.validation.run import validate

    try:
        written = json.loads((recorded.run / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"run={str(recorded.run)!r}: its config.json cannot be read ({error})") from error
    config, _ = recorded_config(written, f"run={str(recorded.run)!r}: its config.json")
    config.output_dir = output_dir or dated(f"replay-{config.name}")
    config.controller.checkpoint_every, config.controller.max_hours = 0, 0.0
    config.controller.keep_every, config.controller.keep_best = 0, ""  # no checkpoint is written
    config.record.diagnose, config.record.schedule = False, True
    if config.algorithm.max_policy_lag and recorded.environment.get("shares_cores"):
        config = side_by_side(config)
    # Replica i follows engine i, also one that was lost or that took a lost one's place; none is lost again or joins.
    generator = dataclasses.replace(
        config.generator, num_replicas=recorded.num_engines, max_replicas=None, num_spares=0
    )
    config = dataclasses.replace(config, generator=generator)
    validate(config)
    if recorded.served is not None:
        check_company(config, recorded.first)
    return config


async def _replay(args: argparse.Namespace, config: RunConfig, recorded: RecordedAttempt) -> int:
    from torchtitan_rl.record.console.progress import Progress
    from torchtitan_rl.record.recorder import Listener, Metrics
    from torchtitan_rl.train.controller import Controller
    from torchtitan_rl.train.influence import WeighedBatches, write_influences
    from torchtitan_rl.types.ends import Preempted

    class StopAt(Listener):
        """Asks the run to stop after the last step of the replay."""

        def __init__(self, controller: Controller) -> None:
            self._stop = controller.stop

        def metrics(self, event: Metrics) -> None:
            if event.line["phase"] == "reinforcement" and event.line["step"] >= recorded.last:
                self._stop.ask(f"the replay ends after step {recorded.last}")

    async def body(controller: Controller) -> None:
        controller.recorder.listeners.append(StopAt(controller))
        weighed: WeighedBatches | None = None
        if args.influence:
            weighed = WeighedBatches(
                controller.batches,
                controller.trainer,
                lambda: controller.state.step,
                lambda: controller.state.policy_version,
                window=args.window,
                beta1=config.trainer.optimizer.betas[0],
            )
            controller.batches = weighed
        try:
            await controller.train()
        except Preempted:
            pass
        args.replayed = controller.run_dir
        if weighed is not None:
            influences = await weighed.influences()
            file = controller.run_dir.path / "influence.jsonl"
            write_influences(file, influences)
            print(*_influence_lines(influences), f"all of them: {file}", sep="\n")

    async def start(*, hosts: Hosts | None, backend: Literal["actors", "local"]) -> Controller:
        if backend == "actors":
            hosts = _host_of_engines(config)
        progress = Progress(quiet=args.quiet)
        return await Controller.launch(config, progress=progress, recorded=recorded, hosts=hosts, backend=backend)

    status = await run_controller(args, start, body, config.output_dir)
    if status or not args.verify:
        return status
    return await asyncio.to_thread(_verified, args, recorded)


def _host_of_engines(config: RunConfig) -> Hosts:
    """This machine, with room for all engines of the record. Those that had ended, or had yet to begin, stand still, so
    they take memory and no cores."""
    from torchtitan_rl.launch.attach import this_host

    hosts = this_host()
    ranks = config.generator.num_replicas * config.generator.tensor_parallel_degree
    for host in hosts.hosts:
        host.ranks_per_core = max(host.ranks_per_core, -(-ranks // host.num_cores))
    return hosts


def _influence_lines(influences: list[Influence]) -> list[str]:
    """The batches that stand out most, those that harmed first."""
    lines = [
        "batches by influence: step, cosine of its gradient with those around it, standard deviations from the usual"
    ]
    in_order = sorted(influences, key=lambda influence: influence.deviations)
    shown = in_order if len(in_order) <= 2 * _SHOWN else in_order[:_SHOWN] + in_order[-_SHOWN:]
    return lines + [f"{of.step:6d} {of.alignment:+8.4f} {of.deviations:+7.1f}" for of in shown]


def _verified(args: argparse.Namespace, recorded: RecordedAttempt) -> int:
    """Prints the first difference. Returns 1 where there is one."""
    from torchtitan_rl.record.run_dir import RunDir
    from torchtitan_rl.tools.replay_differences import compared, first_replay_difference

    steps = {"first": recorded.first, "last": recorded.last}
    difference = first_replay_difference(RunDir(recorded.run), recorded.number, args.replayed, **steps)
    if difference is not None:
        print(f"differs: {difference}")
        return 1
    print(f"the same: {compared(args.replayed, **steps)}")
    return 0
