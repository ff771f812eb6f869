"""Agents as workflows: functions and commands, what they give, and how they fail."""

import asyncio
import math
import os
import sys
import time
import uuid
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from openai import APIStatusError, BadRequestError

from tests.kit.sampler import FunctionSampler, policy
from tests.unit.serve.opened import BYTES, END, client, user
from torchtitan_rl.rollout import external as external_module
from torchtitan_rl.rollout.external import AgentFailed, CommandLimits, SessionLimits, external
from torchtitan_rl.rollout.sampler import SamplingFailed
from torchtitan_rl.serve.gateway import Gateway
from torchtitan_rl.types import Task

TASK = Task(id="t/1", prompt="1+2", answer="3")


async def ask(endpoint, text="1+2"):
    async with client(endpoint.base_url, endpoint.api_key) as sdk:
        answer = await sdk.chat.completions.create(model=endpoint.model, messages=[user(text)])
        return answer.choices[0].message.content


async def play(agent, *texts, sampler=None, task=TASK, **settings):
    settings = {"with_answer": True} | settings  # the commands here judge themselves
    made = policy(*(texts or ("3" + END,)), tokenizer=BYTES, for_training=True)
    made.generator = sampler or made.generator
    async with Gateway(context_tokens=256) as gateway:
        workflow = external(agent, **settings)
        workflow.attach(gateway)
        try:
            return await workflow(task, made, rollout_id="0/0/0", seed=5)
        finally:
            assert not gateway.sessions


async def right(task, endpoint):
    return float(await ask(endpoint) == task.answer)


async def test_a_coroutine_plays_and_returns_its_reward():
    rollout = await play(right)
    assert (rollout.id, rollout.reward, rollout.end_reason, rollout.text) == ("0/0/0", 1.0, "done", "3")
    assert rollout.counts == {"drift": 0, "undelivered": 0, "refused": 0}
    assert BYTES.decode(rollout.turns[0].prompt_tokens) == f"<|user|>1+2{END}<|assistant|>"


async def test_a_plain_function_plays_in_a_thread_and_gives_parts():
    def agent(task, endpoint):
        time.sleep(0.01)  # would stop the event loop
        return asyncio.run(right(task, endpoint)), {"length": 1.0}

    rollout = await play(agent)
    assert (rollout.reward, rollout.reward_parts) == (1.0, {"length": 1.0})


async def test_without_a_reward_the_family_is_left_to_judge():
    async def agent(task, endpoint):
        await ask(endpoint)

    assert (await play(agent)).reward is None


COMMAND = """
import json, os, urllib.request
def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))
task = json.load(open(os.environ["TASK_FILE"]))
answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
              {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": task["prompt"]}]})
reward = float(answer["choices"][0]["message"]["content"] == task["answer"])
"""


def command(tail):
    return [sys.executable, "-c", COMMAND + tail]


async def test_a_judges_own_timeout_is_not_the_attempts():
    async def impatient(task, sandbox):
        await asyncio.wait_for(asyncio.sleep(60), 0.01)

    async def late(task, sandbox):
        await asyncio.sleep(60)

    with pytest.raises(AgentFailed, match="judge: raised TimeoutError for task 't/1'; mend it"):
        await external_module._judged(impatient, TASK, None, 30.0)
    with pytest.raises(AgentFailed, match="judge: was not done with task 't/1' within 0.05 s"):
        await external_module._judged(late, TASK, None, 0.05)


async def test_parts_are_bounded_for_each_reward_and_for_a_run():
    made = policy(*(["3" + END] * 9), tokenizer=BYTES, for_training=True)
    given = {}

    async def agent(task, endpoint):
        await ask(endpoint)
        return 1.0, given

    async with Gateway(context_tokens=256) as gateway:
        workflow = external(agent)
        workflow.attach(gateway)

        async def attempt(names):
            given.clear()
            given.update(dict.fromkeys(names, 0.5))
            return (await workflow(TASK, made, rollout_id="0", seed=1)).reward_parts

        for i in range(4):
            assert len(await attempt(f"part_{i}_{j}" for j in range(64))) == 64
        with pytest.raises(AgentFailed, match="'new' would be more than the 256 names .* the same names in every"):
            await attempt(["part_0_0", "new"])
        assert len(await attempt(["part_0_0", "part_3_1"])) == 2  # known ones go on
        workflow.attach(gateway)
        with pytest.raises(AgentFailed, match="2000 names, and a reward may have 64 parts"):
            await attempt(f"part_{j}" for j in range(2000))
        with pytest.raises(AgentFailed, match="a name has 1000 letters"):
            await attempt(["a" * 1000])
        with pytest.raises(AgentFailed, match="the name 'in time' cannot stand in that of a metric; use letters"):
            await attempt(["in time"])


async def test_a_posted_reward_of_too_many_parts_is_refused_and_fails_the_attempt():
    async def agent(task, endpoint):
        await ask(endpoint)
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {endpoint.api_key}"}) as http:
            parts = {f"part {i}": 1.0 for i in range(2000)}
            answer = await http.post(f"{endpoint.session_url}/reward", json={"reward": 1.0, "parts": parts})
            assert answer.status_code == 400 and "at most 64" in answer.json()["error"]["message"]

    with pytest.raises(AgentFailed, match="posted a reward that was refused .*at most 64"):
        await play(agent)


@pytest.mark.parametrize(
    "tail, reward, parts",
    [
        ('open(os.environ["REWARD_FILE"], "w").write(str(reward))', 1.0, {}),
        ('json.dump({"reward": reward, "size": 2}, open(os.environ["REWARD_FILE"], "w"))', 1.0, {"size": 2.0}),
        ('post(os.environ["SESSION_URL"] + "/reward", {"reward": 0.5, "parts": {"size": 2}})', 0.5, {"size": 2.0}),
        ("", None, {}),
    ],
)
async def test_a_command_plays_and_leaves_its_reward(tail, reward, parts):
    rollout = await play(command(tail))
    assert (rollout.reward, rollout.reward_parts, rollout.text) == (reward, parts, "3")


async def test_a_command_has_a_directory_of_its_own_and_nothing_of_our_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("A_SECRET", "x")
    tell = f"""
open("left", "w").write("x")
open({str(tmp_path / "seen")!r}, "w").write(json.dumps([os.getcwd(), sorted(os.environ), os.environ["SEED"]]))
"""
    await play(command(tell), env={"MORE": "1"})
    import json

    cwd, names, seed = json.loads((tmp_path / "seen").read_text())
    assert not Path(cwd).exists() and "A_SECRET" not in names and {"MORE", "TMPDIR", "TASK_FILE"} < set(names)
    assert seed == "5"


async def raises(task, endpoint):
    await ask(endpoint)
    raise KeyError("lost")


async def hangs(task, endpoint):
    await ask(endpoint)
    await asyncio.sleep(60)


async def stays(task, endpoint):
    await ask(endpoint)
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.3)
            raise


async def silent(task, endpoint):
    return 1.0


async def leaves(task, endpoint):
    sys.exit("usage")


async def gives_a_quarter(task, sandbox):
    return 0.25


def gives(value):
    async def agent(task, endpoint):
        await ask(endpoint)
        return value

    return agent


@pytest.mark.parametrize(
    "agent, settings, message",
    [
        (raises, {}, "agent: raised KeyError: 'lost' for task 't/1'; mend it"),
        (hangs, {"timeout_s": 0.5}, "was not done with task 't/1' within 0.5 s"),
        (stays, {"timeout_s": 0.5}, "was not done"),
        (silent, {}, "took no completion"),
        (leaves, {}, "agent: raised RuntimeError: SystemExit: usage for task 't/1'"),
        (lambda task, endpoint: sys.exit(2), {}, "agent: raised RuntimeError: SystemExit: 2 for task"),
        (gives(torch.ones(2)), {}, "gave reward tensor"),
        (gives(math.nan), {}, "gave reward nan"),
        (gives("high"), {}, "gave reward 'high'"),
        (gives((1.0, {"a": math.inf})), {}, "gave reward"),
        (gives(10**400), {}, "gave reward 1000"),
        (gives(1.7e308), {}, "gave reward 1.7e.308 .*between -1e.06 and 1e.06"),
        (gives((1.0, {"a": 1e200})), {}, "gave reward"),
        (command('open(os.environ["REWARD_FILE"], "w").write("1e200")'), {}, "gave reward 1e.200"),
        (command('post(os.environ["SESSION_URL"] + "/reward", {"reward": 1.7e308})'), {}, "HTTP Error 400"),
        (command('post(os.environ["SESSION_URL"] + "/reward", {"reward": 1, "parts": {"a": 1e7}})'), {}, "Error 400"),
        (command("raise SystemExit(3)"), {}, "ended with status 3"),
        (command("print('no\\nway'); 1 / 0"), {}, "ZeroDivisionError"),
        (command("import time; time.sleep(60)"), {"timeout_s": 3.0}, "was not done within 3 s"),
        (command('open(os.environ["REWARD_FILE"], "w").write("NaN")'), {}, "gave reward nan"),
        (command('open(os.environ["REWARD_FILE"], "w").write("good")'), {}, "neither a number nor JSON"),
        (command('os.symlink("/etc/passwd", os.environ["REWARD_FILE"])'), {}, "cannot be read"),
        (command('os.mkfifo(os.environ["REWARD_FILE"])'), {}, "no plain file"),
        (command('post(os.environ["SESSION_URL"] + "/reward", {"reward": float("nan")})'), {}, "HTTP Error 400"),
        (["/no/such/agent"], {}, "ended with status 127"),
    ],
)
async def test_what_fails_names_the_cause(agent, settings, message):
    with pytest.raises(AgentFailed, match=message.replace("(", r"\(")):
        await play(agent, **settings)


async def test_a_refused_reward_fails_though_the_agent_goes_on():
    tail = """
try:
    post(os.environ["SESSION_URL"] + "/reward", {"reward": float("nan")})
except Exception:
    pass
"""
    with pytest.raises(AgentFailed, match="posted a reward that was refused"):
        await play(command(tail))


FORKS = """
import time
for i in range(200):
    if os.fork() == 0:
        if i % 2:
            os.setsid()
        time.sleep(60)
time.sleep(60)
"""
WRITES = """
import time
for i in range(64):
    open(str(i), "wb").write(b"x" * 2**20)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "tail, limits, message",
    [
        ("while True: print('x' * 1000)", CommandLimits(max_output_mib=0.1), "more than 104857 bytes of output"),
        (FORKS, CommandLimits(max_processes=20), "processes; 20 are allowed"),
        (WRITES, CommandLimits(max_disk_mib=16), "MiB of files; 16 are allowed"),
        # One write passes the limit of a file's size; the count of all files may see its first 16 MiB before it fails.
        ("open('big', 'wb').write(b'x' * 2**25)", CommandLimits(max_disk_mib=16), "ended with status|MiB of files"),
        ("x = bytearray(2**30)", CommandLimits(memory_gib=0.5), "MemoryError"),
    ],
)
async def test_a_command_over_a_limit_is_killed_and_nothing_is_left(tail, limits, message):
    own, began = uuid.uuid4().hex, time.monotonic()  # another process of the tests may have commands too
    with pytest.raises(AgentFailed, match=message):
        await play(command(f"own = '{own}'\n{tail}"), command=limits, timeout_s=20)
    assert time.monotonic() - began < 20  # a supervisor that finds nobody to kill gives up after 30 s
    assert not [p for p in psutil.process_iter(["cmdline"]) if own in str(p.info)]


@pytest.mark.parametrize("judge, reward", [(None, 0.5), (gives_a_quarter, 0.25)])
async def test_a_command_that_fails_at_a_limit_of_the_session_keeps_its_reward(judge, reward):
    tail = """
open(os.environ["REWARD_FILE"], "w").write("0.5")
post(os.environ["OPENAI_BASE_URL"] + "/completions", {"model": "policy", "prompt": "x"})
"""
    rollout = await play(command(tail), session=SessionLimits(max_turns=1), judge=judge)
    assert (rollout.end_reason, rollout.reward) == ("turns", reward)


async def test_a_limit_of_the_session_ends_the_rollout_without_failure():
    async def agent(task, endpoint):
        async with client(endpoint.base_url, endpoint.api_key) as sdk:
            while True:
                await sdk.chat.completions.create(model="policy", messages=[user("a")])

    rollout = await play(agent, "a" + END, "b" + END, session=SessionLimits(max_turns=2))
    assert (rollout.end_reason, rollout.reward, len(rollout.turns)) == ("turns", 0.0, 2)


def shortens(then):
    """Asks for too much, is refused, asks for less, and goes on as told."""

    async def agent(task, endpoint):
        async with client(endpoint.base_url, endpoint.api_key) as sdk:
            text = "1+2" * 200
            try:
                await sdk.chat.completions.create(model="policy", messages=[user(text)])
            except BadRequestError as refused:
                assert refused.code == "context_length_exceeded"
                text = text[:3]
            answer = await sdk.chat.completions.create(model="policy", messages=[user(text)])
            return then(sdk, answer.choices[0].message.content)

    return agent


async def test_an_agent_that_shortens_a_prompt_that_was_too_long_has_not_met_a_limit():
    judged = await play(shortens(lambda sdk, text: None))
    assert (judged.end_reason, judged.reward, judged.text) == ("done", None, "3")  # the family judges
    paid = await play(shortens(lambda sdk, text: float(text == "3")))
    assert (paid.end_reason, paid.reward) == ("done", 1.0)
    with pytest.raises(AgentFailed, match="ZeroDivisionError"):  # of its own making, after it went on
        await play(shortens(lambda sdk, text: 1 / 0))


async def test_an_agent_that_fails_at_the_context_has_ended_by_it():
    async def agent(task, endpoint):
        await ask(endpoint)
        await ask(endpoint, "1+2" * 200)

    rollout = await play(agent)
    assert (rollout.end_reason, rollout.reward, len(rollout.turns)) == ("tokens", 0.0, 1)


async def test_a_fault_of_the_generators_is_not_the_agents():
    def broken(prompt, params):
        raise RuntimeError("no generator replica is left")

    with pytest.raises(SamplingFailed, match="no generator replica"):
        await play(right, sampler=FunctionSampler(broken))


async def test_a_fault_that_a_later_try_has_healed_is_not_blamed_for_the_agents_own():
    tries = []

    def once(prompt, params):
        tries.append(None)
        if len(tries) == 1:
            raise RuntimeError("one replica was restarted")
        return "3" + END

    async def agent(task, endpoint):
        with pytest.raises(APIStatusError):
            await ask(endpoint)
        await ask(endpoint)
        raise KeyError("of the agent")

    with pytest.raises(AgentFailed, match="KeyError"):
        await play(agent, sampler=FunctionSampler(once, tokenizer=BYTES))


async def test_an_attempt_that_goes_on_after_its_end_meets_a_closed_session():
    kept = []

    async def agent(task, endpoint):
        kept.append(endpoint)
        return float(await ask(endpoint) == "3")

    made = policy("3" + END, "3" + END, tokenizer=BYTES)
    async with Gateway(context_tokens=256) as gateway:
        workflow = external(agent)
        workflow.attach(gateway)
        rollout = await workflow(TASK, made, rollout_id="a", seed=0)
        with pytest.raises(Exception, match="is not open"):
            await ask(kept[0])
        assert len(rollout.turns) == 1


@pytest.mark.parametrize(
    "agent, settings, message",
    [
        ([], {}, "is no command"),
        (3, {}, "neither a function nor"),
        (right, {"timeout_s": 0}, "timeout_s=0"),
        (right, {"ignored": ("temprature",)}, "ignored='temprature': is no parameter .* did you mean temperature?"),
        (right, {"ignored": ("zzz",)}, "ignored='zzz': is no parameter .* use some of add_generation_prompt, allowed"),
        (right, {"ignored": ("seed",)}, "ignored='seed'"),
    ],
)
def test_settings_without_meaning_are_refused(agent, settings, message):
    with pytest.raises(ValueError, match=message):
        external(agent, **settings)


async def test_nothing_listens_after_the_end():
    before = len(asyncio.all_tasks())
    async with Gateway(context_tokens=64) as gateway:
        port = gateway.port
    assert len(asyncio.all_tasks()) == before
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)
    assert not [
        c
        for c in psutil.Process(os.getpid()).net_connections()
        if c.laddr and c.laddr.port == port and c.status == "LISTEN"
    ]
