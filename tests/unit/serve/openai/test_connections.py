"""Connections that send too much before a body, too little, or nothing; and more of them than a server has places."""

import asyncio
import time

import httpx
import pytest

from tests.unit.serve.test_guard import echo
from torchtitan_rl.serve.guard import Guard
from torchtitan_rl.serve.listening import Listening
from torchtitan_rl.serve.openai.connections import ConnectionLimits

HEAD = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
QUICK = ConnectionLimits(head_timeout_s=0.5, max_connections=4)


async def served(scene, limits=QUICK, app=echo):
    async with asyncio.timeout(60), Listening(Guard(app, hosts=None), "127.0.0.1", 0, limits) as listening:
        return await scene(listening)


async def connect(listening):
    return await asyncio.open_connection("127.0.0.1", listening.port)


async def sent(writer, content):
    """Sends until the server closes; the bytes that the system took."""
    num = 0
    try:
        for part in content:
            writer.write(part)
            await writer.drain()
            num += len(part)
    except ConnectionError:
        pass
    return num


async def closed(reader, within_s):
    """What the server says before it closes. Fails unless it closes in time."""
    async with asyncio.timeout(within_s):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


@pytest.mark.parametrize(
    "begin", [b"GET / HTTP/1.1\r\nHost: a\r\nX: ", b"GET /", HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: "]
)
async def test_headers_an_address_and_trailers_without_end_are_cut_off(begin):
    async def scene(listening):
        reader, writer = await connect(listening)
        writer.write(begin)
        num = await sent(writer, (b"a" * 2**16 for _ in range(1024)))  # 64 MiB
        await closed(reader, 5)
        await asyncio.sleep(0.05)
        assert num < 2**24 and listening.num_connections == 0  # what sockets hold by themselves

    await served(scene, ConnectionLimits())


async def test_many_short_headers_are_cut_off_and_the_answer_says_why():
    async def scene(listening):
        reader, writer = await connect(listening)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n")
        for i in range(70):
            writer.write(b"X-%d: %b\r\n" % (i, b"a" * 1000))
        said = await closed(reader, 5)
        assert said.startswith(b"HTTP/1.1 431 ") and b"longer than 65536 bytes" in said

    await served(scene, ConnectionLimits())


async def test_a_body_in_chunks_is_no_head():
    async def scene(listening):
        async def parts():
            for _ in range(4000):
                yield b"a" * 500

        async with httpx.AsyncClient() as http:
            assert (await http.post(listening.url, content=parts())).text == str(2_000_000)
            assert (await http.post(listening.url, content=b"a" * 2_000_000)).text == str(2_000_000)
            assert (await http.post(listening.url, content=b"a")).text == "1"  # on the same connection

    await served(scene)


@pytest.mark.parametrize("begin", [b"", b"GET / HT", HEAD])
async def test_who_says_nothing_or_half_is_cut_off(begin):
    async def scene(listening):
        reader, writer = await connect(listening)
        writer.write(begin)
        began = time.monotonic()
        said = await closed(reader, 20)
        assert 0.3 < time.monotonic() - began
        assert said.startswith(b"HTTP/1.1 408 ") if begin else said == b""
        await asyncio.sleep(0.05)
        assert listening.num_connections == 0

    await served(scene)


async def test_a_header_a_time_does_not_win_time():
    async def scene(listening):
        reader, writer = await connect(listening)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n")
        began, reading = time.monotonic(), asyncio.ensure_future(closed(reader, 30))
        while not reading.done():
            writer.write(b"X: a\r\n")
            await asyncio.sleep(0.1)
        assert time.monotonic() - began < 15 and reading.result().startswith(b"HTTP/1.1 408 ")

    await served(scene)


async def test_the_same_holds_for_a_second_request():
    async def scene(listening):
        reader, writer = await connect(listening)
        writer.write(HEAD + b"Content-Length: 1\r\n\r\na")
        assert b"200 OK" in await reader.readuntil(b"\r\n")
        await asyncio.sleep(1)  # idle connections may wait longer
        assert listening.num_connections == 1
        writer.write(b"POST /")
        assert b"HTTP/1.1 408 " in await closed(reader, 20)

    await served(scene)


async def test_requests_sent_ahead_are_bounded():
    async def scene(listening):
        reader, writer = await connect(listening)
        writer.write((HEAD + b"Content-Length: 1\r\n\r\na") * 10)
        for _ in range(10):
            assert b"200 OK" in await reader.readuntil(b"\r\n1\r\n0\r\n\r\n")
        writer.write((HEAD + b"Content-Length: 1\r\n\r\na") * 1000)
        said = await closed(reader, 10)
        assert said.count(b"200 OK") < 50 and b" 500 " not in said

    await served(scene, ConnectionLimits())


async def test_the_connection_that_waited_longest_makes_way():
    async def scene(listening):
        async def asked(reader, writer):
            writer.write(HEAD + b"Content-Length: 1\r\n\r\na")
            return await reader.readuntil(b"\r\n1\r\n0\r\n\r\n") if not reader.at_eof() else b""

        connections = []
        for _ in range(4):
            connections.append(await connect(listening))
            assert b"200 OK" in await asked(*connections[-1])
        fifth = await connect(listening)
        assert b"200 OK" in await asked(*fifth)
        assert await closed(connections[0][0], 5) == b"" and listening.num_connections == 4
        assert b"200 OK" in await asked(*connections[1])

    await served(scene)


async def test_where_all_are_busy_a_request_gets_503():
    begun, go_on = [], asyncio.Event()

    async def slow(scope, receive, send):
        begun.append(1)
        await go_on.wait()
        await echo(scope, receive, send)

    async def scene(listening):
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=30) as http:
            busy = [asyncio.ensure_future(http.post(listening.url, content=b"a")) for _ in range(4)]
            while len(begun) < 4:
                await asyncio.sleep(0.01)
            assert (await http.post(listening.url, content=b"a")).status_code == 503
            go_on.set()
            assert [(await answer).status_code for answer in busy] == [200] * 4
            assert (await http.post(listening.url, content=b"a")).status_code == 200

    await served(scene, app=slow)
