"""Calls to a trainer role, whole: a step's, and those for scores, weights, checkpoints and exports."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path

import torch

from torchtitan_rl.dispatch.training_steps import TrainingSteps
from torchtitan_rl.types import Datum, ForwardBackwardOutput

__all__ = ["TrainingClient"]

_POLL_S, _LONGEST_POLL_S = 0.02, 0.5  # pauses between questions whether a checkpoint is on disk


class TrainingClient(TrainingSteps):
    """Scores and trains one model that lives on a mesh: the policy, or a reference, critic or teacher.

    `forward_backward`, `forward` and `optim_step` send their messages at once and return a future, so a caller may
    submit several before the first is awaited. Calls run in the order they were submitted.
    """

    def forward(
        self, data: list[Datum], *, temperature: float | None = None, top_k: int = 0, hidden: bool = False
    ) -> asyncio.Future[ForwardBackwardOutput]:
        """Log-probabilities of the data's targets, or a critic's values; no gradient.

        `top_k` adds the likeliest tokens of each position; of equally likely tokens the lower id comes first. `hidden`
        adds the states that enter the head. Raises ValueError as `forward_backward` does, for a `top_k` beyond the
        vocabulary, and for `top_k` or `hidden` of a critic.
        """
        if not 0 <= top_k <= self._vocab_size:
            raise ValueError(
                f"forward.top_k={top_k}: must be between 1 and the vocabulary's {self._vocab_size}; use 0 for none"
            )
        if (top_k or hidden) and self._mesh.role == "critic":
            raise ValueError(
                "forward: role='critic' has a value head, neither tokens nor states to learn from; ask "
                "another role for top_k or hidden"
            )
        temperature = self._temperature if temperature is None else temperature
        sent = [
            dataclasses.replace(datum, loss_inputs={}) for datum in data
        ]  # none is read, and hidden states are large
        return self._submit("forward", data, sent, temperature, top_k, hidden)

    async def profile(self, role: str, rank: int, file: str) -> None:
        """Begins to profile a rank of this role; with `file`, ends and writes the trace there."""
        assert role == self._mesh.role
        await self._mesh.call_rank(rank, "profile", file)

    def reset_optimizer(self) -> asyncio.Future[None]:
        """Forgets the optimizer's moments and step count."""
        return self._call("reset_optimizer")

    def begin_model(self, policy_version: int) -> asyncio.Future[None]:
        """Forgets gradients and moments, and counts policy versions from `policy_version`."""
        return self._call("begin_model", policy_version)

    def add_adapter(
        self, name: str, *, lora_rank: int, seed: int, parts: tuple[str, ...], policy_version: int
    ) -> asyncio.Future[None]:
        """Adds a LoRA model over the same base, which later calls train and score; `parts` of "attention" and "mlp" get
        adapters that train. `policy_version` is the version of the fresh model."""
        return self._call("add_adapter", name, lora_rank, seed, parts, policy_version)

    def use_adapter(self, name: str) -> asyncio.Future[None]:
        """Makes a model that was added the one which later calls train and score."""
        return self._call("use_adapter", name)

    def drop_adapter(self, name: str) -> asyncio.Future[None]:
        """Forgets a model that was added."""
        return self._call("drop_adapter", name)

    def freeze_untrained(self) -> asyncio.Future[None]:
        """Drops the gradients of the model's adapters that are not among its `parts`."""
        return self._call("freeze_untrained")

    async def push_copy(self, transport: str) -> None:
        """Pushes the weights in the trainer's own dtype, for another role's `pull_copy`."""
        await self._call("push_copy", transport)

    async def pull_copy(self) -> None:
        """Replaces the weights by the ones that another role's `push_copy` has pushed."""
        await self._call("pull_copy")

    async def push_head(self, transport: str) -> None:
        """Pushes the head alone, in the trainer's own dtype, for another role's `pull_head`."""
        await self._call("push_head", transport)

    async def pull_head(self) -> None:
        """Keeps the head that another role's `push_head` has pushed, as the head of the teacher."""
        await self._call("pull_head")

    async def init_model(self, path: Path) -> None:
        """Loads the weights of a Hugging Face directory or a complete checkpoint, and forgets the optimizer's state."""
        await self._call("init_model", str(path))

    async def save_checkpoint(self, path: Path) -> None:
        """Writes the parameters that train (with LoRA: the adapters) and their optimizer state, one shard per rank, in
        parallel."""
        await self.stage_checkpoint(path)
        await self.checkpoint_written()

    async def stage_checkpoint(self, path: Path) -> None:
        """Begins to write a checkpoint. Returns once its state is copied to host memory and training may go on."""
        await self._call("stage_checkpoint", str(path))

    async def checkpoint_written(self) -> dict[str, list]:
        """Waits until the staged checkpoint is on disk. Returns the path below the checkpoint of each file -> [bytes,
        xxh3]. Raises RuntimeError when a rank could not write, and after the deadline of a call."""
        end = time.monotonic() + self._mesh.timeout_s
        pause_s = _POLL_S
        while None in (written := await self._run("checkpoint_written", self._ask_written)):
            if time.monotonic() > end:
                raise RuntimeError(
                    f"{self._mesh.role}.checkpoint_written: not on disk after {self._mesh.timeout_s:g} s; use a faster "
                    "file system, or raise controller.call_timeout_s"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        return {name: entry for of_rank in written for name, entry in of_rank.items()}

    def _ask_written(self) -> asyncio.Future[list]:
        return self._mesh.call_each("checkpoint_written")

    async def remove_checkpoint(self, path: Path) -> None:
        """Deletes a checkpoint on every host that holds a part of it."""
        await self._call("remove_checkpoint", str(path))

    async def load_checkpoint(self, path: Path, *, policy_version: int = 0, optimizer: bool = True) -> None:
        """Loads a checkpoint of any layout into the role's layout; with `optimizer=False` the weights alone. The
        controller owns the learning-rate schedule."""
        await self._call("load_checkpoint" if optimizer else "load_weights", str(path), policy_version)

    async def save_hf_model(self, path: Path, *, eos: int, pad: int) -> None:
        """Writes a Hugging Face directory that transformers and vLLM can load, with LoRA's adapters merged in."""
        await self._call("save_hf_model", str(path), eos, pad)

    async def save_adapter(self, path: Path) -> None:
        """Writes LoRA's adapters alone, as a directory that PEFT can load. Raises RuntimeError without LoRA."""
        await self._call("save_adapter", str(path))

    async def parameters(self) -> dict[str, torch.Tensor]:
        """Whole parameters by torchtitan's names; for small models."""
        return (await self._run("parameters", lambda: self._mesh.call_each("parameters")))[0]

    async def gradients(self) -> dict[str, torch.Tensor | None]:
        """Whole accumulated gradients by torchtitan's names; for small models."""
        return (await self._run("gradients", lambda: self._mesh.call_each("gradients")))[0]

    async def residency(self) -> list[dict[str, int]]:
        """Per rank, the bytes of model, optimizer and gradients on the device now. Moves nothing."""
        return await self._mesh.call_each("residency")
