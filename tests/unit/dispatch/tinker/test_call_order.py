"""Calls are sent in the order they were made, whatever becomes of the calls before."""

import asyncio

import pytest

from torchtitan_rl.dispatch.tinker.call_order import CallOrder, done


def _calls(sent):
    """`call(name, requests)`: sends each of `requests` after a wait, and answers its name."""

    def call(name, requests=1, error=None):
        async def send():
            for number in range(requests):
                await asyncio.sleep(0.01 if requests > 1 else 0)
                sent.append((name, number))
            if error is not None:
                raise error
            return done(name)

        return send

    return call


async def test_a_call_of_two_requests_keeps_its_place_and_answers_may_come_in_any_order():
    order, sent = CallOrder(), []
    call = _calls(sent)
    futures = [order.submit(call("a")), order.submit(call("b", 3)), order.submit(call("c")), order.submit(call("d"))]
    answers = [await future for future in reversed(futures)]
    assert answers == ["d", "c", "b", "a"]
    assert sent == [("a", 0), ("b", 0), ("b", 1), ("b", 2), ("c", 0), ("d", 0)]


async def test_an_answer_that_has_not_come_holds_up_no_later_request():
    order, sent = CallOrder(), []
    never = asyncio.get_running_loop().create_future()

    async def send():
        return never

    first = order.submit(send)
    answer = await asyncio.wait_for(order.submit(_calls(sent)("b")), 1)
    first.cancel()

    assert (answer, sent) == ("b", [("b", 0)])


async def test_a_call_that_fails_or_is_cancelled_gives_its_place_on():
    order, sent = CallOrder(), []
    call = _calls(sent)
    slow, failing = order.submit(call("slow", 2)), order.submit(call("failing", error=KeyError("x")))
    cancelled, last = order.submit(call("cancelled")), order.submit(call("last"))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(KeyError):
        await failing
    assert (await asyncio.wait_for(last, 1), await slow) == ("last", "slow")
    assert sent == [("slow", 0), ("slow", 1), ("failing", 0), ("last", 0)]
