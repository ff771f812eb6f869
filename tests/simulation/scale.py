"""A simulated run with many replicas and many rollouts in flight, and what it costs the controller.

The controller, its clock and its fakes are those of the other simulations; nothing fails. Every rollout is in flight at
once: with a lag of 1 two batches are admitted before the first one trains, and each is half of the rollouts.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.simulation.engines import FakeReplica
from tests.simulation.pretence import patched, pretended
from tests.simulation.tasks import Play, config_of
from tests.simulation.world import Asked, World
from torchtitan_rl.actors.operations import Operation
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.router import Router
from torchtitan_rl.environment import let_garbage_wait
from torchtitan_rl.train.controller import Controller

__all__ = ["GROUP", "Cost", "Crowd", "config_at", "cost_of", "decision_s", "simulated"]

GROUP = 8  # rollouts of a task
_NO_END_S = 1e9
_LONG_ENOUGH_S = 0.4  # for a mean of publications
_EVERY_S = 0.002  # processor time between two looks at the stack


@dataclass(kw_only=True)
class Cost:
    """What one run has cost. Seconds are of the processor."""

    replicas: int
    rollouts: int
    requests: int = 0
    tokens: int = 0
    """That the rollouts have sampled."""
    seconds: float = 0.0
    """Of the two batches, from the first request to the last line of metrics."""
    shares: Counter[str] = field(default_factory=Counter)
    """Part of the package, `event loop` or `simulator` -> share of `seconds`."""
    publication_s: float = 0.0
    """Of a publication to every replica, fakes included; a mean."""
    bytes_in_flight: float = 0.0
    """Resident bytes per rollout in flight, fakes included."""
    peak: int = 0
    """Most requests that were unanswered at once."""
    messages: dict[str, int] = field(default_factory=dict)
    """Endpoint of the replicas -> calls in the run."""

    @property
    def controller_s(self) -> float:
        """Seconds in functions of the package, and in what they call of other packages."""
        others = self.shares["simulator"] + self.shares["event loop"]
        return self.seconds * (1 - others / max(1, self.shares.total()))


class Crowd(World):
    """A world in which nothing fails, and whose log keeps no more than the number of requests."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(0, [], call_timeout_s=_NO_END_S)
        self.config, self.peak, self.bytes_at_peak = config, 0, 0
        self._in_flight = 0
        self.messages: Counter[str] = Counter()

    def note(self, text: str) -> None:
        pass

    def asked(self, request: Any, engine: Any) -> Asked:
        asked = super().asked(request, engine)
        self.log.requests.clear()
        self._in_flight += 1
        if self._in_flight > self.peak:
            self.peak = self._in_flight
            if self.peak == self.config.algorithm.tasks_per_step * self.config.algorithm.group_size * 2:
                self.bytes_at_peak = resident()
        return asked

    def answered(self, asked: Asked) -> None:
        self._running.pop(asked.stream, None)
        self._in_flight -= 1


def config_at(replicas: int, rollouts: int, directory: Path, *, order: str = "slots", group: int = GROUP) -> RunConfig:
    """Two batches at lag 1, or with `order="finished"` at lag 2, together of so many rollouts, of one or two turns.
    Raises ValueError unless `rollouts` is a multiple of twice the size of a group."""
    if rollouts % (2 * group):
        raise ValueError(f"rollouts={rollouts}: are two batches of groups of {group}; give a multiple of {2 * group}")
    config = config_of(0, directory)
    algorithm, controller, generator = config.algorithm, config.controller, config.generator
    config.task = Play.Config(max_turns=2)
    algorithm.max_policy_lag, algorithm.batch_order = (1, "slots") if order == "slots" else (2, "finished")
    algorithm.tasks_per_step, algorithm.group_size = rollouts // group // 2, group
    algorithm.tasks_per_minibatch, algorithm.filters.zero_variance = 0, False
    algorithm.on_rollout_failure = "fail"
    controller.num_steps, controller.checkpoint_every, controller.eval_every = 2, 0, 0
    controller.sample_timeout_s = controller.call_timeout_s = controller.reward_timeout_s = _NO_END_S
    generator.num_replicas, generator.max_replica_restarts = replicas, 10
    config.sampling.max_tokens = 24
    config.sampling.max_rollout_tokens = 60
    config.trainer.max_tokens_per_microbatch = 4096
    return config


@contextmanager
def simulated(config: RunConfig) -> Iterator[Crowd]:
    """A world for one run of the config, whose event loop is this thread's for as long as the block runs."""
    world = Crowd(config)
    call_leader = FakeReplica.call_leader

    def counted(
        replica: FakeReplica, operation: Operation, *args: Any, timeout_s: float | None = None
    ) -> asyncio.Future:
        world.messages[operation.__name__] += 1
        return call_leader(replica, operation, *args, timeout_s=timeout_s)

    changes = [(FakeReplica, name, counted) for name in ("call_leader", "call_all")]
    with pretended(world, config), patched(changes), torch.inference_mode():
        world.begin_attempt(_NO_END_S)
        asyncio.set_event_loop(world.loop)
        try:
            yield world
        finally:
            world.end_attempt()
            asyncio.set_event_loop(None)


def cost_of(replicas: int, rollouts: int, *, order: str = "slots") -> Cost:
    """Runs once and measures. Needs the main thread, whose SIGPROF it takes, and little else in the process."""
    torch.set_num_threads(1)
    cost = Cost(replicas=replicas, rollouts=rollouts)
    with tempfile.TemporaryDirectory() as directory:
        config = config_at(replicas, rollouts, Path(directory) / "run", order=order)
        with simulated(config) as world:
            world.loop.run_until_complete(_measured(world, config, cost))
    return cost


def decision_s(replicas: int, rollouts: int) -> float:
    """Seconds of one routing decision and of the note that the request was answered, with `rollouts` requests in
    flight: the least of 20 means over 100. Half of the prompts are new, and half extend a prompt that was sent."""
    router, healthy = Router(replicas), list(range(replicas))
    sent = [[index, *range(40)] for index in range(rollouts)]
    route = partial(router.route, version=None, serving=healthy, loaded_versions=(), newest=1)
    route(sent)
    means = []
    for block in range(20):
        numbers = range(100 * block, 100 * block + 100)
        prompts = [[-index, *range(40)] if index % 2 else [*sent[index % rollouts], 1] for index in numbers]
        began = time.perf_counter()
        for prompt in prompts:
            [chosen] = route([prompt])
            router.finished(chosen, 1, None)
        means.append((time.perf_counter() - began) / len(prompts))
    return min(means)


async def _measured(world: Crowd, config: RunConfig, cost: Cost) -> None:
    controller = await Controller.launch(config)
    async with controller:
        gc.collect()
        let_garbage_wait()  # as `torchtitan-rl train` does
        before, began, requests = resident(), time.process_time(), world.num_requests
        with _looks() as looks:
            await controller.reinforce()
        cost.seconds, cost.shares = time.process_time() - began, looks
        cost.requests, cost.peak = world.num_requests - requests, world.peak
        cost.messages = dict(world.messages)
        cost.tokens = sum(line["tokens/generated"] for line in _lines(controller))
        cost.bytes_in_flight = max(0, world.bytes_at_peak - before) / cost.rollouts
        began, number = time.process_time(), 0
        while (used := time.process_time() - began) < _LONG_ENOUGH_S:
            await controller.publish()
            number += 1
        cost.publication_s = used / number


def _lines(controller: Controller) -> list[dict[str, Any]]:
    return [line for line in controller.run_dir.read_metrics() if line["phase"] == "reinforcement"]


@contextmanager
def _looks() -> Iterator[Counter[str]]:
    """Counts where the processor is, every two milliseconds of its time: the innermost function of this repository
    counts, with what it calls of other packages."""
    counted: Counter[str] = Counter()

    def look(number: int, frame: Any) -> None:
        while frame is not None:
            file = frame.f_code.co_filename
            if "/torchtitan_rl/" in file:
                counted[file.rpartition("/torchtitan_rl/")[2].partition("/")[0]] += 1
                return
            if "/tests/simulation/" in file:
                counted["event loop" if file.endswith("virtual_clock.py") else "simulator"] += 1
                return
            frame = frame.f_back
        counted["event loop"] += 1

    before = signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, _EVERY_S, _EVERY_S)
    try:
        yield counted
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * 4096
