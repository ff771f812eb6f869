"""From a config to a controller that has run to its end, for the verbs `train` and `eval`."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl.cli.exit_status import fail
from torchtitan_rl.environment import let_garbage_wait
from torchtitan_rl.record.console.notices import is_json, say
from torchtitan_rl.record.disk import disk_problem
from torchtitan_rl.record.status import note_end
from torchtitan_rl.record.user_code import error_text

if TYPE_CHECKING:
    from torchtitan_rl.config.run import RunConfig
    from torchtitan_rl.launch.backend import Backend
    from torchtitan_rl.train.controller import Controller

__all__ = ["checked_backend", "run_controller"]

_ATTACH_S = 60.0
_TRAINS = ("train", "fork")


def checked_backend(args: argparse.Namespace, config: RunConfig, *, generators_only: bool) -> Backend:
    """The backend that the arguments name. Raises ValueError for a settled config that the backend cannot run."""
    from torchtitan_rl.launch.choice import backend_of

    backend = backend_of(args.backend)
    if args.hosts and not backend.takes_hosts:
        raise ValueError(
            f"--hosts={','.join(args.hosts)}: --backend {args.backend} is this process alone; leave one of them out"
        )
    backend.check(config, generators_only=generators_only)
    return backend


async def run_controller(
    args: argparse.Namespace,
    start: Callable[..., Awaitable[Controller]],
    body: Callable[[Controller], Awaitable[None]],
    directory: str,
) -> int:
    """Starts a controller on `args.hosts`, runs `body(controller)`, and leaves no process behind. Returns an exit
    status. `directory` is the run's, "" for one that the controller chooses.

    `start` is `Controller.launch` with all arguments bound but `hosts` and `backend`.
    """
    from torchtitan_rl.cli.summary import next_command
    from torchtitan_rl.dispatch.role_mesh import WorkerLost
    from torchtitan_rl.types.ends import PREEMPTED_STATUS, Ended, Preempted

    controller, hosts, args.final = None, None, True  # only a failure may be mended by a restart
    try:
        if args.hosts:
            from torchtitan_rl.launch.attach import attach

            hosts = await attach(args.hosts, timeout_s=_ATTACH_S, config_file=args.config)
        controller = await start(hosts=hosts, backend=args.backend)
        let_garbage_wait()  # collections were a twelfth of a quickstart's step
        if args.verb in _TRAINS:  # no other verb has anything to keep
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _sigterm, controller, asyncio.current_task())
        await body(controller)
        return 0
    except asyncio.CancelledError:
        _note_end(controller, "interrupted", "asked to end at once")
        line = "" if is_json() else "\n"  # below the ^C
        progress = f"{_place(controller)}; metrics so far are in {controller.run_dir.path}" if controller else ""
        say(f"{line}interrupted {progress or 'during start-up'}", event="interrupted", level="warning")
        return 130
    except Preempted as end:
        _note_end(controller, "preempted", str(end))
        go_on = f"go on with --resume latest --output-dir {shlex.quote(str(controller.run_dir.path))}"
        say(f"stopped {_place(controller)} with a checkpoint: {end}; {go_on}", event="stopped", level="warning")
        return PREEMPTED_STATUS
    except Exception as error:
        run_dir = controller.run_dir.path if controller else Path(directory or ".")
        problem = disk_problem(error, run_dir, run_dir / "checkpoints")
        args.final = isinstance(error, (Ended, ValueError)) or bool(problem)
        if args.debug:
            with suppress(OSError):  # as `say` does
                traceback.print_exc()
        text = f"{problem}\n{error_text(error)}" if problem else error_text(error)
        _note_end(controller, "run_failed", text)
        status = fail(text)
        if controller and args.verb in _TRAINS:
            say(f"see why: {next_command('diagnose', controller.run_dir.path)}", event="next")
        if controller and not isinstance(error, WorkerLost):
            await controller.checkpoints.finish_at_end()  # while the ranks that write it live
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
            await hosts.abandon(_ATTACH_S)  # the failure has been printed


def _note_end(controller, kind: str, text: str) -> None:
    """Notes in the run's events why it ends before its last step."""
    if controller is not None:
        note_end(controller.recorder, kind, text)


def _place(controller) -> str:
    return f"in the {controller.state.phase} phase at step {controller.state.phase_step}"


def _sigterm(controller, task: asyncio.Task) -> None:
    """SIGTERM makes the run write a checkpoint after the present step and end, another one `SAME_REQUEST_S` later ends
    it at once. Slurm sends two together when it preempts."""
    from torchtitan_rl.types.ends import SAME_REQUEST_S

    controller.stop.ask("SIGTERM")
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: None)
    loop.call_later(SAME_REQUEST_S, lambda: loop.add_signal_handler(signal.SIGTERM, task.cancel))
