"""Starting a run again when it was killed or failed: torchrun's own restarts around a verb of the command.

torchrun (`torch.distributed.elastic`) starts the command as its one worker and starts it again when it ends with
another status than 0. `hosts.watchdog` kills a command that gives no sign of life. The command writes its real status
to a file, and ends with 0 where a restart would not help.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import uuid
from pathlib import Path

from torchtitan_rl.environment import end_with_parent, without_torchrun
from torchtitan_rl.hosts import watchdog
from torchtitan_rl.observability.console import say

__all__ = ["run_with_restarts", "attempt", "leave_outcome"]


def run_with_restarts(verb: str, arguments: list[str], max_restarts: int) -> int:
    """Runs `torchtitan-rl VERB ARGUMENTS`, again (`train` with `--resume auto`) when it was killed or failed, at most
    `max_restarts` times. Returns the exit status of the last attempt."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-") as directory:
        outcome = Path(directory) / "outcome.json"
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=1,
            max_restarts=max_restarts,
            run_id=f"torchtitan-rl-{uuid.uuid4().hex[:8]}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
        )
        command = ("-m", "torchtitan_rl.cli", verb, *arguments, "--outcome", str(outcome))
        try:
            with watchdog.watch(Path(directory) / "signs_of_life.json"):
                elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            _, failure = error.get_first_failure()
            ended = f"was ended by signal {-failure.exitcode}" if failure.exitcode < 0 else "failed"
            say(f"error: the last attempt {ended}; {max_restarts} restarts are used up", event="error", level="error")
            return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        except SignalException as error:  # the worker has had SIGTERM too
            return _status(outcome, otherwise=128 + int(error.sigval))
        return _status(outcome, otherwise=0)


def _status(outcome: Path, *, otherwise: int) -> int:
    return json.loads(outcome.read_text())["status"] if outcome.exists() else otherwise


def attempt() -> int:
    """Makes this process, a worker of `run_with_restarts`, an ordinary one: it forgets torchrun's settings, which a
    trainer mesh would take for its own, and ends when torchrun ends. Returns the number of restarts so far."""
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    kept = without_torchrun(os.environ)
    os.environ.clear()
    os.environ.update(kept)
    end_with_parent(signal.SIGKILL)
    watchdog.sign_of_life(watchdog.START_S)
    return restarts


def leave_outcome(file: str, status: int, *, final: bool) -> int:
    """Tells `run_with_restarts` the command's status. Returns the status for torchrun: 0 where a restart would not
    help."""
    Path(file).write_text(json.dumps({"status": status}))
    return 0 if final else status
