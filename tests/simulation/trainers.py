"""A trainer that takes virtual time, and the store: the methods of a `RoleMesh` over a number that stands for weights.

The weights are a hash of everything that has trained, in the order of the optimizer steps: two runs with equal weights
have trained on the same tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.simulation.engines import number_of
from torchtitan_rl.actors.operations import Operation, TrainerOperations
from torchtitan_rl.dispatch.role_mesh import ProcessDied
from torchtitan_rl.types import LossFunction, Microbatch, OptimParams, OptimStepOutput, RankOutput
from torchtitan_rl.weights import checkpoint
from torchtitan_rl.weights.layout import Manifest

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["FakeStore", "FakeTrainer"]

_SECONDS = {
    "forward_backward": (0.5, 6.0),
    "optim_step": (0.1, 0.5),
    "push_weights": (0.1, 1.0),
    "stage_checkpoint": (0.1, 1.0),
    "load_checkpoint": (0.5, 3.0),
}
"""Endpoint -> the least and the most virtual seconds of a call; any other call takes 0.01 s."""
_TURNS_OF_A_PUSH = 5
"""Turns of the event loop that the answer to a push takes, as one that comes through a mesh: requests that begin
meanwhile meet the pull that the answer sets off."""


class FakeStore:
    """Which versions exist, and the weights of each."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}

    def weights_of(self, version: int) -> int:
        if version not in self.held:
            raise RuntimeError(f"policy_version={version}: is not in the store (it holds {sorted(self.held)})")
        return self.held[version]

    async def announce(self, manifest: Manifest) -> None:
        """Takes no time, as where a version lies in shared memory: a request may come between push and pull."""

    async def discard(self, version: int) -> None:
        await asyncio.sleep(0.01)
        self.held.pop(version, None)


class FakeTrainer:
    """The policy's trainer, of two data-parallel ranks. Calls run one at a time, in the order they were made."""

    role, num_ranks, data_parallel_size = "policy", 2, 2

    def __init__(self, world: World) -> None:
        self.world, self.timeout_s = world, world.call_timeout_s
        self.dead = False
        self.version, self.weights, self.num_calls = 0, world.seed, 0
        """Optimizer steps that were not skipped; what they have made of the weights; calls of `optim_step`."""
        self._gradient: list[str] = []
        self._staged: tuple[float, dict[str, list]] = (0.0, {})
        self._free_at = 0.0
        self._calls: set[asyncio.Future] = set()

    # What a mesh offers.

    def call_split(self, operation: Operation, shards: Sequence[Any], *args: Any) -> asyncio.Future[list]:
        return self._call(operation, lambda: [self._rank_forward_backward(shard, *args) for shard in shards])

    def call_each(self, operation: Operation, *args: Any, timeout_s: float | None = None) -> asyncio.Future[list]:
        def answers() -> list:
            first = getattr(self, operation.__name__)(*args)
            others = first.version if isinstance(first, Manifest) else first
            return [first, *[others] * (self.num_ranks - 1)]

        return self._call(operation, answers)

    def call_all(self, operation: Operation, *args: Any, timeout_s: float | None = None) -> asyncio.Future:
        return self._call(operation, lambda: getattr(self, operation.__name__)(*args))

    def _call(self, operation: Operation, work: Callable[[], Any]) -> asyncio.Future:
        loop = self.world.loop
        answer, (least, most) = loop.create_future(), _SECONDS.get(operation.__name__, (0.01, 0.01))
        self._free_at = max(self._free_at, loop.time()) + self.world.between(least, most)
        self._calls.add(answer)
        answer.add_done_callback(self._calls.discard)
        if self.dead:
            loop.call_later(1.0, self._lose, answer)
        else:
            pushes = operation is TrainerOperations.push_weights
            loop.call_at(self._free_at, self._finish, answer, work, _TURNS_OF_A_PUSH * pushes)
            if pushes:
                loop.call_at(self._free_at, self.world.pushing.set)
        return answer

    def _finish(self, answer: asyncio.Future, work: Callable[[], Any], turns: int) -> None:
        """Answers after so many turns of the event loop, at the same time."""
        if turns:
            self.world.loop.call_soon(self._finish, answer, work, turns - 1)
            return
        if self.dead:
            return
        try:
            result = work()
        except Exception as error:
            if not answer.done():
                answer.set_exception(RuntimeError(f"policy-0: {error}"))
            return
        if not answer.done():
            answer.set_result(result)

    def die(self) -> None:
        """Ends the process: calls that wait fail a second later."""
        self.dead = True
        for answer in self._calls:
            self.world.loop.call_later(1.0, self._lose, answer)

    def _lose(self, answer: asyncio.Future) -> None:
        if not answer.done():
            answer.set_exception(ProcessDied("policy-0: its process died; see its log"))

    # Operations.

    def _rank_forward_backward(
        self, microbatches: list[Microbatch], loss_fn: LossFunction, temperature: float, loss_weight: float
    ) -> RankOutput:
        rows = []
        for microbatch in microbatches:
            logprobs_T, mask_T = microbatch.loss_inputs["sampling_logprobs"], microbatch.loss_inputs["loss_mask"]
            rows += (logprobs_T * mask_T).split(microbatch.lengths)
            tokens = iter(zip(microbatch.target_tokens_T.tolist(), mask_T.tolist(), logprobs_T.tolist(), strict=True))
            for length in microbatch.lengths:
                sampled: dict[int, list[int]] = {}
                for token, mask, logprob in itertools.islice(tokens, length):
                    if mask:
                        sampled.setdefault(number_of(logprob), []).append(token)
                if sampled:
                    self._gradient.append(repr(list(sampled.values())))
                    self.world.log.trained.append((self.num_calls, len(self.world.log.publications), sampled))
        return RankOutput(rows={"policy_logprobs": rows}, loss=1.0, sums={"policy/entropy": 1.0, "mismatch/kl": 0.0})

    def optim_step(self, params: OptimParams, grad_scale: float) -> OptimStepOutput:
        skipped, data = self.num_calls in self.world.skipped_steps, sorted(self._gradient)
        self._gradient.clear()
        if not skipped:
            self.version += 1
            self.weights = zlib.crc32(f"{self.weights}/{data}".encode())
        self.num_calls += 1
        self.world.log.weights[self.num_calls] = self.weights
        self.world.note(f"step {self.num_calls}: version {self.version}, weights {self.weights:08x}")
        norm = float("inf") if skipped else 1.0
        return OptimStepOutput(grad_norm=norm, lr=params.lr, policy_version=self.version, skipped=skipped)

    def reserve_weights(self, dtype: torch.dtype, transport: str) -> None:
        pass

    def push_weights(self, dtype: torch.dtype, transport: str, verify: bool, adapters_apart: bool = False) -> Manifest:
        self.world.store.held[self.version] = self.weights
        self.world.log.publications.append(self.version)
        return Manifest(version=self.version, entries={}, nbytes=0)

    def discard_weights(self, version: int) -> None:
        pass

    # Checkpoints.

    def stage_checkpoint(self, path: str) -> None:
        file = Path(path) / "model" / "weights.json"
        file.parent.mkdir(parents=True)
        log = self.world.log
        held = [self.version, self.weights, self.num_calls, log.publications, sorted(log.played)]
        file.write_text(json.dumps(held))
        ready = self.world.loop.time() + self.world.between(0.2, 8.0)
        self._staged = ready, checkpoint.checksums(Path(path), [file])

    def checkpoint_written(self) -> dict[str, list] | None:
        ready, files = self._staged
        if self.world.loop.time() < ready:
            return None
        self.world.may_fail("checkpoint", None)
        return files

    def load_checkpoint(self, path: str, policy_version: int) -> None:
        held, log = json.loads((Path(path) / "model" / "weights.json").read_text()), self.world.log
        self.version, self.weights, self.num_calls, publications, played = held
        log.loaded = (self.num_calls, self.version, policy_version)
        log.publications, log.had_played, log.played = publications[:-1], set(played), set(played)

    def remove_checkpoint(self, path: str) -> None:
        checkpoint.remove(Path(path))
