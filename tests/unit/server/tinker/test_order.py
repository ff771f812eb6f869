"""Order, duplicates, gaps and expiry of requests."""

import asyncio

import pytest

from torchtitan_rl.server.tinker.faults import Fault, server
from torchtitan_rl.server.tinker.futures import Answer, Futures
from torchtitan_rl.server.tinker.order import InOrder


def answering(log, name, wait=None):
    async def start():
        log.append(name)

        async def answer():
            if wait is not None:
                await wait.wait()
            return Answer(content=name.encode())

        return answer()

    return start


async def content(futures, request_id):
    found = await futures.fetch(request_id, 5)
    return found.content.decode() if isinstance(found, Answer) else found


def test_requests_run_in_the_order_of_their_numbers_whatever_order_they_arrive_in():
    async def run():
        futures, log = Futures(), []
        order = InOrder(futures)
        for seq_id in (3, 4, 2, 6, 5, 1):
            order.submit(seq_id, f"m:{seq_id}", answering(log, str(seq_id)))
        return [await content(futures, f"m:{seq_id}") for seq_id in range(1, 7)], log

    answers, log = asyncio.run(run())
    assert answers == log == ["1", "2", "3", "4", "5", "6"]


def test_a_request_that_is_sent_again_runs_once_and_is_the_same_future():
    async def run():
        futures, log = Futures(), []
        order = InOrder(futures)
        for _ in range(3):
            order.submit(1, "m:1", answering(log, "1"))
        first = await content(futures, "m:1")
        order.submit(1, "m:1", answering(log, "again"))
        return first, await content(futures, "m:1"), log

    assert asyncio.run(run()) == ("1", "1", ["1"])


def test_the_next_request_is_submitted_before_the_answer_of_the_one_before():
    async def run():
        futures, log, held = Futures(), [], asyncio.Event()
        order = InOrder(futures)
        order.submit(1, "m:1", answering(log, "1", held))
        order.submit(2, "m:2", answering(log, "2"))
        assert await content(futures, "m:2") == "2"
        pending = await futures.fetch("m:1", 0.01)
        held.set()
        return pending, await content(futures, "m:1")

    assert asyncio.run(run()) == (None, "1")


def test_a_failure_ends_its_own_future_alone():
    async def run():
        futures, log, told = Futures(), [], []
        futures.on_server_fault = told.append

        async def wrong():
            raise ValueError("data[0]: is wrong; mend it")

        async def breaks():
            async def answer():
                raise RuntimeError("policy-0.forward: OSError: gone")

            return answer()

        order = InOrder(futures)
        order.submit(1, "m:1", wrong)
        order.submit(2, "m:2", breaks)
        order.submit(3, "m:3", answering(log, "3"))
        return [await content(futures, f"m:{i}") for i in (1, 2, 3)], told

    (first, second, third), told = asyncio.run(run())
    assert first.body == {"error": "data[0]: is wrong; mend it", "category": "user"}
    assert second.category == "server" and "OSError" in second.message and third == "3"
    assert len(told) == 1


def test_a_number_that_never_comes_fails_those_behind_it_and_holds_nothing_up_for_ever():
    async def run():
        futures, log = Futures(), []
        order = InOrder(futures, gap_s=0.05)
        order.submit(2, "m:2", answering(log, "2"))
        order.submit(4, "m:4", answering(log, "4"))
        faults = [await content(futures, name) for name in ("m:2", "m:4")]
        order.submit(5, "m:5", answering(log, "5"))
        order.submit(3, "m:3", answering(log, "3"))
        return faults, await content(futures, "m:5"), await content(futures, "m:3"), log

    faults, fifth, late, log = asyncio.run(run())
    assert all(fault.category == "user" and "seq_id=1, which never came" in fault.message for fault in faults)
    assert fifth == "5" and log == ["5"] and "has been answered" in late.message


def test_a_request_far_ahead_is_refused_at_once():
    async def run():
        futures = Futures()
        InOrder(futures).submit(10**9, "m", answering([], "x"))
        return await content(futures, "m")

    assert "far ahead" in asyncio.run(run()).message


def test_what_waits_for_a_model_that_is_unloaded_is_told_so():
    async def run():
        futures = Futures()
        order = InOrder(futures)
        order.submit(2, "m:2", answering([], "2"))
        order.close("the model is unloaded")
        order.submit(3, "m:3", answering([], "3"))
        return [(await content(futures, name)).message for name in ("m:2", "m:3")]

    assert asyncio.run(run()) == ["the model is unloaded"] * 2


def test_answers_expire_and_what_was_fetched_expires_sooner():
    now = [0.0]

    async def run():
        futures = Futures(kept_s=100, kept_fetched_s=10, clock=lambda: now[0])
        for name in ("fetched", "left"):
            futures.start(name, _answer(name))
        assert await content(futures, "fetched") == "fetched"
        now[0] = 11.0
        with pytest.raises(Fault, match="'fetched': is not known: its answer has expired"):
            await futures.fetch("fetched", 1)
        assert await content(futures, "left") == "left"
        now[0] = 300.0
        with pytest.raises(Fault):
            await futures.fetch("left", 1)
        return len(futures)

    async def _answer(name):
        return Answer(content=name.encode())

    assert asyncio.run(run()) == 0


def test_closing_fails_what_is_not_done():
    async def run():
        futures = Futures()
        futures.start("m", asyncio.Event().wait())
        await asyncio.sleep(0)
        await futures.close()
        return await futures.fetch("m", 1)

    assert asyncio.run(run()).category == server("").category
