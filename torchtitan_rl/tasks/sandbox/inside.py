"""Process 1 within a sandbox of bubblewrap: takes files and commands from the controller, and kills what they leave.

The controller speaks to it over one socket that commands do not inherit. Commands run as the user that this process
has, so it makes itself unreadable to them; signals from within the sandbox do not reach process 1. It ends when the
socket does, and the kernel then kills whatever else is in the sandbox.

The file runs with the standard library alone, and imports as little of that as it can: each module of `json`, `signal`
and `socket` would add 5 to 10 ms to the start of every sandbox.
"""

import _signal  # `signal` without its enumerations
import ctypes
import marshal
import os
import resource
import select
import stat
import struct
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

__all__ = ["ANSWER", "DIRECTORY", "FIRST_USER", "LENGTH", "NUM_USERS", "encoded", "main"]

DIRECTORY = "/tmp/sandbox"
FIRST_USER, NUM_USERS = 1 << 30, 1 << 29
"""Users that no machine has, from whom the sandboxes of root take theirs."""

LENGTH = struct.Struct("!I")
"""Bytes of a request, before the request."""
ANSWER = struct.Struct("!i3I")
"""A status, and the bytes of three parts, which follow: a text, two contents. The controller takes no pickles and the
like from a sandbox."""

_LOOK_EVERY_S = 0.05
_OPEN_FILES = 1024
_MAX_FILES = 50_000
"""Files and directories at once: an empty one takes memory of the kernel too."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4  # linux/prctl.h


def encoded(content: "dict[str, Any]") -> bytes:
    """A request as the controller sends it."""
    text = marshal.dumps(content)
    return LENGTH.pack(len(text)) + text


class _Channel:
    """This process's end of the socket. Raises EOFError where the controller has ended."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def receive(self) -> "dict[str, Any]":
        return marshal.loads(self._read(LENGTH.unpack(self._read(LENGTH.size))[0]))

    def answer(self, status: int, text: str, content: bytes = b"", second: bytes = b"") -> None:
        first = text.encode()
        head = ANSWER.pack(status, len(first), len(content), len(second))
        left = memoryview(b"".join((head, first, content, second)))
        while left:
            left = left[os.write(self.descriptor, left) :]

    def _read(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            part = os.read(self.descriptor, min(size - len(content), 1 << 20))
            if not part:
                raise EOFError
            content += part
        return bytes(content)


def main(descriptor: int) -> "NoReturn":
    """Serves one sandbox until the controller's end of the socket is closed."""
    os.set_inheritable(descriptor, False)
    channel = _Channel(descriptor)
    try:
        settings = channel.receive()
        with open("/proc/self/oom_score_adj", "w") as file:  # short of memory, the kernel kills in here first
            file.write("1000")
        _leave_root(settings["user"])
        libc = ctypes.CDLL(None, use_errno=True)
        for option, value in ((_PR_SET_PDEATHSIG, _signal.SIGKILL), (_PR_SET_DUMPABLE, 0)):
            if libc.prctl(option, int(value), 0, 0, 0):
                raise OSError(ctypes.get_errno(), "prctl")
        os.mkdir(DIRECTORY, 0o700)
        _announce(descriptor, settings["port"])
        while True:
            request = channel.receive()
            if "command" in request:
                _run(channel, settings, request)
            elif "files" in request:
                _answer_write(channel, request["files"])
            else:
                _answer_read(channel, request["name"], request["max_bytes"])
    except (EOFError, ConnectionError):
        os._exit(0)


def _leave_root(user: int) -> None:
    """Where the sandbox was started by root: becomes a user that owns nothing on this machine, because the kernel does
    not count root's processes, and shows root root's files."""
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def _announce(descriptor: int, port: int) -> None:
    """Says that the sandbox is ready; with a port, hands over a socket that listens at it within the sandbox: the
    sandbox has a network of its own, and the controller answers there for the gateway."""
    if not port:
        os.write(descriptor, b"+")
        return
    import socket

    with (
        socket.socket(fileno=os.dup(descriptor)) as stream,
        socket.create_server(("127.0.0.1", port), backlog=128) as own,
    ):
        socket.send_fds(stream, [b"+"], [own.fileno()])


def _run(channel: _Channel, settings: "dict[str, Any]", request: "dict[str, Any]") -> None:
    """Runs one command, kills what it left, and sends how it ended."""
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        _become(request, settings, out_end, err_end)
    os.close(out_end)
    os.close(err_end)
    written: dict[int, bytearray] = {out: bytearray(), err: bytearray()}
    limit = ""
    status: int | None = None
    deadline = time.monotonic() + request["timeout_s"]
    pidfd = os.pidfd_open(child)
    poll = select.poll()
    for descriptor in (channel.descriptor, pidfd, out, err):
        poll.register(descriptor, select.POLLIN)
    look_at = 0.0
    while status is None and not limit:
        for descriptor, _ in poll.poll(1000 * max(0.0, min(_LOOK_EVERY_S, deadline - time.monotonic()))):
            if descriptor == channel.descriptor:  # nothing is sent while a command runs: the controller has ended
                os._exit(0)
            if descriptor == pidfd:
                status = _reaped(child)
            elif not _read_some(descriptor, written[descriptor]):
                poll.unregister(descriptor)
        if sum(map(len, written.values())) > settings["output_bytes"]:
            limit = "output"
        now = time.monotonic()
        if status is None and not limit and now >= look_at:
            limit = "time" if now >= deadline else _passed(settings)
            _reaped(child, only_others=True)
            look_at = now + _LOOK_EVERY_S
    status = _kill_all(child, status)
    for descriptor, content in written.items():
        os.set_blocking(descriptor, False)
        while len(content) <= settings["output_bytes"] and _read_some(descriptor, content):
            pass
        os.close(descriptor)
    os.close(pidfd)
    whole = settings["output_bytes"]
    stdout = bytes(written[out][:whole])
    stderr = bytes(written[err][: whole - len(stdout)])
    if not limit and sum(map(len, written.values())) > whole:
        limit = "output"
    channel.answer(status, limit, stdout, stderr)


def _become(request: "dict[str, Any]", settings: "dict[str, Any]", out: int, err: int) -> "NoReturn":
    """In a new process: becomes the command."""
    try:
        os.setsid()
        for descriptor, number in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
            os.dup2(descriptor, number)
        os.closerange(3, _OPEN_FILES)
        for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
            _signal.signal(number, _signal.SIG_DFL)  # Python ignores them
        directory = os.path.normpath(os.path.join(DIRECTORY, request["cwd"]))
        os.makedirs(directory, exist_ok=True)
        os.chdir(directory)
        cpu_s = int(-(-settings["cpu_s"] // 1))  # rounded up
        for kind, value in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_CPU, cpu_s),
            (resource.RLIMIT_DATA, settings["memory_bytes"]),
            (resource.RLIMIT_FSIZE, settings["disk_bytes"]),
            (resource.RLIMIT_NOFILE, _OPEN_FILES),
            (resource.RLIMIT_NPROC, settings["processes"] + 1),  # this process and those that it starts, and process 1
            (resource.RLIMIT_MEMLOCK, 1 << 16),
        ):
            _, hard = resource.getrlimit(kind)
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        os.execvpe(request["command"][0], request["command"], request["env"] | {"HOME": directory, "TMPDIR": directory})
    except BaseException as error:
        os.write(2, f"{request['command'][0]!r} cannot be started: {error}\n".encode())
    finally:
        os._exit(127)


def _passed(settings: "dict[str, Any]") -> str:
    """The limit that all processes together have passed; empty: none. Memory that is shared after a fork counts once
    for each process."""
    memory = 0
    for name in os.listdir("/proc"):
        if name.isdecimal() and name != "1":
            try:
                with open(f"/proc/{name}/status", "rb") as file:
                    for line in file:
                        if line.startswith((b"RssAnon:", b"RssShmem:")):
                            memory += int(line.split()[1]) * 1024
            except (OSError, IndexError, ValueError):  # it has ended
                continue
    if memory > settings["memory_bytes"]:
        return "memory"
    files = os.statvfs("/tmp")
    return "disk" if files.f_files - files.f_ffree > _MAX_FILES else ""


def _read_some(descriptor: int, content: bytearray) -> bool:
    """Reads what is there. False at the end, and where nothing is there."""
    try:
        part = os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return False
    content += part
    return bool(part)


def _reaped(child: int, *, only_others: bool = False) -> "int | None":
    """Takes note of processes that have ended; the status of `child` if it is one of them."""
    if not only_others:
        process, status = os.waitpid(child, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if process else None
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None
        if ended is None or ended.si_pid == child:
            return None
        os.waitpid(ended.si_pid, 0)


def _kill_all(child: int, status: "int | None") -> int:
    """Kills every process but this one, waits for their ends, and returns the status of `child`."""
    while True:
        try:
            os.kill(-1, _signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            process, ended = os.waitpid(-1, 0)
        except ChildProcessError:
            return -_signal.SIGKILL if status is None else status
        if process == child:
            status = os.waitstatus_to_exitcode(ended)


def _parent(name: str) -> "tuple[int, str]":
    """A descriptor of the directory of a file, which is made where it does not exist, and the file's own name in it.
    No part is a link."""
    *directories, last = name.split("/")
    at = os.open(DIRECTORY, os.O_RDONLY | os.O_DIRECTORY)
    for part in directories:
        try:
            os.mkdir(part, 0o755, dir_fd=at)
        except FileExistsError:
            pass
        try:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
        finally:
            os.close(at)
        at = below
    return at, last


def _answer_write(channel: _Channel, files: "dict[str, bytes]") -> None:
    for name, content in files.items():
        try:
            at, last = _parent(name)
            try:
                try:
                    os.unlink(last, dir_fd=at)
                except FileNotFoundError:
                    pass
                file = os.open(last, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=at)
                with os.fdopen(file, "wb") as opened:
                    opened.write(content)
            finally:
                os.close(at)
        except OSError as error:
            return channel.answer(1, f"{name!r} cannot be written ({error.strerror})")
    channel.answer(0, "")


def _answer_read(channel: _Channel, name: str, max_bytes: int) -> None:
    """Answers with status 1 and why a file cannot be read, with status 2 where there is none."""
    try:
        at, last = _parent(name)
        try:
            file = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
        finally:
            os.close(at)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            return channel.answer(1, f"{name!r} is no plain file")
        with os.fdopen(file, "rb") as opened:
            content = opened.read(max_bytes + 1)
    except FileNotFoundError:
        return channel.answer(2, "")
    except OSError as error:
        return channel.answer(1, f"{name!r} cannot be read ({error.strerror})")
    if len(content) > max_bytes:
        return channel.answer(1, f"{name!r} has more than {max_bytes} bytes")
    channel.answer(0, "", content)
