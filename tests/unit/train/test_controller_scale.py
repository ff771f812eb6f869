"""What the controller does for a rollout does not grow with the rollouts in flight, and what it does for a request not
with the replicas. Lines of Python are counted, not seconds: docs/dev/controller_at_scale.md has the seconds."""

import asyncio
import sys

import pytest

from benchmarks.controller_scale import growths, power
from tests.simulation.scale import config_at, simulated
from torchtitan_rl.dispatch.router import Router
from torchtitan_rl.train.controller import Controller
from torchtitan_rl.types import SamplingParams


def lines_of(call):
    """Lines that `call` runs through, those of pretended engines left out; a comprehension counts each item."""
    count = 0

    def line(frame, event, _):
        nonlocal count
        count += event == "line"
        return line

    def enters(frame, event, _):
        return None if "/tests/simulation/" in frame.f_code.co_filename else line

    before = sys.gettrace()
    sys.settrace(enters)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def lines_of_run(directory, replicas, rollouts, order="slots", group=8):
    config = config_at(replicas, rollouts, directory / f"{replicas}-{rollouts}", order=order, group=group)

    async def reinforce():
        async with await Controller.launch(config) as controller:
            await controller.reinforce()

    with simulated(config) as world:
        return lines_of(lambda: world.loop.run_until_complete(reinforce()))


@pytest.mark.parametrize(("order", "group"), [("slots", 8), ("finished", 1)])
def test_a_rollout_costs_the_same_with_four_times_as_many_in_flight(tmp_path, order, group):
    few, many = (lines_of_run(tmp_path, 4, rollouts, order, group) for rollouts in (64, 256))
    assert few > 64 * 100
    assert many < 4.1 * few


def test_a_publication_costs_each_replica_the_same(tmp_path):
    eight, more, most = (lines_of_run(tmp_path, replicas, 16) for replicas in (8, 32, 128))
    assert (most - more) / (128 - 32) < 1.1 * (more - eight) / (32 - 8)


class Looked(list):
    """Counts how often somebody looks at all of it."""

    times = 0

    def __iter__(self):
        self.times += 1
        return super().__iter__()


def test_a_route_costs_the_same_with_256_replicas_as_with_eight():
    counted = []
    for replicas in (8, 256):
        router, healthy = Router(replicas), Looked(range(replicas))

        def route(number, router=router, healthy=healthy):
            [chosen] = router.route([[number, 1]], None, serving=healthy, loaded_versions=(), newest=1)
            router.finished(chosen, 1, None)

        for number in range(20 * replicas):
            router.route([[-number, 1]], None, serving=healthy, loaded_versions=(), newest=1)
        looks = healthy.times
        counted.append(lines_of(lambda: [route(number) for number in range(1, 400)]))
        assert healthy.times == looks
    assert counted[1] < 1.2 * counted[0]


@pytest.mark.parametrize("lost", [1, 3])
def test_lost_replicas_are_not_in_the_way(lost):
    router, healthy = Router(64), list(range(lost, 64))
    routed = [
        index for n in range(63) for index in router.route([[n]], None, serving=healthy, loaded_versions=(), newest=1)
    ]
    assert sorted(routed) == sorted([*healthy, *healthy[: 63 - len(healthy)]])


def lines_of_waiting(directory, requests):
    """Half of the requests name a version, one after the other, and the other half wait for the end of these."""
    config = config_at(1, 16, directory / str(requests))

    async def wait():
        async with await Controller.launch(config) as controller:
            sample, version = controller.generator.sample, controller.policy_version
            controller.versions.pin(version, "test")
            asked = []
            for number in range(requests):
                params, named = SamplingParams(max_tokens=2, seed=number), version if number < requests // 2 else None
                if number == requests // 2:
                    controller.versions.served = version + 1  # which nobody has published
                asked.append(asyncio.ensure_future(sample([2], params, policy_version=named)))
                await asyncio.sleep(0)
            await asyncio.wait(asked[: requests // 2])
            for request in asked:
                request.cancel()

    with simulated(config) as world:
        return lines_of(lambda: world.loop.run_until_complete(wait()))


def test_requests_that_wait_for_a_version_are_not_woken_by_every_answer(tmp_path):
    assert lines_of_waiting(tmp_path, 256) < 4.2 * lines_of_waiting(tmp_path, 64)


def test_the_power_of_a_growth():
    assert power([(2, 12), (4, 48), (8, 192)]) == pytest.approx(2)
    assert power([(10, 7), (1000, 7)]) == pytest.approx(0)
    rows = [
        {"replicas": 8, "rollouts": n, "us/rollout": 5, "us/token": n, "us/decision": n**2, "ms/publication": 1}
        | {"bytes/rollout": 1 / n}
        for n in (10, 100)
    ]
    told = "us/rollout +0.00, us/token +1.00, us/decision +2.00, ms/publication +0.00, bytes/rollout -1.00"
    assert growths(rows) == [f"with rollouts, at 8 replicas: {told}"]
