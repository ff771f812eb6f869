"""How a trainer rank uses the weight store: versions for generators, copies and heads for other trainer roles."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torchtitan_rl.config.actors import TrainerConfig
from torchtitan_rl.model import lora
from torchtitan_rl.model.sharding import load_whole, plain_name, whole
from torchtitan_rl.weights import layout
from torchtitan_rl.weights.shared_memory import SharedBuffers
from torchtitan_rl.weights.versioned import VersionedStore

__all__ = ["WeightExchange"]

_COPY, _HEAD = "copy", "head"  # the store's keys of weights that one trainer role sends to another
_HEAD_WEIGHT = "lm_head.weight"


class WeightExchange:
    """Sends one model's weights to the store and loads weights that other trainer roles have sent.

    Every rank of the model's mesh makes the same calls: gathering a sharded tensor is a collective call, and rank 0
    writes.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        role: str,
        n_kv_heads: int,
        config: TrainerConfig,
        device: torch.device,
        tensor_parallel: tuple[int, int],
        store: VersionedStore,
    ):
        """`tensor_parallel`: this rank's index in the tensor-parallel group, and the group's size."""
        self.model, self.role, self.device, self.store = model, role, device, store
        self.buffers = SharedBuffers()
        self._n_kv_heads, self._config, self._tensor_parallel = n_kv_heads, config, tensor_parallel

    async def push(self, version: int, dtype: torch.dtype, transport: str, verify: bool) -> None:
        """Publishes the weights as policy version `version`, parameters cast to `dtype`, adapters merged in."""
        await self._publish(version, dtype, transport, verify)

    async def push_copy(self, transport: str) -> None:
        """Publishes the weights in the trainer's dtype, adapters merged in, for another trainer role to pull."""
        await self._publish(_COPY, None, transport, True)

    async def pull_copy(self) -> None:
        """Loads the weights that another role published by `push_copy`; the roles' layouts may differ. A critic keeps
        the value head. Raises RuntimeError when the published weights do not fit the model."""
        manifest, payload = await self.store.fetch(_COPY, verify=True)
        own = {_HEAD_WEIGHT} if self.role == "critic" else set()
        held = {name: (tuple(t.shape), t.dtype) for name, t in self.model.state_dict().items() if name not in own}
        offered = {name: entry for name, entry in manifest.entries.items() if name not in own}
        if difference := layout.explain_difference(offered, held):
            raise RuntimeError(f"{self.role}.pull_copy: the published weights do not fit this model: {difference}")
        load_whole(self.model, {n: t for n, t in layout.read(payload, manifest).items() if n not in own}, self.device)

    async def push_head(self, transport: str) -> None:
        """Publishes the head's weight in the trainer's dtype, for another trainer role to hold as a teacher's head."""
        if self.role == "critic":
            raise ValueError("role='critic': has a value head, which no policy can learn from; copy another role's")
        await self._publish(_HEAD, None, transport, True, only=_HEAD_WEIGHT)

    async def pull_head(self) -> None:
        """Holds the head that another role published by `push_head`: each tensor-parallel rank a vocabulary slice."""
        if self.role == "critic":
            raise ValueError("role='critic': has no vocabulary to compare with a teacher's; give it to the policy")
        manifest, payload = await self.store.fetch(_HEAD, verify=True)
        weight = layout.read(payload, manifest)[_HEAD_WEIGHT]
        compute_dtype = getattr(torch, self._config.training.mixed_precision_param)  # the head's dtype
        head: Any = self.model.lm_head
        head.hold_teacher(weight.to(compute_dtype), *self._tensor_parallel)

    def discard_weights(self, version: int | str) -> None:
        """Frees a published version's segment for the next publication."""
        self.buffers.release(version)

    def close(self) -> None:
        """Closes the segments of all published versions, for a process that lives on."""
        self.buffers.close()

    def base_and_adapters(self) -> tuple[dict[str, torch.Tensor], lora.Adapters]:
        """The model's state without adapters, and the whole adapters for `lora.merge` (empty without LoRA). With LoRA a
        collective call."""
        state = self.model.state_dict()
        if self._config.lora is None:
            return state, {}
        return lora.base_state(state), lora.whole_adapters(state, self._n_kv_heads, self._config.lora)

    async def _publish(
        self, version: int | str, dtype: torch.dtype | None, transport: str, verify: bool, *, only: str | None = None
    ) -> None:
        state, adapters = self.base_and_adapters()
        if only is not None:
            state = {only: state[only]}
        # `named_parameters` lacks wq, wk and wv, which the state shows for the fused weight: subtract buffers instead.
        buffers = {plain_name(name) for name, _ in self.model.named_buffers()}
        manifest = layout.plan(
            version, ((name, t.shape, t.dtype, name not in buffers) for name, t in state.items()), dtype
        )
        publisher = dist.get_rank() == 0
        handle, payload = "", None
        if publisher and transport == "shared_memory":
            handle, payload = self.buffers.take(version, manifest.nbytes)
        elif publisher:
            payload = torch.zeros(manifest.nbytes, dtype=torch.uint8)
        for name, tensor in state.items():
            weight = whole(tensor)  # collective: every rank takes part, rank 0 uses the result
            if publisher:
                layout.write(payload, manifest, name, lora.merge(name, weight, adapters) if adapters else weight)
        if publisher:
            if self.device.type == "cuda":  # one wait for all asynchronous copies
                torch.cuda.current_stream().synchronize()
            await self.store.publish(manifest, payload, handle=handle, verify=verify)
