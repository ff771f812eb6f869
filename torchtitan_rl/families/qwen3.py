"""Qwen3, dense and as a mixture of experts: norms of each query and key head, no biases."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from annotated_types import Gt

from torchtitan_rl.families.decoder import DecoderShape, ExpertsShape, sizes_of_hf
from torchtitan_rl.families.hf_keys import HfKeys, check_keys, required, rope_of
from torchtitan_rl.families.rope import YarnScaling

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

__all__ = ["Qwen3Shape", "HF_KEYS", "HF_KEYS_OF_MIXTURE"]

HF_KEYS = HfKeys(
    title="a Qwen3",
    one_value={"use_qk_norm": (True,)},
    # Windows are used with use_sliding_window alone. A dense model has no experts to describe.
    changes_nothing=("sliding_window", "max_window_layers", "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob"),
    rope={"yarn": YarnScaling.hf_names},
)
HF_KEYS_OF_MIXTURE = HfKeys(
    title="a Qwen3",
    read=("moe_intermediate_size", "num_experts", "num_local_experts", "num_experts_per_tok", "load_balance_coeff"),
    one_value={
        "use_qk_norm": (True,),
        "mlp_only_layers": ([],),
        "decoder_sparse_step": (1,),
        "norm_topk_prob": (True,),
    },
    changes_nothing=("sliding_window", "max_window_layers"),
    rope={"yarn": YarnScaling.hf_names},
)


@dataclass(kw_only=True, slots=True)
class Qwen3Shape(DecoderShape):
    """The sizes of a Qwen3. Example: `Qwen3Shape(vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2,
    head_dim=32, hidden_dim=384)` has 0.8M parameters."""

    rope_theta: Annotated[float, Gt(1)] = 1e6
    """Base of the rotary embedding's frequencies."""
    experts: ExpertsShape | None = None
    """Puts a mixture of experts in the place of every feed-forward; None: a dense model."""
    rope_scaling: YarnScaling | None = None
    """For contexts beyond that of the original training; None: no scaling."""

    name: ClassVar[str] = "qwen3"
    model_types: ClassVar[tuple[str, ...]] = ("qwen3", "qwen3_moe")
    optional_weights: ClassVar[str] = ".e_score_correction_bias"

    @property
    def layer_extras(self) -> int:
        return 2 * self.head_dim  # the norms of query and key heads

    def model_spec(self) -> ModelSpec:
        from torchtitan.components.optimizer import register_moe_load_balancing_hook
        from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
        from torchtitan.models.qwen3.model import Qwen3TransformerBlock
        from torchtitan.protocols.model_spec import ModelSpec

        from torchtitan_rl.families import blocks, rotations

        rope = rotations.half_rotation(self.head_dim, self.max_seq_len, self.rope_theta, self.rope_scaling)

        def block() -> Qwen3TransformerBlock.Config:
            return Qwen3TransformerBlock.Config(
                attention_norm=blocks.norm(self.dim, self.norm_eps),
                ffn_norm=blocks.norm(self.dim, self.norm_eps),
                attention=blocks.attention(self, rope, head_norms=True),
                feed_forward=blocks.feed_forward(self) if self.experts is None else None,
                moe=blocks.mixture(self, self.experts) if self.experts is not None else None,
            )

        return ModelSpec(
            name="qwen3",
            flavor="custom",
            model=Qwen3Model.Config(**blocks.tables(self), layers=[block() for _ in range(self.n_layers)]),
            parallelize_fn=parallelize_qwen3,
            pipelining_fn=None,
            post_optimizer_build_fn=register_moe_load_balancing_hook,
            state_dict_adapter=_adapter,
        )

    @classmethod
    def _fields_of_hf(cls, hf: dict[str, Any], where: str) -> dict[str, Any]:
        experts, inner, heads = None, "intermediate_size", ["num_key_value_heads"]
        if hf["model_type"] == "qwen3_moe":
            # To transformers a mixture without norm_topk_prob has False.
            check_keys(hf | {"norm_topk_prob": bool(hf.get("norm_topk_prob"))}, HF_KEYS_OF_MIXTURE, where)
            number, inner = "num_local_experts" if "num_local_experts" in hf else "num_experts", "moe_intermediate_size"
            required(hf, (number, "num_experts_per_tok"), where)
            experts = ExpertsShape(
                num_experts=hf[number], top_k=hf["num_experts_per_tok"], load_balance_coeff=hf.get("load_balance_coeff")
            )
        else:
            check_keys(hf, HF_KEYS, where)
            heads.append("head_dim")  # transformers takes 128, but for a mixture
        _, scaling = rope_of(hf, where)
        return sizes_of_hf(hf, where, inner=inner, heads=heads) | {
            "experts": experts,
            "rope_scaling": YarnScaling.from_hf(scaling, where) if scaling else None,
        }

    def _hf_kind(self) -> dict[str, Any]:
        shared: dict[str, Any] = dict(attention_bias=False, use_sliding_window=False)
        if self.experts is None:
            return dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3") | shared
        kind = dict(
            architectures=["Qwen3MoeForCausalLM"],
            model_type="qwen3_moe",
            moe_intermediate_size=self.hidden_dim,
            num_experts=self.experts.num_experts,
            num_experts_per_tok=self.experts.top_k,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )
        if self.experts.load_balance_coeff is not None:
            kind["load_balance_coeff"] = self.experts.load_balance_coeff
        return kind | shared

    def _hf_rope(self) -> dict[str, Any]:
        return {} if self.rope_scaling is None else self.rope_scaling.to_hf()

    # torchtitan's standard sizes.

    @classmethod
    def of_flavor(cls, flavor: str) -> Self:
        """The sizes of a standard flavour of torchtitan. Raises ValueError for an unknown one."""
        model = flavor_spec(flavor).model
        attention, moe = model.layers[0].attention, model.layers[0].moe
        if moe is None:
            hidden_dim, experts = model.layers[0].feed_forward.w1.out_features, None
        else:
            hidden_dim = moe.routed_experts.inner_experts.hidden_dim
            experts = ExpertsShape(num_experts=moe.num_experts, top_k=moe.router.top_k)
        return cls(
            vocab_size=model.vocab_size,
            dim=model.dim,
            n_layers=len(model.layers),
            n_heads=attention.n_heads,
            n_kv_heads=attention.n_kv_heads,
            head_dim=attention.head_dim,
            hidden_dim=hidden_dim,
            experts=experts,
            rope_theta=attention.rope.theta,
            max_seq_len=attention.rope.max_seq_len,
            tie_embeddings=model.enable_weight_tying,
            norm_eps=model.norm.eps,
        )


def flavor_spec(flavor: str) -> ModelSpec:
    """torchtitan's spec of a standard Qwen3, drawn by torchtitan's own rule. Raises ValueError for an unknown one."""
    from torchtitan.models.qwen3 import model_registry, qwen3_configs

    if flavor not in qwen3_configs:
        raise ValueError(f"model.flavor={flavor!r}: is not a Qwen3 flavour; use one of {', '.join(qwen3_configs)}")
    spec = model_registry(flavor, attn_backend="varlen")
    for layer in spec.model.layers:
        if layer.moe is not None:  # Hugging Face's model of that name has no load-balancing bias
            layer.moe.load_balance_coeff = None
    return dataclasses.replace(spec, state_dict_adapter=_adapter)


def _adapter(model_config: Any, hf_assets_path: str | None) -> Any:
    """torchtitan's adapter, and a name for the load-balancing bias, which Hugging Face's Qwen3 does not have.

    The name is DeepSeek-V3's. Other programs ignore the tensor; the adapter's `from_hf` reads the bias back.
    """
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    adapter = Qwen3StateDictAdapter(model_config, hf_assets_path)
    adapter.from_hf_map["model.layers.{}.mlp.gate.e_score_correction_bias"] = "layers.{}.moe.expert_bias_E"
    return adapter
