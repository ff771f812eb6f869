"""What the verbs of the command do that start processes or read checkpoints."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torchtitan_rl.environment import let_garbage_wait
from torchtitan_rl.record.console import is_json, say
from torchtitan_rl.record.disk import disk_problem
from torchtitan_rl.record.json_filter import filter_stderr
from torchtitan_rl.record.status import note_end
from torchtitan_rl.record.user_code import told

__all__ = [
    "ended",
    "fail",
    "dry_run",
    "train",
    "train_with_restarts",
    "evaluate",
    "audit",
    "export",
    "sample",
    "address",
    "without_restarts",
]

_ATTACH_S = 60.0


def ended(main_coroutine, status: Callable[[int], int] = int) -> int:
    """Runs a coroutine to its end; Ctrl-C gives exit status 130. Ends this process at once, with `status(code)`."""
    if is_json():
        filter_stderr()
    try:
        code = asyncio.run(main_coroutine)
    except KeyboardInterrupt:
        code = 130
    code = status(code)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of Monarch, or of a reward that hangs, must not keep a finished run alive.
    os._exit(code)


def fail(message: str) -> int:
    """Prints an error, at most three lines. Returns the exit status."""
    lines = message.strip().splitlines()[:3] or ["unknown"]
    say("\n".join(["error: " + lines[0], *lines[1:]]), event="error", level="error")
    return 1


def dry_run(args: argparse.Namespace, config) -> int:
    """Says whether a valid config can run on this machine. Starts nothing."""
    from torchtitan_rl.launch.inventory import check_fits, local_host
    from torchtitan_rl.launch.preflight import busy_problem, host_problem, memory_problem
    from torchtitan_rl.train.evaluation import look_at_data
    from torchtitan_rl.validation.rewards import check_reward
    from torchtitan_rl.validation.run import missing_weights

    # A dry run connects to no other host: it takes each host to be like this machine.
    hosts = [local_host(worker) for worker in args.hosts] or [local_host()]
    check_fits(config, hosts)
    if problem := memory_problem(config, hosts):
        raise ValueError(problem)
    family, unread = look_at_data(config)
    if not unread:
        asyncio.run(check_reward(config, family))
    say(f"{args.config}: valid; nothing was started", event="valid", to=sys.stdout)
    # Problems of this machine now, not of the config: a dry run only reports them.
    for missing in (missing_weights(config), host_problem(hosts[0]), busy_problem(config, hosts), unread):
        if missing:
            say(f"still needed: {missing}", event="needed", level="warning", to=sys.stdout)
    return 0


def train_with_restarts(args: argparse.Namespace, config, argv: list[str]) -> int:
    """`train` under `launch.restarts`; `argv` are the arguments of the command."""
    from torchtitan_rl.launch.restarts import run_with_restarts
    from torchtitan_rl.train.resume import place
    from torchtitan_rl.train.start import output_path

    if args.max_restarts < 0:
        raise ValueError(f"--max-restarts={args.max_restarts}: must not be negative; use 0 for none")
    arguments, directory = without_restarts(argv[argv.index("train") + 1 :]), config.output_dir
    if not directory:  # the same one for every attempt
        directory = str(place(config, args.resume)[0] if args.resume else output_path(config, absolute=False))
        arguments += ["--output-dir", directory]
    return run_with_restarts("train", arguments, args.max_restarts, directory)


def without_restarts(arguments: list[str]) -> list[str]:
    """The arguments without `--max-restarts N`."""
    at = next((i for i, argument in enumerate(arguments) if argument.startswith("--max-restarts")), len(arguments))
    return arguments[:at] + arguments[at + (1 if "=" in "".join(arguments[at : at + 1]) else 2) :]


async def _guarded(args, start, body, directory: str) -> int:
    """Starts a controller on `args.hosts`, runs `body(controller)`, and leaves no process behind. Returns an exit
    status. `directory` is the run's, "" for one that the controller chooses.

    `start` is `Controller.launch` with all arguments bound but `hosts` and `backend`.
    """
    from torchtitan_rl.cli.summary import next_command
    from torchtitan_rl.types.ends import PREEMPTED_STATUS, Ended, Preempted

    controller, hosts, args.final = None, None, True  # only a failure may be mended by a restart
    try:
        if args.hosts:
            from torchtitan_rl.launch.attach import attach

            hosts = await attach(args.hosts, timeout_s=_ATTACH_S, config_file=args.config)
        controller = await start(hosts=hosts, backend=args.backend)
        let_garbage_wait()  # collections were a twelfth of a quickstart's step
        if args.verb == "train":  # no other verb has anything to keep
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _sigterm, controller, asyncio.current_task())
        await body(controller)
        return 0
    except asyncio.CancelledError:
        _note_end(controller, "interrupted", "asked to end at once")
        line = "" if is_json() else "\n"  # below the ^C
        where = f"{_where(controller)}; metrics so far are in {controller.run_dir.path}" if controller else ""
        say(f"{line}interrupted {where or 'during start-up'}", event="interrupted", level="warning")
        return 130
    except Preempted as end:
        _note_end(controller, "preempted", str(end))
        go_on = f"go on with --resume latest --output-dir {controller.run_dir.path}"
        say(f"stopped {_where(controller)} with a checkpoint: {end}; {go_on}", event="stopped", level="warning")
        return PREEMPTED_STATUS
    except Exception as error:
        run_dir = controller.run_dir.path if controller else Path(directory or ".")
        problem = disk_problem(error, run_dir, run_dir / "checkpoints")
        args.final = isinstance(error, (Ended, ValueError)) or bool(problem)
        if args.debug:
            traceback.print_exc()
        text = f"{problem}\n{told(error)}" if problem else told(error)
        _note_end(controller, "run_failed", text)
        status = fail(text)
        if controller and args.verb == "train":
            say(f"see why: {next_command('diagnose', controller.run_dir.path)}", event="next")
        return status
    finally:
        if controller and args.hosts:
            await controller.close()  # other hosts' processes cannot be killed from here
        elif controller:
            if controller.config.record.timeline:
                from torchtitan_rl.record.timeline.span_file import WRITE_S

                await asyncio.sleep(WRITE_S + 0.5)  # the actors' last spans are on disk then
            controller.launcher.kill()  # `close` would take seconds; all files of the run are written
            controller.recorder.close()
        elif hosts is not None:
            await hosts.abandon(_ATTACH_S)  # what failed has been told


def _note_end(controller, kind: str, text: str) -> None:
    """Notes in the run's events why it ends before its last step."""
    if controller is not None:
        note_end(controller.recorder, kind, text)


def _where(controller) -> str:
    return f"in the {controller.state.phase} phase at step {controller.state.phase_step}"


def _sigterm(controller, task: asyncio.Task) -> None:
    """SIGTERM makes the run write a checkpoint after the present step and end, another one `SAME_REQUEST_S` later ends
    it at once. Slurm sends two together when it preempts."""
    from torchtitan_rl.types.ends import SAME_REQUEST_S

    controller.stop.ask("SIGTERM")
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: None)
    loop.call_later(SAME_REQUEST_S, lambda: loop.add_signal_handler(signal.SIGTERM, task.cancel))


async def train(args: argparse.Namespace, config) -> int:
    from torchtitan_rl.cli.summary import summary_rows
    from torchtitan_rl.launch.watchdog import alive
    from torchtitan_rl.record.json_console import JsonProgress
    from torchtitan_rl.record.plot import plot_curve
    from torchtitan_rl.record.progress import Progress
    from torchtitan_rl.serve.run_gateway import serving
    from torchtitan_rl.train.controller import Controller

    progress = (JsonProgress if args.json_logs else Progress)(quiet=args.quiet)
    served_at = address(args, args.serve, args.serve_host)

    async def body(controller: Controller) -> None:
        async with serving(controller, served_at, quiet=args.quiet):
            report = await controller.train()
        curve = controller.run_dir.path / "curve.png"
        plot_curve(controller.run_dir.read_metrics(), curve)
        progress.final_table(summary_rows(controller, report, curve))

    with alive(config.controller.hang_timeout_s):
        return await _guarded(
            args,
            partial(Controller.launch, config, progress=progress, resume_from=args.resume),
            body,
            config.output_dir,
        )


async def evaluate(args: argparse.Namespace, config) -> int:
    from torchtitan_rl.record.progress import Progress
    from torchtitan_rl.tasks.pass_rate_filter import write_pass_rates
    from torchtitan_rl.train.controller import Controller
    from torchtitan_rl.train.start import dated
    from torchtitan_rl.weights.checkpoint import hf_weights
    from torchtitan_rl.weights.origin import origin

    weights, source = hf_weights(Path(args.checkpoint)), origin(Path(args.checkpoint))
    config.output_dir, of_step = config.output_dir or dated(f"eval-{config.name}"), source.text and f"{source.text}: "
    if args.num_tasks is not None and args.num_tasks < 1:
        raise ValueError(f"--num-tasks={args.num_tasks}: must be at least 1")
    if args.pass_rates is not None and not os.access(Path(args.pass_rates).absolute().parent, os.W_OK):
        raise ValueError(f"--pass-rates={args.pass_rates}: cannot be written; give a file in a directory that can")

    async def body(controller: Controller) -> None:
        controller.state.step = source.step or 0
        result = await controller.evaluate(args.split, num_tasks=args.num_tasks, pass_at_k=config.controller.pass_at_k)
        print(f"{of_step}{args.split} accuracy {result.accuracy:.4f}{result.failed_text()}")
        if args.pass_rates is not None:
            write_pass_rates(args.pass_rates, result.pass_rates)
        for name, result in (await controller.evaluate_sets()).items():
            print(f"{of_step}{name} {result.split} accuracy {result.accuracy:.4f}{result.failed_text()}")

    return await _guarded(
        args,
        partial(Controller.launch, config, progress=Progress(quiet=args.quiet), hf_weights=weights),
        body,
        config.output_dir,
    )


def audit(args: argparse.Namespace) -> int:
    """Prints what became of a run's draws, and problems. Returns 1 where there are problems."""
    from torchtitan_rl.record.run_dir import RunDir
    from torchtitan_rl.tools import audit as auditing

    run_dir = RunDir(args.run)
    if not run_dir.tables["ledger"]:
        raise ValueError(f"run={args.run!r}: has no ledger; give a run directory that has begun reinforcement")
    counts, problems = auditing.audit(run_dir)
    print(", ".join(f"{name} {number}" for name, number in counts.items()))
    for problem in problems:
        print(f"problem: {problem}")
    print("the records agree" if not problems else f"{len(problems)} problems")
    return 1 if problems else 0


async def export(args: argparse.Namespace) -> int:
    from torchtitan_rl.cli import export as exporting

    try:
        paths = Path(args.checkpoint), Path(args.directory)
        for directory in await exporting.export(*paths, trusted=args.trust_code):
            print(directory)
        return 0
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        return fail(told(error))


async def sample(args: argparse.Namespace) -> int:
    from torchtitan_rl.cli.sample import sample
    from torchtitan_rl.config.sampling import AlteredSampling
    from torchtitan_rl.types import SamplingParams
    from torchtitan_rl.validation.sampling import check_altered, check_greedy

    try:
        altered = AlteredSampling(**{f.name: getattr(args, f.name) for f in dataclasses.fields(AlteredSampling)})
        check_altered("--", altered)
        if not args.temperature:
            check_greedy("--", altered, "add --temperature 1")
        params = SamplingParams(
            max_tokens=args.max_tokens, temperature=args.temperature, seed=0, **dataclasses.asdict(altered)
        )
        checkpoint = Path(args.checkpoint)
        print(await sample(checkpoint, args.prompt, params, output_dir=args.output_dir, quiet=args.quiet))
        return 0
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        return fail(told(error))


def address(args: argparse.Namespace, port: int | None, host: str):
    """Where clients come in; None: nothing is served."""
    from torchtitan_rl.serve.guard import host_names
    from torchtitan_rl.serve.run_gateway import Address

    if port is None:
        return None
    return Address(
        host=host,
        port=port,
        api_key_file=args.api_key_file,
        tool_parser=args.tool_parser,
        allow_hosts=host_names(args.allow_host),
        ignored=tuple(args.ignore),
    )
