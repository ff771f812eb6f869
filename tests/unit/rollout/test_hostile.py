"""Agents that mean harm, beside agents that do not: each costs its own attempt, and no other."""

import asyncio
import math
import sys
import threading

import httpx
import pytest

from tests.unit.serve.fuzz import Chatter
from tests.unit.serve.opened import BYTES, client, user
from torchtitan_rl.rollout.external import AgentFailed, CommandLimits, external
from torchtitan_rl.rollout.policy import Policy
from torchtitan_rl.serve.gateway import Gateway
from torchtitan_rl.serve.limits import ServerLimits
from torchtitan_rl.types import Task

ASKED = {"model": "policy", "messages": [user("a")]}
SEEN = []
"""Sessions of others, for an agent to try."""


async def good(task, endpoint):
    SEEN.append(endpoint)
    async with client(endpoint.base_url, endpoint.api_key) as sdk:
        for _ in range(4):
            answer = await sdk.chat.completions.create(model="policy", messages=[user(task.prompt)])
            assert answer.choices[0].message.content
            await asyncio.sleep(0.05)
    return 1.0


async def never_returns(task, endpoint):
    await asyncio.sleep(1000)


async def posts_nan(task, endpoint):
    key = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with httpx.AsyncClient(headers=key) as http:
        await http.post(f"{endpoint.base_url}/chat/completions", json=ASKED)
        answer = await http.post(f"{endpoint.session_url}/reward", content=b'{"reward": NaN}')
        assert answer.status_code == 400
    return math.nan


def ten_threads(task, endpoint):
    """Floods: five hundred requests from ten threads, most of them too many at once. Their refusals are its own."""
    statuses = []

    def calls():
        with httpx.Client(headers={"Authorization": f"Bearer {endpoint.api_key}"}) as http:
            for _ in range(50):
                statuses.append(http.post(f"{endpoint.base_url}/chat/completions", json=ASKED | {"n": 8}).status_code)

    threads = [threading.Thread(target=calls) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) <= {200, 400, 429} and statuses.count(400) > 300
    raise RuntimeError("flooded")


async def half_a_body(task, endpoint):
    host, port = endpoint.base_url.split("/")[2].split(":")
    head = f"POST /sessions/{endpoint.session_id}/v1/completions HTTP/1.1\r\nHost: {host}\r\n"
    head += f"Authorization: Bearer {endpoint.api_key}\r\nContent-Length: 1000\r\n\r\n{{"
    answers = []
    for _ in range(20):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode())
        answers.append((reader, writer))
    for _, writer in answers[10:]:
        writer.close()
    for reader, writer in answers[:10]:
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()
    raise RuntimeError("half")


async def tries_others(task, endpoint):
    await asyncio.sleep(0.1)  # others have begun
    others = [seen for seen in SEEN if seen.session_id != endpoint.session_id]
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {endpoint.api_key}"}) as http:
        for other in others:
            answer = await http.post(f"{other.base_url}/chat/completions", json=ASKED)
            assert answer.status_code in (401, 404)  # 404: it has ended
            assert (await http.post(f"{other.session_url}/reward", json={"reward": -9})).status_code in (401, 404)
    assert others
    raise RuntimeError("tried")


FORKS = [sys.executable, "-c", "import os, time\nfor i in range(100): os.fork() or time.sleep(60)\ntime.sleep(60)"]
GIGABYTE = [sys.executable, "-c", "while True: open('big', 'ab').write(b'x' * 2**20)"]
FLOODS = [sys.executable, "-c", "while True: print('x' * 4096)"]
HOSTILE = {
    "never returns": (never_returns, "within 2 s"),
    "posts NaN": (posts_nan, "posted a reward that was refused|gave reward nan"),
    "calls from ten threads": (ten_threads, ""),
    "sends half a body": (half_a_body, "raised RuntimeError: half"),
    "tries the sessions of others": (tries_others, "raised RuntimeError: tried"),
    "forks": (FORKS, "processes; 16 are allowed"),
    "writes a gigabyte": (GIGABYTE, "status|MiB of files"),
    "floods its output": (FLOODS, "bytes of output"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_agent_costs_its_own_attempt_only(name):
    agent, message = HOSTILE[name]
    task = Task(id="t", prompt="a")
    timeout_s = 2.0 if name == "never returns" else 30.0
    limits = CommandLimits(max_processes=16, max_disk_mib=32, max_output_mib=0.5)
    SEEN.clear()
    policy = Policy(generator=Chatter(), tokenizer=BYTES, max_tokens=64, max_prompt_tokens=64, for_training=True)
    async with Gateway(context_tokens=256, limits=ServerLimits(body_timeout_s=1.0)) as gateway:
        theirs, ours = external(agent, timeout_s=timeout_s, command=limits), external(good, timeout_s=30)
        theirs.attach(gateway), ours.attach(gateway)
        bad = asyncio.ensure_future(theirs(task, policy, rollout_id="bad", seed=0))
        fine = await asyncio.gather(*(ours(task, policy, rollout_id=f"{i}", seed=i) for i in range(4)))
        if message:
            with pytest.raises(AgentFailed, match=message):
                await bad
        else:  # its session ended it
            assert ((await bad).end_reason, (await bad).reward, len((await bad).turns)) == ("turns", 0.0, 64)
        assert all((rollout.reward, len(rollout.turns)) == (1.0, 4) for rollout in fine)
        after = await ours(task, policy, rollout_id="after", seed=9)
        assert len(after.turns) == 4 and not gateway.sessions
        assert fine[0].turns[0].completion.tokens == after.turns[0].completion.tokens
