"""Rewards that compute: what comes back from another process, and that no process is left behind."""

import asyncio
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.kit.processes import gone
from torchtitan_rl.tasks.judging import judge
from torchtitan_rl.tasks.reward_process import RewardProcess, RewardProcessError, cpu_bound
from torchtitan_rl.types import Task

TASK = Task(id="t/7", prompt="1+1=", answer="2")
ROOT = Path(__file__).parents[3]


async def rewards_of(reward, completions=("a", "b"), timeout_s=20.0):
    return await judge(reward, TASK, list(completions), timeout_s)


async def refusal(reward, **kwargs):
    """The one line with which `judge` refuses a reward function, and the error itself."""
    with pytest.raises(RuntimeError) as caught:
        await rewards_of(reward, **kwargs)
    message = str(caught.value)
    assert "\n" not in message and "'t/7'" in message
    return message, caught.value


@cpu_bound
def right(task, completions):
    print("not an answer")  # must not be taken for one
    return [float(completion == task.answer) for completion in completions]


@cpu_bound
def where(task, completions):
    return [os.getpid()]


@cpu_bound
def raises(task, completions):
    raise KeyError("score")


@cpu_bound
def leaves(task, completions):
    sys.exit(3)


@cpu_bound
def crashes(task, completions):
    os.kill(os.getpid(), signal.SIGSEGV)


@cpu_bound
def is_asked_to_stop(task, completions):
    os.kill(os.getpid(), signal.SIGTERM)
    program = subprocess.Popen(["sleep", "20"])
    program.terminate()
    return [program.wait()]


@cpu_bound
def never_ends(task, completions):
    if completions[0] != "a":  # a file to say where this process is
        Path(completions[0]).write_text(str(os.getpid()))
    return [float(bool(re.match(r"(a+)+$", "a" * 60 + "b")))]  # backtracks for ages, and holds Python's lock


class Sums:
    name = "sums"

    @cpu_bound
    def reward(self, task, completions):
        return torch.tensor([0.25] * len(completions))


async def test_functions_methods_partials_and_lambdas_are_called_elsewhere():
    assert await rewards_of(right, ["2", "3"]) == [1.0, 0.0]
    assert await rewards_of(functools.partial(right), ["2", "3"]) == [1.0, 0.0]
    assert await rewards_of(cpu_bound(lambda task, completions: [len(task.prompt)]), ["x"]) == [4.0]
    assert await rewards_of(Sums()) == [0.25, 0.25]
    (first,), (second,) = await rewards_of(where, ["x"]), await rewards_of(where, ["x"])
    assert first == second != os.getpid()  # one process, kept for the next


async def test_more_calls_than_processes_wait_for_their_turn():
    assert (await asyncio.gather(*(judge(right, TASK, [str(i)], 20.0) for i in range(5)))) == [
        [0.0],
        [0.0],
        [1.0],
        [0.0],
        [0.0],
    ]


async def test_what_it_raises_is_named_and_the_traceback_comes_along():
    message, error = await refusal(raises)
    line = raises.__code__.co_firstlineno + 2  # the decorator's line is the first
    assert message == (
        f"reward={__name__}:raises: raised KeyError: 'score' for task 't/7'; mend the reward function "
        f"(test_reward_process.py:{line})"
    )
    assert 'raise KeyError("score")' in error.__cause__.__notes__[0]
    assert "raised SystemExit: 3" in (await refusal(leaves))[0]


async def test_what_it_returns_is_checked_as_that_of_others():
    assert "returned nan at position 1" in (await refusal(cpu_bound(lambda task, completions: [0.0, float("nan")])))[0]
    assert "returned 1 rewards for the 2 completions" in (await refusal(where))[0]
    lazy = cpu_bound(lambda task, completions: (float(len(c)) for c in completions))
    assert "raised TypeError: returned a generator from a process" in (await refusal(lazy))[0]


async def test_a_process_that_crashes_is_named_and_replaced():
    assert (
        "reward=" + __name__ + ":crashes: ended its process (killed by SIGSEGV) for task" in (await refusal(crashes))[0]
    )
    assert await rewards_of(right, ["2"]) == [1.0]


async def test_a_reward_that_never_ends_is_killed_at_the_deadline_and_its_process_replaced(tmp_path):
    await rewards_of(right, ["2"])  # the process has started
    file, start = tmp_path / "pid", time.monotonic()
    message, _ = await refusal(never_ends, completions=[str(file)], timeout_s=0.5)
    assert 0.4 < time.monotonic() - start < 15.0
    assert message.startswith(f"reward={__name__}:never_ends: gave no answer for task 't/7' within 0.5 s; ")
    assert gone(int(file.read_text()))
    assert await rewards_of(right, ["2"]) == [1.0]


@cpu_bound
def runs_a_program(task, completions):
    program = subprocess.Popen(["sleep", "1000"])
    Path(completions[0]).write_text(str(program.pid))
    return [float(program.wait())]


async def test_what_a_late_reward_has_started_is_killed_with_it(tmp_path):
    await rewards_of(right, ["2"])  # the process has started
    assert "gave no answer" in (await refusal(runs_a_program, completions=[str(tmp_path / "pid")], timeout_s=1.0))[0]
    assert gone(int((tmp_path / "pid").read_text()))


async def test_a_reward_that_nobody_waits_for_any_more_is_killed(tmp_path):
    async def cancelled():
        waiting = asyncio.create_task(judge(never_ends, TASK, [str(tmp_path / "pid")], 60.0))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.wait([waiting])

    await asyncio.wait_for(cancelled(), 60.0)
    assert gone(int((tmp_path / "pid").read_text()))


class Marked:
    @cpu_bound
    def __call__(self, task, completions):
        return [float(os.getpid())]


async def test_a_mark_on_the_call_of_an_object_counts():
    assert await rewards_of(Marked(), ["x"]) != [float(os.getpid())]


def test_the_working_directory_is_no_place_of_modules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    process = RewardProcess()
    try:
        process.load(len)
        assert process.call("abc") == 3.0
    finally:
        process.kill()
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(RewardProcessError, match="ended its process before it was loaded .exit status 1"):
        RewardProcess().load(len)


async def test_what_cannot_be_sent_or_loaded_is_refused():
    lock = threading.Lock()
    message, _ = await refusal(cpu_bound(lambda task, completions: [float(lock.locked())]))
    assert "cannot be sent to a process (TypeError: cannot pickle '_thread.lock' object) for task" in message

    class Unloadable:
        cpu_bound = True

        def __reduce__(self):
            return (int, ("x",))

        def __call__(self, task, completions):
            raise AssertionError

    assert "could not be loaded by a process: ValueError: invalid literal" in (await refusal(Unloadable()))[0]


def test_a_function_is_sent_again_after_one_that_cannot_be_loaded():
    class Unloadable:
        def __reduce__(self):
            return (int, ("x",))

    process = RewardProcess()
    try:
        process.load(right)
        with pytest.raises(RewardProcessError, match="could not be loaded"):
            process.load(Unloadable())
        process.load(right)
        assert process.call(TASK, ["2"]) == [1.0]
    finally:
        process.kill()
        process.process.wait()


def test_an_async_function_cannot_be_marked():
    async def waits(task, completions):
        return [0.0]

    with pytest.raises(ValueError, match="cpu_bound=.*waits: is async, so it waits and does not compute; leave"):
        cpu_bound(waits)


RUN = """
import asyncio, sys
from tests.unit.tasks.test_reward_process import TASK, never_ends
from torchtitan_rl.tasks.judging import judge
asyncio.run(judge(never_ends, TASK, [sys.argv[1]], 60.0))
"""


async def test_a_signal_for_all_processes_of_a_run_leaves_a_reward_its_process_and_ends_what_it_starts():
    assert await rewards_of(is_asked_to_stop, ["x"]) == [-signal.SIGTERM]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_a_run_that_is_interrupted_or_killed(end, tmp_path):
    file = tmp_path / "pid"
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(file)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()
        time.sleep(0.05)
    worker = int(file.read_text())
    assert psutil.pid_exists(worker)
    run.send_signal(end)
    run.communicate(timeout=10)
    assert gone(worker)


def test_processes_end_with_the_thread_of_the_event_loop_that_used_them():
    pids = []
    thread = threading.Thread(target=lambda: pids.extend(asyncio.run(judge(where, TASK, ["x"], 20.0))))
    thread.start()
    thread.join(60)
    assert gone(int(pids[0]))
