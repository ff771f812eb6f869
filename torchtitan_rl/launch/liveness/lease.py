"""A worker serves a controller for as long as it hears from the controller.

The worker listens at its known address, and says to whoever connects where its Monarch listens: on another port after
each start, because Monarch's connections to an address do not outlive the process that listened there. A thread of the
controller keeps a connection to the known address, says who it is, sends a byte every other second and reads it back. A
worker that has heard nothing for 30 s ends every process that it started for the controller, and begins anew: a
controller that was killed, or is behind a network that has parted, leaves nothing running. Neither side depends on an
event loop or on Monarch.

A controller that attaches is answered once the worker knows whether every controller before it lives that has not said
goodbye. Where all of them are dead, the worker ends what they left and begins anew, and the newcomer asks again.

A process of the worker's host may ask the worker to leave its run (`launch.join`, when a scheduler wants the host
back). Then the worker answers each byte of the controller with the seconds that are left for it.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from torchtitan_rl.environment import end_with_parent, seconds_of, signal_of_parents_end

__all__ = ["ANSWERS_S", "SILENT_S", "serve", "monarch_at", "ask_to_attach", "ask_to_leave", "until_released", "Lease"]

SILENT_S = seconds_of("TORCHTITAN_RL_LEASE_S", 30)
"""Seconds without a word from its controller after which a worker ends what it started for it. A network that parts for
a few seconds ends nothing, and the devices of a controller that is gone are free within a minute."""
EVERY_S = min(2.0, SILENT_S / 4)
"""Seconds between two words of a controller: several may be lost within every patience below."""
GONE_S = 2 * EVERY_S
"""Seconds after the end of its connection within which a controller that lives has connected again: it tries every
`EVERY_S`."""
QUIET_S = min(10.0, SILENT_S)
"""Seconds without a word after which a controller is dead to another one that attaches. Monarch takes its processes for
dead after 8, so its run has failed already."""
ANSWERS_S = 8.0
"""Seconds in which a worker that is there echoes two words, the connection made again between them."""
_ANSWER_S = 5.0
"""Seconds for one message to a worker that is there, and for a connection to it."""
_END_S = 10.0
"""Seconds for killed processes to end: those with a GPU take some."""
_LOOK_EVERY_S = 0.2
_BEAT, _BYE, _READY, _LEAVES = b".", b"!", b"+", b"-"
_ATTACHES, _KEEPS, _WAITS, _HURRIES = "attach", "keep", "wait", "leave"


@dataclass
class _Controller:
    """A controller as the worker knows it."""

    name: str
    """Random, one for each process."""
    pid: int
    began: float
    """Seconds since 1970."""
    machine: str
    """The same for processes that see each other by their ids."""
    last_word: float = field(default_factory=time.monotonic)
    closed: float | None = None
    """When its connection ended; None while it is open."""

    def is_dead(self) -> bool:
        now = time.monotonic()
        if self.closed is not None and (now - self.closed > GONE_S or self._process_is_gone()):
            return True
        return now - self.last_word > QUIET_S

    def _process_is_gone(self) -> bool:
        if self.machine != _machine():
            return False
        try:
            return psutil.Process(self.pid).create_time() != self.began
        except psutil.NoSuchProcess:
            return True


def _machine() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


@functools.cache
def _identity(pid: int) -> str:
    """This process, as a worker is told of it: JSON in one line."""
    began = psutil.Process(pid).create_time()
    return json.dumps({"name": uuid.uuid4().hex, "pid": pid, "began": began, "machine": _machine()})


class _Worker:
    """The worker's side: the controllers that have sent a message and have not taken their leave, by name."""

    def __init__(self, server: socket.socket, monarch: str):
        self.server, self.monarch = server, monarch
        self.ends_by = signal_of_parents_end()
        self._controllers: dict[str, _Controller] = {}
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        self._leaves_at: float | None = None
        """When the controllers have to be gone; None: nobody has asked the worker to leave."""

    def accept(self) -> None:
        while True:
            connection, _ = self.server.accept()
            connection.settimeout(SILENT_S)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb", buffering=0) as stream:
            try:
                connection.sendall(f"{self.monarch}\n".encode())
                if not (line := stream.readline().decode()):
                    return  # somebody has looked whether a worker listens here
                wish, identity = line.split(" ", 1)
                if wish in (_WAITS, _HURRIES):
                    if wish == _HURRIES:
                        self._leaves_at = time.monotonic() + float(identity)
                    return self._wait_for_release(connection)
                controller = _Controller(**json.loads(identity))
                if wish == _KEEPS:
                    self._listen(connection, controller)
                elif wish == _ATTACHES:
                    if self._left_by_the_dead(controller.name):
                        self._begin_anew("another controller attaches, and the one before is dead")
                    connection.sendall(_READY)
            except (OSError, ValueError, TypeError):
                pass  # the controller has ended or connects again, or it was none

    def _listen(self, connection: socket.socket, controller: _Controller) -> None:
        with self._lock:
            controller = self._controllers.setdefault(controller.name, controller)
            controller.last_word, controller.closed = time.monotonic(), None
        try:
            while word := connection.recv(1):
                # An older connection may have ended meanwhile, and has said that the controller's is closed.
                controller.last_word, controller.closed = time.monotonic(), None
                if word == _BYE:
                    with self._lock:
                        self._controllers.pop(controller.name, None)
                elif self._leaves_at is not None:
                    word = _LEAVES + f"{max(0.0, self._leaves_at - time.monotonic()):.1f}\n".encode()
                connection.sendall(word)
        finally:
            controller.closed = time.monotonic()

    def _left_by_the_dead(self, newcomer: str) -> bool:
        """Whether there are controllers before the newcomer and all are dead. Returns False once one of them sends a
        message; waits `QUIET_S` at most."""
        began = time.monotonic()
        with self._lock:
            before = [controller for name, controller in self._controllers.items() if name != newcomer]
        while not all(controller.is_dead() for controller in before):
            if any(controller.last_word > began for controller in before):
                return False
            time.sleep(0.05)
        return bool(before)

    def _wait_for_release(self, connection: socket.socket) -> None:
        while self._controllers:
            time.sleep(_LOOK_EVERY_S)
        connection.sendall(_READY)

    def watch(self) -> None:
        while True:
            time.sleep(EVERY_S)
            with self._lock:
                words = [controller.last_word for controller in self._controllers.values()]
            if words and time.monotonic() - max(words) > SILENT_S:
                self._begin_anew(f"the controller has not been heard of for {SILENT_S:g} s")

    def _begin_anew(self, reason: str) -> None:
        """Ends every process that this one has started, and runs the worker's program again. The kernel forgets the
        signal of the parent's end where another thread than the first one does that."""
        self._ending.acquire()  # never released: this program ends
        children = psutil.Process().children(recursive=True)
        for child in children:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(children, timeout=_END_S)
        print(
            f"{reason}: {len(children)} processes of its run were ended, and this worker waits for another controller",
            file=sys.stderr,
            flush=True,
        )
        end_with_parent(self.ends_by)
        os.execv(sys.executable, [sys.executable, "-m", "torchtitan_rl.launch.worker", *sys.argv[1:]])


def serve(host: str, port: int, monarch: str) -> None:
    """Listens at a worker's known address and tells controllers `monarch`, the address of the worker's Monarch.

    When a controller that has sent a message falls silent, or has died and another one attaches, this process kills
    what it has started and executes itself anew. Raises OSError when the address is taken or belongs to another host.
    """
    worker = _Worker(socket.create_server((host, port)), monarch)
    for work in (worker.accept, worker.watch):
        threading.Thread(target=work, daemon=True).start()


def monarch_at(connection: socket.socket) -> str:
    """Where the Monarch of the worker listens that this connection leads to. Raises OSError when nothing is said."""
    with connection.makefile("rb", buffering=0) as stream:
        if not (line := stream.readline()).endswith(b"\n"):
            raise ConnectionError("closed without saying where its Monarch listens")
        return line.decode().strip()


def _line(connection: socket.socket) -> str:
    """What follows on a connection up to the end of the line."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := connection.recv(1)):
            raise ConnectionError("the worker has closed the connection")
        line += byte
    return line.decode()


def ask_to_attach(host: str, port: int) -> str:
    """Where the Monarch of the worker at `host` and `port` listens, where nothing is left of a controller that is dead;
    "" where the worker has just ended that and begins anew. Blocks for some `QUIET_S`. Raises OSError where no worker
    is."""
    with socket.create_connection((host, port), timeout=_ANSWER_S) as connection:
        monarch = monarch_at(connection)
        connection.sendall(f"{_ATTACHES} {_identity(os.getpid())}\n".encode())
        connection.settimeout(QUIET_S + _END_S + _ANSWER_S)
        try:
            return monarch if connection.recv(1) == _READY else ""
        except ConnectionResetError:
            return ""


def until_released(host: str, port: int) -> bool:
    """Blocks until every controller of the worker at `host` and `port` has said goodbye, and returns True; False where
    the worker ends or begins anew instead."""
    return _waits(host, port, f"{_WAITS} \n")


def ask_to_leave(host: str, port: int, within_s: float) -> bool:
    """Has the worker at `host` and `port` tell its controllers that the host leaves in `within_s` seconds, in place of
    what it was asked before. Then as `until_released`."""
    return _waits(host, port, f"{_HURRIES} {within_s}\n")


def _waits(host: str, port: int, wish: str) -> bool:
    try:
        with socket.create_connection((host, port), timeout=_ANSWER_S) as connection:
            monarch_at(connection)
            connection.sendall(wish.encode())
            connection.settimeout(None)  # the worker is a child of this process, or on this host: its end is seen
            return connection.recv(1) == _READY
    except OSError:
        return False


class Lease(threading.Thread):
    """The controller's side, for the worker at `host` and `port` whose Monarch listens at `monarch`. `on_leave` is
    called on a thread of its own, with the seconds that are left, each time the worker says that its host leaves."""

    def __init__(self, host: str, port: int, monarch: str, on_leave: Callable[[float], None] | None = None):
        super().__init__(daemon=True, name=f"lease-{host}:{port}")
        self._on_leave = on_leave
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
                    connection.sendall(f"{_KEEPS} {_identity(os.getpid())}\n".encode())
                    self._keep(connection)
            except OSError:
                self._over.wait(EVERY_S)

    def _keep(self, connection: socket.socket) -> None:
        while True:
            over = self._over.is_set()
            connection.sendall(_BYE if over else _BEAT)
            if not (word := connection.recv(1)):
                raise ConnectionError("the worker has closed the connection")
            if word == _LEAVES:
                within_s = float(_line(connection))
                if self._on_leave is not None:
                    self._on_leave(within_s)
            with self._answered:
                self._num_answers += 1
                self._answered.notify_all()
            if over:
                return
            self._over.wait(EVERY_S)

    def answers(self, within_s: float) -> bool:
        """Whether the same worker, still running, answers a message that is sent from now on. Blocks for `within_s`
        seconds at most."""
        with self._answered:
            enough = self._num_answers + 2  # the next answer may be to a word before
            self._answered.wait_for(lambda: self._replaced or self._num_answers >= enough, within_s)
            return self._num_answers >= enough

    def end(self) -> None:
        """Tells the worker that the run is over: it keeps what it started, which the run has stopped itself."""
        self._over.set()
        self.join(_ANSWER_S)
