"""How a trainer rank sends weights to the store."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.model import lora
from torchtitan_rl.model.module_state import fused_layers, fused_state, split
from torchtitan_rl.model.sharding import plain_name, whole
from torchtitan_rl.record.tracing import span
from torchtitan_rl.weights import layout, sharded_push
from torchtitan_rl.weights.finite import NotFinite
from torchtitan_rl.weights.payload import PayloadWriter
from torchtitan_rl.weights.pieces import AnyManifest, HeadRows
from torchtitan_rl.weights.trainer_shards import aliases_of
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
        self.n_kv_heads, self.lora, self.layers = n_kv_heads, config.lora, fused_layers(model)
        self.aliases = aliases_of(model)
        """Further name of a parameter -> the name by which a version has it."""
        self._base = ""
        """The name of the base that adapters are published for; empty: none is published."""
        self._base_fingerprint = ""
        """Empty until somebody asks."""
        # `named_parameters` lacks wq, wk and wv, which the state shows for the fused weight: subtract buffers instead.
        self.buffer_names = {plain_name(name) for name, _ in model.named_buffers()}

    async def push(
        self,
        version: int | str,
        dtype: torch.dtype | None,
        transport: str,
        verify: bool,
        *,
        only: str | None = None,
        merged: bool = True,
    ) -> AnyManifest | NotFinite | None:
        """Writes the weights to where others can read them, as `version`: a policy version, or a name for another
        trainer role. Adapters are merged in, or with `merged=False` left out. Parameters are cast to `dtype`; None
        keeps the trainer's. `only` names the one tensor to write.

        Rank 0 answers with the manifest, which nobody else knows until it is announced in the store, or with a tensor
        that is not finite, the first one; the others with None."""
        if transport == "store":
            return sharded_push.push(self, version, dtype, only, merged=merged)
        adapters = self.base_and_adapters()[1] if merged and self.lora is not None else {}
        stored, aliases = self._stored(), self.aliases
        if only is not None:
            stored, aliases = {only: stored[aliases.get(only, only)]}, {}
        manifest = layout.plan(version, self._described(stored), dtype)
        manifest.entries |= {name: manifest.entries[kept] for name, kept in aliases.items()}
        if dist.get_rank():
            for tensor in stored.values():
                whole(tensor)  # collective: every rank takes part, rank 0 uses the result
            return None
        handle, payload = self.buffers.take(version, manifest.nbytes)
        with span("publish weights"):
            writer = PayloadWriter(manifest, payload, verify=verify)
            for fused_name, tensor in stored.items():
                for name, part in split(fused_name, whole(tensor), self.layers).items():
                    if name in adapters:
                        part = lora.merge(name, part.reshape(manifest.entries[name].shape), adapters)
                    writer.add(name, part)
            not_finite = writer.finish()
        if not_finite:
            return NotFinite(version=version, tensor=not_finite)
        await self.store.keep(manifest, payload, handle=handle)
        return manifest

    def reserve(self, dtype: torch.dtype, transport: str) -> None:
        """Makes the memory of two versions, the one that generators hold and the next one, before the first is pushed.
        A collective call."""
        if transport == "store":
            nbytes = sharded_push.payload_bytes(self, dtype)
        elif dist.get_rank():
            return
        else:
            nbytes = layout.plan("", self._described(self._stored()), dtype).nbytes
        self.buffers.reserve(nbytes, 2)

    def _stored(self) -> dict[str, torch.Tensor]:
        """What a version has of the model, by name, each tensor once: not under its `aliases`."""
        state = lora.base_state(fused_state(self.model))
        return {name: tensor for name, tensor in state.items() if name not in self.aliases}

    async def push_adapters(
        self, version: int, dtype: torch.dtype, transport: str, verify: bool
    ) -> AnyManifest | NotFinite | None:
        """Writes the adapters alone as `version`, whole and cast to `dtype`, each B times alpha / rank. The first
        time, and the first after another base was loaded, it publishes the base before. Answers as `push` does."""
        assert self.lora is not None, "validation asks for trainer.lora"
        if not self._base:
            base = f"base-{self.base_fingerprint()}"
            written = await self.push(base, dtype, transport, verify, merged=False)
            if isinstance(written, NotFinite):
                written = NotFinite(version=version, tensor=written.tensor)
            elif written is not None:
                await self.store.announce(written)
            if _of_rank_0(isinstance(written, NotFinite)):
                return written
            self._base = base
        state = lora.adapter_state(fused_state(self.model))
        tensors = {name: whole(tensor) for name, tensor in state.items()}  # collective, so before any return
        if dist.get_rank():
            return None
        manifest = layout.plan(version, ((n, tuple(t.shape), t.dtype, True) for n, t in tensors.items()), dtype)
        manifest.base = self._base
        if transport == "store":
            handle, payload = "", torch.zeros(manifest.nbytes, dtype=torch.uint8)
        else:
            handle, payload = self.buffers.take(version, manifest.nbytes)
        with span("publish weights"):
            writer, scaling = PayloadWriter(manifest, payload, verify=verify), self.lora.alpha / self.lora.rank
            for name, tensor in tensors.items():
                writer.add(name, tensor * scaling if name.endswith(".lora_b.weight") else tensor)
            not_finite = writer.finish()
        if not_finite:
            return NotFinite(version=version, tensor=not_finite)
        await self.store.keep(manifest, payload, handle=handle)
        return manifest

    def base_has_changed(self) -> None:
        """Makes the next publication of adapters publish the base again, under another name. From then on only
        generators that hold the base before can load adapters of it."""
        self._base_fingerprint = ""
        if self._base:
            self.buffers.release(self._base)
            self._base = ""

    def base_fingerprint(self) -> str:
        """A hash of the frozen weights, computed once for each base; a collective call where it is."""
        self._base_fingerprint = self._base_fingerprint or lora.base_fingerprint(self.model.state_dict())
        return self._base_fingerprint

    def _described(self, state: dict[str, torch.Tensor]) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, bool]]:
        """What `layout.plan` asks about each tensor of a fused state: name, shape, dtype, whether it is a parameter."""
        for name, tensor in state.items():
            layer, shape = self.layers.get(name.rpartition(".wqkv.")[0]), tuple(tensor.shape)
            parts = (
                [(name, shape)] if layer is None else HeadRows(layer.heads_per_kv, layer.head_dim).shapes(name, shape)
            )
            for part, part_shape in parts:
                yield part, part_shape, tensor.dtype, name not in self.buffer_names

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


def _of_rank_0(answer: bool) -> bool:
    """The answer of rank 0, on every rank: only rank 0 knows of a tensor that is not finite. A collective call."""
    answers = [answer]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(answers, src=0)
    return answers[0]
