"""Linux namespaces by the tools of util-linux and iproute2, and processes that are started in them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

__all__ = ["missing", "has_netem", "hold", "holder_pid", "in_network", "popen", "users_of", "identities"]

TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "taskset": "util-linux",
    "mount": "mount",
}
"""What the bed calls, and Debian's package of it."""
KINDS = {"net": "net", "uts": "uts", "ipc": "ipc", "mnt": "mount"}
"""The namespaces of a host that nsenter enters, with its options; the PID namespace is set before it is forked."""
_PROBE = (
    "ip link set lo up && ip link add name a0 type veth peer name a1 && ip link add name b0 type bridge && "
    "tc qdisc add dev a0 root tbf rate 1mbit burst 64kb latency 50ms"
)
_CLONE_NEWPID = 0x20000000
_READY_S = 10.0

_libc = ctypes.CDLL(None, use_errno=True)
_forking = threading.Lock()


def missing() -> str:
    """Why no bed can be made on this machine, in one sentence; "" when one can."""
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            return f"{tool}: is not on PATH, and the network test bed needs it; apt install {package}"
    made = subprocess.run(
        ["unshare", "--net", "--pid", "--uts", "--ipc", "--mount", "--fork", "sh", "-c", _PROBE],
        capture_output=True,
        text=True,
        timeout=_READY_S,
    )
    if made.returncode == 0:
        return ""
    reason = (made.stderr.strip().splitlines() or ["no reason given"])[-1]
    if os.geteuid() != 0:
        return f"uid={os.geteuid()}: may not make namespaces ({reason}); start the network test bed as root"
    return f"namespaces: this machine makes none with a veth, a bridge and tbf in them ({reason}); use another machine"


def has_netem() -> bool:
    """Whether the kernel has the queueing discipline netem."""
    command = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    return subprocess.run(command, capture_output=True, timeout=_READY_S).returncode == 0


def hold(flags: Sequence[str], script: str) -> subprocess.Popen:
    """Starts a process in new namespaces (`flags` of unshare) that runs `script`, then holds them until its standard
    input ends: at the latest when this process dies. Raises RuntimeError with the script's own words if it fails."""
    # A parent that ignores SIGCHLD need not wait for its children: what loses its parent in there leaves no zombie.
    ready = f"set -e\n{script}\ntrap '' CHLD\necho ready\nexec cat"
    holder = subprocess.Popen(
        ["unshare", *flags, "sh", "-c", ready],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    if holder.stdout.readline() != "ready\n":
        _, words = holder.communicate(timeout=_READY_S)
        raise RuntimeError(f"namespaces: {' '.join(words.split()) or 'the holder ended without a word'}")
    return holder


def holder_pid(holder: subprocess.Popen) -> int:
    """The process, by its id outside, that is PID 1 in a holder with `--pid --fork`."""
    (child,) = psutil.Process(holder.pid).children()
    return child.pid


def in_network(pid: int, *lines: str, tool: str = "ip") -> None:
    """Runs lines of `ip -batch` or `tc -batch` in the network namespace of a process. Raises RuntimeError with the
    tool's own words."""
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{pid}/ns/net", tool, "-batch", "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=_READY_S,
    )
    if done.returncode:
        raise RuntimeError(f"{tool} {'; '.join(lines)}: {' '.join(done.stderr.split())}")


def popen(
    pid: int, command: Sequence[str], *, env: Mapping[str, str], cwd: str, cores: set[int], **options
) -> subprocess.Popen:
    """Starts a command in all namespaces of the process `pid`, on `cores`. `env` is added to this process's
    environment; `options` go to subprocess.Popen."""
    spaces = [f"--{option}=/proc/{pid}/ns/{kind}" for kind, option in KINDS.items()]
    entering = ["nsenter", *spaces, f"--wd={cwd}", "taskset", "--cpu-list", ",".join(map(str, sorted(cores)))]
    theirs, ours = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY), os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        with _forking:  # only children of this thread are affected, and only between the two calls
            _setns(theirs, _CLONE_NEWPID)
            try:  # nsenter and taskset become the command: there is no process between
                return subprocess.Popen([*entering, *command], env={**os.environ, **env}, **options)
            finally:
                _setns(ours, _CLONE_NEWPID)
    finally:
        os.close(theirs)
        os.close(ours)


def identities(pid: int) -> set[str]:
    """What the kernel calls the namespaces of a process: net:[4026532200] and the like."""
    return {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in (*KINDS, "pid")}


def users_of(namespaces: set[str]) -> list[str]:
    """The processes of this machine that are in one of the namespaces, each with its command line."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            links = {os.readlink(directory / "ns" / kind) for kind in (*KINDS, "pid")}
            if links & namespaces:
                found.append(f"{directory.name} {(directory / 'cmdline').read_text()[:100]!r}")
        except OSError:
            pass  # the process has ended
    return found


def _setns(fd: int, kind: int) -> None:
    if _libc.setns(fd, kind):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def entered(pid: int, kind: str, body: Callable[[], int]) -> int:
    """What `body` returns when it is called with this process in one namespace of `pid`; the process stays there."""
    fd = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
    try:
        _setns(fd, 0)
        return body()
    finally:
        os.close(fd)
