"""Weights from one trainer role to another through the store: copies of a model, and heads for distillation."""

from __future__ import annotations

from typing import Any

import torch

from torchtitan_rl.model.sharding import load_whole
from torchtitan_rl.weights import layout
from torchtitan_rl.weights.difference import explain_difference
from torchtitan_rl.weights.finite import NotFinite
from torchtitan_rl.weights.pieces import AnyManifest

__all__ = ["RoleCopies"]

_COPY, _HEAD = "copy", "head"  # the store's keys of weights that one trainer role sends to another
_HEAD_WEIGHT = "lm_head.weight"


class RoleCopies:
    """One rank's part in sending and loading copies; every rank of the mesh makes the same calls."""

    def __init__(self, rank: Any):
        """`rank` is the `TrainerRank` that sends or loads."""
        self.rank, self.exchange = rank, rank.exchange

    async def push_copy(self, transport: str) -> None:
        """Publishes the weights in the trainer's dtype, adapters merged in, for another trainer role to pull."""
        await self._announce(await self.exchange.push(_COPY, None, transport, True))

    async def pull_copy(self) -> None:
        """Loads the weights that another role published by `push_copy`; the roles' layouts may differ. A critic keeps
        the value head. Raises RuntimeError when the published weights do not fit the model."""
        manifest, payload = await self.exchange.store.fetch(_COPY, verify=True)
        own = {_HEAD_WEIGHT} if self.rank.role == "critic" else set()
        loaded = {
            name: (tuple(t.shape), t.dtype) for name, t in self.rank.model.state_dict().items() if name not in own
        }
        offered = {name: entry for name, entry in manifest.entries.items() if name not in own}
        if difference := explain_difference(offered, loaded):
            raise RuntimeError(f"{self.rank.role}.pull_copy: the published weights do not fit this model: {difference}")
        tensors = {name: tensor for name, tensor in layout.read(payload, manifest).items() if name not in own}
        load_whole(self.rank.model, tensors, self.rank.device)

    async def push_head(self, transport: str) -> None:
        """Publishes the head's weight in the trainer's dtype, for another trainer role to hold as a teacher's head."""
        if self.rank.role == "critic":
            raise ValueError("role='critic': has a value head, which no policy can learn from; copy another role's")
        await self._announce(await self.exchange.push(_HEAD, None, transport, True, only=_HEAD_WEIGHT))

    async def _announce(self, written: AnyManifest | NotFinite | None) -> None:
        """On rank 0, lets other roles see what was written. Raises RuntimeError for weights that are not finite."""
        if isinstance(written, NotFinite):
            raise RuntimeError(
                f"{self.rank.role}: {written.tensor} has a NaN or an infinity, so no other role gets these weights; go "
                "on from an earlier checkpoint"
            )
        if written is not None:
            await self.exchange.store.announce(written)

    async def pull_head(self) -> None:
        """Holds the head that another role published by `push_head`: each tensor-parallel rank a vocabulary slice."""
        if self.rank.role == "critic":
            raise ValueError("role='critic': has no vocabulary to compare with a teacher's; give it to the policy")
        manifest, payload = await self.exchange.store.fetch(_HEAD, verify=True)
        weight = layout.read(payload, manifest)[_HEAD_WEIGHT]
        compute_dtype = getattr(torch, self.rank.config.training.mixed_precision_param)  # the head's dtype
        head: Any = self.rank.model.lm_head
        head.hold_teacher(weight.to(compute_dtype), *self.rank.tensor_parallel)
