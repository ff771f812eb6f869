"""Who gets a place in the trainer, and when: the places of clients that have gone, and those who wait."""

import asyncio
import dataclasses
import time
from types import SimpleNamespace

import pytest

from tests.kit.tinker import Trainer, served
from torchtitan_rl.serve.errors import Refused
from torchtitan_rl.serve.tinker.bodies import CreateModelBody, LoraBody, SessionBody
from torchtitan_rl.serve.tinker.faults import Fault
from torchtitan_rl.serve.tinker.models import ModelPlaces
from torchtitan_rl.serve.tinker.service import Server, TinkerLimits


def a_server(directory, *, max_models=2, silent_s=0.4, wait_s=5.0):
    limits = TinkerLimits(max_models=max_models, silent_s=silent_s, place_wait_s=wait_s)
    return Server(served(directory), Trainer(), None, None, directory, limits)


def create(service, session_id, number=0):
    """Asks for a model; returns the id of the future."""
    body = CreateModelBody(
        session_id=session_id, model_seq_id=number, base_model="base", lora_config=LoraBody(rank=4, seed=1)
    )
    return service.models.create(body)


async def answer(service, request_id, timeout_s=10.0):
    """The answer of a future: its content, or its fault's sentence."""
    result = await service.futures.fetch(request_id, timeout_s)
    return None if result is None else getattr(result, "message", "") or result.content.decode()


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    monkeypatch.setattr("torchtitan_rl.serve.tinker.models._LOOK_S", 0.05)


async def test_a_new_model_waits_for_the_place_of_a_client_that_has_gone(tmp_path):
    """Two sessions hold both places. One goes on giving signs of life, the other ended without `close()`."""
    server = a_server(tmp_path)
    service = server.service("")
    alive, gone, new = [await service.create_session(SessionBody()) for _ in range(3)]
    for session in (alive, gone):
        assert "create_model" in await answer(service, create(service, session))
    began = time.monotonic()
    request = create(service, new)
    assert await answer(service, request, 0.2) is None, "it waits, and does not fail"
    while (result := await answer(service, request, 0.05)) is None:
        for session in (alive, new):
            service.session(session)
    assert f"{new}:train:0" in result and time.monotonic() - began >= 0.35
    assert set(service.models.live) == {f"{alive}:train:0", f"{new}:train:0"} == set(server.places.trainer.models)


async def test_owners_compete_for_the_same_places(tmp_path):
    server = a_server(tmp_path, max_models=1)
    one, two = server.service("one"), server.service("two")
    first, second = await one.create_session(SessionBody()), await two.create_session(SessionBody())
    await answer(one, create(one, first))
    request = create(two, second)
    assert await answer(two, request, 0.1) is None
    await one.finish(first)
    assert "create_model" in await answer(two, request, 0.1), "a place that becomes free is given at once"
    assert not one.models.live and list(two.models.live) == server.places.trainer.models


async def test_who_waits_in_vain_is_told_so(tmp_path):
    server = a_server(tmp_path, max_models=1, silent_s=60.0, wait_s=0.3)
    service = server.service("")
    alive, new = await service.create_session(SessionBody()), await service.create_session(SessionBody())
    await answer(service, create(service, alive))
    result = await answer(service, create(service, new))
    assert "models=1: as many as" in result and "none became free within 0.3 s" in result
    assert "--max-models" in result
    began = time.monotonic()
    assert "end a session" in await answer(service, create(service, alive, 1)), "its own places will not be freed"
    assert time.monotonic() - began < 0.2


async def test_models_wait_in_the_order_in_which_they_came(tmp_path):
    server = a_server(tmp_path, max_models=1, silent_s=60.0)
    service = server.service("")
    sessions = [await service.create_session(SessionBody()) for _ in range(4)]
    requests = [create(service, session) for session in sessions]
    for i, session in enumerate(sessions):
        assert "create_model" in await answer(service, requests[i], 1.0)
        assert list(service.models.live) == [f"{session}:train:0"]
        await service.finish(session)
        newcomer = await service.create_session(SessionBody())
        if i == 0:
            late = create(service, newcomer)
    assert "create_model" in await answer(service, late, 1.0)


async def test_requests_of_a_model_are_signs_of_life_too(tmp_path):
    """A client without heartbeats that trains keeps its place."""
    server = a_server(tmp_path, max_models=1, silent_s=0.3, wait_s=1.0)
    service = server.service("")
    training, new = await service.create_session(SessionBody()), await service.create_session(SessionBody())
    await answer(service, create(service, training))

    async def start(model):
        raise ValueError("nothing to do")

    request = create(service, new)
    while (result := await answer(service, request, 0.05)) is None:
        service.models.submit(f"{training}:train:0", None, start)
    assert "none became free" in result


async def test_the_room_for_what_waits_is_one_for_the_models_of_all_owners(tmp_path):
    """Each model has room left, and what alice's model waits with leaves none to bob's."""
    server, models = a_server(tmp_path), []
    whole = dataclasses.replace(server.places.rooms[0], max_requests=10, max_bytes=250)
    server.places.rooms = (dataclasses.replace(whole, whole=whole), server.places.rooms[1])
    for owner in ("alice", "bob"):
        service = server.service(owner)
        session = await service.create_session(SessionBody())
        await answer(service, create(service, session))
        models.append((service.models, f"{session}:train:0"))

    async def start(model):
        raise ValueError("nothing to do")

    (alices, of_alice), (bobs, of_bob) = models
    for number in (2, 3):
        alices.submit(of_alice, number, start, nbytes=90)
    with pytest.raises(Refused, match="2 requests of 180 bytes are held") as refused:
        bobs.submit(of_bob, 2, start, nbytes=90)
    assert refused.value.status == 429
    alices.remove(alices.model(of_alice), "its client asked for it")
    bobs.submit(of_bob, 2, start, nbytes=90)
    assert (whole.requests, whole.nbytes) == (1, 90)


async def test_a_session_that_was_abandoned_long_ago_is_finished_when_its_owner_begins_another(tmp_path):
    server = a_server(tmp_path)
    server.limits = dataclasses.replace(server.limits, abandoned_s=0.2)
    service = server.service("")
    abandoned, alive = [await service.create_session(SessionBody()) for _ in range(2)]
    for session in (abandoned, alive):
        await answer(service, create(service, session))
    await asyncio.sleep(0.25)
    service.session(alive)
    await service.create_session(SessionBody())
    assert set(service.models.live) == {f"{alive}:train:0"} == set(server.places.trainer.models)
    with pytest.raises(Fault, match="has ended"):
        service.session(abandoned)
    service.session(alive)


async def test_a_place_that_was_freed_for_one_who_waits_is_no_reason_to_refuse_another():
    places = ModelPlaces(None, lora=None, max_models=1, wait_s=0.2)

    def model(session_id):
        return SimpleNamespace(session_id=session_id, models=SimpleNamespace(silent=lambda session: False))

    places.occupy(first := model("A"))
    second = asyncio.ensure_future(places.wait(model("B")))
    await asyncio.sleep(0.05)
    places.vacate(first)
    await places.wait(model("C"))  # nobody has taken the place yet
    await second
