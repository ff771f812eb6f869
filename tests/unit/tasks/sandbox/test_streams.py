"""Connections as messages: two ends in one process, with a server behind the second."""

import asyncio
from contextlib import asynccontextmanager

from torchtitan_rl.tasks.sandbox.streams import Streams


@asynccontextmanager
async def joined(serve):
    """(the end that opens streams, what is sent between the ends, the sandboxes that were connected)."""
    sent, sandboxes = [], []

    async def connect(sandbox):
        sandboxes.append(sandbox)
        return await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])

    async def pump(source, target):
        while True:
            messages = await source.messages()
            sent.extend(messages)
            target.take(messages)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        first, second = Streams(), Streams(connect)
        pumps = [asyncio.ensure_future(pump(first, second)), asyncio.ensure_future(pump(second, first))]
        try:
            async with asyncio.timeout(20):
                yield first, sent, sandboxes
        finally:
            for task in pumps:
                task.cancel()
            await first.close()
            await second.close()
    assert not first._streams and not second._streams


async def echo(reader, writer):
    while part := await reader.read(65536):
        writer.write(part)
        await writer.drain()
    writer.close()


async def test_bytes_arrive_whole_both_ways_on_many_streams_at_once():
    async def sends(number):
        content = bytes([number]) * (number * 400_000)
        reader, writer = await first.open(number)
        writer.write(content)
        writer.write_eof()
        assert await reader.read() == content
        writer.close()

    async with joined(echo) as (first, _, sandboxes):
        await asyncio.gather(*map(sends, range(5)))
    assert sandboxes == [0, 1, 2, 3, 4]


async def test_an_answer_comes_after_the_end_of_the_question():
    async def serve(reader, writer):
        writer.write(b"%d bytes" % len(await reader.read()))
        writer.close()

    async with joined(serve) as (first, _, _):
        reader, writer = await first.open(0)
        writer.write(b"question")
        writer.write_eof()
        assert await reader.read() == b"8 bytes"
        writer.close()


async def test_a_server_that_does_not_read_stops_its_own_stream_alone():
    read = asyncio.Event()

    async def serve(reader, writer):
        if await reader.readline() == b"slow\n":
            await read.wait()
        await echo(reader, writer)

    async with joined(serve) as (first, sent, _):
        slow_reader, slow = await first.open(0)
        slow.write(b"slow\n" + bytes(32_000_000))
        slow.write_eof()
        reader, writer = await first.open(1)
        writer.write(b"fast\nanswer")
        writer.write_eof()
        assert await reader.read() == b"answer"
        await asyncio.sleep(0.2)
        # The window, and what the kernel takes of a loopback connection for a server that does not read.
        assert sum(len(content) for number, kind, content in sent if (number, kind) == (0, "data")) < 16_000_000
        read.set()
        assert len(await slow_reader.read()) == 32_000_000
        writer.close(), slow.close()


async def test_a_connection_that_is_refused_or_broken_is_closed_on_the_other_side():
    async def serve(reader, writer):
        await reader.readline()
        writer.transport.abort()

    async with joined(serve) as (first, _, _):
        reader, writer = await first.open(0)
        writer.write(b"x\n")
        assert await reader.read() == b""
        writer.close()

    async def refuses(sandbox):
        raise ConnectionRefusedError

    first, second = Streams(), Streams(refuses)
    reader, writer = await first.open(0)
    second.take(await first.messages())
    first.take(await second.messages(within_s=5))
    assert await reader.read() == b""
    writer.close()
    await first.close()


async def test_nothing_to_send_is_an_answer_after_a_while():
    assert await Streams().messages(within_s=0.01) == []


async def test_an_end_that_connects_none_ignores_what_would_open_one():
    streams = Streams()
    streams.take([(0, "open", 5), (0, "data", b"x"), (0, "taken", 1), (0, "end", None), (0, "gone", None)])
    assert not streams._streams


async def test_streams_that_are_closed_close_their_connections():
    async with joined(echo) as (first, _, _):
        reader, writer = await first.open(0)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        await first.close()
        assert await reader.read() == b""
        writer.close()
