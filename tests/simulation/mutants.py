"""Faults put back into the package, one at a time: each imitates a defect that libraries of this kind have had."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tests.simulation.pretence import patched
from torchtitan_rl.dispatch import mesh_training_client
from torchtitan_rl.dispatch.mesh_sampling_client import MeshSamplingClient
from torchtitan_rl.dispatch.replica import Membership, Replica
from torchtitan_rl.dispatch.versions import PolicyVersions
from torchtitan_rl.record import attempts
from torchtitan_rl.rollout import group, lagged_batches, player
from torchtitan_rl.rollout.batches import SynchronousBatches
from torchtitan_rl.rollout.draws import Draw, Draws
from torchtitan_rl.rollout.finished import FinishedGroups
from torchtitan_rl.rollout.first_finished import FirstFinished
from torchtitan_rl.rollout.lagged_batches import LaggedBatches
from torchtitan_rl.train.checkpoints import Checkpoints
from torchtitan_rl.train.evaluation import Evaluations
from torchtitan_rl.train.overlapped_evaluations import OverlappedEvaluations

__all__ = ["MUTANTS", "Mutant"]


@dataclass(kw_only=True, slots=True)
class Mutant:
    """A fault and the property that catches it. `changes` are (owner, name, new value)."""

    imitates: str
    caught_by: str
    changes: list[tuple[Any, str, Any]]
    first_seed: int = 0
    """Where a test begins to look for a seed that shows the fault."""

    def put_back(self) -> AbstractContextManager[None]:
        """The package has the fault for as long as the block runs."""
        return patched(self.changes)


async def _wait_for_nothing(*args: Any) -> None:
    return None


# Position in the data.


def _replaced_in_the_same_round(self: Draws, draws: list[Draw]) -> list[Draw]:
    return [dataclasses.replace(draw, task=self.source.replacement(draw.slot, 1)) for draw in draws]


_write = Checkpoints._write


async def _write_the_state_of_now(self: Checkpoints, path: Any, content: dict, parts: dict, stage_s: float) -> dict:
    await asyncio.gather(*(role.checkpoint_written() for role in parts))
    self.state.draws = self._batch_state()
    return await _write(self, path, content | dataclasses.asdict(self.state), parts, stage_s)


# What makes up a batch.


async def _gather_what_succeeds(*calls: Any, return_exceptions: bool = False) -> list:
    results = await asyncio.gather(*calls, return_exceptions=True)
    return [result for result in results if not isinstance(result, BaseException)] or results


async def _gather_all_but_the_slowest(*calls: Any, return_exceptions: bool = False) -> list:
    tasks = [asyncio.ensure_future(call) for call in calls]
    late = set(tasks)
    while len(late) > (1 if len(tasks) > 1 else 0):
        _, late = await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
    for task in late:
        task.cancel()
    return await asyncio.gather(*(task for task in tasks if task not in late), return_exceptions=return_exceptions)


_next_batch = LaggedBatches.next_batch


async def _next_batch_one_more_ahead(self: LaggedBatches) -> Any:
    algorithm = self._algorithm
    algorithm.max_policy_lag += 1
    try:
        return await _next_batch(self)
    finally:
        algorithm.max_policy_lag -= 1


_merge = mesh_training_client._merge


def _merge_in_the_order_of_the_ranks(answers: list, ranks: list[list[list[int]]], data: list, *, who: str) -> Any:
    output = _merge(answers, ranks, data, who=who)
    order = [index for microbatches in ranks for members in microbatches for index in members]
    output.policy_logprobs = [output.policy_logprobs[index] for index in order]
    return output


# Versions.


async def _leave_and_release_nothing(self: MeshSamplingClient, role: str, hurry: Any = None) -> None:
    index = next(index for index in self._serving_indices if self._replicas[index].mesh.role == role)
    if len(self._serving_indices) == 1:
        raise RuntimeError(f"{role}: is the only healthy replica; it stays")
    self._replicas[index].membership = Membership.LEFT
    self._update_serving()
    self._replicas[index].lost = "has left"


@asynccontextmanager
async def _serving_without_a_wake_up(self: Replica, version: int | None) -> Any:
    kind = "unpinned" if version is None else "pinned"
    async with self._changed:
        await self._until(lambda: self._serves(version) or self._may_load(version))
        if not self._serves(version):
            await self._load(self.versions.served if version is None else version)
        self._in_flight[kind] += 1
    try:
        yield
    finally:
        self._in_flight[kind] -= 1


async def _pull_at_once(self: Replica, version: int) -> None:
    self._pulling = version
    try:
        async with self._fetched(version), self._changed:
            previous = await self._switch(version)
    finally:
        self._pulling = None
    await self._release(previous)


async def _pull_while_a_request_loads(self: Replica, version: int) -> None:
    self._pulling = version
    try:
        async with self._fetched(version), self._changed:
            await self._until(lambda: not self._in_flight["pinned"])
            previous = await self._switch(version)
    finally:
        self._pulling = None
        async with self._changed:
            self._changed.notify_all()
    await self._release(previous)


def _serves_unpinned_with_anything(self: Replica, version: int | None) -> bool:
    return self.loaded_version is not None if version is None else self.loaded_version == version


async def _release_for_everybody(self: PolicyVersions, version: int, holder: str) -> None:
    if self._holders.pop(version, None) is not None:
        await self._store.discard(version)
        await self._trainer.discard_weights(version)


async def _wake_and_release_nothing(self: Replica) -> None:
    async with self._changed:
        self._changed.notify_all()


# Lost replicas.

_lose, _sample = MeshSamplingClient._lose, Replica.sample


def _lose_the_dead_alone(self: MeshSamplingClient, replica: Replica, error: Exception) -> None:
    if "no answer within" not in str(error):
        _lose(self, replica, error)


def _sample_for_ever(self: Replica, requests: list, version: int | None, timeout_s: float) -> Any:
    return _sample(self, requests, version, 1e9)


def _nothing(*args: Any, **named: Any) -> Any:
    return 0


def _find_nothing(*args: Any) -> None:
    pass


_evaluate = Evaluations._evaluate


async def _evaluate_with_the_newest(self: Evaluations, *arguments: Any) -> Any:
    return await _evaluate(self, *arguments[:-1], None)


def _mutant(
    imitates: str, caught_by: str, *changes: tuple[Any, str, Callable | SimpleNamespace], first_seed: int = 0
) -> Mutant:
    return Mutant(imitates=imitates, caught_by=caught_by, changes=list(changes), first_seed=first_seed)


MUTANTS: dict[str, Mutant] = {
    "data skipped at resume": _mutant(
        "a checkpoint holds the position after the draws in flight, which are lost with the process",
        "a_resumed_run_goes_on",
        (LaggedBatches, "state_dict", SynchronousBatches.state_dict),
    ),
    "prompts replayed at resume": _mutant(
        "weights are restored and the position in the data is not",
        "a_resumed_run_goes_on",
        (Draws, "load_state_dict", _nothing),
    ),
    "finished rollouts played again": _mutant(
        "a checkpoint holds the position in the data alone, so that rollouts that had finished are made anew",
        "what_had_finished_is_not_played_again",
        (FinishedGroups, "restore", lambda self, lines: []),
    ),
    "state newer than the weights": _mutant(
        "a checkpoint that is written beside training takes up the state when it is written, not when it is staged",
        "a_resumed_run_goes_on",
        (Checkpoints, "_write", _write_the_state_of_now),
    ),
    "lines of a dead attempt count": _mutant(
        "metrics after the checkpoint stay, so that steps have two lines after a resume",
        "each_draw_ends_once",
        (attempts, "cut_metrics", _nothing),
    ),
    "a replacement keeps the name": _mutant(
        "a group that takes a filtered one's place has its id and its random numbers",
        "each_draw_ends_once",
        (Draws, "replace", _replaced_in_the_same_round),
    ),
    "groups trained in part": _mutant(
        "rollouts that failed are left out and their siblings train, with a biased baseline",
        "what_trains_is_what_was_admitted",
        (group, "asyncio", SimpleNamespace(gather=_gather_what_succeeds)),
        first_seed=8,
    ),
    "long rollouts discarded": _mutant(
        "the batch is full once most of it has finished, and the slowest group is thrown away",
        "each_draw_ends_once",
        (player, "asyncio", SimpleNamespace(gather=_gather_all_but_the_slowest)),
    ),
    "one batch too many ahead": _mutant(
        "admission is off by one, so that tokens are a publication older than the bound",
        "no_token_is_older_than_the_lag",
        (LaggedBatches, "next_batch", _next_batch_one_more_ahead),
    ),
    "long slots passed over": _mutant(
        "a batch takes whatever finished first, and nothing waits for a slot that is due",
        "no_token_is_older_than_the_lag",
        (FirstFinished, "_last_due", lambda self, due, room: float("inf")),
        (lagged_batches, "check_lag", _find_nothing),  # it would end the run
        first_seed=19,
    ),
    "rows of another datum": _mutant(
        "outputs come back in the order of ranks and microbatches, not of the data",
        "what_trains_is_what_was_admitted",
        (mesh_training_client, "_merge", _merge_in_the_order_of_the_ranks),
        first_seed=6,
    ),
    "an evaluation of two versions": _mutant(
        "an evaluation beside training samples with the newest weights, and no publication waits for it",
        "an_evaluation_has_one_version",
        (Evaluations, "_evaluate", _evaluate_with_the_newest),
        (OverlappedEvaluations, "finish", _wait_for_nothing),
    ),
    "an evaluation lost at resume": _mutant(
        "a checkpoint that falls between an evaluation's begin and its end does not say that it is due",
        "every_evaluation_is_made_once",
        (OverlappedEvaluations, "begin_due", _nothing),
        first_seed=4,
    ),
    "a lost wake-up": _mutant(
        "the end of a request wakes nobody that waits for the replica's version to change",
        "every_wait_ends",
        (Replica, "_serving", _serving_without_a_wake_up),
    ),
    "weights change under a request": _mutant(
        "a sync does not wait for requests that name a version",
        "a_named_version_is_served",
        (Replica, "pull", _pull_at_once),
    ),
    "two loads of one fetch": _mutant(
        "a pull fetches while a request for the same version loads it, and finds its fetch used up",
        "what_is_loaded_was_fetched",
        (Replica, "pull", _pull_while_a_request_loads),
    ),
    "stale weights": _mutant(
        "requests for the newest version are served by what an earlier request has left loaded",
        "no_token_is_older_than_the_lag",
        (Replica, "_serves", _serves_unpinned_with_anything),
        (lagged_batches, "check_lag", _find_nothing),  # it would end the run
        first_seed=8,
    ),
    "a version deleted under its holder": _mutant(
        "the first release deletes a version, whoever else holds it",
        "a_named_version_is_served",
        (PolicyVersions, "release", _release_for_everybody),
    ),
    "versions of lost replicas kept": _mutant(
        "a lost replica's version is never released, so that the store grows",
        "nothing_is_left_over",
        (Replica, "release", _wake_and_release_nothing),
    ),
    "a slow replica's requests sent twice": _mutant(
        "a request is sent again at its deadline, while the replica that has it stays in use",
        "a_request_has_one_answer",
        (MeshSamplingClient, "_lose", _lose_the_dead_alone),
        first_seed=5,
    ),
    "versions of replicas that leave kept": _mutant(
        "the version of a replica that leaves is never released, so that the store grows",
        "nothing_is_left_over",
        (MeshSamplingClient, "leave", _leave_and_release_nothing),
        first_seed=5,
    ),
    "a hung replica waited for": _mutant(
        "calls have no deadline and nobody asks for signs of life",
        "every_wait_ends",
        (Replica, "sample", _sample_for_ever),
        (MeshSamplingClient, "_begin_probing", _nothing),
        first_seed=14,
    ),
}
