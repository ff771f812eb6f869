"""The operations of the workers of a mesh, and the parts that each operation needs on the device.

An operation has one name in four places: the method here, which says what it takes and needs; an endpoint of the actor
(`PolicyTrainer`, `Generator`); the method of the rank that does the work (`TrainerRank`, `GeneratorRank`); and, for
most of a trainer's, the method of `MeshTrainingClient`. `Replica`, `Repair` and `Placement` call a generator's.
Everybody above calls the client, which names the operation by the function here:
`mesh.call_split(TrainerOperations.forward_backward, shards, ...)`. A mesh of actors sends the call to the endpoint of
that name; a mesh in this process calls the rank. docs/extending.md adds an operation from end to end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from torchtitan_rl.types import LossFunction, Microbatch, OptimParams, OptimStepOutput, RankOutput, Request
from torchtitan_rl.weights.finite import NotFinite
from torchtitan_rl.weights.pieces import AnyManifest

__all__ = [
    "GENERATOR_PARTS",
    "TRAINED_ROLES",
    "TRAINER_PARTS",
    "VALUE_ROLES",
    "GeneratorOperations",
    "Operation",
    "TrainerOperations",
    "WorkerProcess",
    "needed_parts",
    "needs",
    "device_parts",
]

TRAINER_PARTS = ("model", "gradients", "optimizer")
GENERATOR_PARTS = ("weights", "kv_cache")  # in the order in which parts wake
TRAINED_ROLES = ("policy", "critic")
VALUE_ROLES = ("critic", "reward_model")  # one value per position where other roles have logits

Operation = Callable[..., Any]
"""A method of `TrainerOperations`, `GeneratorOperations` or `WorkerProcess`, as a function."""


def needs(*parts: str) -> Callable[[Operation], Operation]:
    """Says which parts an operation needs on the device, in the order of error messages. An operation that needs
    gradients needs a role that trains."""

    def mark(operation: Operation) -> Operation:
        operation.needs = parts  # type: ignore[attr-defined]  # read by `needed_parts`
        return operation

    return mark


def needed_parts(operation: Operation) -> tuple[str, ...]:
    """The parts that an operation needs on the device; empty: it runs wherever they are."""
    return getattr(operation, "needs", ())


class TrainerOperations(Protocol):
    """One rank of a trainer role. `TrainerRank` does the work; the actor `PolicyTrainer` passes calls on."""

    @needs("model")
    def forward(
        self, microbatches: list[Microbatch], temperature: float, top_k: int, hidden: bool, entropy: bool
    ) -> RankOutput:
        """Scores the rank's microbatches, in order."""

    @needs("model", "gradients")
    def forward_backward(
        self, microbatches: list[Microbatch], loss_fn: LossFunction, temperature: float, loss_weight: float
    ) -> RankOutput:
        """Adds the gradient of the rank's microbatches, in order."""

    @needs("model", "optimizer", "gradients")
    def optim_step(self, params: OptimParams, grad_scale: float) -> OptimStepOutput:
        """Clips the gradient, takes one optimizer step and zeroes the gradient."""

    @needs("optimizer", "gradients")
    def reset_optimizer(self) -> None:
        """Forgets moments and step count."""

    @needs("optimizer", "gradients")
    def begin_model(self, policy_version: int) -> None:
        """Forgets gradients and moments, and counts policy versions from `policy_version`."""

    # Weights, through the store.

    def reserve_weights(self, dtype: torch.dtype, transport: str) -> None:
        """Makes the memory that `push_weights` writes to."""

    @needs("model")
    def push_weights(
        self, dtype: torch.dtype, transport: str, verify: bool, adapters_apart: bool
    ) -> AnyManifest | NotFinite | int:
        """Writes the policy version to where generators can read it. Rank 0 returns the manifest, or which tensor is
        not finite; the others the version's number."""

    def discard_weights(self, version: int | str) -> None:
        """Frees the memory of a published version."""

    @needs("model")
    def push_copy(self, transport: str) -> None:
        """Publishes the weights for another trainer role."""

    @needs("model")
    def pull_copy(self) -> None:
        """Loads the weights that another trainer role published by `push_copy`."""

    @needs("model")
    def push_head(self, transport: str) -> None:
        """Publishes the head's weight for another trainer role."""

    @needs("model")
    def pull_head(self) -> None:
        """Holds the head that another trainer role published by `push_head`, as the head of a teacher."""

    # Files.

    @needs("model", "optimizer")
    def init_model(self, path: str) -> None:
        """Loads a Hugging Face directory or a checkpoint, and resets the optimizer."""

    @needs("model", "optimizer")
    def stage_checkpoint(self, path: str) -> None:
        """Copies the state to host memory, from where a thread writes it."""

    def checkpoint_written(self) -> dict[str, list] | None:
        """File -> [bytes, xxh3] of what the rank wrote; None while it writes."""

    def remove_checkpoint(self, path: str) -> None:
        """Deletes what the rank's host has of a checkpoint."""

    @needs("model", "optimizer", "gradients")
    def load_checkpoint(self, path: str, policy_version: int) -> None:
        """Loads parameters and optimizer, and drops the accumulated gradient."""

    @needs("model")
    def load_weights(self, path: str, policy_version: int) -> None:
        """Loads a checkpoint's parameters alone, and drops the accumulated gradient."""

    @needs("model")
    def save_hf_model(self, path: str, eos: int, pad: int) -> None:
        """Writes a Hugging Face directory; of a role with a value head, that of a sequence classifier."""

    @needs("model")
    def save_adapter(self, path: str) -> None:
        """Writes the LoRA adapters as a directory for PEFT."""

    @needs("model")
    def parameters(self) -> dict[str, torch.Tensor]:
        """Whole parameters."""

    @needs("model", "gradients")
    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Whole accumulated gradients."""

    @needs("model", "optimizer", "gradients")
    def moments(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Whole first and second moments of Adam."""

    # Several LoRA models over one base.

    @needs(*TRAINER_PARTS)
    def add_adapter(self, name: str, lora_rank: int, seed: int, parts: tuple[str, ...], policy_version: int) -> None:
        """Adds a model, which is in use afterwards."""

    @needs(*TRAINER_PARTS)
    def use_adapter(self, name: str) -> None:
        """Exchanges the model in use for another one that was added."""

    def drop_adapter(self, name: str) -> None:
        """Forgets a model."""

    @needs("gradients")
    def freeze_untrained(self) -> None:
        """Drops the gradients of adapters that do not train."""

    # The device, and what somebody sees of it.

    def offload(self, parts: list[str]) -> None:
        """Moves parts to host memory."""

    def onload(self, parts: list[str]) -> None:
        """Moves parts back to the device."""

    def residency(self) -> dict[str, int]:
        """Bytes of each part on the device."""

    def profile(self, file: str) -> None:
        """Begins to profile the rank's process; with `file`, ends and writes the trace there."""


class GeneratorOperations(Protocol):
    """One rank of a generator replica. `GeneratorRank` does the work; the actor `Generator` passes calls on."""

    @needs(*GENERATOR_PARTS)
    async def sample(self, ticket: int, requests: list[Request]) -> list[tuple[int, Any]]:
        """Admits requests under a ticket. Returns the answers that are there, each with the index of its request; the
        answer to one that was cancelled is None."""

    async def cancel(self, numbers: list[int]) -> None:
        """Gives up the requests with these `Request.number`: nobody waits for their answers, which are None."""

    async def fetch(self, manifest: AnyManifest, verify: bool) -> ValueError | None:
        """Stages the version of a manifest. Returns why the version does not fit this model."""

    async def fetch_hf(self, directory: str, version: int) -> None:
        """Stages the weights of a Hugging Face directory."""

    @needs("weights")
    async def load(self, version: int) -> float | ValueError:
        """Copies the staged version into the model. Returns the seconds for which the engine stood still, or why the
        version cannot be loaded."""

    @needs("weights")
    async def load_adapters(self, version: int, slot: int) -> float | ValueError:
        """Copies the staged adapters into a slot of the model, and the base that they are for if the model has another.
        Returns as `load` does."""

    async def probe(self) -> None:
        """Returns once the engine's thread has answered."""

    async def sleep(self) -> None:
        """Frees weights and KV cache on the device."""

    async def wake(self, part: str) -> None:
        """Brings `"weights"` or `"kv_cache"` back."""

    async def profile(self, file: str) -> None:
        """Begins to profile the rank's process; with `file`, ends and writes the trace there."""

    @needs("weights")
    async def weights(self) -> dict[str, torch.Tensor]:
        """The rank's parameters, in host memory."""

    async def modules(self) -> list[str]:
        """Class names of the model's modules."""

    async def abort(self) -> None:
        """Ends the rank's process at once."""


class WorkerProcess(Protocol):
    """A process of a mesh: the actors `PolicyTrainer` and `Generator`."""

    async def pid(self) -> int:
        """The process id."""

    async def setup(self) -> None:
        """Builds the rank."""


def device_parts(role: str) -> tuple[str, ...]:
    """The parts that a role holds on the device."""
    if role == "generator":
        return GENERATOR_PARTS
    return TRAINER_PARTS if role in TRAINED_ROLES else ("model",)
