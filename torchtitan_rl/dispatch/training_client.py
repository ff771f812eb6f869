"""A trainer role as everything above drives it. Layers above see no rank, no data-parallel size, no microbatch and no
filler row."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from pathlib import Path

import torch

from torchtitan_rl.types import Datum, ForwardBackwardOutput, LossFunction, OptimParams, OptimStepOutput
from torchtitan_rl.weights.pieces import AnyManifest

__all__ = ["TrainingClient"]


class TrainingClient(ABC):
    """Scores and trains one model: the policy, or a reference, critic, teacher or reward model.

    There are two. `MeshTrainingClient` drives a mesh of this run's own actors, or of objects in this process.
    `RemoteTrainingClient` drives a service that speaks Tinker's protocol. It raises RuntimeError for a call that the
    protocol does not have.

    Methods that are no coroutines (`forward`, `forward_backward`, `optim_step`, `push_weights`, those of optimizer and
    adapters) send their messages at once and return a future, so a caller may submit several before the first is
    awaited. Calls run in the order they were submitted.
    """

    @abstractmethod
    def forward_backward(
        self,
        data: list[Datum],
        loss_fn: LossFunction,
        *,
        loss_config: dict[str, float] | None = None,
        loss_weight: float = 1.0,
        temperature: float | None = None,
    ) -> asyncio.Future[ForwardBackwardOutput]:
        """Adds the gradient of `loss_weight` x the summed loss of the data. Gradients accumulate over calls.

        `loss_config` holds keyword arguments of the loss. `temperature` divides the logits; its default is the run's
        sampling temperature. Raises ValueError for an empty list, for a datum longer than the trainer's context, and
        for datums that differ in their loss inputs or in their number of targets per token.
        """

    @abstractmethod
    def optim_step(
        self, params: OptimParams | None = None, *, grad_scale: float = 1.0
    ) -> asyncio.Future[OptimStepOutput]:
        """Clips `grad_scale` x the accumulated gradient, takes one optimizer step and zeroes the gradient."""

    @abstractmethod
    def forward(
        self,
        data: list[Datum],
        *,
        temperature: float | None = None,
        top_k: int = 0,
        hidden: bool = False,
        entropy: bool = False,
    ) -> asyncio.Future[ForwardBackwardOutput]:
        """Log-probabilities of the data's targets, or a critic's values; no gradient.

        `top_k` adds the likeliest tokens of each position; of equally likely tokens the lower id comes first. `hidden`
        adds the states that enter the head, `entropy` the entropy at each position. Raises ValueError as
        `forward_backward` does, for a `top_k` beyond the vocabulary, and for any of the three of a critic.
        """

    @abstractmethod
    def reset_optimizer(self) -> asyncio.Future[None]:
        """Forgets the optimizer's moments and step count."""

    # Several models over one base.

    @abstractmethod
    def begin_model(self, policy_version: int) -> asyncio.Future[None]:
        """Forgets gradients and moments, and counts policy versions from `policy_version`."""

    @abstractmethod
    def add_adapter(
        self, name: str, *, lora_rank: int, seed: int, parts: tuple[str, ...], policy_version: int
    ) -> asyncio.Future[None]:
        """Adds a LoRA model over the same base, which later calls train and score; `parts` of "attention" and "mlp" get
        adapters that train. `policy_version` is the version of the fresh model."""

    @abstractmethod
    def use_adapter(self, name: str) -> asyncio.Future[None]:
        """Makes a model that was added the one which later calls train and score."""

    @abstractmethod
    def drop_adapter(self, name: str) -> asyncio.Future[None]:
        """Forgets a model that was added."""

    @abstractmethod
    def freeze_untrained(self) -> asyncio.Future[None]:
        """Drops the gradients of the model's adapters that are not among its `parts`."""

    # Weights for generators and other roles.

    @abstractmethod
    def push_weights(
        self, dtype: torch.dtype, transport: str, verify: bool, adapters_apart: bool = False
    ) -> asyncio.Future[AnyManifest]:
        """Writes the current policy version, with `adapters_apart` its adapters alone, to where generators can read it,
        and returns its manifest. `dispatch.versions.PolicyVersions` calls this, and makes the version visible. Raises
        WeightsNotFinite for weights with a NaN or an infinity."""

    @abstractmethod
    async def discard_weights(self, version: int | str) -> None:
        """Frees the memory of a version that was pushed."""

    @abstractmethod
    async def push_copy(self, transport: str) -> None:
        """Pushes the weights in the trainer's own dtype, for another role's `pull_copy`."""

    @abstractmethod
    async def pull_copy(self) -> None:
        """Replaces the weights by the ones that another role's `push_copy` has pushed."""

    @abstractmethod
    async def push_head(self, transport: str) -> None:
        """Pushes the head alone, in the trainer's own dtype, for another role's `pull_head`."""

    @abstractmethod
    async def pull_head(self) -> None:
        """Keeps the head that another role's `push_head` has pushed, as the head of the teacher."""

    # Checkpoints and exports.

    @abstractmethod
    async def init_model(self, path: Path) -> None:
        """Loads the weights of a Hugging Face directory or a complete checkpoint, and forgets the optimizer's state."""

    async def save_checkpoint(self, path: Path) -> None:
        """Writes the parameters that train (with LoRA: the adapters) and their optimizer state."""
        await self.stage_checkpoint(path)
        await self.checkpoint_written()

    @abstractmethod
    async def stage_checkpoint(self, path: Path) -> None:
        """Begins to write a checkpoint. Returns once its state is copied to host memory and training may go on."""

    @abstractmethod
    async def checkpoint_written(self) -> dict[str, list]:
        """Waits until the staged checkpoint is on disk. Returns the path below the checkpoint of each file -> [bytes,
        xxh3]. Raises RuntimeError when a rank could not write, and after the deadline of a call."""

    @abstractmethod
    async def remove_checkpoint(self, path: Path) -> None:
        """Deletes a checkpoint on every host that holds a part of it."""

    @abstractmethod
    async def load_checkpoint(self, path: Path, *, policy_version: int = 0, optimizer: bool = True) -> None:
        """Loads a checkpoint of any layout into the role's layout; with `optimizer=False` the weights alone. The
        accumulated gradient is dropped. The controller owns the learning-rate schedule."""

    @abstractmethod
    async def save_hf_model(self, path: Path, *, eos: int, pad: int) -> None:
        """Writes a Hugging Face directory that transformers and vLLM can load, with LoRA's adapters merged in; of a
        critic the directory of a sequence classifier."""

    @abstractmethod
    async def save_adapter(self, path: Path) -> None:
        """Writes LoRA's adapters alone, as a directory that PEFT can load. Raises RuntimeError without LoRA."""

    # A look inside.

    @abstractmethod
    async def parameters(self) -> dict[str, torch.Tensor]:
        """Whole parameters by torchtitan's names; for small models."""

    @abstractmethod
    async def gradients(self) -> dict[str, torch.Tensor | None]:
        """Whole accumulated gradients by torchtitan's names; for small models."""

    @abstractmethod
    async def moments(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Whole first and second moments of Adam by torchtitan's names, of the parameters that have taken a step; for
        small models."""

    @abstractmethod
    async def residency(self) -> list[dict[str, int]]:
        """Per rank, the bytes of model, optimizer and gradients on the device now. Moves nothing."""

    @abstractmethod
    async def profile(self, role: str, rank: int, file: str) -> None:
        """Begins to profile a rank of this role; with `file`, ends and writes the trace there."""
