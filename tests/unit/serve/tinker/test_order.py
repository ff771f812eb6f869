"""Order, duplicates, gaps and expiry of requests."""

import asyncio

import pytest

from tests.kit.clock import Clock
from torchtitan_rl.serve.errors import Refused
from torchtitan_rl.serve.tinker.faults import Fault, server, user
from torchtitan_rl.serve.tinker.futures import Futures, ReadyBody, Shelf
from torchtitan_rl.serve.tinker.order import InOrder, QueueRoom


def in_order(futures, **more):
    ahead = more.pop("ahead", QueueRoom(max_requests=100, max_bytes=1000))
    started = more.pop("started", QueueRoom(max_requests=100, max_bytes=1000))
    return InOrder(futures, ahead=ahead, started=started, **more)


def answering(log, name, wait=None):
    async def start():
        log.append(name)

        async def answer():
            if wait is not None:
                await wait.wait()
            return ReadyBody(content=name.encode())

        return answer()

    return start


async def content(futures, request_id):
    found = await futures.fetch(request_id, 5)
    return found.content.decode() if isinstance(found, ReadyBody) else found


async def test_requests_run_in_the_order_of_their_numbers_whatever_order_they_arrive_in():
    futures, log = Futures(), []
    order = in_order(futures)
    for seq_id in (3, 4, 2, 6, 5, 1):
        order.submit(seq_id, f"m:{seq_id}", answering(log, str(seq_id)))
    answers = [await content(futures, f"m:{seq_id}") for seq_id in range(1, 7)]
    assert answers == log == ["1", "2", "3", "4", "5", "6"]


async def test_a_request_that_is_sent_again_runs_once_and_is_the_same_future():
    futures, log = Futures(), []
    order = in_order(futures)
    for _ in range(3):
        order.submit(1, "m:1", answering(log, "1"))
    first = await content(futures, "m:1")
    order.submit(1, "m:1", answering(log, "again"))

    assert (first, await content(futures, "m:1"), log) == ("1", "1", ["1"])


async def test_the_next_request_is_submitted_before_the_answer_of_the_one_before():
    futures, log, held = Futures(), [], asyncio.Event()
    order = in_order(futures)
    order.submit(1, "m:1", answering(log, "1", held))
    order.submit(2, "m:2", answering(log, "2"))
    assert await content(futures, "m:2") == "2"
    pending = await futures.fetch("m:1", 0.01)
    held.set()

    assert (pending, await content(futures, "m:1")) == (None, "1")


async def test_a_failure_ends_its_own_future_alone():
    futures, log, told = Futures(), [], []
    futures.on_server_fault = told.append

    async def wrong():
        raise ValueError("data[0]: is wrong; mend it")

    async def breaks():
        async def answer():
            raise RuntimeError("policy-0.forward: OSError: gone")

        return answer()

    order = in_order(futures)
    order.submit(1, "m:1", wrong)
    order.submit(2, "m:2", breaks)
    order.submit(3, "m:3", answering(log, "3"))
    first, second, third = [await content(futures, f"m:{i}") for i in (1, 2, 3)]
    assert first.body == {"error": "data[0]: is wrong; mend it", "category": "user"}
    assert second.category == "server" and "OSError" in second.message and third == "3"
    assert len(told) == 1


async def test_a_number_that_never_comes_fails_those_behind_it_and_holds_nothing_up_for_ever():
    futures, log = Futures(), []
    order = in_order(futures, gap_s=0.05)
    order.submit(2, "m:2", answering(log, "2"))
    order.submit(4, "m:4", answering(log, "4"))
    faults = [await content(futures, name) for name in ("m:2", "m:4")]
    order.submit(5, "m:5", answering(log, "5"))
    late = order.submit(3, "m:3", answering(log, "3"))
    fifth, late = await content(futures, "m:5"), await content(futures, late)
    assert all(fault.category == "user" and "seq_id=1, which never came" in fault.message for fault in faults)
    assert fifth == "5" and log == ["5"] and "nothing was done for it" in late.message


async def test_a_request_far_ahead_is_refused_at_once():
    futures = Futures()

    assert "far ahead" in (await content(futures, in_order(futures).submit(10**9, "m", answering([], "x")))).message


async def test_a_refused_request_takes_no_number():
    """Its future is its own: the request that the number belongs to runs."""
    futures, log = Futures(), []
    order = in_order(futures)
    refused = order.submit(200_000, "m:200000", answering(log, "far"))
    assert refused != "m:200000" and "far ahead" in (await content(futures, refused)).message
    assert "m:200000" not in futures
    assert order.submit(1, "m:1", answering(log, "1")) == "m:1"

    assert (await content(futures, "m:1")) == "1"


async def test_a_request_that_is_refused_at_its_place_lets_the_next_go_on_at_once():
    futures, log = Futures(), []
    order = in_order(futures)

    async def refuse():
        raise user("save_weights_external: is not offered by this server")

    order.submit(2, "m:2", answering(log, "2"))
    order.submit(1, "m:1", refuse)
    async with asyncio.timeout(5):
        refused, second = await content(futures, "m:1"), await content(futures, "m:2")
    assert "not offered" in refused.message and second == "2"


async def test_a_number_that_an_unnumbered_request_took_is_refused_and_nothing_hangs():
    futures, log = Futures(), []
    order = in_order(futures)
    order.submit(3, "m:3", answering(log, "3"))
    order.submit(0, "m:x", answering(log, "x"))
    twice = order.submit(1, "m:1", answering(log, "1"))
    unnumbered, message = await content(futures, "m:x"), (await content(futures, twice)).message
    assert unnumbered == "x" and "without a number has taken it" in message


async def test_requests_ahead_of_their_turn_are_bounded_and_the_next_one_is_always_taken():
    futures, log = Futures(), []
    whole = QueueRoom(max_requests=100, max_bytes=250)
    orders = [in_order(futures, ahead=QueueRoom(max_requests=3, max_bytes=200, whole=whole)) for _ in range(2)]
    for seq_id in (2, 3):
        orders[0].submit(seq_id, f"a:{seq_id}", answering(log, str(seq_id)), nbytes=90)
    with pytest.raises(Refused, match="2 requests of 180 bytes are held.*send seq_id=1 first") as refused:
        orders[0].submit(4, "a:4", answering(log, "4"), nbytes=90)
    assert refused.value.status == 429 and "a:4" not in futures
    with pytest.raises(Refused, match="180 bytes are held"):  # the room of all models
        orders[1].submit(2, "b:2", answering(log, "b"), nbytes=90)
    orders[0].submit(5, "a:5", answering(log, "5"))
    with pytest.raises(Refused, match="3 requests"):
        orders[0].submit(6, "a:6", answering(log, "6"))
    orders[0].submit(1, "a:1", answering(log, "1"), nbytes=10**6)
    assert [await content(futures, f"a:{i}") for i in (1, 2, 3)] == ["1", "2", "3"]
    orders[0].submit(4, "a:4", answering(log, "4"), nbytes=90)
    assert [await content(futures, f"a:{i}") for i in (4, 5)] == ["4", "5"]

    assert (whole.requests, whole.nbytes) == (0, 0)


async def test_requests_that_are_not_answered_are_bounded_and_one_alone_always_fits():
    futures, log, held = Futures(), [], asyncio.Event()
    order = in_order(futures, started=QueueRoom(max_requests=9, max_bytes=100))
    order.submit(1, "m:1", answering(log, "1", held), nbytes=10**6)
    await asyncio.sleep(0.01)
    with pytest.raises(Refused, match="seq_id=2: 1 requests of 1000000 bytes.*wait for answers") as refused:
        order.submit(2, "m:2", answering(log, "2"), nbytes=90)
    assert refused.value.status == 429
    held.set()
    assert await content(futures, "m:1") == "1"
    order.submit(2, "m:2", answering(log, "2"), nbytes=90)

    assert (await content(futures, "m:2")) == "2"


async def test_a_request_that_was_being_submitted_when_its_model_was_closed_is_told_so():
    futures = Futures()
    order = in_order(futures)

    async def never():
        await asyncio.Event().wait()

    order.submit(1, "m:1", never)
    await asyncio.sleep(0.01)
    order.close("its session was finished")

    assert (await content(futures, "m:1")).message == "its session was finished"


async def test_answers_are_bounded_in_number_and_bytes(monkeypatch):
    monkeypatch.setattr("torchtitan_rl.serve.tinker.futures._MAX_KEPT", 5)
    monkeypatch.setattr("torchtitan_rl.serve.tinker.futures._MAX_KEPT_BYTES", 100)

    async def _large():
        return ReadyBody(content=b"x" * 99)

    futures = Futures()
    refused = [futures.refuse(user("x")) for _ in range(8)]
    assert len(futures) == 5 and refused[2] not in futures and refused[3] in futures
    futures.start("large", _large())
    assert len((await futures.fetch("large", 5)).content) == 99
    assert len(futures) == 2

    assert (await content(futures, refused[-1])).message == "x"


async def test_what_waits_for_a_model_that_is_unloaded_is_told_so():
    futures = Futures()
    order = in_order(futures)
    order.submit(2, "m:2", answering([], "2"))
    order.close("the model is unloaded")
    late = order.submit(3, "m:3", answering([], "3"))

    assert ([(await content(futures, name)).message for name in ("m:2", late)]) == ["the model is unloaded"] * 2


async def test_answers_expire_and_what_was_fetched_expires_sooner():
    clock = Clock()

    async def run():
        futures = Futures(kept_s=100, kept_fetched_s=10, clock=clock)
        for name in ("fetched", "left"):
            futures.start(name, _answer(name))
        assert await content(futures, "fetched") == "fetched"
        clock.now = 11.0
        with pytest.raises(Fault, match="'fetched': is not known: its answer has expired"):
            await futures.fetch("fetched", 1)
        assert await content(futures, "left") == "left"
        clock.now = 300.0
        with pytest.raises(Fault):
            await futures.fetch("left", 1)
        return len(futures)

    async def _answer(name):
        return ReadyBody(content=name.encode())

    assert await run() == 0


async def test_closing_fails_what_is_not_done():
    futures = Futures()
    futures.start("m", asyncio.Event().wait())
    await asyncio.sleep(0)
    await futures.close()

    assert (await futures.fetch("m", 1)).category == server("").category


async def test_an_owner_who_asks_for_much_takes_no_answer_from_another(monkeypatch):
    monkeypatch.setattr("torchtitan_rl.serve.tinker.futures._MAX_KEPT", 5)
    monkeypatch.setattr("torchtitan_rl.serve.tinker.futures._MAX_KEPT_BYTES", 150)
    shelf = Shelf()
    alice, bob = Futures(shelf), Futures(shelf)
    own = [bob.refuse(user("x")) for _ in range(2)]
    for _ in range(9):
        last = alice.refuse(user("x"))
    assert (alice.num_kept, bob.num_kept) == (3, 2) and last in alice

    async def large():
        return ReadyBody(content=b"x" * 99)

    for name in ("one", "two"):
        alice.start(name, large())
        await alice.fetch(name, 5)
    assert "two" in alice and "one" not in alice and alice.kept_bytes + bob.kept_bytes <= 150

    assert [fault.message for fault in [await content(bob, name) for name in own]] == ["x", "x"]


async def test_the_clock_of_a_gap_is_not_set_back_by_what_arrives_behind_it():
    futures, log = Futures(), []
    order = in_order(futures, gap_s=0.3)
    began = asyncio.get_running_loop().time()
    for seq_id in range(2, 12):  # 1 never comes
        order.submit(seq_id, f"m:{seq_id}", answering(log, str(seq_id)))
        await asyncio.sleep(0.1)
        if (first := await futures.fetch("m:2", 0.0)) is not None:
            break
    assert "seq_id=1, which never came" in first.message
    assert asyncio.get_running_loop().time() - began < 0.8


async def test_a_request_without_a_number_follows_the_one_that_is_beginning():
    futures, log, begun = Futures(), [], asyncio.Event()
    order = in_order(futures, gap_s=0.2)

    async def save():
        log.append("save")
        await begun.wait()  # saving and loading wait before their answer is under way
        return await answering([], "save")()

    order.submit(1, "m:1", save)
    await asyncio.sleep(0)
    order.submit(0, "m:unload", answering(log, "unload"))
    begun.set()
    assert await content(futures, "m:unload") == "unload"
    order.submit(3, "m:3", answering(log, "3"))
    assert await content(futures, "m:3") == "3" and log == ["save", "unload", "3"]
