"""A lost replica of the generator is replaced in place. The tests share a stack; each leaves both replicas healthy."""

import asyncio
import os
import signal
import time

import pytest
import torch

from tests.integration.conftest import small_config
from torchtitan_rl.actors.operations import GeneratorOperations, WorkerProcess
from torchtitan_rl.train.controller import Controller
from torchtitan_rl.types import SamplingParams

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("forked")]

PROMPTS = [[20 + i, 31, 27, 44 - i, 14] for i in range(8)]
HANG_S = 6.0
REJOINS_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def controller(loop, tmp_path_factory):
    config = small_config(
        tmp_path_factory.mktemp("repair") / "run",
        generator__num_replicas=2,
        generator__max_replica_restarts=5,
        generator__num_spares=1,
        generator__probe_every_s=0.5,
        generator__hang_timeout_s=HANG_S,
    )
    controller = loop.run_until_complete(Controller.launch(config))
    yield controller
    loop.run_until_complete(controller.close())


def _sample(controller, num: int, max_tokens: int = 40):
    return asyncio.gather(
        *(
            controller.generator.sample(
                PROMPTS[i % 8] + [30 + i // 8], SamplingParams(max_tokens=max_tokens, seed=i, ignore_eos=True)
            )
            for i in range(num)
        )
    )


async def _pid(controller, index) -> int:
    return (await controller.generator._replicas[index].mesh.call_each(WorkerProcess.pid))[0]


async def _spare(controller) -> int:
    """Waits until a spare is prepared; returns its process id. A spare is started once generators have answered."""
    async with asyncio.timeout(60):
        await _sample(controller, 1)
        while controller.launcher._spares is None:
            await asyncio.sleep(0.05)
    (preparing,) = controller.launcher._spares._preparing
    procs, actors = await asyncio.wait_for(asyncio.shield(preparing), 60)
    (pid,) = [pid for _, pid in await actors.prepare.call(True)]
    return pid


async def _all_healthy(controller) -> float:
    """Waits until every replica is healthy; returns the seconds that took."""
    start = time.monotonic()
    while set(controller.generator.health().values()) != {"healthy"}:
        assert time.monotonic() - start < REJOINS_WITHIN_S, controller.generator.health()
        await asyncio.sleep(0.05)
    return time.monotonic() - start


def test_a_killed_replica_rejoins_with_the_served_version_and_its_requests_go_elsewhere(loop, controller):
    async def run():
        spare = await _spare(controller)
        before = await _sample(controller, 64)
        victim, batch = await _pid(controller, 1), asyncio.ensure_future(_sample(controller, 64))
        await asyncio.sleep(0.05)
        os.kill(victim, signal.SIGKILL)
        during = await asyncio.wait_for(batch, 60)
        await controller.trainer.optim_step()  # a version is published while the replacement starts
        version = await controller.publish()
        took = await _all_healthy(controller)
        replica = controller.generator._replicas[1]
        await replica.mesh.call_leader(GeneratorOperations.probe)
        return victim, before, during, version, took, replica, await _pid(controller, 1) == spare

    victim, before, during, version, took, replica, was_spare = loop.run_until_complete(run())
    assert [c.tokens for c in during] == [c.tokens for c in before]
    assert was_spare and replica.loaded_version == version == controller.policy_version
    assert controller.versions.holders()[version] == ["generator-0", "generator-1", "newest"]
    assert controller.generator.num_restarts == 1
    print(f"rejoined after {took:.1f} s")


@pytest.mark.slow
def test_a_stopped_replica_is_found_without_a_call_and_replaced(loop, controller):
    async def run():
        victim, start = await _pid(controller, 0), time.monotonic()
        os.kill(victim, signal.SIGSTOP)
        while controller.generator.health()["generator-0"] == "healthy":
            assert time.monotonic() - start < HANG_S + 5
            await asyncio.sleep(0.05)
        reason = controller.generator.health()["generator-0"]
        answers = await asyncio.wait_for(_sample(controller, 8), 60)
        await _all_healthy(controller)
        return reason, answers, await controller.generator._replicas[0].mesh.call_leader(GeneratorOperations.probe)

    reason, answers, _ = loop.run_until_complete(run())
    assert reason.startswith("generator-0.probe: no answer, generator-0-0 (pid ") and "is stopped (SIGSTOP)" in reason
    assert all(len(answer.tokens) == 40 for answer in answers)


@pytest.mark.slow  # the next test has a replacement from scratch, without a spare that dies
def test_without_its_spare_a_replica_is_replaced_from_scratch(loop, controller):
    async def run():
        spare = await _spare(controller)
        os.kill(spare, signal.SIGKILL)
        os.kill(await _pid(controller, 1), signal.SIGKILL)
        answers = await asyncio.wait_for(_sample(controller, 64), REJOINS_WITHIN_S)
        await _all_healthy(controller)
        return spare, await _pid(controller, 1), answers

    spare, pid, answers = loop.run_until_complete(run())
    assert pid != spare and len(answers) == 64


def test_with_every_replica_gone_requests_wait_for_a_replacement(loop, controller):
    """One replacement is the spare, the other one starts from scratch."""

    async def run():
        expected = await _sample(controller, 16)
        spare = await _spare(controller)
        for index in (0, 1):
            os.kill(await _pid(controller, index), signal.SIGKILL)
        answers = await asyncio.wait_for(_sample(controller, 16), REJOINS_WITHIN_S)
        await controller.publish()
        await _all_healthy(controller)
        return expected, answers, [await _pid(controller, index) == spare for index in (0, 1)]

    expected, answers, were_spares = loop.run_until_complete(run())
    for one, other in zip(expected, answers, strict=True):
        assert one.tokens == other.tokens
        assert torch.allclose(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-5)
    assert controller.generator.num_restarts >= 3 and sorted(were_spares) == [False, True]


def test_more_losses_than_allowed_end_the_run_and_say_why(loop, controller):
    controller.generator._repair.max_restarts = controller.generator.num_restarts

    async def run():
        os.kill(await _pid(controller, 0), signal.SIGKILL)
        start = time.monotonic()
        while "max_replica_restarts" not in controller.generator._no_repair:
            assert time.monotonic() - start < 20
            await asyncio.sleep(0.05)
        await _sample(controller, 1)

    with pytest.raises(RuntimeError, match=r"generator.max_replica_restarts=\d: so many replicas were replaced within"):
        loop.run_until_complete(run())
