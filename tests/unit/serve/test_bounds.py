"""How much one client can make a gateway hold: before work is done, while it waits, and after its session has ended."""

import gc
import json
import zlib

import httpx
import openai
import psutil
import pytest

from tests.unit.serve.fuzz import Chatter
from tests.unit.serve.opened import BYTES, served, session, user
from torchtitan_rl.rollout.agent import SessionLimits
from torchtitan_rl.rollout.policy import Policy
from torchtitan_rl.serve.errors import Refused
from torchtitan_rl.serve.gateway import Gateway
from torchtitan_rl.serve.limits import Places

CONTEXT = 32_768


def tools(i):
    """Some 500 KB of descriptions, of few tokens for a template that does not show them."""
    properties = {f"argument {j} of session {i}": {"type": "integer"} for j in range(100)}
    return [
        {"type": "function", "function": {"name": f"f{j}", "parameters": {"type": "object", "properties": properties}}}
        for j in range(100)
    ]


def resident_mib():
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20


async def test_sessions_that_have_ended_are_forgotten_with_all_that_they_sent():
    async def scene():
        policy = Policy(generator=Chatter(), tokenizer=BYTES, max_tokens=64, max_prompt_tokens=64)
        async with Gateway(context_tokens=CONTEXT) as gateway:

            async def one(i):
                opened = gateway.open_session(policy, seed=0, limits=SessionLimits())
                headers = {"Authorization": f"Bearer {opened.secret}"}
                async with httpx.AsyncClient(headers=headers, timeout=60) as http:
                    body = {"messages": [user("hi")], "tools": tools(i)}
                    answer = await http.post(f"{opened.endpoint.base_url}/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                gateway.end_session(opened)

            for i in range(4):
                await one(i)
            before = resident_mib()
            for i in range(40):
                await one(i)
            assert not gateway.sessions and gateway.app.waiting_bytes == 0
            return resident_mib() - before

    assert await scene() < 20


@pytest.mark.parametrize(
    "path, body, message",
    [
        ("chat/completions", {"messages": [user("a")] * 4097}, "messages: has 4097 entries, and 4096 may be"),
        ("chat/completions", {"messages": [user("a")], "tools": tools(0) * 2}, "tools: has 200 entries, and 128 may"),
        ("completions", {"prompt": ["a"] * 1025}, "prompt: has 1025 entries, and 1024 may be"),
        ("completions", {"prompt": ["a"] * 200, "n": 8}, "prompt: 200 entries with n=8 are 1600 completions, and"),
        ("completions", {"prompt": "a", "stop_token_ids": [5] * 257}, "stop_token_ids: has more than 256"),
    ],
)
async def test_a_request_of_too_many_parts_is_refused_before_it_is_rendered(path, body, message):
    async with session("a", context_tokens=2**17) as (opened, _, sampler):
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {opened.secret}"}) as http:
            answer = await http.post(f"{opened.endpoint.base_url}/{path}", json=body)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"]
        assert not sampler.asked


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "br"])
async def test_a_compressed_body_is_refused(encoding):
    async with session("a") as (opened, _, _):
        headers = {"Authorization": f"Bearer {opened.secret}", "Content-Encoding": encoding}
        async with httpx.AsyncClient(headers=headers) as http:
            answer = await http.post(f"{opened.endpoint.base_url}/completions", content=zlib.compress(b" " * 10**6))
        assert answer.status_code == 415 and "bodies are not expanded" in answer.json()["error"]["message"]
        assert json.loads(answer.text)["error"]["code"] == "unsupported_encoding"


async def test_a_client_without_a_session_may_send_as_many_prompts_as_may_be_awaited():
    async with served(*["a"] * 200) as (_, sdk, _):
        answer = await sdk.completions.create(model="policy", prompt=[[1, 2]] * 200)
        assert len(answer.choices) == 200


async def test_clients_without_a_session_share_tokens_too():
    async with served(*"abcd") as (gateway, sdk, _):
        gateway.sessions._places.num_tokens = 200
        asked = {"model": "policy", "prompt": [1, 2]}
        with pytest.raises(openai.BadRequestError, match="may come to 264 tokens, and 200 may be awaited"):
            await sdk.completions.create(**asked, n=4)
        await sdk.completions.create(**asked, n=3)
        assert gateway.sessions._places.taken_tokens == gateway.sessions._places.taken == 0


def test_places_are_given_back():
    places = Places(2, 100)
    places.take(1, 60)
    with pytest.raises(Refused, match="completions of 60 tokens are awaited, and 100 may be; wait") as refused:
        places.take(1, 60)
    assert refused.value.status == 429
    places.give(1, 60)
    places.take(2, 100)
    with pytest.raises(Refused, match="2 completions are awaited"):
        places.take(1)
