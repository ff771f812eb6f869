"""Commands that mean harm, in a sandbox of bubblewrap: none reads, reaches, changes or outlives what is outside."""

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from tests.kit.hostile import HOSTILE, SHORT, left, line, machine, outcome
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


@pytest.fixture
def host(tmp_path):
    with machine(tmp_path) as host:
        yield host


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_command_does_not_get_out(name, host):
    script, holds = HOSTILE[name]
    config = SandboxConfig(**{**_fields(SMALL), "cpu_s": 1.0}) if name == "computes beyond its time" else SMALL
    began = time.monotonic()
    async with config.open() as sandbox:
        command = line(sandbox.python, host, script)
        done = await sandbox.run(command, timeout_s=1.0 if name in SHORT else WITHIN_S)
        after = await sandbox.run(["ls", "/proc"], timeout_s=10)  # the sandbox lives, and nothing else in it
        too_many_files = name.startswith("makes files without content")  # still: whatever runs next ends for them
        if not too_many_files:
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
    seen = outcome(done)
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
            done = await sandbox.run(line(sandbox.python, host, script), timeout_s=20)
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
