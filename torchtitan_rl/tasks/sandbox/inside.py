"""Process 1 within a sandbox: takes files and commands from the controller, and kills what they leave.

The controller (outside.py) speaks to it over one socket that commands do not inherit. Commands run as the user that
this process has, so it makes itself unreadable to them; signals from within the sandbox do not reach process 1. It ends
when the socket does, and the kernel then kills whatever else is in the sandbox.

The file runs with the standard library alone, of Python 3.9 or later: in a container it is the image's. It imports as
little of that as it can: each module of `json`, `signal` and `socket` would add 5 to 10 ms to the start of every
sandbox.
"""

import _signal  # `signal` without its enumerations
import ctypes
import marshal
import os
import resource
import select
import stat
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

__all__ = ["ANSWER", "DIRECTORY", "FIRST_USER", "LENGTH", "MOUNT", "NOT_STARTED", "NUM_USERS", "encoded", "main"]

DIRECTORY = "/tmp/sandbox"
MOUNT = "/run/sandbox"
"""Where a container has this file and, until process 1 has connected to the controller, the socket."""
FIRST_USER, NUM_USERS = 1 << 30, 1 << 29
"""Users that no machine has, from whom the sandboxes of root take theirs."""

LENGTH = struct.Struct("!I")
"""Bytes of a request, before the request."""
ANSWER = struct.Struct("!i3I")
"""A status, and the bytes of three parts, which follow: a text, two contents. The controller takes no pickles and the
like from a sandbox."""

NOT_STARTED = "not started"
"""In the place of a limit: the surroundings of a command could not be made, and its standard error says why."""

_LOOK_EVERY_S = 0.05
_OPEN_FILES = 1024
_MAX_PATH = 2048
_MAX_FILES = 50_000
"""Files and directories at once: an empty one takes memory of the kernel too."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22  # linux/prctl.h
_SECCOMP_MODE_FILTER = 2  # linux/seccomp.h
_FORMAT = 4
"""Of marshal: what Python 3.9 reads and later ones too."""


def encoded(content: "dict[str, Any]") -> bytes:
    """A request as the controller sends it."""
    text = marshal.dumps(content, _FORMAT)
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
        _signal.signal(_signal.SIGINT, _signal.SIG_IGN)  # for a signal without a handler a command is out of reach
        libc = ctypes.CDLL(None, use_errno=True)
        if not settings["container"]:  # there the parent is a thread of the engine's, which may come and go
            _prctl(libc, _PR_SET_PDEATHSIG, int(_signal.SIGKILL))
        _prctl(libc, _PR_SET_DUMPABLE, 0)
        if settings["filter"]:
            _give_up(libc, settings["filter"])
        os.mkdir(DIRECTORY, 0o700)
        root = _Root(settings["disk_bytes"]) if settings["writable_root"] else None
        _announce(descriptor, settings["port"])
        while True:
            request = channel.receive()
            if "command" in request:
                _run(channel, settings, root, request)
            elif "files" in request:
                _answer_write(channel, request["files"])
            else:
                _answer_read(channel, request["name"], request["max_bytes"])
    except (EOFError, ConnectionError):
        os._exit(0)


def _prctl(libc: "Any", option: int, *values: "Any") -> None:
    if libc.prctl(option, *values, *[0] * (4 - len(values))):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _give_up(libc: "Any", program: bytes) -> None:
    """Refuses system calls to this process and to what it starts, as a filter program says (seccomp.py)."""

    class Program(ctypes.Structure):  # struct sock_fprog
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]

    _prctl(libc, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(Program(len(program) // 8, program)))


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


def _run(channel: _Channel, settings: "dict[str, Any]", root: "_Root | None", request: "dict[str, Any]") -> None:
    """Runs one command, kills what it left, and sends how it ended."""
    killed_before = _killed_for_memory()
    (out, out_end), (err, err_end), (started, started_end) = os.pipe(), os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        _become(request, settings, out_end, err_end, started_end)
    for descriptor in (out_end, err_end, started_end):
        os.close(descriptor)
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
            limit = "time" if now >= deadline else _exceeded(settings, root)
            _reaped(child, only_others=True)
            look_at = now + _LOOK_EVERY_S
    status = _kill_all(child, status)
    for descriptor, content in written.items():
        os.set_blocking(descriptor, False)
        while len(content) <= settings["output_bytes"] and _read_some(descriptor, content):
            pass
        os.close(descriptor)
    os.close(pidfd)
    if not os.read(started, 1) and not limit:
        limit = NOT_STARTED
    os.close(started)
    whole = settings["output_bytes"]
    stdout = bytes(written[out][:whole])
    stderr = bytes(written[err][: whole - len(stdout)])
    if not limit and sum(map(len, written.values())) > whole:
        limit = "output"
    if not limit and _killed_for_memory() > killed_before:
        limit = "memory"
    channel.answer(-_signal.SIGKILL if limit else status, limit, stdout, stderr)


def _become(request: "dict[str, Any]", settings: "dict[str, Any]", out: int, err: int, started: int) -> "NoReturn":
    """In a new process: becomes the command. Writes to `started` once its surroundings are made; from then on it fails
    with status 127 as a command that cannot be executed."""
    try:
        os.setsid()
        for descriptor, number in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
            os.dup2(descriptor, number)
        os.closerange(3, started)  # `started` closes when the command begins
        os.closerange(started + 1, _OPEN_FILES)
        for number in (_signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGINT, _signal.SIGTERM):
            _signal.signal(number, _signal.SIG_DFL)  # process 1 ignores them
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
            (resource.RLIMIT_MEMLOCK, 1 << 16),
            # This process and those that it starts, and process 1. In containers a user's processes are counted over
            # all of them, so a control group has the limit.
            *([] if settings["container"] else [(resource.RLIMIT_NPROC, settings["processes"] + 1)]),
        ):
            _, hard = resource.getrlimit(kind)
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        env = request["default_env"] | (_environment_of_image() if settings["container"] else {})
        env |= {"HOME": directory, "TMPDIR": directory} | request["env"]
        os.write(started, b"+")
        os.execvpe(request["command"][0], request["command"], env)
    except BaseException as error:
        os.write(2, f"{request['command'][0]!r} cannot be started: {error}\n".encode())
    finally:
        os._exit(127)


def _environment_of_image() -> "dict[str, str]":
    """What an image sets, such as its PATH, without the proxies that engines add, with their passwords."""
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}


def _killed_for_memory() -> int:
    """How many processes of a container the kernel has killed for its memory; 0 in bubblewrap, which has no /sys."""
    for name in ("memory.events", "memory/memory.oom_control"):  # of control groups v2, v1
        try:
            with open(f"/sys/fs/cgroup/{name}") as file:
                return next(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
        except (OSError, StopIteration):
            continue
    return 0


def _exceeded(settings: "dict[str, Any]", root: "_Root | None") -> str:
    """The limit that all processes together exceed; empty: none. Memory that is shared after a fork counts once
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
    memory_disks = [os.statvfs(place) for place in ("/tmp", "/dev/shm") if os.path.isdir(place)]
    too_many = sum(disk.f_files - disk.f_ffree for disk in memory_disks) > _MAX_FILES
    return "disk" if too_many or (root is not None and root.is_over()) else ""


class _Root:
    """What commands have written to a container's own copy of its image, which has no limit of the kernel's.

    A walk over an image's files takes a second, so they are looked at only where its disk has become fuller by what is
    left to the sandbox, whoever wrote that. A file that has been changed here has a later change time than this object,
    and nobody in the sandbox can set that time.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._since_ns = max_bytes, time.time_ns()
        self._bytes, self._files = 0, 0
        self._least_bytes, self._least_files = 0, 0
        self._look_when_below(os.statvfs("/"))

    def is_over(self) -> bool:
        disk = os.statvfs("/")
        if disk.f_bavail * disk.f_frsize < self._least_bytes or disk.f_favail < self._least_files:
            self._bytes, self._files = self._changed()
            self._least_bytes = self._least_files = 0
        self._look_when_below(disk)
        return self._bytes > self._max_bytes or self._files > _MAX_FILES

    def _look_when_below(self, disk: os.statvfs_result) -> None:
        """Sets the free space below which files are counted again, as less may be this sandbox's doing. It rises where
        others free some."""
        free_bytes = disk.f_bavail * disk.f_frsize
        self._least_bytes = max(self._least_bytes, free_bytes - self._max_bytes + self._bytes)
        self._least_files = max(self._least_files, disk.f_favail - _MAX_FILES + self._files)

    def _changed(self) -> "tuple[int, int]":
        """Bytes of the files that have been changed, and their number with directories."""
        with open("/proc/self/mountinfo") as file:
            mounts = {line.split()[4] for line in file}
        size, number, directories = 0, 0, ["/"]
        while directories:
            directory = directories.pop()
            if len(directory) > _MAX_PATH:  # no program's; a place that this walk would not get to the end of
                return self._max_bytes + 1, number
            try:
                with _readable(directory) as entries:
                    for entry in entries:
                        if entry.path in mounts:
                            continue
                        status = entry.stat(follow_symlinks=False)
                        if status.st_ctime_ns >= self._since_ns:
                            size, number = size + 512 * status.st_blocks, number + 1
                        if stat.S_ISDIR(status.st_mode):
                            directories.append(entry.path)
            except OSError:  # it has gone, or is another user's and closed to this one, who then wrote nothing in it
                continue
        return size, number


def _readable(directory: str) -> "os._ScandirIterator[str]":
    """The entries of a directory. One of this user's own that the user has closed is opened: who cannot list a
    directory may write files in it."""
    try:
        return os.scandir(directory)
    except PermissionError:
        os.chmod(directory, 0o700)  # of another user it raises PermissionError
        return os.scandir(directory)


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


def _parent(name: str, *, make: bool) -> "tuple[int, str]":
    """A descriptor of the directory of a file, and the file's own name in it. With `make` it is made where it does not
    exist. No part is a link."""
    *directories, last = name.split("/")
    at = os.open(DIRECTORY, os.O_RDONLY | os.O_DIRECTORY)
    for part in directories:
        try:
            if make:
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
            at, last = _parent(name, make=True)
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
        at, last = _parent(name, make=False)
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


def _connected(path: str) -> int:
    """In a container: the socket on which the controller waits. It refuses once the controller has ended, and process 1
    ends with that."""
    import _socket

    stream = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    stream.connect(path)
    return stream.detach()


if __name__ == "__main__":
    main(_connected(sys.argv[1]))
