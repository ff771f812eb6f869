"""Families with a mistake each. `certify` must break on every one, with a line that names the part.

A fault stands where a person makes it: in the torchtitan config that a family builds, in its adapter, in its parallel
plan.
"""

import dataclasses
import itertools
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.common import ComplexRoPE, CosSinRoPE
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

from torchtitan_rl.families import Llama3Shape, Qwen2Shape, Qwen3Shape, Qwen35Shape
from torchtitan_rl.families.delta_net import DeltaKernel
from torchtitan_rl.model.attention import PackedDocuments
from torchtitan_rl.weights import layout
from torchtitan_rl.weights.versioned import MemoryStore


def altered(family, change):
    """The family with another spec: `change` gets the spec and the shape, and returns what differs of the spec."""

    class Altered(family):
        def model_spec(self):
            spec = super().model_spec()
            return dataclasses.replace(spec, **(change(spec, self) or {}))

    return Altered


def layers(change):
    """A fault in the config of every layer."""
    return lambda spec, shape: [change(layer, shape) for layer in spec.model.layers] and None


# The rotary embedding.


class PairRotation(CosSinRoPE):
    """Pairs dimension 2i with 2i + 1, where the family's embedding pairs i with i + dim / 2."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def forward(self, xq, xk, positions=None):
        pairs = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (xq, xk))
        rotated = super().forward(*pairs, positions)
        return tuple(x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for x in rotated)


def pair_rotation(layer, shape):
    layer.attention.rope = PairRotation.Config(
        dim=shape.head_dim, max_seq_len=shape.max_seq_len, theta=shape.rope_theta
    )


def half_rotation(layer, shape):
    layer.attention.rope = CosSinRoPE.Config(dim=shape.head_dim, max_seq_len=shape.max_seq_len, theta=shape.rope_theta)


def unscaled(layer, shape):
    layer.attention.rope = ComplexRoPE.Config(dim=shape.head_dim, max_seq_len=shape.max_seq_len, theta=shape.rope_theta)


def same_amplitude(layer, shape):
    layer.attention.rope.amplitude = 1.0


def ordered_as_hugging_face(spec, shape):
    class Adapter(Llama3StateDictAdapter):
        def _permute(self, w, *sizes, **more):
            return w

        def _reverse_permute(self, w, *sizes, **more):
            return w

    return dict(state_dict_adapter=Adapter)


# Parameters.


def no_bias(layer, shape):
    linear = layer.attention.qkv_linear
    linear.wqkv = dataclasses.replace(linear.wqkv, bias=False)


def no_head_norms(layer, shape):
    layer.attention.qk_norm = None


def untied(spec, shape):
    spec.model.enable_weight_tying = False


def gate_is_up(spec, shape):
    def adapter(config, path):
        made = spec.state_dict_adapter(config, path)
        gate, up = (f"model.layers.{{}}.mlp.{name}_proj.weight" for name in ("gate", "up"))
        made.from_hf_map |= {gate: made.from_hf_map[up], up: made.from_hf_map[gate]}
        return made

    return dict(state_dict_adapter=adapter)


# Computation.


def wrong_eps(layer, shape):
    for norm in (layer.attention_norm, layer.ffn_norm):
        norm.eps = 1e-5


def wrong_eps_of_heads(layer, shape):
    layer.attention.qk_norm.eps = 1e-5


def no_renormalisation(layer, shape):
    layer.moe.router.route_norm = False


class Unscaled(RMSNorm):
    """A norm that forgets its scale."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, self.normalized_shape, None, self.eps)


def no_norm_scale(spec, shape):
    norm = spec.model.norm
    spec.model.norm = Unscaled.Config(normalized_shape=shape.dim, eps=norm.eps, param_init=norm.param_init)


class FrozenBias(Linear):
    """A linear layer whose bias acts and does not learn."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias.detach())


def frozen_bias(layer, shape):
    linear = layer.attention.qkv_linear
    values = {f.name: getattr(linear.wqkv, f.name) for f in dataclasses.fields(linear.wqkv)}
    linear.wqkv = FrozenBias.Config(**values)


class ForgetfulKernel(DeltaKernel):
    """A gated delta rule that passes no state on from one chunk of 64 tokens to the next."""

    @dataclass(kw_only=True, slots=True)
    class Config(DeltaKernel.Config):
        pass

    def forward(self, *inputs, cu_seqlens=None, cu_seqlens_cpu=None):
        ends = [0]
        for begin, end in itertools.pairwise(cu_seqlens_cpu.tolist()):
            ends += [*range(begin + 64, end, 64), end]
        return super().forward(*inputs, cu_seqlens_cpu=torch.tensor(ends))


def no_memory(layer, shape):
    if layer.delta_net is not None:
        layer.delta_net.kernel = ForgetfulKernel.Config()


def wrong_eps_of_outputs(layer, shape):
    if layer.delta_net is not None:
        layer.delta_net.norm.eps = 1e-5


# Work laid out.


def with_hook(change):
    """A fault in how the model is cut: `change(attention, parallel_dims)` for every layer's attention."""

    def changed(spec, shape):
        def parallelize(model, *, parallel_dims, **more):
            model = spec.parallelize_fn(model, parallel_dims=parallel_dims, **more)
            for layer in model.layers.values():
                change(layer.attention.inner_attention, parallel_dims)
            return model

        return dict(parallelize_fn=parallelize)

    return changed


def one_document(inner_attention, parallel_dims):
    """Every packed token sees all tokens before it."""

    def join(module, args, kwargs):
        return args, kwargs | {"attention_masks": PackedDocuments.build([args[0].shape[1]])}

    inner_attention.register_forward_pre_hook(join, with_kwargs=True)


def swapped_heads(inner_attention, parallel_dims):
    """Each rank has the right key and value heads, and hands them to the wrong queries."""
    if parallel_dims.tp_enabled:
        inner_attention.register_forward_pre_hook(lambda module, args: (args[0], *map(_flipped, args[1:])))


def _flipped(x_BLNH):
    if isinstance(x_BLNH, DTensor):
        return DTensor.from_local(x_BLNH.to_local().flip(2), x_BLNH.device_mesh, x_BLNH.placements)
    return x_BLNH.flip(2)


class StaleStore(MemoryStore):
    """Hands out one tensor as it was when it was first fetched."""

    NAME = "layers.1.attention.qkv_linear.wk.weight"

    def __init__(self):
        super().__init__()
        self._first = None

    async def read(self, manifest, *, verify):
        manifest, payload = await super().read(manifest, verify=verify)
        payload = payload.clone()
        place = layout.read(payload, manifest)[self.NAME]
        if self._first is None:
            self._first = place.clone()
        place.copy_(self._first)
        return manifest, payload


ROPE = "layers.0.attention.rope"
OF_TRAINER = {
    "rotary form swapped": ("qwen2", altered(Qwen2Shape, layers(pair_rotation)), ROPE),
    "scaling ignored": ("llama3", altered(Llama3Shape, layers(unscaled)), ROPE),
    "q and k permutation forgotten": ("llama3", altered(Llama3Shape, ordered_as_hugging_face), ROPE),
    "norm scale ignored": ("llama3", altered(Llama3Shape, no_norm_scale), "norm"),
    "yarn's amplitude ignored": ("qwen2+yarn", altered(Qwen2Shape, layers(same_amplitude)), ROPE),
    "bias dropped": ("qwen2", altered(Qwen2Shape, layers(no_bias)), "model.layers.0.self_attn.k_proj.bias"),
    "bias does not learn": ("qwen2", altered(Qwen2Shape, layers(frozen_bias)), "layers.0.attention.qkv_linear.wk.bias"),
    "epsilon 1e-5 for 1e-6": ("qwen2", altered(Qwen2Shape, layers(wrong_eps)), "layers.0.attention_norm"),
    "packing leaks": ("qwen2", altered(Qwen2Shape, with_hook(one_document)), "layers.*.attention.inner_attention"),
    "tied head untied": ("qwen3", altered(Qwen3Shape, untied), "lm_head.weight"),
    "head norms missing": (
        "qwen3",
        altered(Qwen3Shape, layers(no_head_norms)),
        "model.layers.0.self_attn.k_norm.weight",
    ),
    "epsilon of heads": ("qwen3", altered(Qwen3Shape, layers(wrong_eps_of_heads)), "layers.0.attention.q_norm"),
    "gate and up swapped": ("qwen3", altered(Qwen3Shape, gate_is_up), "layers.0.feed_forward"),
    "states end with a chunk": ("qwen3_5", altered(Qwen35Shape, layers(no_memory)), "layers.0.attn"),
    "epsilon of outputs": ("qwen3_5", altered(Qwen35Shape, layers(wrong_eps_of_outputs)), "layers.0.attn.norm"),
    "no renormalisation": ("qwen3+moe", altered(Qwen3Shape, layers(no_renormalisation)), "layers.0.moe"),
}
"""Name -> (model, family with the fault, what the broken line names). The trainer of one rank shows them."""
HalfRotation = altered(Llama3Shape, layers(half_rotation))
"""A fault that torchtitan's adapter refuses itself."""
SwappedHeads = altered(Qwen2Shape, with_hook(swapped_heads))
"""A fault that two tensor-parallel ranks show."""
