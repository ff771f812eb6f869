"""The text part of Qwen3.5, dense: three layers of gated delta net to one of gated attention, norms whose scale is
1 + weight, and a rotary embedding of a quarter of a head."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Gt, Interval

from torchtitan_rl.families.decoder import DecoderShape, sizes_of_hf
from torchtitan_rl.families.hf_keys import HfKeys, check_keys, required

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

__all__ = ["Qwen35Shape", "HF_KEYS"]

HF_KEYS = HfKeys(
    title="a Qwen3.5",
    read=(
        "layer_types",
        "full_attention_interval",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "partial_rotary_factor",
    ),
    one_value={"attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",), "mlp_only_layers": ([],)},
    # Heads that guess several tokens are a model of their own: neither trained nor exported.
    changes_nothing=("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    # Sections rotate by the places of an image; a text's tokens have one place in all of them.
    rope={"default": ("partial_rotary_factor", "mrope_section", "mrope_interleaved")},
)
_BESIDE_TEXT = frozenset(
    "vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id language_model_only".split()
)
"""Keys of the whole model's config.json that say nothing about the text part."""

_TEXT = "qwen3_5_text"
_WHOLE = "qwen3_5"


@dataclass(kw_only=True, slots=True)
class Qwen35Shape(DecoderShape):
    """The sizes of a Qwen3.5's text part. Example: `Qwen35Shape(vocab_size=64, dim=128, n_layers=4, n_heads=4,
    n_kv_heads=2, head_dim=32, hidden_dim=384, n_key_heads=4, n_value_heads=4, key_head_dim=32, value_head_dim=32)` has
    0.9M parameters."""

    rope_theta: Annotated[float, Gt(1)] = 1e7
    """Base of the rotary embedding's frequencies."""
    rotary_factor: Annotated[float, Interval(gt=0, le=1)] = 0.25
    """The part of a head that the rotary embedding turns."""
    full_attention_interval: Annotated[int, Ge(1)] = 4
    """Every so many layers have attention, the last of each; the others a gated delta net."""
    n_key_heads: Annotated[int, Ge(1)]
    """Query and key heads of a gated delta net."""
    n_value_heads: Annotated[int, Ge(1)]
    """Value heads of a gated delta net, a multiple of `n_key_heads`."""
    key_head_dim: Annotated[int, Ge(1)]
    value_head_dim: Annotated[int, Ge(1)]
    conv_size: Annotated[int, Ge(1)] = 4
    """Taps of the convolution before a gated delta net."""

    name: ClassVar[str] = "qwen3_5"
    model_types: ClassVar[tuple[str, ...]] = (_TEXT, _WHOLE)
    other_weights: ClassVar[tuple[str, ...]] = ("model.visual.", "mtp.")
    # Adapters of gated delta nets would need five layers more, and PEFT's names for three of them are one.
    lora_targets: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj", "down_proj")

    def __post_init__(self) -> None:
        numbers = self.n_key_heads, self.n_value_heads, self.n_layers, self.full_attention_interval
        if not all(isinstance(number, (int, float)) and number > 0 for number in (*numbers, self.rotary_factor)):
            return  # one number by itself is refused by its constraints, in `validation.fields`
        DecoderShape.__post_init__(self)  # super() without arguments fails in a class with slots
        if self.n_value_heads % self.n_key_heads:
            raise ValueError(
                f"model.shape.n_value_heads={self.n_value_heads}: every key head of a gated delta net serves as many "
                f"value heads; use a multiple of n_key_heads={self.n_key_heads}"
            )
        if self.n_layers < self.full_attention_interval:
            raise ValueError(
                f"model.shape.n_layers={self.n_layers}: none of them has attention, which every n-th layer has with "
                f"full_attention_interval={self.full_attention_interval}; use more layers, or a smaller interval"
            )

    @property
    def _rotation(self) -> tuple[str, int]:
        return "rotary_factor", int(self.head_dim * self.rotary_factor)

    @classmethod
    def debug(cls, **sizes: Any) -> Self:
        return cls(**sizes | {"n_layers": 4}, n_key_heads=2, n_value_heads=4, key_head_dim=16, value_head_dim=32)

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has attention; if not, a gated delta net."""
        return (layer + 1) % self.full_attention_interval == 0

    @property
    def num_attention_layers(self) -> int:
        return self.n_layers // self.full_attention_interval

    @property
    def cut_sizes(self) -> dict[str, int]:
        return {
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "hidden_dim": self.hidden_dim,
            "n_key_heads": self.n_key_heads,
            "n_value_heads": self.n_value_heads,
        }

    @property
    def state_sizes(self) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """What a gated delta net keeps of a sequence: (taps - 1, channels) of the convolution's inputs, and
        (value heads, key size, value size) of its state."""
        keys, values = self.n_key_heads * self.key_head_dim, self.n_value_heads * self.value_head_dim
        return (self.conv_size - 1, 2 * keys + values), (self.n_value_heads, self.key_head_dim, self.value_head_dim)

    @property
    def num_parameters(self) -> int:
        keys, values = self.n_key_heads * self.key_head_dim, self.n_value_heads * self.value_head_dim
        heads, kv_heads = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        attention = self.dim * (2 * heads + 2 * kv_heads + heads) + 2 * self.head_dim  # with a gate for each output
        delta_net = (
            self.dim * (2 * keys + 2 * values + 2 * self.n_value_heads)
            + values * self.dim
            + self.conv_size * (2 * keys + values)
            + 2 * self.n_value_heads
            + self.value_head_dim
        )
        layers = self.num_attention_layers * attention + (self.n_layers - self.num_attention_layers) * delta_net
        layers += self.n_layers * (3 * self.dim * self.hidden_dim + 2 * self.dim)
        return self.vocab_size * self.dim * (1 if self.tie_embeddings else 2) + layers + self.dim

    def own_model_fault(self, device: Literal["cpu", "cuda"]) -> str:
        if device == "cpu":
            return f"on a CPU the kernels of vLLM's own {self.name} take bfloat16 alone, and the trainer has float32"
        if importlib.util.find_spec("torchvision") is None:
            return (
                f"vLLM's own {self.name} is in one module with the whole model, which imports torchvision, and "
                "torchvision is not installed"
            )
        return ""

    def model_spec(self) -> ModelSpec:
        import torch.nn as nn

        from torchtitan_rl.families import blocks, rotations
        from torchtitan_rl.families.delta_net import DeltaKernel, DeltaNet, Qwen35Attention, TextBlock, TextModel

        from torchtitan.models.common import Linear  # isort: skip
        from torchtitan.models.common.config_utils import get_attention_config
        from torchtitan.models.common.nn_modules import Conv1d
        from torchtitan.models.qwen3_5.model import OffsetRMSNorm, RMSNormGated
        from torchtitan.models.qwen3_5.parallelize import parallelize_qwen3_5
        from torchtitan.protocols.model_spec import ModelSpec

        _, rotary_dim = self._rotation
        rope = rotations.half_rotation(rotary_dim, self.max_seq_len, self.rope_theta, None)
        keys, values = self.n_key_heads * self.key_head_dim, self.n_value_heads * self.value_head_dim

        def linear(inputs: int, outputs: int) -> Linear.Config:
            return Linear.Config(in_features=inputs, out_features=outputs, param_init=blocks.NORMAL)

        def norm(size: int) -> OffsetRMSNorm.Config:
            return OffsetRMSNorm.Config(dim=size, eps=self.norm_eps, param_init={"weight": nn.init.zeros_})

        def convolution(channels: int) -> Conv1d.Config:
            bound = self.conv_size**-0.5
            return Conv1d.Config(
                in_channels=channels,
                out_channels=channels,
                kernel_size=self.conv_size,
                groups=channels,
                bias=False,
                param_init={"weight": partial(nn.init.uniform_, a=-bound, b=bound)},
            )

        def attention() -> Qwen35Attention.Config:
            return Qwen35Attention.Config(
                n_heads=self.n_heads,
                n_kv_heads=self.n_kv_heads,
                head_dim=self.head_dim,
                rotary_dim=rotary_dim,
                rope=rope,
                wq=linear(self.dim, 2 * self.n_heads * self.head_dim),
                wk=linear(self.dim, self.n_kv_heads * self.head_dim),
                wv=linear(self.dim, self.n_kv_heads * self.head_dim),
                wo=linear(self.n_heads * self.head_dim, self.dim),
                q_norm=norm(self.head_dim),
                k_norm=norm(self.head_dim),
                inner_attention=get_attention_config("varlen"),
            )

        def delta_net() -> DeltaNet.Config:
            return DeltaNet.Config(
                key_head_dim=self.key_head_dim,
                value_head_dim=self.value_head_dim,
                conv_kernel_size=self.conv_size,
                in_proj_q=linear(self.dim, keys),
                in_proj_k=linear(self.dim, keys),
                in_proj_v=linear(self.dim, values),
                in_proj_z=linear(self.dim, values),
                in_proj_a=linear(self.dim, self.n_value_heads),
                in_proj_b=linear(self.dim, self.n_value_heads),
                conv_q=convolution(keys),
                conv_k=convolution(keys),
                conv_v=convolution(values),
                kernel=DeltaKernel.Config(),
                norm=RMSNormGated.Config(
                    dim=self.value_head_dim, eps=self.norm_eps, param_init={"weight": nn.init.ones_}
                ),
                out_proj=linear(values, self.dim),
                param_init={"A_log": _draw_log_rates, "dt_bias": nn.init.ones_},
            )

        def block(layer: int) -> TextBlock.Config:
            return TextBlock.Config(
                attention_norm=norm(self.dim),
                ffn_norm=norm(self.dim),
                attention=attention() if self.has_attention(layer) else None,
                delta_net=None if self.has_attention(layer) else delta_net(),
                feed_forward=blocks.feed_forward(self),
            )

        tables = blocks.tables(self) | {"norm": norm(self.dim)}
        return ModelSpec(
            name="qwen3_5",
            flavor="custom",
            model=TextModel.Config(**tables, layers=[block(layer) for layer in range(self.n_layers)]),
            parallelize_fn=parallelize_qwen3_5,
            pipelining_fn=None,
            post_optimizer_build_fn=None,
            state_dict_adapter=_adapter,
        )

    @classmethod
    def _fields_of_hf(cls, hf: dict[str, Any], where: str) -> dict[str, Any]:
        if hf["model_type"] == _WHOLE:
            hf = _text_part(hf, where)
        check_keys(hf, HF_KEYS, where)
        names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
        required(hf, names, where)
        return sizes_of_hf(hf, where, heads=("num_key_value_heads", "head_dim")) | {
            "rotary_factor": _rotary_factor(hf, where),
            "full_attention_interval": _interval(hf, where),
            "n_key_heads": hf["linear_num_key_heads"],
            "n_value_heads": hf["linear_num_value_heads"],
            "key_head_dim": hf["linear_key_head_dim"],
            "value_head_dim": hf["linear_value_head_dim"],
            "conv_size": hf.get("linear_conv_kernel_dim") or 4,
        }

    def _hf_kind(self) -> dict[str, Any]:
        kinds = ("linear_attention", "full_attention")
        return dict(
            architectures=["Qwen3_5ForCausalLM"],
            model_type=_TEXT,
            attention_bias=False,
            attn_output_gate=True,
            layer_types=[kinds[self.has_attention(layer)] for layer in range(self.n_layers)],
            full_attention_interval=self.full_attention_interval,
            linear_num_key_heads=self.n_key_heads,
            linear_num_value_heads=self.n_value_heads,
            linear_key_head_dim=self.key_head_dim,
            linear_value_head_dim=self.value_head_dim,
            linear_conv_kernel_dim=self.conv_size,
            mamba_ssm_dtype="float32",
            partial_rotary_factor=self.rotary_factor,
        )

    def _hf_rope(self) -> dict[str, Any]:
        return {"partial_rotary_factor": self.rotary_factor}


def _text_part(hf: dict[str, Any], where: str) -> dict[str, Any]:
    """The text part's keys in the config.json of a whole Qwen3.5, which sees images too."""
    text = hf.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"{where}: its config.json has no text_config; fetch the directory again")
    outer = {name: value for name, value in hf.items() if name not in _BESIDE_TEXT | {"text_config", "model_type"}}
    text = {"tie_word_embeddings": outer.get("tie_word_embeddings")} | text | {"model_type": _TEXT}
    inner = text["tie_word_embeddings"]
    if (tied := outer.pop("tie_word_embeddings", None)) is not None and inner is not None and tied != inner:
        raise ValueError(
            f"{where}: its config.json says tie_word_embeddings={tied!r}, and {inner!r} in text_config; "
            "keep the right one"
        )
    check_keys(outer, HF_KEYS, where)
    return text


def _rotary_factor(hf: dict[str, Any], where: str) -> float:
    """The part of a head that turns, wherever it stands; without any 1/4, as in transformers."""
    parts = [hf, hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}]
    factors = {float(part["partial_rotary_factor"]) for part in parts if part.get("partial_rotary_factor") is not None}
    if len(factors) > 1:
        raise ValueError(
            f"{where}: its config.json has partial_rotary_factor={' and '.join(map(str, sorted(factors)))}; "
            "keep the right one"
        )
    return factors.pop() if factors else 0.25


def _interval(hf: dict[str, Any], where: str) -> int:
    """Every how many layers have attention. Raises ValueError for layers in another order."""
    num, kinds = hf["num_hidden_layers"], hf.get("layer_types")
    interval = hf.get("full_attention_interval") or 4
    if kinds is not None and "full_attention" in kinds:
        interval = kinds.index("full_attention") + 1
    regular = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(num)]
    if kinds is not None and kinds != regular or num < interval:
        raise ValueError(
            f"{where}: its config.json says layer_types={str(kinds)[:160]} for num_hidden_layers={num}; only a Qwen3.5 "
            "with full_attention in every n-th layer and linear_attention in the others is supported"
        )
    return interval


def _draw_log_rates(parameter) -> None:
    """Logarithms of decay rates, from 0.01 to 16 as torchtitan and transformers draw them."""
    parameter.data.uniform_(0.01, 16.0).log_()


def _adapter(model_config: Any, hf_assets_path: str | None) -> Any:
    """torchtitan's adapter for the files of a whole Qwen3.5. For any other directory, and for what this package writes,
    under the names that transformers gives the text part alone."""
    from torchtitan_rl.families import delta_net  # noqa: F401 - without this module torchtitan's needs `fla`

    from torchtitan.models.qwen3_5.state_dict_adapter import Qwen35StateDictAdapter  # isort: skip

    whole, text = "model.language_model.", "model."

    class Adapter(Qwen35StateDictAdapter):
        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            return {name.replace(whole, text, 1): tensor for name, tensor in super().to_hf(state_dict).items()}

        def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
            return super().from_hf(
                {
                    name if name.startswith(whole) else name.replace(text, whole, 1): tensor
                    for name, tensor in hf_state_dict.items()
                }
            )

    config_json = Path(hf_assets_path or "") / "config.json"
    if hf_assets_path and config_json.exists() and json.loads(config_json.read_text()).get("model_type") == _WHOLE:
        return Qwen35StateDictAdapter(model_config, hf_assets_path)
    return Adapter(model_config, hf_assets_path)
