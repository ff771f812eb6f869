"""A program and every process that it starts, ended together; on request in Linux namespaces of its own.

A supervisor stands between the controller and the program: `supervised` makes one of the calling process, and
`command_line` starts a command below one. Linux gives the supervisor each process
whose parent has ended (PR_SET_CHILD_SUBREAPER), so a process that left its session and its parent is still below it.
The supervisor ends with the program, on the signal STOP, and with the thread that started it, and kills first what is
left below it.

In namespaces of its own a command sees the processes that it starts and no others, and of the directory in which
commands of this machine have their files, its own alone::

    supervisor            a new user namespace, and a new PID namespace for its children; it sees all processes still
      first process       process 1 of the PID namespace: the kernel kills the namespace when it ends; mounts of its own
        command

The file runs with the standard library alone: a supervisor starts in a fraction of the time of the package.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # the module takes longer to import than all others here
    from typing import NoReturn

__all__ = [
    "FAILED",
    "STOP",
    "adopt_orphans",
    "command_line",
    "descendants",
    "kill_descendants",
    "main",
    "parents",
    "supervised",
]

STOP = signal.SIGUSR2
"""Tells a supervisor to kill everything below it and to end. A scheduler sends SIGTERM to every process of a run and
means the controller, so a supervisor ignores SIGTERM."""
FAILED = 125
"""Exit status of a supervisor that cannot make the surroundings of its command."""

_KILL_S = 30.0
"""Seconds for the processes of a tree to end once they are killed: a hundred take long on a busy machine."""
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER = 1, 24, 36  # linux/prctl.h
_CAP_SYS_PTRACE, _CAP_SYS_ADMIN = 19, 21  # linux/capability.h
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000  # linux/sched.h
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18  # linux/mount.h

_WAITED = {STOP, signal.SIGCHLD}
_STOPPING = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
_IGNORED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def command_line(
    directory: str,
    command: list[str],
    *,
    cwd: str,
    isolated: bool,
    memory_bytes: int = 0,
    file_bytes: int = 0,
    started: int = -1,
) -> list[str]:
    """The command line of a supervisor, which the calling thread has to start and outlive. `directory` belongs to the
    command, which runs in `cwd`, the directory or one below it; with `isolated` it alone of its parent's directories is
    visible.

    The kernel holds each process of the command to `memory_bytes` of address space and files of `file_bytes`; 0: no
    limit. The supervisor ends as the command does; with 127 and a sentence where the command cannot be started, with
    FAILED and a sentence where its surroundings cannot be made. A command may end with these too: a byte is written to
    `started`, a descriptor that the supervisor inherits and the command does not, once the surroundings are made.
    """
    settings = (os.getpid(), directory, cwd, int(isolated), memory_bytes, file_bytes, started)
    # By an import, because Python compiles a script anew each time that it runs.
    start = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import process_tree as p; p.main(sys.argv)"
    return [sys.executable, "-I", "-S", "-c", start, *map(str, settings), *command]


def supervised(parent: int) -> None:
    """Forks. The child returns, in a session of its own; this process becomes its supervisor, never returns, and ends
    as the child does. `parent` is the process that started this one: everything ends with its thread."""
    mask = _begin(parent)
    if (child := os.fork()) == 0:
        _leave(mask)
        return
    _supervise(child)


def adopt_orphans() -> None:
    """Has Linux give this process each process below it whose parent ends, of whatever session."""
    _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def parents() -> dict[int, int]:
    """Process id -> id of its parent, for every process in /proc."""
    parent_of = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent_of[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):  # it has ended
                continue
    return parent_of


def descendants(pid: int, parents: dict[int, int]) -> list[int]:
    """The processes below `pid`."""
    children: dict[int, list[int]] = {}
    for process, parent in parents.items():
        children.setdefault(parent, []).append(process)
    below, following = [], children.get(pid, [])
    while following:
        below += following
        following = [child for process in following for child in children.get(process, ())]
    return below


def kill_descendants(child: int) -> int | None:
    """Kills every process below this one, which adopts orphans; the status of `child` if it is one of them. A process
    that starts others while it is killed leaves them to this process, so they are killed in a later round."""
    status, deadline = None, time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = ended[1] if ended[0] == child else status
        except ChildProcessError:  # there are no more
            return status
        for process in descendants(os.getpid(), parents()):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.001)
    try:
        os.write(2, f"process_tree: processes below {os.getpid()} did not end within {_KILL_S:g} s\n".encode())
    except OSError:  # nobody reads it any more
        pass
    return status


def _begin(parent: int) -> set[int | signal.Signals]:
    """Makes this process a supervisor. Returns the signals that it blocked before."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED | _IGNORED)
    adopt_orphans()
    _end_with(parent)
    return mask


def _end_with(parent: int) -> None:
    """Has the kernel send STOP when the thread that started this process ends."""
    _call("prctl", _PR_SET_PDEATHSIG, STOP, 0, 0, 0)
    if os.getppid() != parent:  # it ended before prctl
        os._exit(FAILED)


def _leave(mask: set[int | signal.Signals]) -> None:
    """In a supervisor's child: back to the signals of before, a session of its own, and an end with the supervisor."""
    supervisor = os.getppid()
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:
        os._exit(FAILED)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _supervise(child: int, report: int | None = None) -> NoReturn:
    """Waits for the child's end or for STOP, kills what is left below this process, and ends as the child did, or as
    the status that the first process of a namespace wrote to `report` says."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # whoever reads what the child writes waits for the child alone
        os.dup2(nothing, descriptor)
    status = None
    while status is None and signal.sigwait(_WAITED) != STOP:
        status = _reaped(child)
    killed = kill_descendants(child)
    status = killed if status is None else status
    if report is not None:
        status = _reported(report) or status
    if status is None:
        os._exit(FAILED)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else FAILED)


def _reported(report: int) -> int | None:
    """The status that the first process of a namespace wrote; None where it wrote none. A command may reach the pipe
    through /proc, and must not stop the supervisor."""
    try:
        status = int.from_bytes(os.read(report, 2), "little")
    except BlockingIOError:  # processes of the namespace are left
        return None
    return None if os.WIFSIGNALED(status) and os.WTERMSIG(status) in _STOPPING else status


def _reaped(child: int) -> int | None:
    """Takes note of the children that have ended; the status of `child` if it is one of them."""
    status = None
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == child else status
    except ChildProcessError:  # there are no more
        pass
    return status


def main(arguments: list[str]) -> NoReturn:
    """A supervisor's process, with the arguments that `command_line` makes."""
    _, parent, directory, cwd, isolated, memory_bytes, file_bytes, number, *command = arguments
    mask, report, started = _begin(int(parent)), None, int(number)
    if started >= 0:
        os.set_inheritable(started, False)
    if int(isolated):
        _own_namespaces()
        _end_with(int(parent))
        report, writing = os.pipe()
        os.set_blocking(report, False)
    if (child := os.fork()) == 0:
        try:
            _leave(mask)
            if int(isolated):
                _own_view(directory)
                if (grandchild := os.fork()) != 0:
                    _close(started)
                    _first_process(grandchild, writing)
                os.setsid()  # the command may stop its own group, and must not stop process 1 with it
            os.chdir(cwd)
            for kind, limit in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, file_bytes)):
                _limit(kind, int(limit))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if started >= 0:
                os.write(started, b"+")
            _become(command)
        except BaseException as error:
            print(f"{command[0]!r} cannot be started: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(FAILED)
    _close(started)  # a command might find it in /proc
    if report is not None:
        os.close(writing)
    _supervise(child, report)


def _become(command: list[str]) -> NoReturn:
    """Replaces this process by a command; one that cannot be started has status 127."""
    # Python ignores the first two, and an actor the last: a command would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]!r} cannot be started: {error}", file=sys.stderr, flush=True)
        os._exit(127)


def _close(descriptor: int) -> None:
    """Closes a descriptor; -1: there is none."""
    if descriptor >= 0:
        os.close(descriptor)


def _limit(kind: int, limit: int) -> None:
    """Sets a limit of the kernel unless a lower one holds already."""
    _, hard = resource.getrlimit(kind)
    if limit and (hard == resource.RLIM_INFINITY or limit < hard):
        resource.setrlimit(kind, (limit, limit))


def _own_namespaces() -> None:
    """Puts this process into a user namespace, and its children into a PID namespace. Users keep their numbers, so
    files belong to whom they belonged to."""
    process, (gate, opened) = os.getpid(), os.pipe()
    if (helper := os.fork()) == 0:  # the maps are written from outside the new namespace
        try:
            os.close(opened)
            if os.read(gate, 1):
                _write_maps(process)
                os._exit(0)
        except OSError as error:
            print(f"user namespace: its users cannot be mapped ({error})", file=sys.stderr, flush=True)
        finally:
            os._exit(FAILED)
    try:
        _call("unshare", _CLONE_NEWUSER | _CLONE_NEWPID)
    except OSError as error:
        print(f"namespaces: the kernel refuses them ({error})", file=sys.stderr, flush=True)
        os._exit(FAILED)
    os.write(opened, b"1")
    os.close(opened)
    os.close(gate)
    if os.waitpid(helper, 0)[1]:
        os._exit(FAILED)


def _write_maps(process: int) -> None:
    """Maps the users and groups of a new user namespace to themselves: all where this process may, else its own."""
    try:
        if os.geteuid() != 0:
            raise PermissionError
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/self/{name}") as file:
                ranges = [line.split() for line in file]
            _write(f"/proc/{process}/{name}", "".join(f"{first} {first} {size}\n" for first, _, size in ranges))
    except PermissionError:
        _write(f"/proc/{process}/setgroups", "deny")
        _write(f"/proc/{process}/uid_map", f"{os.geteuid()} {os.geteuid()} 1\n")
        _write(f"/proc/{process}/gid_map", f"{os.getegid()} {os.getegid()} 1\n")


def _write(file: str, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())  # the kernel takes a map in one call
    finally:
        os.close(descriptor)


def _own_view(directory: str) -> None:
    """In process 1 of a PID namespace: mounts of its own, a /proc of the namespace, and an empty parent of `directory`
    with `directory` alone in it. Raises OSError."""
    _call("unshare", _CLONE_NEWNS)  # not the supervisor's mounts: it finds what to kill in the machine's /proc
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    own = os.open(directory, os.O_PATH)
    _mount("tmpfs", os.path.dirname(directory), "tmpfs", _MS_NOSUID | _MS_NODEV)
    os.mkdir(directory)
    _mount(f"/proc/self/fd/{own}", directory, None, _MS_BIND)
    os.close(own)
    os.chdir(directory)  # the directory of before has the hidden parent above it
    for capability in (_CAP_SYS_ADMIN, _CAP_SYS_PTRACE):  # root would undo the mounts, or have process 1 do that
        _call("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)


def _first_process(child: int, report: int) -> NoReturn:
    """Process 1 of a PID namespace: reaps whatever ends in it, and ends when `child` does, as a shell would. No signal
    of its own ends it, so it writes the child's status to `report` for the supervisor."""
    while True:
        process, status = os.wait()
        if process == child:
            os.write(report, status.to_bytes(2, "little"))
            os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    try:
        encoded = (None if text is None else os.fsencode(text) for text in (source, target, kind))
        _call("mount", *encoded, ctypes.c_ulong(flags), None)
    except OSError as error:
        raise OSError(f"{target} cannot be mounted in its namespace ({error})") from None


def _call(name: str, *arguments) -> None:
    """Calls a function of the C library that returns -1 for an error. Does nothing where there is no such function."""
    if sys.platform != "linux":
        return
    if getattr(_libc, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


_libc = ctypes.CDLL(None, use_errno=True)
