"""gpt-oss: a mixture of experts whose attention has sinks, and a sliding window in every other layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from annotated_types import Ge, Gt

from torchtitan_rl.families.decoder import DecoderShape, ExpertsShape, sizes_of_hf
from torchtitan_rl.families.hf_keys import HfKeys, check_keys, required, rope_of
from torchtitan_rl.families.rope import YarnScaling

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

__all__ = ["GptOssShape", "HF_KEYS"]

HF_KEYS = HfKeys(
    title="a gpt-oss",
    read=(
        *("num_local_experts", "num_experts", "num_experts_per_tok", "load_balance_coeff"),
        *("sliding_window", "layer_types", "swiglu_limit"),
    ),
    one_value={"attention_bias": (True,), "swiglu_alpha": (1.702,)},
    # Names of other programs for num_experts_per_tok and for the original context of rope_scaling.
    changes_nothing=("experts_per_token", "initial_context_length"),
    rope={"yarn": YarnScaling.hf_names},
)


@dataclass(kw_only=True, slots=True)
class GptOssShape(DecoderShape):
    """The sizes of a gpt-oss. Example: `GptOssShape(vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2,
    head_dim=32, hidden_dim=128, experts=ExpertsShape(num_experts=4, top_k=2))` has 1.0M parameters."""

    experts: ExpertsShape = field()
    sliding_window: Annotated[int, Ge(1)] = 128
    """Positions that a query of layers 0, 2, 4, ... attends to, its own included."""
    swiglu_limit: Annotated[float, Gt(0)] = 7.0
    """Bound of an expert's gate from above, and of the other factor from both sides."""
    rope_theta: Annotated[float, Gt(1)] = 1.5e5
    """Base of the rotary embedding's frequencies."""
    rope_scaling: YarnScaling | None = None
    """For contexts beyond that of the original training; None: no scaling."""
    norm_eps: Annotated[float, Ge(0)] = 1e-5
    """Added to the mean square in every RMS norm."""
    tie_embeddings: bool = False
    """Whether the head shares the embedding's weights."""

    name: ClassVar[str] = "gpt-oss"
    model_types: ClassVar[tuple[str, ...]] = ("gpt_oss",)
    optional_weights: ClassVar[str] = ".e_score_correction_bias"
    has_sinks: ClassVar[bool] = True

    @property
    def layer_extras(self) -> int:
        attention = self.head_dim * (self.n_heads + 2 * self.n_kv_heads) + self.dim + self.n_heads  # biases and sinks
        return attention + self.experts.num_experts * (2 * self.hidden_dim + self.dim + 1)  # biases, and the router's

    @classmethod
    def debug(cls, **sizes: Any) -> Self:
        scaling = YarnScaling(factor=4.0, original_max_seq_len=32, truncate=False)
        return cls(**sizes, experts=ExpertsShape(num_experts=4, top_k=2), sliding_window=16, rope_scaling=scaling)

    def model_spec(self) -> ModelSpec:
        from torchtitan.components.optimizer import register_moe_load_balancing_hook
        from torchtitan.models.gpt_oss import GptOssModel, parallelize_gptoss
        from torchtitan.models.gpt_oss.model import GptOssTransformerBlock
        from torchtitan.protocols.model_spec import ModelSpec

        from torchtitan_rl.families import biased_blocks, blocks, rotations

        rope = rotations.half_rotation(self.head_dim, self.max_seq_len, self.rope_theta, self.rope_scaling)

        def block(layer: int) -> GptOssTransformerBlock.Config:
            return GptOssTransformerBlock.Config(
                attention_norm=blocks.norm(self.dim, self.norm_eps),
                ffn_norm=blocks.norm(self.dim, self.norm_eps),
                attention=biased_blocks.attention(self, rope, None if layer % 2 else self.sliding_window),
                moe=biased_blocks.mixture(self, self.experts, self.swiglu_limit),
            )

        return ModelSpec(
            name="gpt_oss",
            flavor="custom",
            model=GptOssModel.Config(**blocks.tables(self), layers=[block(layer) for layer in range(self.n_layers)]),
            parallelize_fn=parallelize_gptoss,
            pipelining_fn=None,
            post_optimizer_build_fn=register_moe_load_balancing_hook,
            state_dict_adapter=_adapter,
        )

    @classmethod
    def _fields_of_hf(cls, hf: dict[str, Any], where: str) -> dict[str, Any]:
        if hf.get("quantization_config"):
            method = hf["quantization_config"].get("quant_method")
            raise ValueError(
                f"{where}: its config.json says quantization_config.quant_method={method!r}, and weights here are "
                "bfloat16 or float32; write them once as bfloat16, with transformers: AutoModelForCausalLM."
                "from_pretrained(DIR, quantization_config=Mxfp4Config(dequantize=True), dtype='bfloat16')"
                # In the original format save_pretrained of transformers 5.19 leaves the experts out.
                ".save_pretrained(NEW_DIR, save_original_format=False), and copy the tokenizer's files"
            )
        check_keys(hf, HF_KEYS, where)
        number = "num_local_experts" if "num_local_experts" in hf else "num_experts"
        rope = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
        # transformers has values for what a config.json lacks, and some differ from those of other families.
        required(hf, (number, "num_experts_per_tok", "num_hidden_layers", "sliding_window", rope), where)
        if hf[rope].get("rope_theta") is None:
            required(hf, ("rope_theta",), where)
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(hf["num_hidden_layers"])]
        if hf.get("layer_types", kinds) not in (kinds, None):
            raise ValueError(
                f"{where}: its config.json says layer_types={hf['layer_types']!r}; only a gpt-oss whose layers "
                "0, 2, 4, ... have a sliding window is supported"
            )
        _, scaling = rope_of(hf, where)
        return sizes_of_hf(hf, where, heads=("num_key_value_heads", "head_dim"), norm_eps=1e-5) | {
            "experts": ExpertsShape(
                num_experts=hf[number], top_k=hf["num_experts_per_tok"], load_balance_coeff=hf.get("load_balance_coeff")
            ),
            "sliding_window": hf["sliding_window"],
            "swiglu_limit": 7.0 if hf.get("swiglu_limit") is None else hf["swiglu_limit"],
            "rope_scaling": YarnScaling.from_hf(scaling, where) if scaling else None,
        }

    def _hf_kind(self) -> dict[str, Any]:
        kind: dict[str, Any] = dict(
            architectures=["GptOssForCausalLM"],
            model_type="gpt_oss",
            attention_bias=True,
            num_local_experts=self.experts.num_experts,
            num_experts_per_tok=self.experts.top_k,
            sliding_window=self.sliding_window,
            layer_types=["full_attention" if layer % 2 else "sliding_attention" for layer in range(self.n_layers)],
            swiglu_alpha=1.702,
            swiglu_limit=self.swiglu_limit,
        )
        if self.experts.load_balance_coeff is not None:
            kind["load_balance_coeff"] = self.experts.load_balance_coeff
        return kind

    def _hf_rope(self) -> dict[str, Any]:
        return {} if self.rope_scaling is None else self.rope_scaling.to_hf()


def _adapter(model_config: Any, hf_assets_path: str | None) -> Any:
    """torchtitan's adapter with the names and layouts of weights in bfloat16.

    torchtitan's own writes experts as an MXFP4 checkpoint has them, (E, outputs, inputs), and under names that the
    model's parameters do not have. The name of the load-balancing bias, which Hugging Face's gpt-oss does not have, is
    DeepSeek-V3's: other programs ignore the tensor.
    """
    from torchtitan.models.gpt_oss.state_dict_adapter import GptOssStateDictAdapter

    experts, theirs = "layers.{}.moe.routed_experts.inner_experts.", "model.layers.{}.mlp."
    expert_names = {
        f"{theirs}experts.gate_up_proj": f"{experts}mlp1_weight_EGD",
        f"{theirs}experts.gate_up_proj_bias": f"{experts}mlp1_bias_EG",
        f"{theirs}experts.down_proj": f"{experts}mlp2_weight_EDF",
        f"{theirs}experts.down_proj_bias": f"{experts}mlp2_bias_ED",
        f"{theirs}router.e_score_correction_bias": "layers.{}.moe.expert_bias_E",
    }

    class Adapter(GptOssStateDictAdapter):
        def __init__(self) -> None:
            super().__init__(model_config, hf_assets_path)
            for name in [name for name in self.from_hf_map if ".experts." in name]:
                del self.from_hf_map[name]
            self.from_hf_map.update(expert_names)

        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            state = super().to_hf(state_dict)
            if model_config.enable_weight_tying:
                state.pop("lm_head.weight", None)
            return _inputs_and_outputs_exchanged(state)

        def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
            state = super().from_hf(_inputs_and_outputs_exchanged(hf_state_dict))
            if model_config.enable_weight_tying and "tok_embeddings.weight" in state:
                state.setdefault("lm_head.weight", state["tok_embeddings.weight"])
            return state

    return Adapter()


def _inputs_and_outputs_exchanged(state: dict[str, Any]) -> dict[str, Any]:
    """The tensors, with experts' weights (E, inputs, outputs), as Hugging Face has them, as (E, outputs, inputs) of
    torchtitan, and the other way round."""
    return {
        name: tensor.transpose(-2, -1) if name.endswith((".gate_up_proj", ".down_proj")) else tensor
        for name, tensor in state.items()
    }
