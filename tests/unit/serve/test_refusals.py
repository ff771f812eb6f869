"""Bad input: the status, the error body and the sentence that SDKs expect."""

import json

import httpx
import openai
import pytest

from tests.kit.clock import Clock
from tests.unit.serve.opened import ADD, END, client, served, session, user
from torchtitan_rl.rollout.agent import SessionLimits
from torchtitan_rl.serve.keys import check_key, is_loopback, read_key
from torchtitan_rl.serve.limits import Rate
from torchtitan_rl.types import WITHOUT_ADAPTERS

CHAT, TEXT = "chat/completions", "completions"
ASKED = {"model": "policy", "messages": [{"role": "user", "content": "a"}]}
IMAGE = [{"type": "image_url", "image_url": {"url": "data:"}}]

BAD = {
    "no json": (CHAT, b"{", "is not JSON"),
    "no object": (CHAT, b"[]", "body"),
    "no messages": (CHAT, {"model": "policy"}, "messages: Field required"),
    "empty messages": (CHAT, ASKED | {"messages": []}, "messages"),
    "messages of text": (CHAT, ASKED | {"messages": "hi"}, "messages"),
    "a role that is none": (CHAT, ASKED | {"messages": [{"role": "king", "content": "a"}]}, "messages.0.role"),
    "an image": (CHAT, ASKED | {"messages": [{"role": "user", "content": IMAGE}]}, "'image_url' is no text"),
    "top_p": (CHAT, ASKED | {"top_p": 0.9}, "top_p=0.9: this session trains"),
    "temperature": (CHAT, ASKED | {"temperature": 0.5}, "temperature=0.5: this session trains at"),
    "nan": (CHAT, b'{"messages":[{"role":"user","content":"a"}],"temperature":NaN}', "temperature"),
    "logit bias": (CHAT, ASKED | {"logit_bias": {"5": 1}}, "logit_bias: is not offered: it would draw"),
    "json mode": (
        CHAT,
        ASKED | {"response_format": {"type": "json_object"}},
        "response_format: this session trains, and a policy",
    ),
    "top logprobs": (CHAT, ASKED | {"logprobs": True, "top_logprobs": 3}, "top_logprobs: is not offered"),
    "an unknown parameter": (CHAT, ASKED | {"frobnicate": 1}, "frobnicate: is not offered: there is no such"),
    "a forced tool": (
        CHAT,
        ASKED | {"tools": [ADD], "tool_choice": "required"},
        "tool_choice: this session trains, and a policy",
    ),
    "an empty stop": (CHAT, ASKED | {"stop": [""]}, "stop: has an empty text"),
    "n": (CHAT, ASKED | {"n": 1000}, "n=1000: is more than"),
    "no limit": (CHAT, ASKED | {"max_tokens": 0}, "max_tokens"),
    "a token outside": (TEXT, {"prompt": [1, 262]}, "token id 262 is outside the vocabulary of 262"),
    "a negative token": (TEXT, {"prompt": [-1]}, "token id -1"),
    "a huge token": (TEXT, {"prompt": [10**30]}, "prompt"),
    "no prompt": (TEXT, {"prompt": []}, "prompt: has no tokens"),
    "an empty prompt": (TEXT, {"prompt": ""}, "prompt: has no tokens"),
    "echo": (TEXT, {"prompt": "a", "echo": True}, "echo: is not offered"),
    "a stop token outside": (TEXT, {"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids: token id 999"),
    "half of a pair": (
        CHAT,
        ASKED
        | {
            "messages": [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '"\\ud800"'}}
                    ],
                }
            ]
        },
        None,
    ),
}


def body_of(answer):
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("name", BAD)
async def test_a_request_that_is_wrong_gets_400_and_a_sentence(name):
    path, body, message = BAD[name]

    async def scene():
        async with session("a" + END) as (opened, _, sampler):
            endpoint = opened.endpoint
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {endpoint.api_key}"}) as http:
                answer = await http.post(f"{endpoint.base_url}/{path}", content=content)
            if message is None:  # what a tokenizer makes of it is the tokenizer's affair
                assert answer.status_code < 500
                return
            assert answer.status_code == 400, answer.text
            error = body_of(answer)
            assert message in error["message"] and error["type"] == "invalid_request_error"
            assert not sampler.asked and opened.counts["refused"] == 1

    await scene()


async def test_what_the_agent_sends_and_the_run_decides_may_be_ignored():
    ignored = ("temperature", "top_p", "presence_penalty")
    async with session("a", ignored=ignored) as (_, sdk, sampler):
        await sdk.chat.completions.create(
            model="policy", messages=[user("a")], temperature=0.2, top_p=0.5, presence_penalty=1
        )
        params = sampler.asked[0][1]
        assert (params.temperature, params.top_p, params.presence_penalty) == (1.0, 1.0, 0.0)


async def test_an_evaluation_samples_at_its_own_temperature():
    async with session("a", for_training=False, temperature=0.0, altered={"top_p": 0.9}) as (_, sdk, sampler):
        await sdk.chat.completions.create(model="policy", messages=[user("a")], temperature=0.7)
        assert (sampler.asked[0][1].temperature, sampler.asked[0][1].top_p) == (0.0, 0.9)


async def test_sessions_paths_and_models_that_do_not_exist_get_404():
    async with session("a") as (opened, sdk, _):
        root = opened.endpoint.base_url.split("/sessions")[0]
        for url in (f"{root}/sessions/nobody/v1", f"{root}/v1"):
            with pytest.raises(openai.NotFoundError) as refused:
                await client(url, opened.secret).chat.completions.create(model="policy", messages=[user("a")])
            assert refused.value.code == "session_not_found"
        with pytest.raises(openai.NotFoundError, match="'gpt-4o': is not served here; use policy") as refused:
            await sdk.chat.completions.create(model="gpt-4o", messages=[user("a")])
        assert refused.value.code == "model_not_found"
        async with httpx.AsyncClient() as http:
            assert body_of(await http.get(f"{root}/nowhere"))["code"] == "not_found"
            answer = await http.get(f"{root}/sessions/{opened.id}/v1/chat/completions")
            assert answer.status_code == 405 and body_of(answer)
            assert (await http.get(f"{root}/healthz")).json()["status"] == "ok"


async def test_a_session_opens_with_its_own_key_only():
    async with session("a") as (opened, _, _):
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer é".encode()}):
            async with httpx.AsyncClient() as http:
                answer = await http.post(f"{opened.endpoint.base_url}/chat/completions", json=ASKED, headers=header)
            assert answer.status_code == 401 and body_of(answer)["code"] == "invalid_api_key"
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        named = {"Authorization": f"Bearer {opened.secret}", "X-Session-ID": opened.id}
        root = opened.endpoint.base_url.split("/sessions")[0]
        async with httpx.AsyncClient() as http:
            answer = await http.post(f"{root}/v1/chat/completions", json=ASKED, headers=named)
        assert answer.status_code == 200 and len(opened.turns()) == 1


async def test_a_body_that_is_long_or_late_or_cut_off_is_refused():
    async with session("a") as (opened, _, _):
        opened_at = opened.endpoint
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {opened_at.api_key}"}) as http:
            answer = await http.post(f"{opened_at.base_url}/completions", content=b" " * 80_000)
            assert answer.status_code == 413 and body_of(answer)["code"] == "request_too_large"

            async def parts():
                for _ in range(80):
                    yield b" " * 1000

            answer = await http.post(f"{opened_at.base_url}/completions", content=parts())
            assert answer.status_code == 413


def test_a_rate_lets_a_burst_through_and_then_so_many_a_second():
    clock = Clock()
    rate = Rate(2.0, clock=clock)
    rate.take(), rate.take()
    with pytest.raises(Exception, match="2 requests per second are allowed; wait 0.50 s") as refused:
        rate.take()
    assert refused.value.status == 429 and refused.value.headers == {"Retry-After": "1"}
    slow = Rate(0.7, clock=clock)
    slow.take()
    with pytest.raises(Exception, match="wait 1.43 s") as refused:
        slow.take()
    assert refused.value.headers == {"Retry-After": "2"}  # after 1 s it would be refused again
    clock.now = 0.5
    rate.take()


async def test_too_many_at_once_wait():
    async with session(*"abcd", limits=SessionLimits(max_parallel=2)) as (_, sdk, _):
        with pytest.raises(openai.RateLimitError, match="2 may be"):
            await sdk.chat.completions.create(model="policy", messages=[user("a")], n=3)


async def test_clients_without_a_session_share_their_places():
    async with served(*"abcd") as (gateway, sdk, _):
        gateway.sessions._places.number = 2
        with pytest.raises(openai.RateLimitError, match="0 completions are awaited, and 2 may be"):
            await sdk.chat.completions.create(model="policy", messages=[user("a")], n=3)
        await sdk.chat.completions.create(model="policy", messages=[user("a")], n=2)
        assert gateway.sessions._places.taken == 0


async def test_clients_without_a_session_choose_the_version_and_how_to_sample():
    async with served("a", "b", versions=(4, 7), api_key="secret") as (gateway, sdk, sampler):
        assert [model.id for model in (await sdk.models.list()).data] == ["policy", "policy@4", "policy@7"]
        answer = await sdk.chat.completions.create(
            model="policy@4", messages=[user("a")], temperature=0.3, top_p=0.5, seed=9
        )
        params = sampler.asked[0][1]
        assert (params.temperature, params.top_p, params.seed, answer.model) == (0.3, 0.5, 9, "policy@4")
        with pytest.raises(openai.NotFoundError, match="policy@5"):
            await sdk.chat.completions.create(model="policy@5", messages=[user("a")])
        with pytest.raises(openai.AuthenticationError):
            await client(f"{gateway.url}/v1", "other").models.list()
        assert not gateway.sessions


async def test_the_base_has_a_name_where_adapters_are_beside_it():
    async with served("a", versions=(4,), no_base="") as (_, sdk, sampler):
        assert [model.id for model in (await sdk.models.list()).data] == ["policy", "base", "policy@4"]
        assert (await sdk.models.retrieve("base")).id == "base"
        answer = await sdk.chat.completions.create(model="base", messages=[user("a")])
        assert answer.model == "base" and sampler.versions == [WITHOUT_ADAPTERS]
        with pytest.raises(openai.NotFoundError, match="'base@4': is not served here; use policy or base or policy@4"):
            await sdk.chat.completions.create(model="base@4", messages=[user("a")])
    async with served("a") as (_, sdk, sampler):
        assert [model.id for model in (await sdk.models.list()).data] == ["policy"]
        with pytest.raises(openai.NotFoundError, match="model='base': .* no adapters beside a base; use the policy"):
            await sdk.chat.completions.create(model="base", messages=[user("a")])
        assert not sampler.asked


@pytest.mark.parametrize("model", ["base", "policy@4"])
async def test_a_session_has_the_turns_of_its_own_policy_alone(model):
    async with session("a") as (opened, sdk, sampler):
        with pytest.raises(openai.NotFoundError, match=f"'{model}': a session's turns may train.*use policy, or ask"):
            await sdk.chat.completions.create(model=model, messages=[user("a")])
        assert not sampler.asked and not opened.turns()


def test_a_key_comes_from_a_file_or_the_environment_and_is_needed_elsewhere(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHTITAN_RL_API_KEY", raising=False)
    (tmp_path / "key").write_text("abc\n")
    assert read_key(str(tmp_path / "key"), "0.0.0.0") == "abc"
    assert read_key("", "127.0.0.1") == ""
    with pytest.raises(ValueError, match="--host=0.0.0.0: other machines reach it, and no API key"):
        read_key("", "0.0.0.0")
    monkeypatch.setenv("TORCHTITAN_RL_API_KEY", "def")
    assert read_key("", "0.0.0.0") == "def"
    (tmp_path / "empty").write_text("")
    with pytest.raises(ValueError, match="is empty"):
        read_key(str(tmp_path / "empty"), "127.0.0.1")
    with pytest.raises(ValueError, match="cannot be read"):
        read_key(str(tmp_path / "none"), "127.0.0.1")
    assert is_loopback("::1") and is_loopback("localhost") and not is_loopback("10.0.0.1")
    check_key("abc", "abc")
