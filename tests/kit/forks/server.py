"""Processes of tests that begin as forks of one that has made their imports, which are most of what a start costs.

`forks` starts a server. While its environment is in use, Python processes that would become a trainer, a generator, a
store or a command are forks (`sitecustomize.py`); every other process starts as always. A fork is a process of its own
from then on: it has its own pid, may be killed, and runs Monarch's start like any other. It differs from a process that
started by itself in this:

- its parent is the server. The child of who started it is a small process, which lives as long as the fork: the end of
  one is the end of the other. Its memory, sockets and files are not those of the fork.
- strings have the hashes that they have in every other fork of the server, so that sets have one order in all of them.
- its imports were made before its start: what they take is not to be measured in it.

Tests of such things start processes as always, or the command alone (`ACTORS_ALONE`)."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SERVERS = "TORCHTITAN_RL_TEST_FORKS"
ACTORS_ALONE = {"TORCHTITAN_RL_TEST_FORKS_OF": "actors"}
"""The environment of a command that starts by itself, while its actors are forks: its children are its own."""
_CONTROLLER = ("torchtitan_rl.cli.main", "torchtitan_rl.train.controller")
_TRAINER = ("torchtitan_rl.actors.trainer_rank", "torchtitan.models.qwen3")
_GENERATOR = ("vllm", "torchtitan_rl.actors.generator_rank", "torchtitan.models.qwen3", "vllm.v1.worker.cpu_worker")
_LATER_IN_A_CONTROLLER = (
    *("torch.distributed.checkpoint", "transformers", "pandas", "duckdb", "pyarrow"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg", "torchtitan_rl.record.plot"),
)
_LATER_IN_A_TRAINER = (
    "torchtitan.trainer",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint._fsspec_filesystem",
)
_LATER_IN_A_GENERATOR = (
    *("vllm.renderers.hf", "vllm.v1.attention.backends.cpu_attn", "vllm.v1.core.sched.scheduler"),
    *("vllm.model_executor.layers.quantization.online.base", "vllm.distributed.elastic_ep.elastic_execute"),
)
"""These three: what functions import when they are called, in every run."""
IMPORTS = {
    "trainer": (*_TRAINER, *_LATER_IN_A_TRAINER),
    "generator": (*_GENERATOR, *_LATER_IN_A_GENERATOR),
    "local": (
        *(*_CONTROLLER, *_TRAINER, *_GENERATOR),
        *(*_LATER_IN_A_CONTROLLER, *_LATER_IN_A_TRAINER, *_LATER_IN_A_GENERATOR),
    ),
    "command": (*_CONTROLLER, *_LATER_IN_A_CONTROLLER),
}
"""What processes of a kind have imported. Monarch is not among it: it starts threads, which no fork has."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""With these, none of the imports starts a thread."""
_OF_THREADS = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ATEN_")
READ_AT_IMPORT = (*_OF_THREADS, "TORCHDYNAMO_", "PYTORCH_", "CUDA_", "HF_", "PYTHONHASHSEED", "LC_", "LANG")
"""Beginnings of environment variables that packages read once. A process with others of these starts by itself. Those
of vLLM and of torch's compiler are read when they are needed; an engine in the process of the tests sets some."""


def variables_of(directory: str) -> dict[str, str]:
    """The environment variables with which processes begin as forks of the server of a directory."""
    return {SERVERS: directory, "PYTHONPATH": str(HERE)}


@contextmanager
def forks(awaited: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """The environment variables with which processes begin as forks of a server, which ends with the context. The
    imports of the kinds `awaited` are made at once, those of others when the first process of the kind starts."""
    from torchtitan_rl.environment import default_environment

    with tempfile.TemporaryDirectory(prefix="forks-") as directory:
        variables = variables_of(directory)
        environment = default_environment() | os.environ | {"OMP_DYNAMIC": "false"} | variables
        values = {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}
        Path(directory, "environment.json").write_text(json.dumps({"prefixes": READ_AT_IMPORT, "values": values}))
        listeners = [socket.socket(socket.AF_UNIX) for _ in IMPORTS]
        for kind, listener in zip(IMPORTS, listeners):
            listener.bind(f"{directory}/{kind}")
            listener.listen(64)
        fds = [listener.fileno() for listener in listeners]
        with open(f"{directory}/log", "wb") as log:
            server = subprocess.Popen(
                [sys.executable, __file__, *map(str, fds)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=fds,
                env=environment | ONE_THREAD | {"VLLM_CONFIGURE_LOGGING": "0"},  # as `record.logs` sets it for a rank
            )
        Path(directory, "pid").write_text(str(server.pid))
        for listener in listeners:
            listener.close()
        try:
            for kind in awaited:
                await_imports(f"{directory}/{kind}")
            yield variables
        finally:
            server.terminate()
            server.wait(10)


def await_imports(address: str) -> None:
    """Monarch waits 30 s for a process, which on a busy machine is less than the imports take."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(300)
        connection.connect(address)
        connection.shutdown(socket.SHUT_WR)  # asks for nothing: the answer is the end of the connection
        connection.recv(1)


@contextmanager
def in_use(variables: dict[str, str]) -> Iterator[None]:
    """Lets processes that start meanwhile be forks: `variables` are those of `forks`."""
    before = dict(os.environ)
    if directory := variables.get(SERVERS):
        take_back(directory)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def take_back(directory: str) -> None:
    """Takes back what an engine in this process has left of variables that are read at import: with these, processes
    would start by themselves."""
    read_at_import = json.loads(Path(directory, "environment.json").read_text())
    for name in [name for name in os.environ if name.startswith(READ_AT_IMPORT)]:
        del os.environ[name]
    os.environ.update(read_at_import["values"])


@contextmanager
def started_by_themselves() -> Iterator[None]:
    """Lets no process that starts meanwhile be a fork."""
    before = os.environ.pop(SERVERS, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[SERVERS] = before


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def make_imports(kind: str) -> None:
    from torchtitan_rl import adapters

    for module in IMPORTS[kind]:
        if module == "vllm":
            adapters.prepare_vllm(eager=True)
        importlib.import_module(module)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def serve(listener: socket.socket) -> dict:
    """Forks for every connection. Returns in a fork, with what it was asked to become; never in the server."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ, None)
    children: dict[socket.socket, int] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                start, fds = received(connection)
                if start is None:
                    for fd in fds:
                        os.close(fd)
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    for inherited in (listener, connection, selector, *children):
                        inherited.close()
                    for number, fd in zip(start["descriptors"], fds, strict=True):
                        place(fd, number)
                    return start
                for fd in fds:
                    os.close(fd)
                send(connection, pid)
                children[connection] = pid
                selector.register(connection, selectors.EVENT_READ, None)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, connection)
            elif key.data is not None:  # a fork has ended
                selector.unregister(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(children.pop(key.data), 0)
                send(key.data, os.waitstatus_to_exitcode(status))
                if key.data in selector.get_map():
                    selector.unregister(key.data)
                key.data.close()
            elif key.fileobj in children:  # who asked for a fork has ended
                selector.unregister(key.fileobj)
                os.kill(children[key.fileobj], signal.SIGKILL)


def place(fd: int, number: int) -> None:
    """Gives an open file the number that it has in the process that asked. Beyond the standard streams this process
    holds no file of that number: it would lose it."""
    if fd == number:
        os.set_inheritable(fd, True)
        return
    if number > 2 and os.path.exists(f"/proc/self/fd/{number}"):
        raise RuntimeError(f"descriptor={number}: is open in the fork; let the server hold fewer files")
    os.dup2(fd, number)
    os.close(fd)


def send(connection: socket.socket, number: int) -> None:
    try:
        connection.sendall(f"{number}\n".encode())
    except OSError:  # who asked has ended, which its end of the connection says too
        pass


def received(connection: socket.socket) -> tuple[dict | None, list[int]]:
    """What to become, and the files of `start["descriptors"]`; None where the other end has closed before it said."""
    data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 4)
    while data and not data.endswith(b"\n"):
        if not (more := connection.recv(1 << 16)):
            break
        data += more
    return (json.loads(data) if data.endswith(b"\n") else None), fds


def become(start: dict) -> NoReturn:
    """Runs what the process was asked to become, as Python does with `-m`. A supervised command asks whether its
    supervisor is its parent: it gets the parent of the process that it stands for, with which that process ends."""
    end_with_parent()
    os.getppid = lambda: start["parent"]
    os.environ.clear()
    os.environ.update(start["environment"])
    os.chdir(start["directory"])
    module, *sys.argv[1:] = start["argv"]
    sys.path[0] = start["directory"]
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.orig_argv[1:] = ["-m", *start["argv"]]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream.isatty(), write_through="PYTHONUNBUFFERED" in os.environ)

    from torchtitan_rl.environment import prepare_environment

    prepare_environment()
    gc.enable()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the end of an interpreter that has imported vLLM prints what was not freed


def main() -> None:
    end_with_parent()
    sys.path.append(str(ROOT))
    selector, kinds = selectors.DefaultSelector(), []
    for kind, fd in zip(IMPORTS, map(int, sys.argv[1:])):
        selector.register(socket.socket(fileno=fd), selectors.EVENT_READ, kind)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
    try:
        while True:  # a kind's imports are made when a process of the kind is asked for first
            for key, _ in selector.select():
                selector.unregister(key.fileobj)
                if (pid := os.fork()) == 0:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    for listening in [*selector.get_map().values()]:
                        listening.fileobj.close()
                    make_kind(key.fileobj, key.data)
                kinds.append(pid)
                key.fileobj.close()
    finally:
        for pid in kinds:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def make_kind(listener: socket.socket, kind: str) -> NoReturn:
    try:
        end_with_parent()
        gc.disable()
        make_imports(kind)
        gc.freeze()
        if num_threads() != 1:
            raise RuntimeError(f"{kind}: {num_threads()} threads, of which a fork has one; see ONE_THREAD")
        become(serve(listener))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
