"""Python imports this module at its start wherever this directory is on PYTHONPATH (`tests.kit.forks.server`).

Where a server of forks can make the process that this one is to become, this one lets it do so: it passes on what it
was started with, lives as long as the fork does, and ends as the fork ended."""

import os
import sys

_SERVERS = "TORCHTITAN_RL_TEST_FORKS"
_SUPERVISED = "TORCHTITAN_RL_RESTARTS"  # the number of restarts, and the supervisor's process id
_ACTOR, _COMMAND = "monarch._src.actor.bootstrap_main", "torchtitan_rl.cli"


def _kind() -> str:
    """What this process is to become, as a key of `server.IMPORTS`; empty where it has to start by itself."""
    if _SERVERS not in os.environ or len(sys.orig_argv) < 3 or sys.orig_argv[1] != "-m":
        return ""
    if sys.orig_argv[2] == _COMMAND and os.environ.get(f"{_SERVERS}_OF") != "actors":
        supervises = "sweep" in sys.orig_argv or "--max-restarts" in sys.orig_argv
        return "local" if "local" in sys.orig_argv and not supervises else "command"
    role = os.environ.get("HYPERACTOR_PROCESS_NAME", "")
    if sys.orig_argv[2] != _ACTOR or not role:
        return ""
    return "generator" if role.startswith(("generator", "spare")) else "trainer"


def _become(kind: str) -> None:
    """Ends this process with the fork that it stands for; returns where a fork would not be what this process is."""
    import json
    import signal
    import socket

    directory = os.environ[_SERVERS]
    with open(f"{directory}/environment.json") as file:
        read_at_import = json.load(file)
    prefixes = tuple(read_at_import["prefixes"])
    if {name: value for name, value in os.environ.items() if name.startswith(prefixes)} != read_at_import["values"]:
        return
    supervised = _SUPERVISED in os.environ
    if sys.orig_argv[2] == _ACTOR or supervised:  # as Monarch does in an actor's process, and a supervised command
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if supervised and os.getppid() != int(os.environ[_SUPERVISED].split()[1]):  # it ended before prctl
            os.kill(os.getpid(), signal.SIGKILL)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(300)  # the server may have to make its imports first
    connection.connect(f"{directory}/{kind}")
    descriptors = [0, 1, 2]
    if "--outcome" in sys.orig_argv:  # a supervisor's pipe
        descriptors.append(int(sys.orig_argv[sys.orig_argv.index("--outcome") + 1]))
    start = {
        **{"argv": sys.orig_argv[2:], "environment": dict(os.environ), "directory": os.getcwd()},
        **{"descriptors": descriptors, "parent": os.getppid()},
    }
    line = json.dumps(start).encode() + b"\n"
    sent = socket.send_fds(connection, [line], descriptors)
    for descriptor in descriptors[3:]:
        os.close(descriptor)  # the fork alone holds it
    connection.sendall(line[sent:])
    answers = connection.makefile()
    pid = int(answers.readline())
    connection.settimeout(None)
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: os.kill(pid, number))
    status = int(answers.readline() or 1)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


if kind := _kind():
    _become(kind)
