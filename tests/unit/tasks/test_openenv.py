"""An OpenEnv environment behind its own server, played through the gateway."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.kit.sampler import policy
from tests.unit.serve.opened import BYTES, END
from torchtitan_rl.rollout.agent import SessionLimits
from torchtitan_rl.rollout.external import AgentFailed, external
from torchtitan_rl.serve.gateway import Gateway
from torchtitan_rl.tasks import openenv
from torchtitan_rl.tasks.openenv import OpenEnv, served

ENVIRONMENTS = str(Path(__file__).parents[3] / "environments")


@pytest.fixture
def installed(monkeypatch):
    pytest.importorskip("openenv", reason="an extra of its own: bash scripts/setup.sh openenv")
    monkeypatch.syspath_prepend(ENVIRONMENTS)


def words(seed):
    rng = random.Random(seed)
    return ["".join(rng.choices("abcdefgh", k=4)) for _ in range(2)]


async def play(task, *texts, act=lambda reply: {"letter": reply}, **settings):
    made = policy(*texts, tokenizer=BYTES, for_training=True)
    async with Gateway(context_tokens=256) as gateway:
        agent = OpenEnv.agent("last_letter_server:app", say=lambda observation: observation["word"], act=act)
        workflow = external(agent, timeout_s=150, **settings)
        workflow.attach(gateway)
        return await workflow(task, made, rollout_id="0/0/0", seed=5)


async def test_an_episode_is_a_conversation_rewarded_step_by_step(installed):
    task = OpenEnv.Config().build().task("train", 0)
    first, second = words(task.answer)
    rollout = await play(task, first[-1] + END, "?" + END)
    assert (rollout.reward, len(rollout.turns), rollout.counts["drift"]) == (0.5, 2, 0)
    assert BYTES.decode(rollout.turns[1].prompt_tokens) == (
        f"<|user|>{first}{END}<|assistant|>{first[-1]}{END}<|user|>{second}{END}<|assistant|>"
    )


async def test_an_episode_that_a_limit_of_its_session_ends_keeps_the_rewards_so_far(installed):
    task = OpenEnv.Config().build().task("train", 0)
    first, _ = words(task.answer)
    rollout = await play(task, first[-1] + END, session=SessionLimits(max_turns=1))
    assert (rollout.reward, rollout.end_reason, len(rollout.turns)) == (0.5, "turns", 1)


async def test_an_action_that_the_environment_refuses_is_a_failure(installed):
    task = OpenEnv.Config().build().task("train", 0)
    with pytest.raises(AgentFailed, match="Server error"):
        await play(task, "a" + END, act=lambda reply: {"word": reply})


def test_the_splits_share_no_seed():
    family = OpenEnv.Config(num_train=5, num_validation=3, num_test=2, demonstrate=lambda seed, rng: ["a"]).build()
    seeds = [family.task(s, i).answer for s in ("train", "validation", "test") for i in range(family.num_tasks(s))]
    assert sorted(seeds) == list(range(10))
    assert (family.task("train", 0).demonstration, family.task("test", 0).demonstration) == (["a"], None)


def test_a_server_that_does_not_start_is_an_error_and_is_not_waited_for_again(monkeypatch):
    with pytest.raises(RuntimeError, match="did not answer; start it by hand"):
        served("no_such_module_of_anybody:app")
    monkeypatch.setattr(openenv, "_started", lambda server: pytest.fail("was started again"))
    with pytest.raises(RuntimeError, match="did not answer; start it by hand"):
        served("no_such_module_of_anybody:app")


APP = """
async def app(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"well"})
"""


def test_signals_that_mean_the_controller_do_not_end_a_server(tmp_path, monkeypatch):
    (tmp_path / "signalled_server.py").write_text(APP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # reaches nothing
    monkeypatch.setattr(openenv, "_START_S", 30.0)
    url = served("signalled_server:app")
    process, _ = openenv._servers.pop("signalled_server:app")
    try:
        assert os.getsid(process.pid) == process.pid  # out of reach of a terminal's Ctrl-C
        for number in (signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
        time.sleep(0.5)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
            assert answer.read() == b"well"
        process.stdin.close()
        assert process.wait(10) == 0
    finally:
        process.kill()


ORPHAN = """
import os, signal, sys
sys.path.append(sys.argv[1])
from torchtitan_rl.tasks.openenv import served
print(served("last_letter_server:app"), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_ends_with_the_process_that_started_it(installed):
    ran = subprocess.run([sys.executable, "-c", ORPHAN, ENVIRONMENTS], capture_output=True, text=True, timeout=200)
    host, port = ran.stdout.strip().removeprefix("http://").split(":")
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))):
                return
        time.sleep(0.1)
    raise AssertionError(f"the server at {ran.stdout} lives on")
