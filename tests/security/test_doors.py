"""Attacks on each server: pages of other sites, heads without end, silence, mutated bodies, clients that break off.

All of it on loopback, bounded in number and time: `scripts/test.sh -m "" tests/security` (docs/security.md).
"""

import asyncio
import random
import socket
import struct
import time

import httpx
import pytest

from tests.security.doors import DOORS, Door, as_json, opened
from tests.security.mutations import mutated, mutated_address
from tests.security.open_sockets import open_doors, sockets

pytestmark = pytest.mark.whole

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="session", params=DOORS)
def door(request, tmp_path_factory):
    """One server after the other, each started once."""
    with opened(request.param, tmp_path_factory.mktemp(request.param)) as server:
        yield server


def test_a_page_of_another_site_gets_nothing(door: Door):
    path, body = door.requests[0]
    method, answers_any_name = ("GET" if body is None else "POST"), door.name == "gateway"  # its sessions have keys
    with httpx.Client(base_url=door.url, headers=JSON | door.headers, timeout=60) as http:

        def status(method=method, **headers):
            answer = http.request(method, path, content=as_json(body), headers=headers)
            assert not any(name.startswith("access-control") for name in answer.headers)
            return answer.status_code

        assert status() == 200
        assert status(Host="evil.example") == (200 if answers_any_name else 421)
        assert status(Host="127.0.0.1.evil.example:80") == (200 if answers_any_name else 421)
        assert status(Origin="https://evil.example") == status(Origin="null") == 403
        assert status(**{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}) == 403
        assert status("OPTIONS", Origin="https://evil.example", **{"Access-Control-Request-Method": "POST"}) in (
            403,
            405,
        )
        if body is not None and not answers_any_name:
            assert status(**{"Content-Type": "text/plain"}) == 415
            assert status(**{"Content-Type": "application/x-www-form-urlencoded"}) == 415
    assert door.answers()


def test_no_process_of_it_listens_to_other_hosts(door: Door):
    assert door.answers()  # every process is there
    processes = [door.process, *door.process.children(recursive=True)]
    seen = {place: command for process in processes for place, command in sockets(process).items()}
    assert door.address in seen and open_doors(seen) == {}


def test_heads_without_end_are_cut_off(door: Door):
    before = door.memory_mib()
    for begin in (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ", b"GET /", b"POST / HTTP/1.1\r\nX-0: "):
        with socket.create_connection(door.address, timeout=20) as connection:
            sent = 0
            try:
                connection.sendall(begin)
                for _ in range(1024):  # 64 MiB
                    connection.sendall(b"a" * 2**16)
                    sent += 2**16
            except ConnectionError:
                pass
            assert sent < 2**24  # what the system's own buffers take
    assert door.memory_mib() < before * 1.05 + 5 and door.answers()


async def test_who_says_nothing_or_half_of_a_head_is_cut_off(door: Door):
    async def silent(begin: bytes) -> float:
        reader, writer = await asyncio.open_connection(*door.address)
        writer.write(begin)
        began = time.monotonic()
        async with asyncio.timeout(40):
            try:
                await reader.read()
            except ConnectionError:
                pass
        writer.close()
        return time.monotonic() - began

    assert (
        max(await asyncio.gather(*(silent(begin) for begin in [b"", b"GET / HTTP/1.1\r\nHost: a\r\n"] * 16))) < 20
        and door.answers()
    )


@pytest.mark.parametrize("num", [50, pytest.param(500, marks=pytest.mark.slow)])
def test_mutated_requests_are_never_a_fault_of_the_server(door: Door, num):
    chance, statuses = random.Random(num), dict[int, int]()
    with httpx.Client(base_url=door.url, headers=JSON | door.headers, timeout=120) as http:
        for i in range(num):
            path, body = chance.choice(door.requests)
            content, is_right = as_json(body), i % 10 == 0
            if not is_right and body is None:
                path = mutated_address(path, chance)
            elif not is_right:
                content = mutated(body, chance)
            answer = http.request("GET" if body is None else "POST", path, content=content)
            assert answer.status_code < 500, (path, content[:2000], answer.text[:2000])
            # A right request in between is answered: the wrong ones before it broke nothing.
            assert answer.status_code == 200 or not is_right, (path, answer.text[:2000])
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            if door.name == "serve-tinker" and answer.status_code == 200:
                _check_future(http, answer, content)
    assert num - statuses[200] > num // 25, statuses
    assert door.tracebacks() == [] and door.answers()


def _check_future(http: httpx.Client, answer: httpx.Response, content: bytes) -> None:
    """An accepted request may fail, but not by the server's fault. One that is numbered ahead is not waited for."""
    if not (request_id := answer.json().get("request_id")):
        return
    try:
        ended = http.post("/api/v1/retrieve_future", json={"request_id": request_id}, timeout=5)
    except httpx.ReadTimeout:
        return
    if "json" in ended.headers["content-type"]:
        assert ended.json().get("category") != "server", (content[:2000], ended.text[:2000])


@pytest.mark.parametrize(
    "num_clients, num_rounds", [(16, 1), pytest.param(64, 3, marks=[pytest.mark.slow, pytest.mark.timeout(500)])]
)
async def test_clients_that_break_off_leave_nothing_behind(door: Door, num_clients, num_rounds):
    async def one_round(seed: int) -> list[int]:
        return await _round(door, num_clients, random.Random(seed))

    # Memory that an allocator keeps goes up and down by some 5 MiB; memory that leaks grows with every round. So the
    # server is first warm, and after the rounds it must once be back near that, however often more are made.
    before = 0.0
    for i in range(3):
        await one_round(i)
        before = max(before, _settled_mib(door))
    for i in range(num_rounds + 8):
        statuses = await one_round(3 + i)
        assert len(statuses) == num_clients - num_clients // 2 and set(statuses) <= {200, 429}, statuses
        after = _settled_mib(door)
        if i + 1 >= num_rounds and after < before * 1.05:
            break
    assert after < before * 1.05, f"{before:.0f} MiB before, {after:.0f} MiB after"
    assert door.num_connections() == 0 and door.tracebacks() == [] and door.answers()


async def _round(door: Door, num_clients: int, chance: random.Random) -> list[int]:
    """Every second client breaks off in the middle of its request, or before its answer. Statuses of the others."""

    async def whole(path, body) -> int:
        async with httpx.AsyncClient(headers=JSON | door.headers, timeout=120) as http:
            method = "GET" if body is None else "POST"
            return (await http.request(method, door.url + path, content=as_json(body))).status_code

    async def broken(path, body, share: float, reset: bool) -> None:
        _, writer = await asyncio.open_connection(*door.address)
        content = as_json(body)
        head = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"Host: 127.0.0.1:{door.address[1]}"]
        head += [f"{name}: {value}" for name, value in (JSON | door.headers).items()]
        head += [f"Content-Length: {len(content)}", "", ""]
        sent = "\r\n".join(head).encode() + content
        writer.write(sent[: max(1, int(len(sent) * share))])
        await writer.drain()
        await asyncio.sleep(chance.random() / 2)
        if reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    calls = []
    for i in range(num_clients):
        path, body = chance.choice(door.requests)
        if i % 2:
            calls.append(broken(path, body, chance.choice([0.3, 0.8, 0.95, 1.0]), chance.random() < 0.5))
        else:
            calls.append(whole(path, body))
    return [status for status in await asyncio.gather(*calls) if status is not None]


def _settled_mib(door: Door) -> float:
    """The server's memory once all connections have ended."""
    end = time.monotonic() + 30
    while door.num_connections() and time.monotonic() < end:
        time.sleep(0.2)
    time.sleep(1)
    return door.memory_mib()


def test_every_process_of_the_server_listens_on_loopback_alone(door: Door):
    listening = [
        (process.name(), connection.laddr.ip)
        for process in [door.process, *door.process.children(recursive=True)]
        for connection in process.net_connections("inet")
        if connection.status == "LISTEN"
    ]
    assert listening and all(ip in ("127.0.0.1", "::1") for _, ip in listening), listening
