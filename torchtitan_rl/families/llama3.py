"""Llama 3.x, and what has its layers: SmolLM2, the R1-distilled Llama, Mistral without a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from annotated_types import Ge, Gt

from torchtitan_rl.families.decoder import DecoderShape, sizes_of_hf
from torchtitan_rl.families.hf_keys import HfKeys, check_keys, rope_of
from torchtitan_rl.families.rope import Llama3Scaling

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

__all__ = ["Llama3Shape", "HF_KEYS"]

HF_KEYS = HfKeys(
    title="a Llama 3",
    # A Mistral's window is used whenever there is one. `is_llama_config` is SmolLM2's.
    one_value={"sliding_window": ()},
    changes_nothing=("is_llama_config", "transformers.js_config"),
    rope={"llama3": Llama3Scaling.hf_names},
)


@dataclass(kw_only=True, slots=True)
class Llama3Shape(DecoderShape):
    """The sizes of a Llama 3. Example: `Llama3Shape(vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2,
    head_dim=32, hidden_dim=384)` has 0.8M parameters."""

    rope_theta: Annotated[float, Gt(1)] = 5e5
    """Base of the rotary embedding's frequencies."""
    norm_eps: Annotated[float, Ge(0)] = 1e-5
    """Added to the mean square in every RMS norm."""
    rope_scaling: Llama3Scaling | None = None
    """Llama 3.1's longer context; None: no scaling."""

    name: ClassVar[str] = "llama3"
    model_types: ClassVar[tuple[str, ...]] = ("llama", "mistral")

    @classmethod
    def debug(cls, **sizes: Any) -> Self:
        return cls(**sizes, rope_scaling=Llama3Scaling(factor=8.0, original_max_seq_len=32))  # as all from 3.1 on

    def model_spec(self) -> ModelSpec:
        from torchtitan.models.common import ComplexRoPE
        from torchtitan.models.llama3 import Llama3Model, parallelize_llama
        from torchtitan.models.llama3.model import Llama3TransformerBlock
        from torchtitan.protocols.model_spec import ModelSpec

        from torchtitan_rl.families import blocks

        rope = ComplexRoPE.Config(dim=self.head_dim, max_seq_len=self.max_seq_len, theta=self.rope_theta)
        if self.rope_scaling is not None:
            rope.scaling, rope.scaling_factor = "llama", self.rope_scaling.factor
            rope.low_freq_factor = self.rope_scaling.low_freq_factor
            rope.high_freq_factor = self.rope_scaling.high_freq_factor
            rope.original_max_position_embeddings = self.rope_scaling.original_max_seq_len

        def block() -> Llama3TransformerBlock.Config:
            return Llama3TransformerBlock.Config(
                attention_norm=blocks.norm(self.dim, self.norm_eps),
                ffn_norm=blocks.norm(self.dim, self.norm_eps),
                attention=blocks.attention(self, rope),
                feed_forward=blocks.feed_forward(self),
            )

        return ModelSpec(
            name="llama3",
            flavor="custom",
            model=Llama3Model.Config(**blocks.tables(self), layers=[block() for _ in range(self.n_layers)]),
            parallelize_fn=parallelize_llama,
            pipelining_fn=None,
            post_optimizer_build_fn=None,
            state_dict_adapter=_adapter,
        )

    @classmethod
    def _fields_of_hf(cls, hf: dict[str, Any], where: str) -> dict[str, Any]:
        check_keys(hf, HF_KEYS, where)
        is_mistral = hf["model_type"] == "mistral"
        if is_mistral and "sliding_window" not in hf:
            raise ValueError(
                f"{where}: its config.json has no sliding_window, with which a Mistral's is 4096; set it to null where "
                "the model was trained without a window, or use another model"
            )
        _, scaling = rope_of(hf, where)
        heads = ("num_key_value_heads",) if is_mistral else ()  # a Mistral's is 8 where it is missing
        return sizes_of_hf(hf, where, heads=heads) | {
            "rope_scaling": Llama3Scaling.from_hf(scaling, where) if scaling else None
        }

    def _hf_kind(self) -> dict[str, Any]:
        return dict(architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=False, mlp_bias=False)

    def _hf_rope(self) -> dict[str, Any]:
        return {} if self.rope_scaling is None else self.rope_scaling.to_hf()


def _adapter(model_config: Any, hf_assets_path: str | None) -> Any:
    """torchtitan's adapter, which orders the rows of query and key as torchtitan's rotary embedding pairs them."""
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    class Adapter(Llama3StateDictAdapter):
        """Permutes rows whatever the number of columns: a low-rank adapter's B has `rank` of them."""

        def _permute(self, w, n_heads_arg, dim1=None, dim2=None):
            return super()._permute(w, n_heads_arg)

        def _reverse_permute(self, w, n_heads_arg, dim1=None, dim2=None):
            return super()._reverse_permute(w, n_heads_arg)

    return Adapter(model_config, hf_assets_path)
