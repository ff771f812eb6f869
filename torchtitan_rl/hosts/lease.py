"""A worker serves a controller for as long as it hears from the controller.

The worker listens at its known address, and says to whoever connects where its Monarch listens: on another port after
each start, because Monarch's connections to an address do not outlive the process that listened there. A thread of the
controller keeps a connection to the known address, sends a byte every other second and reads it back. A worker that has
heard nothing for 30 s ends every process that it started for the controller, and begins anew: a controller that was
killed, or is behind a network that has parted, leaves nothing running. Neither side depends on an event loop or on
Monarch.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

import psutil

from torchtitan_rl.environment import end_with_parent, signal_of_parents_end

__all__ = ["SILENT_S", "serve", "monarch_at", "Lease"]

SILENT_S = float(os.environ.get("TORCHTITAN_RL_LEASE_S", 30))
"""Seconds without a word from its controller after which a worker ends what it started for it."""
_EVERY_S, _ANSWER_S = min(2.0, SILENT_S / 4), 5.0
_BEAT, _BYE = b".", b"!"


class _Worker:
    """The worker's side; `heard` is when its controller last said a word (time.monotonic), None without one."""

    def __init__(self, server: socket.socket, monarch: str):
        self.server, self.monarch = server, monarch
        self.heard: float | None = None
        self.ends_by = signal_of_parents_end()

    def accept(self) -> None:
        while True:
            connection, _ = self.server.accept()
            connection.settimeout(SILENT_S)
            threading.Thread(target=self._listen, args=(connection,), daemon=True).start()

    def _listen(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.sendall(f"{self.monarch}\n".encode())
                while word := connection.recv(1):
                    self.heard = None if word == _BYE else time.monotonic()
                    connection.sendall(word)
            except OSError:
                pass  # the controller has ended, or connects again

    def watch(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            if self.heard is not None and time.monotonic() - self.heard > SILENT_S:
                _begin_anew(self.ends_by)


def serve(host: str, port: int, monarch: str) -> None:
    """Listens at a worker's known address and says `monarch`, the address of its Monarch. Once a controller has said a
    word, its silence ends what this process has started, and begins this process anew. Raises OSError where the address
    is taken, or is not of this host."""
    worker = _Worker(socket.create_server((host, port)), monarch)
    for work in (worker.accept, worker.watch):
        threading.Thread(target=work, daemon=True).start()


def _begin_anew(ends_by: int) -> None:
    """`ends_by`: the signal that the end of this process's parent sends. The kernel forgets the signal where another
    thread than the first one runs a new program."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(children, timeout=10)
    print(
        f"the controller has not been heard of for {SILENT_S:g} s: {len(children)} processes of its run were ended, "
        "and this worker waits for another controller",
        file=sys.stderr,
        flush=True,
    )
    end_with_parent(ends_by)
    os.execv(sys.executable, [sys.executable, "-m", "torchtitan_rl.hosts.worker", *sys.argv[1:]])


def monarch_at(connection: socket.socket) -> str:
    """Where the Monarch of the worker listens that this connection leads to. Raises OSError when nothing is said."""
    with connection.makefile("rb", buffering=0) as stream:
        if not (line := stream.readline()).endswith(b"\n"):
            raise ConnectionError("closed without saying where its Monarch listens")
        return line.decode().strip()


class Lease(threading.Thread):
    """The controller's side, for the worker at `host` and `port` whose Monarch listens at `monarch`."""

    def __init__(self, host: str, port: int, monarch: str):
        super().__init__(daemon=True, name=f"lease-{host}:{port}")
        self._to, self._over, self._answered = (host, port), threading.Event(), threading.Condition()
        self._monarch = monarch
        self._num_answers, self._replaced = 0, False
        self.start()

    def run(self) -> None:
        while not self._over.is_set():
            try:
                with socket.create_connection(self._to, timeout=_ANSWER_S) as connection:
                    if monarch_at(connection) != self._monarch:
                        with self._answered:
                            self._replaced = True  # by another worker
                            return self._answered.notify_all()
                    self._keep(connection)
            except OSError:
                self._over.wait(_EVERY_S)

    def _keep(self, connection: socket.socket) -> None:
        while True:
            over = self._over.is_set()
            connection.sendall(_BYE if over else _BEAT)
            if not connection.recv(1):
                raise ConnectionError("the worker has closed the connection")
            with self._answered:
                self._num_answers += 1
                self._answered.notify_all()
            if over:
                return
            self._over.wait(_EVERY_S)

    def answers(self, within_s: float) -> bool:
        """Whether the worker answers to a word that is said from now on: the same worker, still running. Blocks for
        `within_s` seconds at most."""
        with self._answered:
            wanted = self._num_answers + 2  # the next answer may be to a word before
            self._answered.wait_for(lambda: self._replaced or self._num_answers >= wanted, within_s)
            return self._num_answers >= wanted

    def end(self) -> None:
        """Tells the worker that the run is over: it keeps what it started, which the run has stopped itself."""
        self._over.set()
        self.join(_ANSWER_S)
