"""DeepSeek-V3's layout as Moonlight has it: latent attention, shared experts, and a sigmoid router with a bias."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Gt

from torchtitan_rl.constraints import Hint
from torchtitan_rl.families.decoder import DecoderShape, ExpertsShape, sizes_of_hf
from torchtitan_rl.families.hf_keys import HfKeys, check_keys, required

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

__all__ = ["DeepseekV3Shape", "HF_KEYS"]

_READ = (
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "moe_intermediate_size"),
    *("num_experts_per_tok", "n_shared_experts", "first_k_dense_replace", "routed_scaling_factor"),
)
HF_KEYS = HfKeys(
    title="a DeepSeek-V3",
    read=(*_READ, "q_lora_rank", "qk_head_dim", "n_routed_experts", "num_local_experts", "load_balance_coeff"),
    one_value={
        "n_group": (1,),
        "topk_group": (1,),
        "norm_topk_prob": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
        "rope_interleave": (True,),
    },
    # Layers that predict further tokens are not in the model that trains. The other keys are of the authors' training.
    changes_nothing=("num_nextn_predict_layers", "num_mtp_layers", "ep_size", "aux_loss_alpha", "seq_aux"),
)
_LATENT_EPS = 1e-6
"""Of the norms of latents, whatever rms_norm_eps says, as in transformers."""


@dataclass(kw_only=True, slots=True)
class DeepseekV3Shape(DecoderShape):
    """The sizes of a model with DeepSeek-V3's layers. `head_dim` is the size of a query and of a key, `hidden_dim` the
    inner size of an expert. Example: `DeepseekV3Shape(vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=4,
    head_dim=32, rotated_dim=16, value_dim=32, kv_lora_rank=64, hidden_dim=64, dense_hidden_dim=384,
    experts=ExpertsShape(num_experts=8, top_k=2))`."""

    experts: ExpertsShape = field()
    """Without `load_balance_coeff` the router's bias is that of the checkpoint, and stays."""
    kv_lora_rank: Annotated[int, Ge(1)]
    """Size of the latent from which keys and values come."""
    q_lora_rank: Annotated[int | None, Ge(1), Hint("use None for queries from the hidden states")] = None
    """Size of the latent from which queries come; None: queries come from the hidden states."""
    rotated_dim: Annotated[int, Ge(1)]
    """Dimensions of a query and of a key that the rotary embedding turns; heads share that part of the key."""
    value_dim: Annotated[int, Ge(1)]
    """Size of one head's value."""
    dense_hidden_dim: Annotated[int, Ge(1)]
    """Inner size of the feed-forward in the first layers."""
    n_dense_layers: Annotated[int, Ge(0)] = 1
    """Layers, from the first one, with a feed-forward instead of experts."""
    num_shared_experts: Annotated[int, Ge(1), Hint("without shared experts a model is of another family")] = 1
    """Experts that see every token."""
    route_scale: Annotated[float, Gt(0)] = 1.0
    """Factor of the experts' weights."""
    norm_eps: Annotated[float, Ge(0)] = 1e-5
    """Added to the mean square in every RMS norm but those of latents."""
    tie_embeddings: bool = False
    """Whether the head shares the embedding's weights."""

    name: ClassVar[str] = "deepseek-v3"
    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v3",)
    lora_targets: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        DecoderShape.__post_init__(self)  # super() without arguments fails in a class with slots
        if self.n_kv_heads != self.n_heads:
            raise ValueError(
                f"model.shape.n_kv_heads={self.n_kv_heads}: every head of latent attention has keys and values of its "
                f"own; use n_heads={self.n_heads}"
            )
        for name in ("rotated_dim", "value_dim"):
            if getattr(self, name) > self.head_dim:
                raise ValueError(f"model.shape.{name}={getattr(self, name)}: must be at most head_dim={self.head_dim}")
        if self.n_dense_layers >= self.n_layers:
            raise ValueError(
                f"model.shape.n_dense_layers={self.n_dense_layers}: must be below n_layers={self.n_layers}"
            )

    @property
    def _rotation(self) -> tuple[str, int]:
        return "rotated_dim", self.rotated_dim

    @classmethod
    def debug(cls, **sizes: Any) -> Self:
        half = sizes["head_dim"] // 2
        latents = dict(kv_lora_rank=48, rotated_dim=half, value_dim=sizes["head_dim"], dense_hidden_dim=192)
        experts = ExpertsShape(num_experts=8, top_k=2)
        return cls(**sizes | {"n_kv_heads": sizes["n_heads"]}, **latents, experts=experts, num_shared_experts=2)

    def own_model_fault(self, device: Literal["cpu", "cuda"]) -> str:
        # vLLM 0.32 does so; a test in tests/unit/families/test_deepseek_v3.py fails with a vLLM that does not.
        if device != "cpu":
            return ""
        return (
            "on a CPU vLLM's own DeepSeek-V3 rotates most query heads by wrong positions or not at all, because its "
            "kernel takes heads for tokens"
        )

    @property
    def cut_sizes(self) -> dict[str, int]:
        sizes = {"n_heads": self.n_heads, "n_kv_heads": self.n_kv_heads, "hidden_dim": self.hidden_dim}
        return sizes | ({"dense_hidden_dim": self.dense_hidden_dim} if self.n_dense_layers else {})

    @property
    def num_mixture_layers(self) -> int:
        return self.n_layers - self.n_dense_layers

    @property
    def layer_extras(self) -> int:
        latents = self.kv_lora_rank * (self.dim + 1) + self.rotated_dim * self.dim
        return latents + (0 if self.q_lora_rank is None else self.q_lora_rank * (self.dim + 1))

    @property
    def num_parameters(self) -> int:
        heads = self.n_heads * (
            self.head_dim * (self.dim if self.q_lora_rank is None else self.q_lora_rank)
            + (self.head_dim - self.rotated_dim + self.value_dim) * self.kv_lora_rank
            + self.value_dim * self.dim
        )
        experts = self.experts.num_experts * (3 * self.dim * self.hidden_dim + self.dim)  # and its row of the router
        experts += 3 * self.dim * self.hidden_dim * self.num_shared_experts
        dense = self.n_dense_layers * 3 * self.dim * self.dense_hidden_dim
        tables = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2) + self.dim
        every_layer = heads + 2 * self.dim + self.layer_extras
        return tables + self.n_layers * every_layer + dense + self.num_mixture_layers * experts

    def model_spec(self) -> ModelSpec:
        from torchtitan.components.optimizer import register_moe_load_balancing_hook
        from torchtitan.models.common import ComplexRoPE
        from torchtitan.models.deepseek_v3 import DeepSeekV3Model, build_mla_moe_layers, parallelize_deepseekv3
        from torchtitan.protocols.model_spec import ModelSpec

        from torchtitan_rl.families import blocks

        normal, norms = blocks.NORMAL, blocks.norm(self.dim, self.norm_eps).param_init
        layers = build_mla_moe_layers(
            n_layers=self.n_layers,
            n_dense_layers=self.n_dense_layers,
            dim=self.dim,
            n_heads=self.n_heads,
            q_lora_rank=self.q_lora_rank or 0,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.head_dim - self.rotated_dim,
            qk_rope_head_dim=self.rotated_dim,
            v_head_dim=self.value_dim,
            mscale=1.0,
            dense_hidden_dim=self.dense_hidden_dim,
            moe_hidden_dim=self.hidden_dim,
            num_experts=self.experts.num_experts,
            num_shared_experts=self.num_shared_experts,
            router_top_k=self.experts.top_k,
            router_score_func="sigmoid",
            router_route_scale=self.route_scale,
            router_route_norm=True,
            attn_backend="varlen",
            moe_comm_backend="standard",
            non_blocking_capacity_factor=None,
            linear_init=normal,
            norm_init=norms,
            depth_init=lambda layer: normal,
            depth_experts_init=lambda layer: dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), normal["weight"]),
            rope=ComplexRoPE.Config(dim=self.rotated_dim, max_seq_len=self.max_seq_len, theta=self.rope_theta),
        )
        coefficient = self.experts.load_balance_coeff
        for layer in layers:
            layer.attention_norm = blocks.norm(self.dim, self.norm_eps)
            layer.ffn_norm = blocks.norm(self.dim, self.norm_eps)
            layer.attention.kv_norm = blocks.norm(self.kv_lora_rank, _LATENT_EPS)
            layer.attention.q_norm = blocks.norm(self.q_lora_rank or 1, _LATENT_EPS)
            if layer.moe is not None:  # with a coefficient torchtitan's layer has a bias; only the hook moves it
                layer.moe.load_balance_coeff = 1.0 if coefficient is None else coefficient
        return ModelSpec(
            name="deepseek_v3",
            flavor="custom",
            model=DeepSeekV3Model.Config(**blocks.tables(self), layers=layers),
            parallelize_fn=parallelize_deepseekv3,
            pipelining_fn=None,
            post_optimizer_build_fn=None if coefficient is None else register_moe_load_balancing_hook,
            state_dict_adapter=_adapter,
        )

    @classmethod
    def _fields_of_hf(cls, hf: dict[str, Any], where: str) -> dict[str, Any]:
        check_keys(hf, HF_KEYS, where)
        number = "n_routed_experts" if "n_routed_experts" in hf else "num_local_experts"
        # transformers has values for what a config.json lacks: those of the model with 671B parameters.
        required(hf, (*_READ, number, "intermediate_size", "n_group", "topk_group", "rms_norm_eps"), where)
        if "q_lora_rank" not in hf:
            required(hf, ("q_lora_rank",), where)
        if hf.get("num_local_experts", hf[number]) != hf[number]:
            raise ValueError(
                f"{where}: its config.json says n_routed_experts={hf[number]} and num_local_experts="
                f"{hf['num_local_experts']}, two names of one number; keep the right one"
            )
        return sizes_of_hf(hf, where, inner="moe_intermediate_size", heads=("num_key_value_heads",)) | {
            "head_dim": hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"],
            "experts": ExpertsShape(
                num_experts=hf[number], top_k=hf["num_experts_per_tok"], load_balance_coeff=hf.get("load_balance_coeff")
            ),
            "kv_lora_rank": hf["kv_lora_rank"],
            "q_lora_rank": hf["q_lora_rank"],
            "rotated_dim": hf["qk_rope_head_dim"],
            "value_dim": hf["v_head_dim"],
            "dense_hidden_dim": hf["intermediate_size"],
            "n_dense_layers": hf["first_k_dense_replace"],
            "num_shared_experts": hf["n_shared_experts"],
            "route_scale": hf["routed_scaling_factor"],
        }

    def to_hf(self, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
        # transformers' head_dim is the rotated part.
        sizes = {"head_dim": self.rotated_dim, "intermediate_size": self.dense_hidden_dim}
        return DecoderShape.to_hf(self, eos_token_id, pad_token_id) | sizes

    def _hf_kind(self) -> dict[str, Any]:
        kind: dict[str, Any] = dict(
            architectures=["DeepseekV3ForCausalLM"],
            model_type="deepseek_v3",
            attention_bias=False,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.head_dim - self.rotated_dim,
            qk_rope_head_dim=self.rotated_dim,
            v_head_dim=self.value_dim,
            moe_intermediate_size=self.hidden_dim,
            n_routed_experts=self.experts.num_experts,
            num_experts_per_tok=self.experts.top_k,
            n_shared_experts=self.num_shared_experts,
            first_k_dense_replace=self.n_dense_layers,
            routed_scaling_factor=self.route_scale,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            moe_layer_freq=1,
            rope_interleave=True,
            num_nextn_predict_layers=0,
        )
        if self.experts.load_balance_coeff is not None:
            kind["load_balance_coeff"] = self.experts.load_balance_coeff
        return kind


def _adapter(model_config: Any, hf_assets_path: str | None) -> Any:
    """torchtitan's adapter, which has no rule for a tied head."""
    from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter

    class Adapter(DeepSeekV3StateDictAdapter):
        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            state = super().to_hf(state_dict)
            if model_config.enable_weight_tying:
                state.pop("lm_head.weight", None)
            return state

        def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
            state = super().from_hf(hf_state_dict)
            if model_config.enable_weight_tying and "tok_embeddings.weight" in state:
                state.setdefault("lm_head.weight", state["tok_embeddings.weight"])
            return state

    return Adapter(model_config, hf_assets_path)
