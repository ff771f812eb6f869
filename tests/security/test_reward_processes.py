"""Reward functions that fork, write into their pipes, and leave processes behind."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from fractions import Fraction
from pathlib import Path

import numpy
import psutil
import pytest
import torch

from tests.kit.processes import gone
from torchtitan_rl.tasks.judging import judge
from torchtitan_rl.tasks.reward_process import cpu_bound
from torchtitan_rl.types import Task

pytestmark = pytest.mark.whole

TASK = Task(id="t/7", prompt="1+1=", answer="2")
ROOT = Path(__file__).parents[2]


async def called(reward, *completions, timeout_s=20.0, parts=None):
    return await judge(reward, TASK, list(completions), timeout_s, parts)


@cpu_bound
def forks_at_three(task, completions):
    if completions[0] == "3":
        os.fork()  # the child returns from here as well
    return [float(completions[0])]


async def test_a_reward_that_forks_answers_each_call_once():
    assert ([await called(forks_at_three, str(i)) for i in range(10)]) == [[float(i)] for i in range(10)]


WRITES = """
import json, os, pickle
def written(content):
    '''Writes to every pipe of this process.'''
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("pipe:"):
                os.write(descriptor, content)
        except OSError:
            pass
"""


@pytest.mark.parametrize(
    "answer, message",
    [
        ('{"number": 1, "problem": "", "traceback": "", "value": [5.0]}', "answered request 1 when request 2 was"),
        ("[" * 5000 + "]" * 5000, "answered something else when request 2 was asked"),
        ("gibberish", "answered something else when request 2 was asked"),
    ],
)
async def test_an_answer_that_was_not_asked_for_fails_its_call_and_ends_the_process(answer, message):
    where = cpu_bound(lambda task, completions: [float(os.getpid())])
    [before] = await called(where, "a")

    @cpu_bound
    def forges(task, completions):
        names = {}
        exec(WRITES, names)
        names["written"](len(answer).to_bytes(8, "big") + answer.encode())
        return [1.0]

    first = asyncio.ensure_future(called(forges, "a"))
    with pytest.raises(RuntimeError, match="answered .* and its process was killed"):
        await first
    assert gone(int(before))
    [after] = await called(where, "a")
    assert after != before


async def test_nothing_that_a_reward_process_sends_is_unpickled(tmp_path):
    marker = tmp_path / "marker"

    class Answer(float):
        def __reduce__(self):
            return os.system, (f"touch {marker}",)

    @cpu_bound
    def returns_an_object(task, completions):
        return [Answer(0.5)]

    @cpu_bound
    def writes_a_pickle(task, completions):
        names = {}
        exec(WRITES, names)
        import pickle

        names["written"](pickle.dumps(Answer(0.5)))
        return [0.5]

    assert await called(returns_an_object, "a") == [0.5]
    with pytest.raises(RuntimeError, match="writes_a_pickle: answered something else"):
        await called(writes_a_pickle, "a", timeout_s=5.0)
    assert not marker.exists()


async def test_every_documented_form_of_an_answer_comes_back():
    forms = {
        "floats": ([0.1, 1e-300], None),
        "tensor": (torch.tensor([0.25, 0.5]), None),
        "array": (numpy.array([1, 2]), None),
        "scalars": ([torch.tensor(0.5), numpy.float32(0.25)], None),
        "other numbers": ([True, Fraction(1, 4)], None),
        "parts": (([1.0, 2.0], {"form": [0.5, 0.5]}), {"form": [0.5, 0.5]}),
        "parts of tensors": ((torch.ones(2), {"form": torch.zeros(2)}), {"form": [0.0, 0.0]}),
    }
    expected = [[0.1, 1e-300], [0.25, 0.5], [1.0, 2.0], [0.5, 0.25], [1.0, 0.25], [1.0, 2.0], [1.0, 1.0]]
    for (answer, parts), rewards in zip(forms.values(), expected, strict=True):
        seen = {}
        assert await called(cpu_bound(lambda task, completions, a=answer: a), "a", "b", parts=seen) == rewards
        assert seen == (parts or {})


LEAVES = textwrap.dedent(
    """
    import os, signal, time
    def leaves(file):
        '''Forks twice, leaves session and parent, and hears no request to end.'''
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
                os.environ.clear()
                with open(file + ".new", "w") as f:
                    f.write(str(os.getpid()))
                os.rename(file + ".new", file)
                time.sleep(1000)
            os._exit(0)
        while not os.path.exists(file):
            time.sleep(0.01)
    """
)


@cpu_bound
def leaves_and_hangs(task, completions):
    names = {}
    exec(LEAVES, names)
    names["leaves"](completions[0])
    time.sleep(1000)


@cpu_bound
def leaves_and_crashes(task, completions):
    names = {}
    exec(LEAVES, names)
    names["leaves"](completions[0])
    os.kill(os.getpid(), signal.SIGKILL)


@cpu_bound
def leaves_and_kills_its_group(task, completions):
    names = {}
    exec(LEAVES, names)
    names["leaves"](completions[0])
    os.killpg(0, signal.SIGKILL)


@pytest.mark.parametrize(
    "reward, message",
    [
        (leaves_and_hangs, "gave no answer"),
        (leaves_and_crashes, "ended its process .killed by SIGKILL"),
        (leaves_and_kills_its_group, "ended its process .killed by SIGKILL"),
    ],
)
async def test_a_grandchild_that_left_its_session_ends_with_the_call(reward, message, tmp_path):
    file = tmp_path / "pid"
    with pytest.raises(RuntimeError, match=message):
        await called(reward, str(file), timeout_s=20.0 if "killed" in message else 3.0)
    assert gone(int(file.read_text()))


RUN = """
import asyncio, sys
from tests.security.test_reward_processes import called, leaves_and_hangs
asyncio.run(called(leaves_and_hangs, sys.argv[1], timeout_s=60.0))
"""


def test_a_grandchild_that_left_its_session_ends_with_a_run_that_is_killed(tmp_path):
    file = tmp_path / "pid"
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(file)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    deadline = time.monotonic() + 60
    while not file.exists():
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    assert psutil.pid_exists(int(file.read_text()))
    run.kill()
    run.wait(10)
    assert gone(int(file.read_text()))
