"""Which model a run trains."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_rl.config.hf_keys import check_keys, rope_theta

__all__ = ["Qwen3Shape", "ExpertsShape", "ModelConfig"]


@dataclass(kw_only=True, slots=True)
class ExpertsShape:
    """A mixture of experts in the place of every feed-forward. Example: `ExpertsShape(num_experts=8, top_k=2)`."""

    num_experts: int
    """Experts in each layer."""
    top_k: int
    """Experts that see a token."""
    load_balance_coeff: float | None = None
    """How far torchtitan's load-balancing bias moves towards experts with few tokens at every optimizer step; None: no
    bias. Hugging Face's Qwen3 has no such bias: with one, an export is complete for this package only."""


@dataclass(kw_only=True, slots=True)
class Qwen3Shape:
    """The sizes of a Qwen3. Example: `Qwen3Shape(vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2,
    head_dim=32, hidden_dim=384)` has 0.8M parameters."""

    vocab_size: int
    """Rows of the embedding; at least one for every token id of the tokenizer."""
    dim: int
    """Hidden size."""
    n_layers: int
    n_heads: int
    """Query heads of a layer."""
    n_kv_heads: int
    """Key and value heads of a layer."""
    head_dim: int
    """Size of one head."""
    hidden_dim: int
    """Inner size of the gated feed-forward; in a mixture of experts, of each expert."""
    experts: ExpertsShape | None = None
    """Puts a mixture of experts in the place of every feed-forward; None: a dense model."""
    rope_theta: float = 1e6
    """Base of the rotary embedding's frequencies."""
    max_seq_len: int = 4096
    """Positions that the rotary embedding covers, in tokens."""
    tie_embeddings: bool = True
    """Whether the head shares the embedding's weights."""
    norm_eps: float = 1e-6
    """Added to the mean square in every RMS norm."""

    @property
    def num_parameters(self) -> int:
        attention = self.dim * self.head_dim * (2 * self.n_heads + 2 * self.n_kv_heads) + 2 * self.head_dim
        feed_forward = 3 * self.dim * self.hidden_dim
        if self.experts is not None:
            feed_forward = self.experts.num_experts * (feed_forward + self.dim)  # and its row of the router
        layer = attention + feed_forward + 2 * self.dim
        embeddings = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return embeddings + self.n_layers * layer + self.dim

    @classmethod
    def from_hf(cls, config_json: Path) -> Qwen3Shape:
        """Sizes in a Hugging Face `config.json`. Raises ValueError for other models than Qwen3."""
        where = f"model.assets={str(config_json.parent)!r}"
        try:
            hf = json.loads(config_json.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: its config.json is not JSON ({error}); fetch the directory again") from None
        return cls.from_hf_config(hf, where)

    @classmethod
    def from_hf_config(cls, hf: dict, where: str) -> Qwen3Shape:
        """Sizes in the content of a Hugging Face `config.json`. Raises ValueError for another model than Qwen3, and for
        a Qwen3 that computes otherwise (`config.hf_keys`); the messages begin with `where`."""
        if hf.get("model_type") not in ("qwen3", "qwen3_moe"):
            raise ValueError(
                f"{where}: its config.json says model_type={hf.get('model_type')!r}; "
                "only Qwen3 (model_type 'qwen3' or 'qwen3_moe') is supported"
            )
        hf = {"num_experts": hf["num_local_experts"], **hf} if "num_local_experts" in hf else hf
        has_experts = hf["model_type"] == "qwen3_moe"
        # To transformers a mixture without norm_topk_prob has False.
        check_keys(hf | {"norm_topk_prob": bool(hf.get("norm_topk_prob"))} if has_experts else hf, where)
        inner = "moe_intermediate_size" if has_experts else "intermediate_size"
        sizes = (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            inner,
            "max_position_embeddings",
            *(("num_experts", "num_experts_per_tok") if has_experts else ()),
        )
        if missing := [name for name in sizes if name not in hf]:
            raise ValueError(f"{where}: its config.json has no {', '.join(missing)}; fetch the directory again")
        experts = None
        if has_experts:
            experts = ExpertsShape(
                num_experts=hf["num_experts"],
                top_k=hf["num_experts_per_tok"],
                load_balance_coeff=hf.get("load_balance_coeff"),
            )
        return cls(
            vocab_size=hf["vocab_size"],
            dim=hf["hidden_size"],
            n_layers=hf["num_hidden_layers"],
            n_heads=hf["num_attention_heads"],
            n_kv_heads=hf["num_key_value_heads"],
            head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
            hidden_dim=hf[inner],
            experts=experts,
            rope_theta=rope_theta(hf, where),
            max_seq_len=hf["max_position_embeddings"],
            tie_embeddings=hf.get("tie_word_embeddings", False),
            norm_eps=hf.get("rms_norm_eps", 1e-6),
        )

    def to_hf(self, eos_token_id: int, pad_token_id: int) -> dict:
        """The content of a Hugging Face `config.json` with these sizes."""
        kind: dict[str, Any] = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3")
        if self.experts is not None:
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
        return dict(
            **kind,
            vocab_size=self.vocab_size,
            hidden_size=self.dim,
            num_hidden_layers=self.n_layers,
            num_attention_heads=self.n_heads,
            num_key_value_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.hidden_dim,
            rope_theta=self.rope_theta,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            max_position_embeddings=self.max_seq_len,
            tie_word_embeddings=self.tie_embeddings,
            rms_norm_eps=self.norm_eps,
            hidden_act="silu",
            attention_bias=False,
            attention_dropout=0.0,
            use_sliding_window=False,
            initializer_range=0.02,
            use_cache=True,
            torch_dtype="float32",
            eos_token_id=eos_token_id,
            bos_token_id=None,
            pad_token_id=pad_token_id,
        )


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """A model: its sizes, and the directory of its files."""

    assets: str = "chars"
    """A Hugging Face directory with a tokenizer, or one of the package's tokenizers, without weights: `"chars"`, and
    `"bytes"` with a chat template for tools. The directory needs a config.json unless `shape` or `flavor` is set.
    Safetensors in the directory are the initial weights; without safetensors the initial weights are random."""
    shape: Qwen3Shape | None = None
    """Sizes of the model; None: those of `flavor`, or of the config.json in `assets`."""
    flavor: str | None = None
    """Name of a standard Qwen3 of torchtitan, such as `"0.6B"`, that gives the sizes; None: see `shape`."""
    pretrained: bool = False
    """True refuses to start from random weights: `assets` must hold safetensors."""
