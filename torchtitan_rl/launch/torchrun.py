"""A run on several hosts under torchrun, which starts this module once on each host (scripts/train_torchrun.sh).

Each process starts the Monarch worker of its host. Rank 0 also starts the controller (`torchtitan-rl train CONFIG
--hosts ...`), once the addresses of all workers are in torchrun's store. From then on each process watches its own
children, rank 0 watches the heartbeats of all other ranks in the store, and they watch the heartbeat of rank 0. A
process that ends, or sends no heartbeat for 10 s, ends the run on all hosts. SIGTERM on any host asks the controller
for a checkpoint, after which the run ends on all hosts.

torchrun's --max-restarts starts all processes again after every end with another status than 0. Where a restart would
not help, as for a run that was asked to stop, rank 0 leaves the status in the store and the next attempts end with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO

import torch.distributed as dist

from torchtitan_rl.environment import HOST_ADDRESS, end_with_parent
from torchtitan_rl.launch.agreement import joined, joined_problem
from torchtitan_rl.launch.children import end_children, free_port, start_module
from torchtitan_rl.launch.liveness import JOIN_S
from torchtitan_rl.launch.liveness.heartbeats import BEAT_S, HeartbeatWatch
from torchtitan_rl.launch.liveness.restarts import for_attempt, is_final
from torchtitan_rl.launch.liveness.watchdog import SIGNS_OF_LIFE, SignsOfLife
from torchtitan_rl.types.ends import PREEMPTED_STATUS, SAME_REQUEST_S

__all__ = ["main"]

_LAST_WORDS_S = 10.0
"""Seconds for the controller to report an error, and for the other ranks to read that the run has ended."""


def main(arguments: list[str]) -> int:
    """Returns the run's exit status on rank 0. Other ranks return 0, or 1 when the run failed."""
    end_with_parent(signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    children: list[subprocess.Popen] = []
    try:
        return _run(arguments, children)
    except (RuntimeError, ValueError) as error:
        return _fail(str(error))
    except _Interrupted as interrupt:
        return _interrupted(interrupt, children)
    finally:
        end_children(children)


class _Interrupted(BaseException):
    """SIGTERM or SIGINT, raised as an exception in the main thread."""


def _interrupt(number: int, _frame) -> None:
    raise _Interrupted(number)


def _ask(watch: HeartbeatWatch, number: int, _frame) -> None:
    """The first SIGTERM asks the controller for a checkpoint, another one `SAME_REQUEST_S` later ends this host."""
    if watch.asked_at and time.monotonic() > watch.asked_at + SAME_REQUEST_S:
        raise _Interrupted(number)
    watch.asked_at = watch.asked_at or time.monotonic()


def _run(arguments: list[str], children: list[subprocess.Popen]) -> int:
    torchrun_store, rank, size = _join()
    number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if (status := _final_status(torchrun_store, number)) is not None:
        print(f"restart {number}: the run has ended with status {status}, and is not begun again", file=sys.stderr)
        return status
    store = _of_attempt(torchrun_store, number)
    own = _own_address()
    worker = f"tcp://{own}:{free_port(own)}"
    store.set(f"beat/{rank}", "0")
    store.set(f"joined/{rank}", json.dumps(joined(worker, arguments)))
    hosts = _gather(store, size)
    if problem := joined_problem(hosts):
        store.set("final", "1")
        time.sleep(4 * BEAT_S * (rank == 0))  # the store ends with rank 0, and all are to read why
        raise ValueError(problem)
    workers = [host["worker"] for host in hosts]
    children.append(start_module("torchtitan_rl.launch.worker", worker, ignore=[signal.SIGTERM]))
    print(f"host {rank} of {size}: worker {worker}", file=sys.stderr)
    watch = HeartbeatWatch(store, rank, workers)
    watch.start()
    signal.signal(signal.SIGTERM, partial(_ask, watch))
    if rank == 0:
        return _start_and_lead(watch, arguments, number, children)
    return _follow(watch, *children)


def _join() -> tuple[dist.Store, int, int]:
    if os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise ValueError(
            f"nproc_per_node={os.environ['LOCAL_WORLD_SIZE']}: torchrun is to start one process per host; "
            "ranks are started by the run itself, as the config says"
        )
    if "RANK" not in os.environ:
        raise ValueError("RANK: is not set; start this through torchrun, as scripts/train_torchrun.sh does")
    return next(dist.rendezvous("env://", timeout=timedelta(seconds=JOIN_S)))


def _of_attempt(torchrun_store: dist.Store, number: int) -> dist.Store:
    """torchrun's store outlives an attempt: what the one before has said, and how it ended, is not of the next."""
    return dist.PrefixStore(f"attempt-{number}", torchrun_store)


def _final_status(torchrun_store: dist.Store, number: int) -> int | None:
    """The exit status of an attempt before this one after which a restart does not help; None: there is none."""
    for store in (_of_attempt(torchrun_store, earlier) for earlier in range(number)):
        if store.check(["final"]):
            return int(store.get("final"))
    return None


def _gather(store: dist.Store, size: int) -> list[dict]:
    """The message of every host (`agreement.joined`), by rank. Raises RuntimeError naming the ranks that have not
    joined in time."""
    end = time.monotonic() + JOIN_S
    while missing := [rank for rank in range(size) if not store.check([f"joined/{rank}"])]:
        if time.monotonic() > end:
            raise RuntimeError(
                f"NNODES={size}: no host has come as rank {missing} within {JOIN_S:g} s; start the "
                "script there with the same MASTER_ADDR, MASTER_PORT and NNODES"
            )
        time.sleep(BEAT_S)
    return [json.loads(store.get(f"joined/{rank}")) for rank in range(size)]


def _own_address() -> str:
    """The address to bind: TORCHTITAN_RL_HOST_ADDRESS, or the address of the interface that leads to rank 0's host."""
    from torchtitan_rl.launch.inventory import address_towards

    return os.environ.get(HOST_ADDRESS) or address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def _start_and_lead(
    watch: HeartbeatWatch, arguments: list[str], restarts: int, children: list[subprocess.Popen]
) -> int:
    """Rank 0: starts the controller and leads. The controller says in a pipe whether a restart would help, as to the
    supervisor of a run on one host."""
    read, write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-") as directory, os.fdopen(read, "rb", buffering=0) as pipe:
        os.environ[SIGNS_OF_LIFE] = file = f"{directory}/signs_of_life.json"
        os.environ |= for_attempt(restarts)
        arguments = ["train", *arguments, "--hosts", ",".join(watch.workers), "--outcome", str(write)]
        try:
            children.append(start_module("torchtitan_rl.cli", *arguments, pass_fds=[write]))
        finally:
            os.close(write)
        return _lead(watch, SignsOfLife(Path(file)), pipe, *children)


def _lead(
    watch: HeartbeatWatch,
    signs_of_life: SignsOfLife,
    pipe: IO[bytes],
    worker: subprocess.Popen,
    controller: subprocess.Popen,
) -> int:
    """Rank 0: waits for the controller to end and announces its exit status. After a host has failed, the controller
    has 10 s to report the failure before the run ends. A controller that gives no sign of life is killed."""
    deadline, sigterm_sent = None, False
    while (status := controller.poll()) is None:
        signs_of_life.end_if_overdue()
        if watch.asked_at and not sigterm_sent:
            sigterm_sent = True
            controller.send_signal(signal.SIGTERM)
        trouble = watch.trouble() or _ended(worker, watch.address(0))
        if trouble and deadline is None:
            deadline = time.monotonic() + _LAST_WORDS_S
            print(f"error: {trouble}", file=sys.stderr)
        if deadline is not None and time.monotonic() > deadline:
            status = 1
            break
        time.sleep(BEAT_S)
    if status < 0:
        print(f"error: the controller was ended by signal {-status}", file=sys.stderr)
        status = 128 - status
    if is_final(pipe) or watch.asked_at:
        watch.announce("final", str(status))
    watch.announce("outcome", str(status))
    time.sleep(2 * BEAT_S)  # until both are in the store, also where no other host waits for them
    followers = set(range(1, len(watch.workers)))
    end = time.monotonic() + _LAST_WORDS_S
    while not followers <= watch.gone | watch.failures.keys() and time.monotonic() < end:
        time.sleep(BEAT_S)
    if status == 0 and (trouble := watch.trouble()):
        return _fail(f"{trouble}; the run itself had ended well")
    return status


def _follow(watch: HeartbeatWatch, worker: subprocess.Popen) -> int:
    """Other ranks: wait until rank 0 announces how the run ended."""
    while watch.outcome is None:
        if failure := _ended(worker, watch.address(watch.rank)):
            watch.announce(f"failed/{watch.rank}", failure.split(": ", 1)[1])
            time.sleep(4 * BEAT_S)  # until the announcement is in the store and read
            return _fail(failure)
        if trouble := watch.trouble():
            return _fail(f"{trouble}; it leads the run, which ends here too")
        if watch.asked_at:
            watch.announce(f"asked/{watch.rank}", "")
        time.sleep(BEAT_S)
    watch.announce(f"gone/{watch.rank}", "")
    time.sleep(2 * BEAT_S)
    if watch.outcome == str(PREEMPTED_STATUS):
        return PREEMPTED_STATUS
    if watch.outcome != "0":
        return _fail(f"the run failed with exit status {watch.outcome}; see the output of host {watch.address(0)}")
    return 0


def _ended(worker: subprocess.Popen, address: str) -> str | None:
    status = worker.poll()
    if status is None:
        return None
    how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
    return f"host {address}: its worker ended {how}"


def _interrupted(interrupt: _Interrupted, children: list[subprocess.Popen]) -> int:
    """128 + the signal's number. A terminal's Ctrl-C reaches the controller too, which has 5 s to print where the run
    was."""
    if len(children) == 2:
        try:
            children[1].wait(_LAST_WORDS_S / 2)
        except subprocess.TimeoutExpired:
            pass
    return 128 + interrupt.args[0]


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # `HeartbeatWatch` may be waiting for a store that is gone
