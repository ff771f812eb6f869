"""Commands that mean harm, in a sandbox of bubblewrap: none reads, reaches, changes or outlives what is outside."""

import asyncio
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.kit.processes import ended
from tests.kit.sampler import policy
from tests.unit.serve.opened import BYTES, END
from torchtitan_rl.config.load import load_config
from torchtitan_rl.rollout.external import AgentFailed, external
from torchtitan_rl.serve.gateway import Gateway
from torchtitan_rl.tasks.sandbox import bubblewrap
from torchtitan_rl.tasks.sandbox.config import SandboxConfig
from torchtitan_rl.tasks.sandbox.sandbox import SandboxError
from torchtitan_rl.train.controller import Controller
from torchtitan_rl.types import Task

pytestmark = pytest.mark.skipif(bool(bubblewrap.problem()), reason=f"no bubblewrap here: {bubblewrap.problem()}")

ROOT = Path(__file__).parents[2]
SMALL = SandboxConfig(
    kind="bubblewrap", memory_gib=0.25, max_disk_mib=16, max_output_mib=0.25, max_processes=32, cpu_s=30
)
WITHIN_S = 20.0
"""Seconds in which any of these commands has to be over and cleared away, on a busy machine."""

BEGIN = """
import ctypes, errno, json, mmap, os, signal, socket, subprocess, sys, time
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


@pytest.fixture
def host(tmp_path):
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


def left(own):
    return [p.pid for p in psutil.process_iter(["cmdline"]) if own in (p.info["cmdline"] or [])]


def line(host, script):
    return [sys.executable, "-c", BEGIN + script, host.own, str(host.file), str(host.victim.pid), str(host.port)]


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
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
        tried(f"{process} {number}", os.kill, process, number)
say()
os.kill(-1, signal.SIGKILL)
time.sleep(0.2)
seen["survived"] = True
say()
""",
        lambda seen, done: all(seen[f"1 {n}"] is None for n in (15, 9, 19)) and not done.limit,
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


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_command_does_not_get_out(name, host):
    script, holds = HOSTILE[name]
    config = SandboxConfig(**{**_fields(SMALL), "cpu_s": 1.0}) if name == "computes beyond its time" else SMALL
    began = time.monotonic()
    async with config.open() as sandbox:
        short = name in ("forks in every child", "ignores requests to end")
        done = await sandbox.run(line(host, script), timeout_s=1.0 if short else WITHIN_S)
        after = await sandbox.run(["ls", "/proc"], timeout_s=10)  # the sandbox lives, and nothing else in it
        if name != "makes files without content":  # they are still too many, and whatever runs next ends for them
            assert after.status == 0 and len(re.findall(rb"^\d+$", after.stdout, re.MULTILINE)) == 2
        if name == "leaves links to files outside":
            for file in ("link", "directory/id_rsa", "pipe", "endless"):
                with pytest.raises(SandboxError):
                    await sandbox.read(file)
            with pytest.raises(SandboxError):
                await sandbox.write({"directory/id_rsa": b"changed"})
            await sandbox.write({"link": b"new"})
            assert await sandbox.read("link") == b"new"
    assert time.monotonic() - began < WITHIN_S + 5
    seen = {}
    for said in done.stdout.decode(errors="replace").splitlines():
        if said.startswith("{"):
            seen |= json.loads(said)
    assert holds(seen, done), (seen, done.status, done.limit, done.stderr[-500:])
    assert host.secret.encode() not in done.stdout + done.stderr and host.file.read_text() == host.secret
    assert host.victim.poll() is None and psutil.Process(host.victim.pid).status() != psutil.STATUS_STOPPED
    assert not host.visits and not left(host.own)
    assert not Path("/x").exists() and not Path(sys.prefix, "x").exists() and not Path("/tmp/sandbox").exists()


def _fields(config):
    return {name: getattr(config, name) for name in type(config).__dataclass_fields__}


WAITS = """
import os, time
if os.fork() == 0:
    os.setsid()
    while True:
        try:
            open("verdict", "w").write("passed")
        except OSError:
            pass
time.sleep(0.3)
open("sitecustomize.py", "w").write("raise SystemExit(0)")
os.mkdir("tests"); os.symlink("../verdict", "tests/test.py")
"""


async def test_an_agent_does_not_write_the_verdict_of_its_tests():
    """A process that it left, and files under the names of the tests, are gone when the tests run."""
    async with SMALL.open() as sandbox:
        assert (await sandbox.run([sys.executable, "-c", WAITS], timeout_s=10)).status == 0
        await sandbox.write({"tests/test.py": b"open('verdict', 'w').write('failed'); import time; time.sleep(0.3)"})
        done = await sandbox.run([sys.executable, "-I", "tests/test.py"], timeout_s=10)
        assert (done.status, await sandbox.read("verdict")) == (0, b"failed")


async def test_of_this_machine_the_gateways_port_alone_is_in_reach(host):
    served = []

    async def answer(reader, writer):
        served.append(await reader.readline())
        writer.write(b"policy\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        script = f"""
connection = socket.create_connection(("127.0.0.1", {port}))
connection.sendall(b"hello\\n")
seen["gateway"] = connection.makefile().readline()
tried("other", lambda: socket.create_connection(("127.0.0.1", PORT), timeout=2).recv(100))
say()
"""
        async with SMALL.open(gateway=f"http://127.0.0.1:{port}/sessions/1/v1") as sandbox:
            done = await sandbox.run(line(host, script), timeout_s=20)
    assert json.loads(done.stdout) == {"gateway": "policy\n", "other": "ConnectionRefusedError"}, done
    assert served == [b"hello\n"] and not host.visits


RUN = """
import asyncio, sys
from torchtitan_rl.tasks.sandbox.config import SandboxConfig
async def scene():
    async with SandboxConfig(kind="bubblewrap").open({"a": b"1"}) as sandbox:
        code = "import os, time; os.fork() or os.setsid(); print(1); time.sleep(1000)"
        await sandbox.run([sys.executable, "-c", code, sys.argv[1]], timeout_s=1000)
asyncio.run(scene())
"""


def test_a_sandbox_ends_with_a_controller_that_is_killed(tmp_path):
    own, environment = uuid.uuid4().hex, {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    run = subprocess.Popen([sys.executable, "-c", RUN, own], cwd=ROOT, env=environment)
    deadline = time.monotonic() + 60
    while len(pids := [pid for pid in left(own) if pid != run.pid]) < 2:
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    bwraps = [p.pid for p in psutil.Process(run.pid).children(recursive=True)]
    run.kill()
    run.wait(10)
    deadline = time.monotonic() + 15
    while not all(map(ended, {*pids, *bwraps})):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert os.listdir(tmp_path) == []


async def test_a_sandbox_starts_within_50_ms():
    """Or, where other programs have the cores, within four times what Python alone takes to start and end."""
    seconds, python = [], []
    for _ in range(50):
        began = time.perf_counter()
        async with SMALL.open():
            seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)
        python.append(time.perf_counter() - began)
    median, bare = 1000 * statistics.median(seconds), 1000 * statistics.median(python)
    print(f"median of 50 starts: {median:.1f} ms; of Python alone: {bare:.1f} ms")
    assert median <= max(50, 4 * bare)


ASKS = """
import json, os, urllib.request
task = json.load(open(os.environ["TASK_FILE"]))
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "policy", "messages": [{"role": "user", "content": task["prompt"]}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("answer.txt", "w").write(answer)
open(os.environ["REWARD_FILE"], "w").write("1.0")
"""


async def play(script, said="3" + END, **settings):
    made = policy(said, tokenizer=BYTES, for_training=True)
    async with Gateway(context_tokens=256) as gateway:
        workflow = external([sys.executable, "-c", script], timeout_s=30, sandbox=SMALL, **settings)
        workflow.attach(gateway)
        return await workflow(Task(id="t/1", prompt="1+2", answer="3"), made, rollout_id="0/0/0", seed=5)


async def judge(task, sandbox):
    await sandbox.write({"tests/test.py": f"assert open('home/answer.txt').read() == {task.answer!r}".encode()})
    return float((await sandbox.run([sys.executable, "-I", "tests/test.py"], timeout_s=10)).status == 0)


async def test_an_agent_in_a_sandbox_meets_the_policy_and_writes_its_reward():
    rollout = await play(ASKS)
    assert (rollout.reward, rollout.text) == (1.0, "3")


@pytest.mark.parametrize("said, reward", [("3", 1.0), ("4", 0.0)])
async def test_tests_judge_what_the_agent_left_and_nothing_that_it_says_of_itself(said, reward):
    posts = """
urllib.request.urlopen(urllib.request.Request(os.environ["SESSION_URL"] + "/reward", b'{"reward": 1}',
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}))
"""
    rollout = await play(ASKS + posts, said + END, judge=judge)
    assert (rollout.reward, rollout.text) == (reward, said)


async def test_an_agent_whose_sandbox_this_machine_cannot_run_is_refused_before_anything_starts(tmp_path, monkeypatch):
    config = load_config(str(ROOT / "configs" / "quickstart.py"))
    config.algorithm.workflow = external(["true"], sandbox=SMALL)
    config.output_dir = str(tmp_path / "run")
    monkeypatch.setenv("PATH", "")
    bubblewrap.problem.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"external.sandbox.kind='bubblewrap': bwrap is not installed; .*apt"):
            await Controller.launch(config, backend="local")
    finally:
        bubblewrap.problem.cache_clear()
    assert not (tmp_path / "run").exists()


async def test_an_agent_that_fails_in_a_sandbox_says_why():
    with pytest.raises(AgentFailed, match="ended with status 3: no way"):
        await play(ASKS + "print('no way'); raise SystemExit(3)")
    with pytest.raises(AgentFailed, match="wrote more than 262144 bytes of output"):
        await play("while True: print('x' * 1000)")
    with pytest.raises(AgentFailed, match="judge: raised SandboxError: .*'home/answer.txt'"):

        async def reads(task, sandbox):
            return float(await sandbox.read("home/answer.txt") == b"3")

        await play(ASKS + "os.remove('answer.txt'); os.symlink('/proc/1/environ', 'answer.txt')", judge=reads)
