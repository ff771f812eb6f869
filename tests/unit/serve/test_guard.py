"""What a web page of somebody else's can send is refused by every server; what SDKs and proxies send is not."""

import asyncio

import httpx
import openai
import pytest

from tests.unit.serve.opened import served, session, user
from torchtitan_rl.serve.errors import Refused
from torchtitan_rl.serve.errors import answer as refused_answer
from torchtitan_rl.serve.gateway import Gateway, Served
from torchtitan_rl.serve.guard import Guard, allowed_hosts, host_names
from torchtitan_rl.serve.tinker.app import guarded

JSON = {"Content-Type": "application/json"}
ASKED = b'{"model": "policy", "messages": [{"role": "user", "content": "a"}]}'


async def echo(scope, receive, send):
    """Answers 200 with the number of bytes of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(size).encode()})


async def asked(app, method="POST", content=b"{}", headers=JSON, base_url="http://127.0.0.1:8000"):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base_url) as http:
        return await http.request(method, "/v1/x", content=content, headers=headers)


KEYLESS = Guard(echo, hosts=allowed_hosts("127.0.0.1", False))
KEYED = Guard(echo, hosts=allowed_hosts("127.0.0.1", True))


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:1", "LocalHost", "[::1]:8000", "127.0.0.1"])
async def test_a_name_of_this_machine_is_answered(host):
    assert (await asked(KEYLESS, headers=JSON | {"Host": host})).text == "2"


@pytest.mark.parametrize("host", ["evil.example:8000", "127.0.0.1.evil.example", "localhost:8000:80", "", "10.0.0.1"])
async def test_another_name_is_refused_where_no_key_is_asked_for(host):
    answer = await asked(KEYLESS, headers=JSON | {"Host": host})
    assert answer.status_code == 421 and "--allow-host" in answer.json()["error"]["message"]
    assert (await asked(KEYED, headers=JSON | {"Host": host})).status_code == 200


async def test_a_refusal_has_the_form_of_the_dialect_that_was_asked_for():
    async with served() as (gateway, _, _):
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            for prefix in ("", "/sessions/x"):
                for path in ("/v1/messages", "/v1/messages/count_tokens"):
                    for answer in (
                        await http.post(prefix + path, content=b"{}", headers=JSON | {"Host": "evil.example"}),
                        await http.post(
                            prefix + path, content=b"{}", headers=JSON | {"Origin": "https://evil.example"}
                        ),
                        await http.post(prefix + path, content=b"{}", headers={"Content-Type": "text/plain"}),
                        await http.put(prefix + path),
                    ):
                        assert answer.status_code in (403, 405, 415, 421)
                        assert answer.json().keys() == {"type", "error"}
                for path in ("/v1/responses", "/v1/chat/completions", "/v1/messagesx"):
                    answer = await http.put(prefix + path)
                    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


async def test_names_are_allowed_by_the_option():
    app = Guard(echo, hosts=allowed_hosts("127.0.0.1", False, ["Proxy.example"]))
    assert (await asked(app, headers=JSON | {"Host": "proxy.example:9"})).status_code == 200
    assert (await asked(app, headers=JSON | {"Host": "evil.example"})).status_code == 421
    assert allowed_hosts("0.0.0.0", True) is None and allowed_hosts("127.0.0.1", True) is None
    assert "proxy" in allowed_hosts("0.0.0.0", True, ["proxy"]) and "[::1]" in allowed_hosts("::1", False)
    for wrong in ("a:80", "http://a", ""):
        with pytest.raises(ValueError, match="--allow-host"):
            host_names([wrong])


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "https://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:9"}]
    + [{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, {"Sec-Fetch-Site": "same-site"}],
)
@pytest.mark.parametrize("app", [KEYLESS, KEYED])
async def test_a_page_of_another_site_is_refused_with_and_without_a_key(app, headers):
    for method in ("GET", "POST", "OPTIONS"):
        answer = await asked(app, method, headers=JSON | headers)
        assert answer.status_code == 403 and "web page" in answer.json()["error"]["message"]
        assert not any(name.startswith("access-control") for name in answer.headers)


async def test_a_person_who_follows_a_link_and_a_page_of_the_server_itself_are_answered():
    linked = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert (await asked(KEYLESS, "GET", b"", linked)).status_code == 200
    assert (await asked(KEYLESS, headers=JSON | {"Origin": "http://127.0.0.1:8000"})).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
async def test_a_body_that_browsers_send_unasked_is_refused_where_no_key_is_asked_for(kind):
    headers = {} if kind is None else {"Content-Type": kind}
    answer = await asked(KEYLESS, headers=headers)
    assert answer.status_code == 415 and "curl" in answer.json()["error"]["message"]
    assert (await asked(KEYED, headers=headers)).status_code == 200
    assert (await asked(KEYLESS, content=b"", headers=headers)).status_code == 200  # nothing to read


async def test_tinkers_protobuf_is_a_type_of_tinkers_server_alone():
    app, headers = guarded(echo, allowed_hosts("127.0.0.1", False)), {"Content-Type": "application/x-protobuf"}
    assert (await asked(app, headers=headers)).status_code == 200
    assert (await asked(KEYLESS, headers=headers)).status_code == 415
    refused = await asked(app, headers={"Content-Type": "text/plain"})
    assert refused.status_code == 415 and refused.json()["category"] == "user"


async def test_a_long_head_is_refused_in_the_same_process_too():
    answer = await asked(KEYLESS, headers=JSON | {"X": "a" * 70_000})
    assert answer.status_code == 431 and "65536 bytes" in answer.json()["error"]["message"]


async def test_bodies_under_way_share_a_bound_and_give_it_back():
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(scope, receive, send):
        try:
            await receive()
        except Refused as refused:
            return await refused_answer(refused)(scope, receive, send)
        begun.set()
        await go_on.wait()
        await echo(scope, receive_nothing, send)

    async def receive_nothing():
        return {"type": "http.request", "body": b"", "more_body": False}

    app = Guard(slow, hosts=None, max_waiting_bytes=1000)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as http:
        first = asyncio.ensure_future(http.post("/", content=b"a" * 600))
        await begun.wait()
        second = await http.post("/", content=b"a" * 600)
        assert second.status_code == 429 and second.headers["Retry-After"] == "1"
        assert "have 600 bytes, and 1000 may be" in second.json()["error"]["message"]
        go_on.set()
        assert (await first).status_code == 200 and app.waiting_bytes == 0
        assert (await http.post("/", content=b"a" * 600)).status_code == 200


async def test_a_gateway_without_a_key_is_guarded_and_the_sdk_comes_in():
    async with served("a", "b") as (gateway, sdk, sampler):
        assert (await sdk.chat.completions.create(model="policy", messages=[user("a")])).choices
        url = f"{gateway.url}/v1/chat/completions"
        async with httpx.AsyncClient() as http:
            for status, headers in (
                (421, JSON | {"Host": "evil.example"}),
                (403, JSON | {"Origin": "https://evil.example"}),
                (415, {"Content-Type": "text/plain"}),
            ):
                answer = await http.post(url, content=ASKED, headers=headers)
                assert answer.status_code == status and answer.json()["error"]["message"]
        assert len(sampler.asked) == 1


async def test_a_session_has_a_key_so_any_name_and_any_form_of_it_come_in():
    async with session("a") as (opened, _, _):
        headers = {"Authorization": f"Bearer {opened.secret}", "Host": "host.docker.internal:1"}
        headers["Content-Type"] = "application/x-www-form-urlencoded"  # curl -d
        async with httpx.AsyncClient() as http:
            answer = await http.post(f"{opened.endpoint.session_url}/reward", content=b'{"reward": 1}', headers=headers)
            assert answer.status_code == 200 and opened.reward == (1.0, {})
            answer = await http.post(
                f"{opened.endpoint.session_url}/reward",
                content=b'{"reward": 2}',
                headers=headers | {"Origin": "http://a"},
            )
            assert answer.status_code == 403 and opened.reward == (1.0, {})


async def test_a_gateway_with_a_key_is_asked_by_any_name():
    async with served("a", api_key="secret") as (gateway, _, _):
        async with openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key="secret", default_headers={"Host": "proxy.example"}
        ) as sdk:
            assert (await sdk.chat.completions.create(model="policy", messages=[user("a")])).choices
    assert Gateway(context_tokens=8, host="0.0.0.0").app.hosts is None
    with pytest.raises(ValueError, match="api_key is empty"):
        Gateway(context_tokens=8, host="0.0.0.0", served=Served(name="p", policy=None, versions=list))
