"""Commands that mean harm, what each may see in a sandbox, and what is outside for it to find."""

import json
import signal
import socket
import subprocess
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from torchtitan_rl.tasks.sandbox.sandbox import Finished

BEGIN = """
import ctypes, errno, json, mmap, os, resource, signal, socket, subprocess, sys, time
OWN, SECRET_FILE, SECRET_PID, PORT = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
libc = ctypes.CDLL(None, use_errno=True)
seen = {}
def tried(name, function, *arguments):
    try:
        seen[name] = function(*arguments)
    except BaseException as error:
        seen[name] = type(error).__name__
def say():
    print(json.dumps(seen, default=str), flush=True)
"""


@dataclass
class Host:
    """What is outside: a secret in a file and in a process, a server, and files that were there before."""

    own: str
    secret: str
    file: Path
    victim: subprocess.Popen
    port: int
    visits: list


@contextmanager
def machine(tmp_path: Path) -> Iterator[Host]:
    """A machine with secrets, for commands that look for them."""
    own, secret = uuid.uuid4().hex, f"secret-{uuid.uuid4().hex}"
    file = tmp_path / "id_rsa"
    file.write_text(secret)
    victim = subprocess.Popen(["sleep", "300"], env={"SECRET": secret})
    server = socket.create_server(("127.0.0.1", 0))
    visits = []

    def serve():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            visits.append(1)
            connection.sendall(secret.encode())
            connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield Host(own, secret, file, victim, server.getsockname()[1], visits)
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join(5)
    victim.kill()
    victim.wait(5)


def left(own: str) -> list[int]:
    """Processes of this machine that have a word on their command line."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if own in (p.info["cmdline"] or [])]


def line(python: str, host: Host, script: str) -> list[str]:
    return [python, "-c", BEGIN + script, host.own, str(host.file), str(host.victim.pid), str(host.port)]


def outcome(done: Finished) -> dict:
    """What a hostile command has seen."""
    seen: dict = {}
    for row in done.stdout.decode(errors="replace").splitlines():
        if row.startswith("{"):
            seen |= json.loads(row)
    return seen


HOSTILE = {
    "forks without end": (
        """
for i in range(1000):
    try:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    except BlockingIOError:
        break
seen["forks"] = i
say()
""",
        lambda seen, done: seen["forks"] <= 32 and not done.limit,
    ),
    "forks in every child": (
        """
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
""",
        lambda seen, done: done.limit == "time",
    ),
    "fills the disk": (
        """
written = 0
try:
    for i in range(1000):
        with open(f"/tmp/{i}", "wb") as file:
            written += file.write(b"x" * 2**20)
except OSError as error:
    seen["error"] = error.errno
seen["mib"] = written / 2**20
say()
""",
        lambda seen, done: seen["mib"] <= 16 and seen["error"] == 28,
    ),
    "fills shared memory": (
        """
try:
    with open("/dev/shm/x", "wb", buffering=0) as file:
        for i in range(1000):
            file.write(b"x" * 2**20)
except OSError as error:
    seen["error"] = error.errno
seen["mib"] = os.stat("/dev/shm/x").st_size / 2**20
say()
""",
        lambda seen, done: seen["mib"] <= 16,
    ),
    "makes files without content": (
        "for i in range(10**7): os.close(os.open(f'/tmp/sandbox/{i}', os.O_CREAT | os.O_WRONLY))",
        lambda seen, done: done.limit == "disk",
    ),
    "makes files without content in shared memory": (
        "for i in range(10**7): os.close(os.open(f'/dev/shm/{i}', os.O_CREAT | os.O_WRONLY))",
        lambda seen, done: done.limit == "disk",
    ),
    "reads files of the machine": (
        """
for path in (SECRET_FILE, "/root/.ssh/id_rsa", "/etc/shadow", "/etc/passwd", f"/proc/{SECRET_PID}/environ"):
    tried(path, lambda: open(path).read())
    tried(f"/proc/1/root{path}", lambda: open(f"/proc/1/root{path}").read())
say()
""",
        lambda seen, done: all(value in ("FileNotFoundError", "PermissionError") for value in seen.values()),
    ),
    "reaches another port": (
        """
for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0"):
    tried(host, lambda: socket.create_connection((host, PORT), timeout=2).recv(100).decode())
tried("outside", lambda: socket.create_connection(("1.1.1.1", 443), timeout=2).recv(100).decode())
tried("interfaces", lambda: [name for _, name in socket.if_nameindex()])
say()
""",
        lambda seen, done: (
            seen.pop("interfaces") == ["lo"] and set(seen.values()) <= {"ConnectionRefusedError", "OSError", "gaierror"}
        ),
    ),
    "kills its parent": (
        """
for process in (1, os.getppid(), SECRET_PID):
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGPIPE):
        tried(f"{process} {number}", os.kill, process, number)
tried("limit", resource.prlimit, 1, resource.RLIMIT_NOFILE, (0, 0))
say()
os.kill(-1, signal.SIGKILL)
time.sleep(0.2)
seen["survived"] = True
say()
""",
        lambda seen, done: (
            all(seen[f"1 {n}"] is None for n in (15, 9, 19, 2, 13))
            and seen["limit"] == "PermissionError"
            and not done.limit
        ),
    ),
    "leaves links to files outside": (
        """
os.symlink(SECRET_FILE, "link")
os.symlink(os.path.dirname(SECRET_FILE), "directory")
os.mkfifo("pipe")
os.symlink("/dev/zero", "endless")
say()
""",
        lambda seen, done: done.status == 0,
    ),
    "leaves a daemon": (
        """
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)", OWN], {})
    os._exit(0)
os.wait()
say()
""",
        lambda seen, done: done.status == 0 and not done.limit,
    ),
    "writes to the root": (
        """
for path in ("/x", "/usr/x", "/usr/bin/python3", "/etc/x", "/dev/x", "/proc/sys/kernel/core_pattern",
             "/proc/1/oom_score_adj", "/proc/sysrq-trigger", sys.prefix + "/x"):
    tried(path, lambda: open(path, "w").write("x"))
say()
""",
        lambda seen, done: all(value in ("OSError", "PermissionError", "FileNotFoundError") for value in seen.values()),
    ),
    "allocates without end": (
        "tried('grown', lambda: len(bytearray(2**30)))\nsay()",
        lambda seen, done: seen["grown"] == "MemoryError",
    ),
    "allocates in many processes": (
        """
for _ in range(8):
    if os.fork() == 0:
        kept = b"x" * (80 * 2**20)
        time.sleep(60)
time.sleep(60)
""",
        lambda seen, done: done.limit == "memory",
    ),
    "allocates memory that is shared": (
        """
shared = mmap.mmap(-1, 2**30)
for page in range(0, 2**30, 4096):
    shared[page] = 1
time.sleep(60)
""",
        lambda seen, done: done.limit == "memory",
    ),
    "allocates beside the limits": (
        """
tried("memfd", os.memfd_create, "x")
seen["shmget"] = libc.shmget(0, 2**20, 0o1600)
say()
""",
        lambda seen, done: seen == {"memfd": "PermissionError", "shmget": -1},
    ),
    "writes output without end": (
        "while True: os.write(1, b'x' * 65536)",
        lambda seen, done: done.limit == "output" and len(done.stdout) == 2**18,
    ),
    "takes another user's rights": (
        """
tried("setuid", os.setuid, 0)
tried("setgroups", os.setgroups, [0])
tried("chown", os.chown, ".", 0, 0)
tried("su", lambda: subprocess.run(["su", "-c", "id -u"], capture_output=True, stdin=subprocess.DEVNULL).returncode)
open("own", "w").close()
tried("chmod", os.chmod, "own", 0o4755)
rows = [row.split() for row in open("/proc/self/status")]
seen["rights"] = [row[1] for row in rows if row[0] in ("CapPrm:", "CapEff:", "NoNewPrivs:")]
say()
""",
        lambda seen, done: (
            (seen["setuid"], seen["setgroups"], seen["chown"]) == ("PermissionError",) * 3
            and seen["su"] != 0
            and seen["rights"] == ["0" * 16, "0" * 16, "1"]
        ),
    ),
    "mounts": (
        """
seen["mount"] = libc.mount(b"none", b"/tmp/sandbox", b"tmpfs", 0, None)
seen["umount"] = libc.umount2(b"/tmp", 2)
seen["remount"] = libc.mount(None, b"/", None, 32, None)
seen["unshare"] = libc.unshare(0x10020000)
seen["clone"] = libc.syscall(56 if os.uname().machine == "x86_64" else 220, 0x10000011, 0, 0, 0, 0)
say()
""",
        lambda seen, done: set(seen.values()) == {-1} and len(seen) == 5,
    ),
    "looks into its parent": (
        """
libc.ptrace.restype = ctypes.c_long
seen["attach"] = libc.ptrace(16, 1, None, None)
for name in ("mem", "environ", "fd", "cwd"):
    tried(name, lambda: os.listdir("/proc/1/fd") if name == "fd" else open(f"/proc/1/{name}", "rb").read(1))
seen["own"] = sorted(map(int, os.listdir("/proc/self/fd")))[:-1]
say()
""",
        lambda seen, done: (
            (seen["own"], seen["attach"]) == ([0, 1, 2], -1)
            and {seen[name] for name in ("mem", "environ", "fd")} == {"PermissionError"}
            and seen["cwd"] in ("PermissionError", "IsADirectoryError")
        ),
    ),
    "opens raw sockets": (
        """
tried("raw", socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)
tried("packet", socket.socket, socket.AF_PACKET, socket.SOCK_RAW, 0)
tried("vsock", socket.socket, socket.AF_VSOCK, socket.SOCK_STREAM)
tried("alg", socket.socket, socket.AF_ALG, socket.SOCK_SEQPACKET)
say()
""",
        lambda seen, done: set(seen.values()) == {"PermissionError"},
    ),
    "reads the environment of others": (
        """
seen["pids"] = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
for pid in [*range(1, 300), SECRET_PID]:
    if pid != os.getpid() and os.path.exists(f"/proc/{pid}"):
        tried(f"environ {pid}", lambda: open(f"/proc/{pid}/environ").read())
seen["environment"] = sorted(os.environ)
say()
""",
        lambda seen, done: (
            len(seen["pids"]) == 2
            and seen["environ 1"] == "PermissionError"
            and set(seen["environment"]) <= {"HOME", "TMPDIR", "PATH", "LANG", "LC_CTYPE"}
        ),
    ),
    "makes deep directories": (
        """
for depth in range(20000):
    os.mkdir("d")
    os.chdir("d")
seen["depth"] = depth
say()
""",
        lambda seen, done: done.limit in ("", "disk"),
    ),
    "computes beyond its time": (
        "while True: pass",
        lambda seen, done: done.status in (-signal.SIGXCPU, -signal.SIGKILL) and not done.limit,
    ),
    "ignores requests to end": (
        """
for number in range(1, 32):
    try:
        signal.signal(number, signal.SIG_IGN)
    except OSError:
        pass
time.sleep(1000)
""",
        lambda seen, done: (done.status, done.limit) == (-9, "time"),
    ),
}  # fmt: skip
"""Name -> the program, and whether its outcome is what a sandbox allows. With 0.25 GiB, 16 MiB of files, 32 processes,
0.25 MiB of output; `computes beyond its time`: with 1 s of CPU time."""
SHORT = ("forks in every child", "ignores requests to end")
"""Commands that end at their time limit."""
