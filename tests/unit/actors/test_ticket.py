"""Which answers of a ticket travel in one message."""

import asyncio
import threading
import time
from concurrent.futures import Future

import pytest

from torchtitan_rl.actors import ticket
from torchtitan_rl.actors.ticket import Ticket


async def indices(waiting):
    return [index for index, _ in await asyncio.wait_for(waiting.next(), 10)]


async def test_the_last_answer_waits_for_none(monkeypatch):
    monkeypatch.setattr(ticket, "_SHORTEST_WAIT_S", 30.0)
    monkeypatch.setattr(ticket, "_LONGEST_WAIT_S", 30.0)
    futures = [Future(), Future()]
    waiting = Ticket(futures)
    futures[1].set_result("b")
    threading.Timer(0.05, futures[0].set_result, ["a"]).start()
    assert await indices(waiting) == [0, 1] and waiting.is_over


async def test_answers_that_come_within_the_wait_travel_together_and_later_ones_next(monkeypatch):
    monkeypatch.setattr(ticket, "_LONGEST_WAIT_S", 0.05)
    futures = [Future() for _ in range(4)]
    waiting = Ticket(futures)
    futures[2].set_result("c")
    futures[0].set_result("a")
    assert await indices(waiting) == [0, 2] and not waiting.is_over
    futures[1].set_result("b")
    futures[3].set_exception(ValueError("d"))
    (b, d) = await waiting.next()
    assert (b[0], b[1].result(), d[0]) == (1, "b", 3) and isinstance(d[1].exception(), ValueError) and waiting.is_over


@pytest.mark.parametrize("elapsed_s, wait_s", [(0.01, 0.02), (1.0, 0.1), (60.0, 0.2)])
async def test_an_answer_waits_a_tenth_of_the_time_that_it_took(monkeypatch, elapsed_s, wait_s):
    futures, waits = [Future(), Future()], []
    waiting = Ticket(futures)
    waiting._began = time.monotonic() - elapsed_s
    until = waiting._until

    async def noted(number, timeout_s):
        waits.append(timeout_s)
        await until(number, timeout_s if timeout_s is None else 0.0)

    monkeypatch.setattr(waiting, "_until", noted)
    futures[0].set_result("a")
    await waiting.next()
    assert waits == [None, pytest.approx(wait_s, abs=0.005)]


async def test_answers_that_nobody_waits_for_do_not_wake_the_event_loop(monkeypatch):
    monkeypatch.setattr(ticket, "_SHORTEST_WAIT_S", 0.0)
    monkeypatch.setattr(ticket, "_WAIT_SHARE", 0.0)
    futures, wakes = [Future() for _ in range(5)], []
    waiting = Ticket(futures)
    futures[0].set_result("a")
    assert await indices(waiting) == [0]
    monkeypatch.setattr(waiting._loop, "call_soon_threadsafe", lambda *args: wakes.append(args))
    for future in futures[1:4]:
        future.set_result("b")
    assert wakes == []
    monkeypatch.undo()
    assert await indices(waiting) == [1, 2, 3]


async def test_a_wake_up_that_is_under_way_does_not_end_the_wait_for_more_answers(monkeypatch):
    monkeypatch.setattr(ticket, "_SHORTEST_WAIT_S", 5.0)
    monkeypatch.setattr(ticket, "_LONGEST_WAIT_S", 5.0)
    futures = [Future() for _ in range(3)]
    waiting = Ticket(futures)
    answers = asyncio.ensure_future(indices(waiting))
    futures[0].set_result("a")
    await asyncio.sleep(0.02)
    waiting._loop.call_soon_threadsafe(waiting._wakes.set)
    await asyncio.sleep(0.02)
    assert not answers.done()
    for future in futures[1:]:
        future.set_result("b")
    assert await answers == [0, 1, 2]


async def test_answers_are_lost_neither_nor_given_twice_while_a_thread_completes_them(monkeypatch):
    monkeypatch.setattr(ticket, "_SHORTEST_WAIT_S", 0.001)
    monkeypatch.setattr(ticket, "_LONGEST_WAIT_S", 0.001)
    futures = [Future() for _ in range(2000)]
    waiting, taken = Ticket(futures), []

    def complete():
        for index, future in enumerate(futures):
            future.set_result(index)
            if index % 97 == 0:
                time.sleep(0.002)

    thread = threading.Thread(target=complete)
    thread.start()
    while not waiting.is_over:
        taken += await indices(waiting)
    thread.join()
    assert sorted(taken) == list(range(2000))


def test_an_engine_may_answer_after_the_event_loop_has_closed(caplog):
    future = Future()

    async def made():
        return Ticket([future])

    asyncio.run(made())
    future.set_result("a")  # concurrent.futures logs what a callback raises
    assert not caplog.records
