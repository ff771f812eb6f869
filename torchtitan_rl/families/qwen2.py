"""Qwen2 and Qwen2.5, dense: biases of query, key and value, no norms of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Gt

from torchtitan_rl.families.decoder import DecoderShape, sizes_of_hf
from torchtitan_rl.families.hf_keys import HfKeys, check_keys, rope_of
from torchtitan_rl.families.rope import YarnScaling

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

__all__ = ["Qwen2Shape", "HF_KEYS"]

HF_KEYS = HfKeys(
    title="a Qwen2",
    one_value={"attention_bias": (True,)},
    # Windows are used with use_sliding_window alone.
    changes_nothing=("sliding_window", "max_window_layers"),
    rope={"yarn": YarnScaling.hf_names},
)


@dataclass(kw_only=True, slots=True)
class Qwen2Shape(DecoderShape):
    """The sizes of a Qwen2.5. Example: `Qwen2Shape(vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2,
    head_dim=32, hidden_dim=384)` has 0.8M parameters."""

    rope_theta: Annotated[float, Gt(1)] = 1e6
    """Base of the rotary embedding's frequencies."""
    rope_scaling: YarnScaling | None = None
    """For contexts beyond that of the original training; None: no scaling."""

    name: ClassVar[str] = "qwen2"
    model_types: ClassVar[tuple[str, ...]] = ("qwen2",)

    @property
    def layer_extras(self) -> int:
        return self.head_dim * (self.n_heads + 2 * self.n_kv_heads)  # the biases

    @classmethod
    def debug(cls, **sizes: Any) -> Self:
        return cls(**sizes | {"dim": sizes["n_heads"] * sizes["head_dim"]})  # else `own_model_fault`

    def own_model_fault(self, device: Literal["cpu", "cuda"]) -> str:
        if self.head_dim == (size := self.dim // self.n_heads):
            return ""
        return (
            f"vLLM's own Qwen2 makes every head of size dim / n_heads = {size}, not of "
            f"model.shape.head_dim={self.head_dim}"
        )

    def model_spec(self) -> ModelSpec:
        """The layers are torchtitan's Qwen3 without head norms and with biases: torchtitan has no Qwen2."""
        from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
        from torchtitan.models.qwen3.model import Qwen3TransformerBlock
        from torchtitan.protocols.model_spec import ModelSpec

        from torchtitan_rl.families import blocks, rotations

        rope = rotations.half_rotation(self.head_dim, self.max_seq_len, self.rope_theta, self.rope_scaling)

        def block() -> Qwen3TransformerBlock.Config:
            return Qwen3TransformerBlock.Config(
                attention_norm=blocks.norm(self.dim, self.norm_eps),
                ffn_norm=blocks.norm(self.dim, self.norm_eps),
                attention=blocks.attention(self, rope, biases=True),
                feed_forward=blocks.feed_forward(self),
            )

        return ModelSpec(
            name="qwen2",
            flavor="custom",
            model=Qwen3Model.Config(**blocks.tables(self), layers=[block() for _ in range(self.n_layers)]),
            parallelize_fn=parallelize_qwen3,
            pipelining_fn=None,
            post_optimizer_build_fn=None,
            state_dict_adapter=_adapter,
        )

    @classmethod
    def _fields_of_hf(cls, hf: dict[str, Any], where: str) -> dict[str, Any]:
        check_keys(hf, HF_KEYS, where)
        _, scaling = rope_of(hf, where)
        sizes = sizes_of_hf(hf, where, heads=("num_key_value_heads",))
        return sizes | {"rope_scaling": YarnScaling.from_hf(scaling, where) if scaling else None}

    def _hf_kind(self) -> dict[str, Any]:
        return dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", use_sliding_window=False)

    def _hf_rope(self) -> dict[str, Any]:
        return {} if self.rope_scaling is None else self.rope_scaling.to_hf()


def _adapter(model_config: Any, hf_assets_path: str | None) -> Any:
    """torchtitan's adapter of Qwen3, and the names of the biases."""
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    adapter = Qwen3StateDictAdapter(model_config, hf_assets_path)
    for theirs, ours in (("q_proj", "wq"), ("k_proj", "wk"), ("v_proj", "wv")):
        name = f"model.layers.{{}}.self_attn.{theirs}.bias"
        adapter.from_hf_map[name] = f"layers.{{}}.attention.qkv_linear.{ours}.bias"
    return adapter
