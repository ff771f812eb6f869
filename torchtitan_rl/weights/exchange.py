"""A trainer rank's end of the weight store: versions for generators, copies and heads for other trainer roles."""

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

_COPY, _HEAD = "copy", "head"  # the store's keys of weights on their way from one trainer role to another
_HEAD_WEIGHT = "lm_head.weight"


class WeightExchange:
    """Sends one model's weights to the store and takes over what other roles have put there.

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
        """`tensor_parallel`: this rank among those that share the vocabulary, and their number."""
        self.model, self.role, self.device, self.store = model, role, device, store
        self.buffers = SharedBuffers()
        self._n_kv_heads, self._config, self._tensor_parallel = n_kv_heads, config, tensor_parallel

    async def push(self, version: int, dtype: torch.dtype, transport: str, verify: bool) -> None:
        """Publishes the weights as this policy version, parameters cast to `dtype`, adapters merged in."""
        await self._publish(version, dtype, transport, verify)

    async def push_copy(self, transport: str) -> None:
        """Publishes the weights as they are, for another trainer role to pull; the generators' dtype has no say."""
        await self._publish(_COPY, None, transport, True)

    async def pull_copy(self) -> None:
        """Takes over the weights that another role has published by `push_copy`, whatever the two layouts; a critic all
        but the head."""
        manifest, payload = await self.store.fetch(_COPY, verify=True)
        own = {_HEAD_WEIGHT} if self.role == "critic" else set()
        held = {name: (tuple(t.shape), t.dtype) for name, t in self.model.state_dict().items() if name not in own}
        offered = {name: entry for name, entry in manifest.entries.items() if name not in own}
        if difference := layout.explain_difference(offered, held):
            raise RuntimeError(f"{self.role}.pull_copy: the published weights do not fit this model: {difference}")
        load_whole(self.model, {n: t for n, t in layout.read(payload, manifest).items() if n not in own}, self.device)

    async def push_head(self, transport: str) -> None:
        """Publishes the head's weight as it is, for another trainer role to hold as its teacher's."""
        if self.role == "critic":
            raise ValueError("role='critic': has a value head, which no policy can learn from; copy another role's")
        await self._publish(_HEAD, None, transport, True, only=_HEAD_WEIGHT)

    async def pull_head(self) -> None:
        """Holds what another role published by `push_head`, each tensor-parallel rank its slice of the vocabulary."""
        if self.role == "critic":
            raise ValueError("role='critic': has no vocabulary to compare with a teacher's; give it to the policy")
        manifest, payload = await self.store.fetch(_HEAD, verify=True)
        weight = layout.read(payload, manifest)[_HEAD_WEIGHT]
        compute_dtype = getattr(torch, self._config.training.mixed_precision_param)  # as the policy's own head is used
        head: Any = self.model.lm_head
        head.hold_teacher(weight.to(compute_dtype), *self._tensor_parallel)

    def discard_weights(self, version: int | str) -> None:
        """Lets a published version's memory be used again."""
        self.buffers.release(version)

    def close(self) -> None:
        """Gives the published versions' memory back, for a process that lives on."""
        self.buffers.close()

    def base_and_adapters(self) -> tuple[dict[str, torch.Tensor], lora.Adapters]:
        """The state of the model as it is without LoRA, and what `lora.merge` adds to it; with LoRA a collective
        call."""
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
        # The fused QKV weight shows as wq, wk and wv, so what is not a buffer by name is a parameter.
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
            weight = whole(tensor)  # collective: every rank takes part, rank 0 keeps the result
            if publisher:
                layout.write(payload, manifest, name, lora.merge(name, weight, adapters) if adapters else weight)
        if publisher:
            if self.device.type == "cuda":  # once, for all copies
                torch.cuda.current_stream().synchronize()
            await self.store.publish(manifest, payload, handle=handle, verify=verify)
