"""A family's torchtitan model as a vLLM model class."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from torchtitan_rl import platform
from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.engine.adapted_layers import AdaptedLayer, add_adapters
from torchtitan_rl.engine.kernels import pack_matrices
from torchtitan_rl.engine.layer_adapters import AdapterBatch
from torchtitan_rl.engine.layers import shard_for_rank, state_dtypes
from torchtitan_rl.engine.plan import adapted_layers, generator_spec
from torchtitan_rl.engine.routing_record import RoutingRecord
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.model.module_state import places
from torchtitan_rl.model.row_blocks import copy_all, row_blocks
from torchtitan_rl.model.spec import build_spec, with_positions
from torchtitan_rl.record.tracing import span

__all__ = ["EngineShape", "TorchtitanForCausalLM", "TorchtitanModel", "TorchtitanWithStates", "model_class"]


@dataclass(frozen=True)
class EngineShape:
    """The sizes of the model, as vLLM's `additional_config`: vLLM itself reads the config.json."""

    shape: DecoderShape
    record_routing: bool = False
    float32_head: bool = False
    adapters: LoRAConfig | None = None
    """What each of `num_adapters` slots for adapters has room for; None: there are no slots."""
    num_adapters: int = 0

    def compute_hash(self) -> str:
        """What vLLM asks of an additional config: equal for equal sizes."""
        return hashlib.sha256(repr((self.shape, self.adapters, self.num_adapters)).encode()).hexdigest()


class TorchtitanModel(nn.Module):
    """vLLM's model interface over torchtitan's decoder, built from the generator's spec.

    vLLM asks the class whether a model's layers keep states and whether the model may be compiled, so there are two:
    `TorchtitanForCausalLM` and `TorchtitanWithStates`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        sizes: EngineShape = vllm_config.additional_config
        shape, records = sizes.shape, sizes.record_routing
        self.tp_rank, self.tp_size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        # vLLM's warm-up may have as many positions as an iteration has tokens.
        longest = max(vllm_config.model_config.max_model_len, vllm_config.scheduler_config.max_num_batched_tokens)
        self.routing = RoutingRecord(shape) if records and self.tp_rank == 0 else None
        """What the routers of rank 0 choose, which the other ranks' choose too; None: nobody asks."""
        whole = with_positions(build_spec(ModelConfig(shape=shape)), longest)
        spec = generator_spec(whole, self.tp_size, self.routing, float32_head=sizes.float32_head)
        self.decoder = spec.model.build()
        self.decoder.requires_grad_(False)
        self.adapter_batch: AdapterBatch | None = None
        self._adapted: dict[str, AdaptedLayer] = {}
        """The layers with adapters, by torchtitan's name."""
        if sizes.adapters is not None:
            self.adapter_batch = AdapterBatch(sizes.num_adapters, sizes.adapters.rank)
            layers = adapted_layers(whole, sizes.adapters)
            self._adapted = add_adapters(self.decoder, layers, self.adapter_batch)
        pack_matrices(self.decoder)  # compiled code keeps the operators of its first call, which is before any weights

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.decoder.tok_embeddings(input_ids)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **kwargs) -> torch.Tensor:
        """Hidden states (T, D) of the scheduled tokens."""
        hidden = self.decoder.tok_embeddings(input_ids)[None] if inputs_embeds is None else inputs_embeds[None]
        if self.adapter_batch is not None:
            self.adapter_batch.begin(hidden.device, hidden.dtype)
        for layer in self.decoder.layers.values():
            hidden = layer(hidden, None, positions[None])
        return self.decoder.norm(hidden)[0]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.decoder.lm_head(hidden_states)

    def canonical_state(self) -> dict[str, torch.Tensor]:
        """This rank's parameters under torchtitan's names (fused QKV appears as wq, wk, wv)."""
        state = self.decoder.state_dict()
        return {name: tensor for name, tensor in state.items() if ".inner_attention." not in name}  # vLLM's own scales

    @cached_property
    def places(self) -> dict[str, torch.Tensor]:
        """The memory of this rank's parameters under torchtitan's names, see `module_state.places`."""
        return {name: place for name, place in places(self.decoder).items() if ".inner_attention." not in name}

    @cached_property
    def _parameter_names(self) -> set[str]:
        return {name for name, _ in self.named_parameters()}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copies whole tensors under torchtitan's names into this rank's parameters, in place; a tied head once.
        Returns the names of all parameters, for vLLM."""
        tensors = dict(weights)  # names and shapes were compared where the weights were fetched
        with span("copy weights"):
            copy_all(
                (place, shard_for_rank(name, tensors[name], self.tp_rank, self.tp_size).reshape(place.shape))
                for name, place in {id(place): (name, place) for name, place in self.places.items()}.values()
            )
        with span("pack matrices"):
            pack_matrices(self.decoder)
        return self._parameter_names

    @torch.inference_mode()
    def load_adapters(self, slot: int, tensors: dict[str, torch.Tensor]) -> bool:
        """Copies whole adapters under torchtitan's names into this rank's part of a slot. Returns whether they do
        anything: B of none is 0."""
        for _, place, part in self._adapter_places(slot, tensors):
            place.copy_(part)
        names = [f"{name}.lora_b.weight" for name in self._adapted]
        return any(bool(shard_for_rank(n, tensors[n], self.tp_rank, self.tp_size).any()) for n in names)

    @torch.inference_mode()
    def check_holds_adapters(self, slot: int, tensors: dict[str, torch.Tensor]) -> None:
        """Raises RuntimeError unless this rank holds its part of these whole adapters in a slot, bit for bit."""
        for name, place, part in self._adapter_places(slot, tensors):
            if not torch.equal(place, part.to(place.device)):
                raise RuntimeError(f"slot {slot}: the engine holds other values of {name} than were sent")

    def _adapter_places(
        self, slot: int, tensors: dict[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Of each tensor of whole adapters its name, its place in a slot and this rank's part."""
        for name, layer in self._adapted.items():
            names = (f"{name}.lora_a.weight", f"{name}.lora_b.weight")
            a, b = (shard_for_rank(n, tensors[n], self.tp_rank, self.tp_size) for n in names)
            parts = (a, b if layer.rows is None else layer.rows(b))
            yield from zip(names, layer.adapters.slot(slot, layer.index), parts, strict=True)

    @torch.inference_mode()
    def unequal_tie(self, weights: dict[str, torch.Tensor]) -> str:
        """The name of a tensor that shares its memory here with one before it, from which it differs; empty: none."""
        first: dict[int, str] = {}
        for name, place in self.places.items():
            tied = first.setdefault(id(place), name)
            one, other = weights[name], weights[tied]
            if one.data_ptr() != other.data_ptr() and _blocks_differ(one, other):
                return name
        return ""

    @torch.inference_mode()
    def check_holds(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Raises RuntimeError unless this rank holds its part of these whole tensors bit for bit."""
        by_owner: dict[str, dict[str, torch.Tensor]] = {}
        pairs = {(id(self.places[name]), tensor.data_ptr()): (name, tensor) for name, tensor in weights}  # a tie once
        for name, tensor in pairs.values():
            by_owner.setdefault(self._owners[name], {})[name] = tensor
        # The largest first: on a CPU a core takes one module after another, whose fused weights it copies apart.
        groups = sorted(by_owner.items(), key=lambda group: -sum(tensor.nbytes for tensor in group[1].values()))
        on_device = any(place.is_cuda for place in self.places.values())
        with span("compare weights"):
            compared = list(map(self._differing, groups)) if on_device else platform.in_threads(self._differing, groups)
        differ = {name: differs for group in compared for name, differs in group.items()}
        for name, differs in zip(differ, torch.stack(list(differ.values())).tolist()):  # the only wait for a GPU
            if differs:
                raise RuntimeError(f"policy_version={version}: the engine holds other values of {name} than were sent")

    @cached_property
    def _owners(self) -> dict[str, str]:
        """By each name of `canonical_state`, the smallest module whose state dict has that tensor."""
        modules, owners = dict(self.decoder.named_modules()), {}
        for name in self.places:
            owner = name.rpartition(".")[0]
            # No module has the name of a part of a fused weight.
            owners[name] = owner if owner in modules else owner.rpartition(".")[0]
        return owners

    def _differing(self, group: tuple[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Whether each of the tensors of one module differs from this rank's part of the whole tensor of its name."""
        owner, tensors = group
        state, differ = self.decoder.get_submodule(owner).state_dict(prefix=f"{owner}."), {}
        for name, tensor in tensors.items():
            loaded, expected = state[name], shard_for_rank(name, tensor, self.tp_rank, self.tp_size)
            differ[name] = _differ(loaded, expected.to(loaded.device, loaded.dtype, non_blocking=True))
        return differ


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0, "inputs_embeds": 0})
class TorchtitanForCausalLM(TorchtitanModel):
    """A model whose layers attend to keys and values."""


class TorchtitanWithStates(TorchtitanModel):
    """A model with layers that keep a state of each sequence instead of keys and values. It is never compiled."""

    is_hybrid = True
    has_inner_state = True

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """What one such layer keeps on a rank: channels of the convolution, and value heads, are shared by ranks."""
        (taps, channels), (heads, *state) = vllm_config.additional_config.shape.state_sizes
        ranks = vllm_config.parallel_config.tensor_parallel_size
        return (taps, channels // ranks), (heads // ranks, *state)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return state_dtypes(vllm_config.additional_config.shape.state_sizes, vllm_config.model_config.dtype)


def model_class(shape: DecoderShape) -> type[TorchtitanModel]:
    """The class that runs a model of these sizes. vLLM knows it by its name, once it is registered."""
    return TorchtitanWithStates if shape.state_sizes else TorchtitanForCausalLM


def _differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Whether two tensors of one shape and dtype have different bits, as a tensor of one boolean: no GPU is waited
    for."""
    if one.is_cuda:
        return (_bits(one) != _bits(other)).any()
    return torch.tensor(not torch.equal(_bits(one), _bits(other)))


def _blocks_differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors in host memory of one shape and dtype have different bits, compared by every core at once."""
    blocks = [(one[rows], other[rows]) for rows in row_blocks(one)]
    return not all(platform.in_threads(lambda block: torch.equal(_bits(block[0]), _bits(block[1])), blocks))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, in words as long as they fit: torch compares such words four times as fast as bfloat16."""
    flat = tensor.reshape(-1)
    fit = flat.nbytes % 8 == 0 and flat.storage_offset() * flat.itemsize % 8 == 0
    return flat.view(torch.int64 if fit else torch.uint8)
