"""OLMo 2, a family that the package does not have, in one file of a user: norms after attention and after feed-forward,
and norms over the whole width of query and key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch.nn as nn
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl.families import blocks, rotations
from torchtitan_rl.families.decoder import DecoderShape, sizes_of_hf
from torchtitan_rl.families.hf_keys import HfKeys, check_keys

__all__ = ["Olmo2Shape"]


class WidthNorm(RMSNorm):
    """An RMS norm over all heads of a token together."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x_BLNH):
        return super().forward(x_BLNH.flatten(2)).view_as(x_BLNH)


def width_norm(width: int, eps: float) -> WidthNorm.Config:
    return WidthNorm.Config(normalized_shape=width, eps=eps, param_init={"weight": nn.init.ones_})


class WidthNormAttention(GQAttention):
    """torchtitan's attention, whose norms of query and of key have different widths."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        query_norm: WidthNorm.Config
        key_norm: WidthNorm.Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.q_norm, self.k_norm = config.query_norm.build(), config.key_norm.build()


class PostNormBlock(Qwen3TransformerBlock):
    """A layer that adds what its norms return: nothing is normed before attention and feed-forward."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        pass

    def forward(self, x, attention_masks, positions=None):
        x = x + self.attention_norm(self.attention(x, attention_masks, positions))
        return x + self.ffn_norm(self.feed_forward(x))


@dataclass(kw_only=True, slots=True)
class Olmo2Shape(DecoderShape):
    """The sizes of an OLMo 2."""

    tie_embeddings: bool = False

    name: ClassVar[str] = "olmo2"
    model_types: ClassVar[tuple[str, ...]] = ("olmo2",)

    @property
    def cut_sizes(self) -> dict[str, int]:
        # A tensor-parallel rank has a share of the heads, and a norm's mean square is that of all heads.
        return {"ranks of a norm over all heads": 1}

    def own_model_fault(self, device: Literal["cpu", "cuda"]) -> str:
        if device == "cuda":  # not tried
            return ""
        return "vLLM 0.32 runs OLMo 2 by a wrapper of transformers' model, which fails to start (no `do_not_compile`)"

    @property
    def layer_extras(self) -> int:
        return self.head_dim * (self.n_heads + self.n_kv_heads)  # the norms of query and key

    def model_spec(self) -> ModelSpec:
        rope = rotations.half_rotation(self.head_dim, self.max_seq_len, self.rope_theta, None)

        def attention() -> WidthNormAttention.Config:
            plain = blocks.attention(self, rope)
            return WidthNormAttention.Config(
                dim=plain.dim,
                n_heads=plain.n_heads,
                n_kv_heads=plain.n_kv_heads,
                head_dim=plain.head_dim,
                qkv_linear=plain.qkv_linear,
                wo=plain.wo,
                inner_attention=plain.inner_attention,
                rope=plain.rope,
                query_norm=width_norm(self.n_heads * self.head_dim, self.norm_eps),
                key_norm=width_norm(self.n_kv_heads * self.head_dim, self.norm_eps),
            )

        def block() -> PostNormBlock.Config:
            return PostNormBlock.Config(
                attention_norm=blocks.norm(self.dim, self.norm_eps),
                ffn_norm=blocks.norm(self.dim, self.norm_eps),
                attention=attention(),
                feed_forward=blocks.feed_forward(self),
            )

        return ModelSpec(
            name="olmo2",
            flavor="custom",
            model=Qwen3Model.Config(**blocks.tables(self), layers=[block() for _ in range(self.n_layers)]),
            parallelize_fn=parallelize_qwen3,
            pipelining_fn=None,
            post_optimizer_build_fn=None,
            state_dict_adapter=_adapter,
        )

    @classmethod
    def _fields_of_hf(cls, hf: dict[str, Any], where: str) -> dict[str, Any]:
        check_keys(hf, HfKeys(title="an OLMo 2"), where)
        return sizes_of_hf(hf, where, norm_eps=1e-5)  # transformers' default for OLMo 2

    def _hf_kind(self) -> dict[str, Any]:
        return dict(architectures=["Olmo2ForCausalLM"], model_type="olmo2")


def _adapter(model_config: Any, hf_assets_path: str | None) -> Qwen3StateDictAdapter:
    """torchtitan's adapter of Qwen3, with the two norms of a layer where OLMo 2 has them."""
    adapter = Qwen3StateDictAdapter(model_config, hf_assets_path)
    del adapter.from_hf_map["model.layers.{}.input_layernorm.weight"]
    adapter.from_hf_map["model.layers.{}.post_attention_layernorm.weight"] = "layers.{}.attention_norm.weight"
    adapter.from_hf_map["model.layers.{}.post_feedforward_layernorm.weight"] = "layers.{}.ffn_norm.weight"
    return adapter
