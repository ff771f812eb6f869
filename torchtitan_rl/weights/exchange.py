"""How a trainer rank sends weights to the store."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.model import lora
from torchtitan_rl.model.sharding import plain_name
from torchtitan_rl.weights import layout, sharded_push
from torchtitan_rl.weights.finite import FiniteCheck
from torchtitan_rl.weights.versioned import VersionedStore

__all__ = ["WeightExchange"]


class WeightExchange:
    """Sends one model's weights to the store: versions for generators, and what `RoleCopies` sends to other roles.

    Every rank of the model's mesh makes the same calls: gathering a sharded tensor is a collective call, and rank 0
    writes.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        n_kv_heads: int,
        config: TrainerConfig,
        device: torch.device,
        store: VersionedStore,
    ):
        self.model, self.device, self.store = model, device, store
        self.buffers, self.pieces = layout.SharedBuffers(), sharded_push.Publisher()
        self.n_kv_heads, self.lora = n_kv_heads, config.lora
        # `named_parameters` lacks wq, wk and wv, which the state shows for the fused weight: subtract buffers instead.
        self.buffer_names = {plain_name(name) for name, _ in model.named_buffers()}

    async def push(
        self, version: int | str, dtype: torch.dtype | None, transport: str, verify: bool, *, only: str | None = None
    ) -> str:
        """Publishes the weights as `version`, adapters merged in: a policy version, or a name for another trainer role.
        Parameters are cast to `dtype`; None keeps the trainer's. `only` names the one tensor to publish.

        Weights that are not finite are not published: the answer of the rank that would publish is the name of the
        first such tensor. Empty: all is well, or another rank looks."""
        if transport == "store":
            return await sharded_push.push(self, version, dtype, only)
        state, adapters = self.base_and_adapters()
        if only is not None:
            state = {only: state[only]}
        tensors = ((name, t.shape, t.dtype, name not in self.buffer_names) for name, t in state.items())
        manifest = layout.plan(version, tensors, dtype)
        publisher = dist.get_rank() == 0
        handle, payload, check = "", None, FiniteCheck()
        if publisher:
            handle, payload = self.buffers.take(version, manifest.nbytes)
        for name, tensor in state.items():
            # Collective: every rank takes part, rank 0 uses the result.
            weight = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if publisher:
                merged = lora.merge(name, weight, adapters) if adapters else weight
                layout.write(payload, manifest, name, merged)
                check.add(name, merged, manifest.entries[name].view(payload))
        if publisher:
            if self.device.type == "cuda":  # one wait for all asynchronous copies
                torch.cuda.current_stream().synchronize()
            if first := check.first():
                return first
            await self.store.publish(manifest, payload, handle=handle, verify=verify)
        return ""

    def discard_weights(self, version: int | str) -> None:
        """Frees a published version's segment for the next publication."""
        self.buffers.release(version)

    def close(self) -> None:
        """Closes the segments of all published versions, for a process that lives on."""
        self.pieces.close()
        self.buffers.close()

    def base_and_adapters(self) -> tuple[dict[str, torch.Tensor], lora.Adapters]:
        """The state without adapters, and the whole adapters for `lora.merge` (LoRA only, then a collective call)."""
        state = self.model.state_dict()
        if self.lora is None:
            return state, {}
        return lora.base_state(state), lora.whole_adapters(state, self.n_kv_heads, self.lora)
