"""A simulated run of a seed, from its first attempt to its end."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.simulation.pretence import pretended
from tests.simulation.tasks import BATCHES, config_of, faults_of
from tests.simulation.virtual_clock import Stuck
from tests.simulation.world import Log, Watch, World
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.record import attempts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tasks.family import source_of
from torchtitan_rl.tools.audit import audit
from torchtitan_rl.train.controller import Controller
from torchtitan_rl.types import SamplingParams

__all__ = ["Run", "simulate"]

_LIMIT_S = 6000.0  # virtual seconds of one attempt; an attempt with five hangs takes about 1000
_MAX_ATTEMPTS = 8  # more than faults that end an attempt, and one
_TURNS_OF_A_PUSH = 16  # of the event loop, until every replica has begun to pull
_MOST_REPLICAS = 5  # that somebody asks for
_HURRIED = 0.25
_SETTLED_S = 100.0  # after which every request of a finished run has been answered
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a run writes small files: two fifths of its time


@dataclass
class Run:
    """What a simulation leaves, for `properties`."""

    seed: int
    config: RunConfig
    logs: list[Log]
    """One per attempt."""
    history: list[str]
    problems: list[str]
    """What `tools.audit` says of the run directory."""
    evaluated: list[tuple[int, str]]
    """(step, split) of each evaluation in the metrics."""
    undisturbed: Run | None = None
    """The run of the same seed without the faults that depend on time: one replica, no checkpoints, no evaluations, no
    records. Made where a property compares with it."""
    expected_tasks: dict[int, str] = field(default_factory=dict)
    """Slot -> id of the task that is due in it."""

    @property
    def log(self) -> Log:
        """Of the last attempt."""
        return self.logs[-1]


def simulate(seed: int, *, disturbed: bool = True) -> Run:
    """Runs a seed until the run has finished, was stuck or failed without a fault that explains it."""
    with tempfile.TemporaryDirectory(prefix="simulated-", dir=_MEMORY) as directory:
        config = config_of(seed, Path(directory) / "run")
        if not disturbed:
            config.controller.checkpoint_every = config.controller.eval_every = 0
            config.generator.num_replicas, config.generator.max_replica_restarts = 1, 0
        world = World(
            seed, faults_of(seed, config), call_timeout_s=config.controller.call_timeout_s, disturbed=disturbed
        )
        with pretended(world, config), torch.inference_mode():
            while len(world.logs) < _MAX_ATTEMPTS:
                _attempt(world, config, resume="auto" if world.logs else "")
                log = world.logs[-1]
                if log.end == "finished" or not (log.end == "killed" or log.excused):
                    break
            problems = audit(RunDir(config.output_dir))[1] if disturbed else []
            lines = [line for line in RunDir(config.output_dir).read_metrics() if line["phase"] == "evaluation"]
    evaluated = [(line["step"], line["eval/split"]) for line in lines]
    run = Run(seed, config, world.logs, world.history, problems, evaluated)
    family = config.task.build()
    tasks = source_of(family, "train", seed).next(2 * BATCHES * config.algorithm.tasks_per_step)
    run.expected_tasks = {slot: task.id for slot, task in enumerate(tasks)}
    if disturbed and config.algorithm.max_policy_lag == 0:
        run.undisturbed = simulate(seed, disturbed=False)
    return run


def _attempt(world: World, config: RunConfig, resume: str) -> None:
    """One attempt; `world.logs[-1].end` says how it ended."""
    world.begin_attempt(_LIMIT_S)
    log, loop, begun = world.log, world.loop, []
    asyncio.set_event_loop(loop)
    main = loop.create_task(_run(world, config, resume, begun))
    try:
        loop.run_until_complete(main)
        log.end = "finished"
    except Stuck as stuck:
        log.end = f"stuck: {stuck}; waiting: {_waiting(loop)}"
    except Exception as error:
        log.error = error
        log.end = "killed" if world.killed else f"{type(error).__name__}: {error}"
        log.excused = not world.killed and world.excuses(str(error))
    world.note(log.end)
    for controller in begun:
        controller.recorder.listeners.clear()  # a killed process writes nothing more
    world.end_attempt()
    asyncio.set_event_loop(None)
    attempts.unlock(RunDir(config.output_dir))


async def _run(world: World, config: RunConfig, resume: str, begun: list[Controller]) -> None:
    controller = await Controller.launch(config, resume_from=resume)
    begun.append(controller)
    if not world.disturbed:  # only its weights are looked at
        controller.recorder.listeners.clear()
        async with controller:
            await controller.reinforce()
        return
    controller.recorder.listeners.append(Watch(world))
    async with controller:
        over = asyncio.Event()
        asking = asyncio.ensure_future(_ask_for_versions(world, controller, over))
        asking.add_done_callback(lambda done: done.cancelled() or done.exception())  # read, or asyncio warns
        scaling = asyncio.ensure_future(_scale(world, controller, over))
        await controller.train()
        over.set()
        await asking
        await scaling
        await asyncio.sleep(_SETTLED_S)
        replicas, router = controller.generator._replicas, controller.generator._router
        world.log.left = {
            "requests that somebody counts": sum(router.loads) + sum(controller.generator.in_flight()),
            "versions that somebody holds": controller.versions.holders(),
            "versions in the store": sorted(world.store.held),
            "versions in use": sorted(
                {r.loaded_version for r in replicas if r.lost is None} | {controller.policy_version}
            ),
        }


async def _scale(world: World, controller: Controller, over: asyncio.Event) -> None:
    """Asks for another number of replicas now and then, until the run is over; in two seeds of three. Every fourth time
    one has to leave within seconds instead, as with a host that a scheduler takes back."""
    drawn = world.scaling
    while world.seed % 3 and controller.replicas is not None:
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), drawn.uniform(5, 120))
        if over.is_set():
            return
        number = drawn.randint(1, _MOST_REPLICAS)
        serving, hurried = controller.replicas.serving(), drawn.random() < _HURRIED
        if hurried and len(serving) > 1:
            hurry = asyncio.Event()
            world.loop.call_later(drawn.uniform(0, 5), hurry.set)
            with suppress(RuntimeError):  # the others were lost before it had answered: it stays
                await controller.replicas.end(serving[-1], hurry)
                world.note(f"{serving[-1]} had to leave")
            continue
        try:
            await controller.replicas.scale(number)
            world.note(f"{number} replicas")
        except (RuntimeError, ValueError) as error:
            world.note(f"not {number} replicas, but {controller.replicas.number}: {error}")


async def _ask_for_versions(world: World, controller: Controller, over: asyncio.Event) -> None:
    """Keeps a version and asks for it by its number, now and after later versions were published, until the run is
    over. Every second time, requests without a number come first, one in each turn of the event loop, while the
    trainer's answer to a push arrives: some meet a replica between the publication and its pull."""
    numbers = itertools.count(10**6 * len(world.logs))
    for time in itertools.count():
        await asyncio.sleep(world.between(5, 40))
        pushed: list[asyncio.Future] = []
        if time % 2:
            world.pushing.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(world.pushing.wait(), 40)
            for _ in range(_TURNS_OF_A_PUSH):
                params = SamplingParams(max_tokens=2, seed=next(numbers))
                pushed.append(asyncio.ensure_future(controller.generator.sample([2], params)))
                await asyncio.sleep(0)
        await asyncio.gather(*pushed, return_exceptions=True)
        if over.is_set():
            return
        version = controller.policy_version
        try:
            controller.versions.pin(version, "asker")
        except ValueError:  # the version was deleted before the next one was served
            continue
        for _ in range(2):
            asked = []
            for _ in range(2):
                number = next(numbers)
                params = SamplingParams(max_tokens=6, seed=number)
                asked.append(controller.generator.sample([1, number % 50], params, policy_version=version))
            answers: list[Any] = await asyncio.gather(*asked, return_exceptions=True)
            told = [getattr(answer, "policy_versions", answer) for answer in answers]
            world.log.named += [(version, versions) for versions in told]
            world.note(f"version {version} was asked for, {told} answered")
            await asyncio.sleep(world.between(1, 30))
        await controller.versions.release(version, "asker")


def _waiting(loop: asyncio.AbstractEventLoop) -> list[str]:
    """Where each task waits that waits for something else than time."""
    places = []
    for task in asyncio.all_tasks(loop):
        frames = task.get_stack(limit=1)
        if frames:
            places.append(f"{frames[-1].f_code.co_qualname}:{frames[-1].f_lineno}")
    return sorted(places)
