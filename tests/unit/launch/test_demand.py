"""The number of replicas follows the requests."""

import asyncio

import pytest

from tests.kit.replicas import client_of
from tests.unit.launch.test_replicas import replicas_of
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.launch.demand import Demand, scaled_by_demand


def demand_of(*unanswered, places=10, least=1, most=4):
    demand = Demand(places, least=least, most=most, looks=4)
    for number in unanswered:
        demand.look(number)
    return demand


def test_replicas_join_where_requests_wait_on_average_and_no_more_than_may():
    assert demand_of(11, 11, 11, 11).replicas(1) == 2
    assert demand_of(10, 10, 10, 10).replicas(1) == 1  # all have a place
    assert demand_of(0, 40, 2, 1, 1).replicas(1) == 2  # a mean of 11; the look without a request does not count
    assert demand_of(95, 95, 95, 95).replicas(3) == 4


def test_replicas_leave_where_the_rest_would_have_places_to_spare():
    assert demand_of(14, 14, 14, 14).replicas(3) == 2
    assert demand_of(16, 16, 16, 16).replicas(2) == 2  # one would be full
    assert demand_of(16, 16, 16, 16).replicas(3) == 3  # two would be more than three quarters full
    assert demand_of(1, 1, 1, 1, least=2).replicas(4) == 2


def test_more_than_may_be_stay_only_while_they_are_of_use():
    assert demand_of(70, 70, 70, 70).replicas(6) == 6
    assert demand_of(20, 20, 20, 20).replicas(6) == 3


def test_nothing_changes_before_there_have_been_enough_looks():
    demand = demand_of(90, 90, 90)
    assert demand.replicas(1) == 1
    demand.look(90)
    assert demand.replicas(1) == 4
    demand.forget()
    assert demand.replicas(1) == 1


async def test_the_rule_starts_and_ends_replicas(monkeypatch):
    monkeypatch.setattr("torchtitan_rl.launch.demand._EVERY_S", 0.01)
    _, versions, client = client_of(1)
    await client.pull(await versions.publish())
    replicas, started, stopped = replicas_of(client)
    unanswered = [50]
    monkeypatch.setattr(client, "in_flight", lambda: unanswered)
    async with scaled_by_demand(replicas, client, GeneratorConfig(max_num_seqs=10, max_replicas=3), looks=3):
        await reached(replicas, 3)
        unanswered[0] = 5
        await reached(replicas, 1)
    assert [mesh.role for mesh in started] == ["generator-1", "generator-2"]
    assert stopped == ["generator-2", "generator-1"]


async def test_a_replica_that_does_not_start_is_said_and_tried_again(monkeypatch, caplog):
    monkeypatch.setattr("torchtitan_rl.launch.demand._EVERY_S", 0.01)
    _, versions, client = client_of(1)
    await client.pull(await versions.publish())
    fail = {"generator-1"}
    replicas, *_ = replicas_of(client, fail=fail)
    monkeypatch.setattr(client, "in_flight", lambda: [15])
    async with scaled_by_demand(replicas, client, GeneratorConfig(max_num_seqs=10, max_replicas=3), looks=3):
        while not caplog.text:
            await asyncio.sleep(0.01)
        assert (
            "replicas=1: are not 2, as the requests would fill: generator-1: its process did not start" in caplog.text
        )
        fail.clear()
        await reached(replicas, 2)


async def test_the_rule_outlives_an_error_that_nobody_foresaw(monkeypatch, caplog):
    monkeypatch.setattr("torchtitan_rl.launch.demand._EVERY_S", 0.01)
    _, versions, client = client_of(1)
    await client.pull(await versions.publish())
    replicas, *_ = replicas_of(client)
    scale, errors = replicas.scale, [OSError(28, "No space left on device")]

    async def fails_once(number):
        if errors:
            raise errors.pop()
        await scale(number)

    monkeypatch.setattr(replicas, "scale", fails_once)
    monkeypatch.setattr(client, "in_flight", lambda: [15])
    async with scaled_by_demand(replicas, client, GeneratorConfig(max_num_seqs=10, max_replicas=3), looks=3):
        await reached(replicas, 2)
    assert "as the requests would fill: OSError: [Errno 28] No space left on device" in caplog.text


async def test_a_run_whose_number_is_fixed_refuses_a_range_and_one_without_a_range_does_nothing():
    _, _, client = client_of(1)
    async with scaled_by_demand(None, client, GeneratorConfig()):
        pass
    with pytest.raises(ValueError, match="generator.max_replicas=3: the number of replicas is fixed in this run"):
        async with scaled_by_demand(None, client, GeneratorConfig(max_replicas=3)):
            pass


async def reached(replicas, number):
    async def wait():
        while replicas.number != number:
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), 10)
