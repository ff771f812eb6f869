"""A run on several hosts under torchrun, which starts this module once on each host (scripts/train_torchrun.sh).

Each process starts the Monarch worker of its host. Rank 0 also starts the controller (`torchtitan-rl train CONFIG
--hosts ...`), once the addresses of all workers are in torchrun's store. From then on each process watches its own
children, rank 0 watches the heartbeats of all other ranks in the store, and they watch the heartbeat of rank 0. A
process that ends, or sends no heartbeat for 10 s, ends the run on all hosts.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil
import torch.distributed as dist

from torchtitan_rl.environment import end_with_parent, without_torchrun
from torchtitan_rl.hosts.watchdog import SIGNS_OF_LIFE, end_if_overdue

__all__ = ["main"]

_JOIN_S = float(os.environ.get("TORCHTITAN_RL_JOIN_S", 300))
"""Seconds for all hosts to join."""
_BEAT_S = 0.5
_SILENT_S = 10.0
"""Seconds without a heartbeat after which a host is lost."""
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
        _end(children)


class _Interrupted(BaseException):
    """SIGTERM or SIGINT, raised as an exception in the main thread."""


def _interrupt(number: int, _frame) -> None:
    raise _Interrupted(number)


def _run(arguments: list[str], children: list[subprocess.Popen]) -> int:
    store, rank, size = _join()
    own = _own_address()
    worker = f"tcp://{own}:{_free_port(own)}"
    children.append(_start("torchtitan_rl.hosts.worker", worker))
    store.set(f"beat/{rank}", "0")
    store.set(f"worker/{rank}", worker)
    workers = _gather(store, size)
    print(f"host {rank} of {size}: worker {worker}", file=sys.stderr)
    watch = _Watch(store, rank, workers)
    watch.start()
    if rank == 0:
        again = ["--resume", "auto"] if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) else []
        with tempfile.TemporaryDirectory(prefix="torchtitan-rl-") as directory:
            os.environ[SIGNS_OF_LIFE] = file = f"{directory}/signs_of_life.json"
            children.append(_start("torchtitan_rl.cli", "train", *arguments, *again, "--hosts", ",".join(workers)))
            return _lead(watch, Path(file), *children)
    return _follow(watch, *children)


def _join() -> tuple[dist.Store, int, int]:
    if os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise ValueError(
            f"nproc_per_node={os.environ['LOCAL_WORLD_SIZE']}: torchrun is to start one process per host; "
            "ranks are started by the run itself, as the config says"
        )
    if "RANK" not in os.environ:
        raise ValueError("RANK: is not set; start this through torchrun, as scripts/train_torchrun.sh does")
    return next(dist.rendezvous("env://", timeout=timedelta(seconds=_JOIN_S)))


def _gather(store: dist.Store, size: int) -> list[str]:
    """The address of every host's worker, by rank. Raises RuntimeError naming the ranks that have not joined in
    time."""
    end = time.monotonic() + _JOIN_S
    while missing := [rank for rank in range(size) if not store.check([f"worker/{rank}"])]:
        if time.monotonic() > end:
            raise RuntimeError(
                f"NNODES={size}: no host has come as rank {missing} within {_JOIN_S:g} s; start the "
                "script there with the same MASTER_ADDR, MASTER_PORT and NNODES"
            )
        time.sleep(_BEAT_S)
    return [store.get(f"worker/{rank}").decode() for rank in range(size)]


def _own_address() -> str:
    """The address to bind: TORCHTITAN_RL_HOST_ADDRESS, or the address of the interface that leads to rank 0's host."""
    from torchtitan_rl.hosts.inventory import address_towards

    return os.environ.get("TORCHTITAN_RL_HOST_ADDRESS") or address_towards(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    )


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise ValueError(
                f"TORCHTITAN_RL_HOST_ADDRESS={address!r}: cannot be bound ({error.strerror}); give an "
                "address of this host"
            ) from None
        return probe.getsockname()[1]


class _Watch(threading.Thread):
    """Writes this host's heartbeat into the store and reads other heartbeats: rank 0 reads all, other ranks read rank
    0's. No other thread uses the store from here on: a store that blocks does not block the main thread, which then
    sees that no heartbeat has arrived."""

    def __init__(self, store: dist.Store, rank: int, workers: list[str]):
        super().__init__(daemon=True)
        self.rank, self.workers = rank, workers
        self.outcome: str | None = None
        """The run's exit status, as rank 0 announced it; None before."""
        self.failures: dict[int, str] = {}
        """Rank -> the failure that the rank announced."""
        self.gone: set[int] = set()
        """Ranks that have read the outcome."""
        self._store, self._announcements = store, {}
        self._lock = threading.Lock()
        self._heard = {peer: (b"", time.monotonic()) for peer in (range(1, len(workers)) if rank == 0 else [0])}

    def run(self) -> None:
        for beat in range(1, sys.maxsize):
            try:
                self._exchange(beat)
            except (RuntimeError, ValueError):
                return  # the store is gone, so rank 0 is gone: `trouble` will report missing heartbeats
            time.sleep(_BEAT_S)

    def _exchange(self, beat: int) -> None:
        with self._lock:
            announcements, self._announcements = self._announcements, {}
        for name, text in announcements.items():
            self._store.set(name, text)
        self._store.set(f"beat/{self.rank}", str(beat))
        for peer, (last, _) in self._heard.items():
            if (now := self._store.get(f"beat/{peer}")) != last:
                self._heard[peer] = now, time.monotonic()
            if self._store.check([f"failed/{peer}"]):
                self.failures[peer] = self._store.get(f"failed/{peer}").decode()
            if self._store.check([f"gone/{peer}"]):
                self.gone.add(peer)
        if self._store.check(["outcome"]):
            self.outcome = self._store.get("outcome").decode()

    def address(self, rank: int) -> str:
        """The name of a rank's host in errors."""
        return self.workers[rank].removeprefix("tcp://")

    def announce(self, name: str, text: str) -> None:
        """Sets a key of the store at the next beat."""
        with self._lock:
            self._announcements[name] = text

    def trouble(self) -> str | None:
        """A failure that another host has announced, or a missing heartbeat; None when all is well."""
        for peer, failure in self.failures.items():
            return f"host {self.address(peer)}: {failure}"
        for peer, (_, at) in self._heard.items():
            if peer not in self.gone and time.monotonic() - at > _SILENT_S:
                return f"host {self.address(peer)}: has not been heard of for {_SILENT_S:g} s"
        return None


def _lead(watch: _Watch, signs_of_life: Path, worker: subprocess.Popen, controller: subprocess.Popen) -> int:
    """Rank 0: waits for the controller to end and announces its exit status. After a host has failed, the controller
    has 10 s to report the failure before the run ends. A controller that gives no sign of life is killed."""
    deadline = None
    while (status := controller.poll()) is None:
        end_if_overdue(signs_of_life)
        trouble = watch.trouble() or _ended(worker, watch.address(0))
        if trouble and deadline is None:
            deadline = time.monotonic() + _LAST_WORDS_S
            print(f"error: {trouble}", file=sys.stderr)
        if deadline is not None and time.monotonic() > deadline:
            status = 1
            break
        time.sleep(_BEAT_S)
    if status < 0:
        print(f"error: the controller was ended by signal {-status}", file=sys.stderr)
        status = 128 - status
    watch.announce("outcome", str(status))
    others = set(range(1, len(watch.workers)))
    end = time.monotonic() + _LAST_WORDS_S
    while not others <= watch.gone | watch.failures.keys() and time.monotonic() < end:
        time.sleep(_BEAT_S)
    if status == 0 and (trouble := watch.trouble()):
        return _fail(f"{trouble}; the run itself had ended well")
    return status


def _follow(watch: _Watch, worker: subprocess.Popen) -> int:
    """Other ranks: wait until rank 0 announces how the run ended."""
    while watch.outcome is None:
        if failure := _ended(worker, watch.address(watch.rank)):
            watch.announce(f"failed/{watch.rank}", failure.split(": ", 1)[1])
            time.sleep(4 * _BEAT_S)  # until the announcement is in the store and read
            return _fail(failure)
        if trouble := watch.trouble():
            return _fail(f"{trouble}; it leads the run, which ends here too")
        time.sleep(_BEAT_S)
    watch.announce(f"gone/{watch.rank}", "")
    time.sleep(2 * _BEAT_S)
    if watch.outcome != "0":
        return _fail(f"the run failed with exit status {watch.outcome}; see the output of host {watch.address(0)}")
    return 0


def _ended(worker: subprocess.Popen, address: str) -> str | None:
    status = worker.poll()
    if status is None:
        return None
    how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
    return f"host {address}: its worker ended {how}"


def _start(module: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=without_torchrun(os.environ),
        preexec_fn=partial(end_with_parent, signal.SIGKILL),
    )


def _interrupted(interrupt: _Interrupted, children: list[subprocess.Popen]) -> int:
    """128 + the signal's number. A terminal's Ctrl-C reaches the controller too, which has 5 s to print where the run
    was."""
    if len(children) == 2:
        try:
            children[1].wait(_LAST_WORDS_S / 2)
        except subprocess.TimeoutExpired:
            pass
    return 128 + interrupt.args[0]


def _end(children: list[subprocess.Popen]) -> None:
    """Kills the children and all their descendants, and waits until they have ended."""
    processes = []
    for child in children:
        try:
            processes += [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            pass  # the child has ended, and its own children with it
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(processes, timeout=_LAST_WORDS_S)


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # `_Watch` may be waiting for a store that is gone
