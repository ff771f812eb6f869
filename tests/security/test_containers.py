"""Sandboxes that are containers of an image: what commands can do in them, and what is left of them outside.

One container serves many commands, as each start takes a third of a second of processor time."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from tests.kit import containers
from tests.kit.hostile import HOSTILE, SHORT, left, line, machine, outcome
from tests.kit.processes import ended
from tests.kit.sampler import policy
from tests.unit.serve.opened import BYTES, END
from torchtitan_rl.rollout.external import external
from torchtitan_rl.rollout.installed import installed
from torchtitan_rl.serve.gateway import Gateway
from torchtitan_rl.tasks.program_repair import Program, Repair
from torchtitan_rl.tasks.sandbox import container
from torchtitan_rl.tasks.sandbox.config import SandboxConfig, check_each
from torchtitan_rl.tasks.sandbox.sandbox import SandboxError
from torchtitan_rl.types import Task

ROOT = Path(__file__).parents[2]
WITHIN_S = 30.0
LIMITS = dict(memory_gib=0.5, max_disk_mib=16, max_output_mib=0.25, max_processes=32, cpu_s=30)
CODEX = """#!/usr/local/bin/python3
import json, os, sys, urllib.request
config = open(os.environ["CODEX_HOME"] + "/config.toml").read()
url = next(json.loads(row.split(" = ")[1]) for row in config.splitlines() if row.startswith("base_url"))
messages = [{"role": "user", "content": sys.argv[-1]}]
content = json.dumps({"model": "policy", "messages": messages}).encode()
request = urllib.request.Request(url + "/chat/completions", content,
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open(os.environ["REWARD_FILE"], "w").write(str(float(answer == "3")))
"""
"""In the image by the name of an installed agent; it asks in the dialect that is loaded fastest."""


@pytest.fixture(scope="module", params=["podman", "docker"])
def image(request, tmp_path_factory):
    """(engine, name of an image). Skipped where the engine does not run containers."""
    engine = request.param
    if reason := containers.not_reachable(engine):
        pytest.skip(f"no {engine} here: {reason}")
    with containers.image(engine, tmp_path_factory.mktemp("image"), {"usr/local/bin/codex": CODEX}) as name:
        if reason := SandboxConfig(kind=engine, image=name, **LIMITS).problem():
            pytest.skip(f"no {engine} here: {reason}")
        yield engine, name


def small(image, **fields):
    engine, name = image
    return SandboxConfig(kind=engine, image=name, **LIMITS | fields)


def remaining(engine):
    """Containers that sandboxes have left; looked at until there are none, for at most ten seconds."""
    deadline = time.monotonic() + 10
    line = [engine, "ps", "--all", "--quiet", "--filter", "name=torchtitan-rl-"]
    while (ids := subprocess.run(line, capture_output=True, text=True, check=True, timeout=60).stdout.split()) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.2)
    return ids


async def test_files_go_in_commands_run_and_files_come_out(image, monkeypatch, tmp_path):
    monkeypatch.setenv("HTTPS_PROXY", "http://user:password@proxy")
    (tmp_path / "data").write_text("of the machine")
    config = small(image, read_only=(str(tmp_path / "data"),))
    async with config.open({"a.txt": b"3\n", "tests/b.txt": b"4\n"}) as sandbox:
        done = await sandbox.run(["sh", "-c", "cat a.txt tests/b.txt; echo no >&2; echo 7 > sum; exit 2"], timeout_s=20)
        assert (done.status, done.stdout, done.stderr, done.limit) == (2, b"3\n4\n", b"no\n", "")
        assert (await sandbox.read("sum"), await sandbox.read("none/at/all")) == (b"7\n", None)
        done = await sandbox.run(["sh", "-c", "pwd; env"], timeout_s=20, env={"SEED": "5"}, cwd="home")
        there, *rows = done.stdout.decode().split("\n")
        names = dict(row.split("=", 1) for row in rows if "=" in row)
        assert there == names["HOME"] == names["TMPDIR"] == f"{sandbox.directory}/home" and names["SEED"] == "5"
        assert (names["PATH"], names["FLAVOUR"]) == ("/usr/local/bin:/usr/bin", "mint")  # the image's
        assert "password" not in done.stdout.decode()
        done = await sandbox.run(["no-such-program"], timeout_s=20)
        assert done.status == 127 and b"'no-such-program' cannot be started" in done.stderr
        await sandbox.run(
            ["sh", "-c", "ln -s a.txt link; ln -s tests way; mkfifo pipe; head -c 2000 /dev/zero > b"], timeout_s=20
        )
        for name in ("link", "way/b.txt", "pipe", "tests"):
            with pytest.raises(SandboxError, match=name):
                await sandbox.read(name)
        with pytest.raises(SandboxError, match="'b' has more than 1999 bytes"):
            await sandbox.read("b", max_bytes=1999)
        with pytest.raises(ValueError, match="is no name below the sandbox's directory"):
            await sandbox.read("../a")
        script = f"cat {tmp_path}/data; echo 2 > {tmp_path}/data; echo 2 > /testbed/a.py; ls /run/sandbox"
        done = await sandbox.run(["sh", "-c", script], timeout_s=20)
        assert done.stdout == b"of the machine" and done.stderr.count(b"Read-only file system") == 2
    assert (tmp_path / "data").read_text() == "of the machine"


OTHERWISE = {
    # A user of the image is who it was, without rights: root may become root.
    "takes another user's rights": lambda seen, done: (
        seen["setgroups"] == "PermissionError" and seen["rights"] == ["0" * 16, "0" * 16, "1"]
    ),
    # /dev is the container's own, and so is process 1's place among those that are killed first for memory.
    "writes to the root": lambda seen, done: (
        {value for name, value in seen.items() if name not in ("/dev/x", "/proc/1/oom_score_adj")}
        <= {"OSError", "PermissionError", "FileNotFoundError"}
    ),
    # How many files process 1 has open can be read, and none of them.
    "looks into its parent": lambda seen, done: (
        (seen["own"], seen["attach"]) == ([0, 1, 2], -1)
        and {seen[name] for name in ("mem", "environ")} == {"PermissionError"}
    ),
    # An image sets variables of its own.
    "reads the environment of others": lambda seen, done: (
        len(seen["pids"]) == 2 and seen["environ 1"] == "PermissionError"
    ),
}
APART = ("computes beyond its time", "makes files without content")


async def test_no_hostile_command_gets_out(image, tmp_path):
    served, failures = [], []

    async def answer(reader, writer):
        served.append(await reader.readline())
        writer.write(b"policy\n")
        await writer.drain()
        writer.close()

    async def attack(sandbox, host, name):
        script, holds = HOSTILE[name]
        command = line(sandbox.python, host, script)
        done = await sandbox.run(command, timeout_s=1.0 if name in SHORT else WITHIN_S)
        after = await sandbox.run(["ls", "/proc"], timeout_s=WITHIN_S)
        if not OTHERWISE.get(name, holds)(seen := outcome(done), done):
            failures.append((name, seen, done.status, done.limit, done.stderr[-300:]))
        too_many_files = name.startswith("makes files without content")  # still: whatever runs next ends for them
        if not too_many_files and len(re.findall(rb"^\d+$", after.stdout, re.MULTILINE)) != 2:
            failures.append((name, "left", after))
        if host.secret.encode() in done.stdout + done.stderr or host.victim.poll() is not None or left(host.own):
            failures.append((name, "reached what is outside"))
        await sandbox.run(["sh", "-c", "rm -rf /tmp/sandbox/* /tmp/[0-9]* /dev/shm/* /dev/x"], timeout_s=WITHIN_S)

    with machine(tmp_path) as host:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with small(image).open(gateway=f"http://127.0.0.1:{port}/sessions/1/v1") as sandbox:
                for name in HOSTILE:
                    if name not in APART:
                        await attack(sandbox, host, name)
                script = f"""
connection = socket.create_connection(("127.0.0.1", {port}))
connection.sendall(b"hello\\n")
seen["gateway"] = connection.makefile().readline()
tried("other", lambda: socket.create_connection(("127.0.0.1", PORT), timeout=2).recv(100))
say()
"""
                done = await sandbox.run(line(sandbox.python, host, script), timeout_s=WITHIN_S)
        assert outcome(done) == {"gateway": "policy\n", "other": "ConnectionRefusedError"}, done
        async with small(image, cpu_s=1.0).open() as sandbox:
            for name in APART:
                await attack(sandbox, host, name)
        assert host.file.read_text() == host.secret and psutil.Process(host.victim.pid).status() != "stopped"
        assert served == [b"hello\n"] and not host.visits
    assert not failures, failures
    assert not Path("/x").exists() and not Path("/tmp/sandbox").exists() and not remaining(image[0])


FILLS = """
for i in range(1000):
    open(f"/testbed/{i}", "wb").write(b"x" * 2**22)
"""


async def test_a_writable_root_is_a_copy_of_the_image_with_a_limit(image):
    async with small(image, writable_root=True).open() as sandbox:
        done = await sandbox.run(["sh", "-c", "echo 2 >> /testbed/a.py; cat /testbed/a.py"], timeout_s=WITHIN_S)
        assert (done.status, done.stdout) == (0, b"1\n2\n")
        done = await sandbox.run([sandbox.python, "-c", FILLS + "import time; time.sleep(20)"], timeout_s=WITHIN_S)
        assert done.limit == "disk", done
        assert (await sandbox.run([sandbox.python, "-c", "1"], timeout_s=WITHIN_S)).limit in ("", "disk")
        # A part of what is written is enough to look, and too little to be over the limit.
        assert (await sandbox.run(["sh", "-c", "rm /testbed/[0-9]*"], timeout_s=WITHIN_S)).limit in ("", "disk")
    async with small(image, writable_root=True).open() as sandbox:
        assert (await sandbox.run(["sh", "-c", "cat /testbed/a.py"], timeout_s=WITHIN_S)).stdout == b"1\n"


RUN = """
import asyncio, sys
from torchtitan_rl.tasks.sandbox.config import SandboxConfig
async def scene():
    config = SandboxConfig(kind=sys.argv[2], image=sys.argv[3], max_disk_mib=16)
    async with config.open({"a": b"1"}) as sandbox:
        code = "import os, time; os.fork() or os.setsid(); print(1); time.sleep(1000)"
        await sandbox.run([sandbox.python, "-c", code, sys.argv[1]], timeout_s=1000)
asyncio.run(scene())
"""


def test_a_container_ends_with_a_controller_that_is_killed(image, tmp_path):
    own, environment = uuid.uuid4().hex, {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    run = subprocess.Popen([sys.executable, "-c", RUN, own, *image], cwd=ROOT, env=environment)
    deadline = time.monotonic() + 90
    while len(pids := [pid for pid in left(own) if pid != run.pid]) < 2:
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    run.kill()
    run.wait(10)
    deadline = time.monotonic() + 15
    while not all(map(ended, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not remaining(image[0]) and os.listdir(tmp_path) == []


def test_a_container_that_meets_no_controller_ends(image):
    """As where the controller is killed while the engine starts it."""
    config = small(image)
    with container._meeting_place() as (shared, listening):
        listening.close()
        line = container.command_line(config._options(), config.limits, name=container._name(), shared=shared)
        assert subprocess.run(line, capture_output=True, timeout=60).returncode == 0
        assert not remaining(image[0])


ASKS = """
import json, os, urllib.request
task = json.load(open(os.environ["TASK_FILE"]))
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "policy", "messages": [{"role": "user", "content": task["prompt"]}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("answer.txt", "w").write(answer)
"""


async def judge(task, sandbox):
    await sandbox.write({"tests/test.py": f"assert open('home/answer.txt').read() == {task.answer!r}".encode()})
    return float((await sandbox.run([sandbox.python, "-I", "tests/test.py"], timeout_s=20)).status == 0)


async def test_agents_meet_the_policy_in_a_container_that_their_task_names(image):
    """A command, judged by tests; and an installed agent, whose program is the image's."""
    task = Task(id="t/1", prompt="1+2", answer="3")
    workflows = [
        external(["python3", "-c", ASKS], timeout_s=60, sandbox=lambda task: small(image), judge=judge),
        installed("codex", timeout_s=60, sandbox=small(image)),
    ]
    for workflow in workflows:
        async with Gateway(context_tokens=256) as gateway:
            workflow.attach(gateway)
            made = policy("3" + END, tokenizer=BYTES, for_training=True)
            rollout = await workflow(task, made, rollout_id="0/0/0", seed=5)
        assert (rollout.reward, rollout.text) == (1.0, "3")


async def test_programs_are_repaired_in_containers(image):
    family = Repair.Config(sandbox=small(image), timeout_s=30).build()
    task = Task(id="r", prompt="", answer=Program(broken="a-b", right="a+b", arguments=(3, 4)))
    assert await family.reward(task, ["b+a", "a-b"]) == [1.0, 0.0]


def test_what_an_image_lacks_is_said_before_a_run(image):
    engine, name = image
    with pytest.raises(
        RuntimeError, match=rf"task.sandbox.kind='{engine}': there is no image 'none/such' .* pull none/"
    ):
        SandboxConfig(kind=engine, image="none/such").check("task.sandbox")
    with pytest.raises(RuntimeError, match=rf"image '{name}' has no program 'python9' that runs .*add python3"):
        small(image, python="python9").check("task.sandbox")
    with pytest.raises(RuntimeError, match=r"x.image='none/such': there is no such image .* pull none/such"):
        check_each([small(image), SandboxConfig(**LIMITS, kind=engine, image="none/such")], "x")


async def test_a_command_that_the_kernel_kills_for_memory_says_so(image):
    """In one step, before process 1 looks."""
    async with small(image, memory_gib=0.02).open() as sandbox:
        script = "import mmap; m = mmap.mmap(-1, 2**30); [m.__setitem__(i, 1) for i in range(0, 2**30, 4096)]"
        done = await sandbox.run([sandbox.python, "-c", script], timeout_s=WITHIN_S)
        assert (done.status, done.limit) == (-signal.SIGKILL, "memory")
        assert json.loads((await sandbox.run([sandbox.python, "-c", "print(1)"], timeout_s=WITHIN_S)).stdout) == 1
