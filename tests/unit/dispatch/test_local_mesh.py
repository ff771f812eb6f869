"""A worker in this process answers as one in a process of its own would: in order, copied, in time or with its name."""

import asyncio
import time

import pytest
import torch

from torchtitan_rl.dispatch import local_mesh
from torchtitan_rl.dispatch.local_mesh import LocalMesh
from torchtitan_rl.dispatch.role_mesh import NoAnswer


class Worker:
    def __init__(self):
        self.weight = torch.zeros(2)
        self.log = []

    def add(self, amount):
        self.weight += amount
        self.log.append(amount)
        return self.weight

    async def wait(self, seconds):
        self.log.append(f"wait {seconds}")
        await asyncio.sleep(seconds)
        for _ in range(5):  # an answer of the engine takes some rounds of the loop to come through
            await asyncio.sleep(0)
        self.log.append(f"waited {seconds}")
        return seconds

    def fail(self):
        raise KeyError("no such thing\nand more")


def mesh(*, in_order=True, timeout_s=60.0):
    return LocalMesh("policy", Worker(), timeout_s=timeout_s, in_order=in_order)


async def test_calls_take_their_place_when_they_are_made_not_when_they_are_awaited():
    local = mesh()
    calls = [local.call_all(Worker.wait, 0.02), local.call_each(Worker.wait, 0.0), local.call_split(Worker.add, [1.0])]
    answers = [await call for call in reversed(calls)]
    log, (split, each, whole) = local._worker.log, answers
    assert log == ["wait 0.02", "waited 0.02", "wait 0.0", "waited 0.0", 1.0]
    assert (whole, each) == (0.02, [0.0]) and split[0].tolist() == [1.0, 1.0]


async def test_a_generators_calls_overlap():
    local = mesh(in_order=False)
    await asyncio.gather(local.call_leader(Worker.wait, 0.02), local.call_rank(0, Worker.wait, 0.0))

    assert local._worker.log == ["wait 0.02", "wait 0.0", "waited 0.0", "waited 0.02"]


async def test_an_answer_is_a_copy_of_what_the_worker_goes_on_changing():
    local = mesh()
    first = local.call_all(Worker.add, 1.0)
    second = local.call_all(Worker.add, 1.0)

    assert ((await first).tolist(), (await second).tolist()) == ([1.0, 1.0], [2.0, 2.0])


async def test_what_a_worker_raises_names_role_and_endpoint_and_does_not_hold_up_the_next_call():
    local = mesh()
    with pytest.raises(RuntimeError) as caught:
        await local.call_all(Worker.fail)
    error, answer = caught.value, await local.call_all(Worker.add, 2.0)
    assert str(error) == "policy-0.fail: KeyError: 'no such thing\\nand more'"
    assert isinstance(error.__cause__, KeyError) and answer.tolist() == [2.0, 2.0]


async def test_a_call_past_its_deadline_is_given_up_on_and_named():
    with pytest.raises(NoAnswer, match=r"policy-0\.wait: no answer within 0.01 s"):
        await mesh(in_order=False, timeout_s=60).call_rank(0, Worker.wait, 30, timeout_s=0.01)


async def test_a_breakpoint_stops_the_clock(monkeypatch):
    monkeypatch.setattr(local_mesh, "_TICK_S", 0.1)
    call = mesh(in_order=False).call_all(Worker.wait, 0.05, timeout_s=0.25)
    await asyncio.sleep(0.01)
    time.sleep(0.4)  # someone looks at a variable

    assert (await call) == 0.05


def test_shards_must_match_the_one_rank():
    with pytest.raises(ValueError, match=r"policy\.add: 2 shards for 1 data-parallel ranks"):
        mesh().call_split(Worker.add, [[], []])
