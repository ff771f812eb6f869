"""Agents that are commands and mean harm: other agents' keys, tasks and rewards, and processes left behind."""

import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from tests.kit.processes import ended
from tests.kit.sampler import policy
from tests.unit.serve.opened import BYTES, END
from torchtitan_rl.rollout import agent_process
from torchtitan_rl.rollout import external as module
from torchtitan_rl.rollout.external import AgentFailed, CommandLimits, external
from torchtitan_rl.serve.gateway import Gateway
from torchtitan_rl.types import Task

pytestmark = pytest.mark.whole

TASK = Task(id="t/1", prompt="1+2", answer="the-answer")
ROOT = Path(__file__).parents[2]

ASKS = """
import json, os, sys, time, urllib.request
def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))
def ask():
    post(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
         {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "1+2"}]})
def reward(value):
    open(os.environ["REWARD_FILE"], "w").write(str(value))
"""


async def played(gateway, script, rollout_id="0/0/0", task=TASK, **settings):
    workflow = external([sys.executable, "-c", ASKS + script], timeout_s=30, **settings)
    workflow.attach(gateway)
    made = policy("3" + END, tokenizer=BYTES, for_training=True)
    return await workflow(task, made, rollout_id=rollout_id, seed=5)


async def play(*scripts, **settings):
    async with Gateway(context_tokens=256) as gateway:
        attempts = (played(gateway, script, f"0/0/{i}", **settings) for i, script in enumerate(scripts))
        return await asyncio.gather(*attempts, return_exceptions=True)


HONEST = """
ask()
reward(0.25)
open(READY, "w").close()
deadline = time.time() + 20
while not os.path.exists(DONE) and time.time() < deadline:
    time.sleep(0.02)
"""

THIEF = """
import glob
ask()
while not os.path.exists(READY):
    time.sleep(0.02)
stolen = {}
for file in glob.glob("/proc/*/environ"):
    try:
        for entry in open(file, "rb").read().split(b"\\0"):
            if entry.startswith(b"OPENAI_API_KEY="):
                stolen[file] = entry.decode().partition("=")[2]
    except OSError:
        pass
keys = set(stolen.values()) - {os.environ["OPENAI_API_KEY"]}
own = os.path.dirname(os.environ["REWARD_FILE"])
others = [other for other in glob.glob(os.path.join(os.path.dirname(own), "*")) if other != own]
for other in others:
    open(os.path.join(other, "reward"), "w").write("-9")
json.dump({"keys": len(keys), "directories": len(others)}, open(SEEN, "w"))
reward(1.0)
open(DONE, "w").close()
"""


def named(tmp_path, script):
    names = "".join(f"{name} = {str(tmp_path / name.lower())!r}\n" for name in ("READY", "DONE", "SEEN"))
    return names + script


async def test_an_agent_finds_neither_the_key_nor_the_files_of_another(tmp_path):
    if problem := agent_process.no_isolation():
        pytest.skip(f"no namespaces here: {problem}")
    honest, thief = await play(named(tmp_path, HONEST), named(tmp_path, THIEF))
    assert json.loads((tmp_path / "seen").read_text()) == {"keys": 0, "directories": 0}
    assert (honest.reward, thief.reward) == (0.25, 1.0)


async def test_without_isolation_the_same_agent_finds_both(tmp_path):
    """The attack of the test above is one: it succeeds where nothing is done against it."""
    honest, thief = await play(named(tmp_path, HONEST), named(tmp_path, THIEF), command=CommandLimits(isolate="off"))
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["keys"] >= 1 and seen["directories"] >= 1  # other runs on this machine may have agents too
    assert (honest.reward, thief.reward) == (-9.0, 1.0)


UNDOES = """
import ctypes, glob
ask()
if os.readlink("/proc/self/ns/mnt") == OUTER:  # the mounts here are those of the machine: try nothing
    reward(99)
    sys.exit()
directory = os.path.dirname(os.path.dirname(os.environ["REWARD_FILE"]))
libc = ctypes.CDLL(None)
undone = [libc.umount2(path.encode(), 2) for path in (directory, "/proc")]
libc.unshare(0x10020000)  # a user and a mount namespace below: all rights, and still not those of the one above
undone += [libc.umount2(path.encode(), 2) for path in (directory, "/proc")]
reward(max(undone) + len(glob.glob(directory + "/*")))
"""


async def test_an_agent_cannot_undo_its_isolation():
    """The agent tries nothing unless it is in a mount namespace of its own: as root it would unmount the machine's."""
    if problem := agent_process.no_isolation():
        pytest.skip(f"no namespaces here: {problem}")
    outer = os.readlink("/proc/self/ns/mnt")
    [rollout] = await play(f"OUTER = {outer!r}\n{UNDOES}", command=CommandLimits(isolate="require"))
    assert rollout.reward == 0.0  # -1 from every call, and one directory, its own


def test_a_machine_without_namespaces_is_told_about(monkeypatch, caplog):
    monkeypatch.setattr(module, "no_isolation", lambda: "the kernel refuses them")
    with pytest.raises(RuntimeError, match="isolate='require'.*the kernel refuses them.*or set isolate='auto'"):
        external(["true"], command=CommandLimits(isolate="require")).attach(None)
    external(["true"]).attach(None)
    assert "an agent may read the keys and answers of other attempts" in caplog.text
    caplog.clear()
    external(["true"], command=CommandLimits(isolate="off")).attach(None)
    external(played).attach(None)
    assert not caplog.text
    with pytest.raises(ValueError, match="isolate='maybe': there is no such way"):
        external(["true"], command=CommandLimits(isolate="maybe"))


READS = 'ask()\nreward(float("the-answer" in open(os.environ["TASK_FILE"]).read()))'


async def test_the_task_file_has_the_answer_where_it_is_asked_for():
    [without] = await play(READS)
    [with_answer] = await play(READS, with_answer=True)
    [made] = await play(READS, task_data=lambda task: {"own": task.answer})
    assert (without.reward, with_answer.reward, made.reward) == (0.0, 1.0, 1.0)


async def test_a_posted_reward_counts_before_the_file_and_after_what_a_function_returns():
    post = 'ask()\npost(os.environ["SESSION_URL"] + "/reward", {"reward": 0.5, "parts": {"posted": 1}})\n'
    [both] = await play(post + "reward(1.0)")
    assert (both.reward, both.reward_parts) == (0.5, {"posted": 1.0})
    [file] = await play("ask()\nreward(1.0)")
    assert file.reward == 1.0
    [wrong] = await play(post + 'reward("nothing")')
    assert isinstance(wrong, AgentFailed) and "neither a number nor JSON" in str(wrong)


LEAVES = """
import signal
OWN = {own!r}
def leave():
    '''Forks twice, leaves session, parent and environment, and hears no request to end.'''
    until_exec, held = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)", OWN], {{}})
        os._exit(0)
    os.close(held)
    os.wait()
    os.read(until_exec, 1)
ask()
leave()
"""


def left(own):
    return [p.pid for p in psutil.process_iter(["cmdline"]) if own in (p.info["cmdline"] or [])]


@pytest.mark.parametrize("isolate", ["auto", "off"])
@pytest.mark.parametrize(
    "end, message",
    [("reward(1.0)", ""), ("time.sleep(1000)", "not done within"), ("os.kill(os.getpid(), 9)", "ended with status")],
)
async def test_a_process_that_left_its_session_and_environment_ends_with_the_attempt(isolate, end, message):
    own = uuid.uuid4().hex
    async with Gateway(context_tokens=256) as gateway:
        script = ASKS + LEAVES.format(own=own) + end
        workflow = external(
            [sys.executable, "-c", script], timeout_s=8 if "within" in message else 30,
            command=CommandLimits(isolate=isolate),
        )  # fmt: skip
        workflow.attach(gateway)
        attempt = workflow(TASK, policy("3" + END, tokenizer=BYTES), rollout_id="0/0/0", seed=5)
        if message:
            with pytest.raises(AgentFailed, match=message):
                await attempt
        else:
            assert (await attempt).reward == 1.0
    assert not left(own)


RUN = """
import asyncio, sys
from tests.security.test_agent_processes import ASKS, LEAVES, played
from torchtitan_rl.serve.gateway import Gateway
async def scene():
    async with Gateway(context_tokens=256) as gateway:
        await played(gateway, LEAVES.format(own=sys.argv[1]) + "time.sleep(1000)")
asyncio.run(scene())
"""


def test_a_command_and_what_it_left_end_with_a_controller_that_is_killed():
    own = uuid.uuid4().hex
    run = subprocess.Popen([sys.executable, "-c", RUN, own], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 120
    while not (pids := [pid for pid in left(own) if pid != run.pid]):
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    run.kill()
    run.wait(10)
    deadline = time.monotonic() + 15  # a supervisor that finds nobody to kill gives up after 30 s
    while not all(map(ended, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
