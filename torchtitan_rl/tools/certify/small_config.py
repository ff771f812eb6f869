"""The content of a `config.json` made small: the same kind of model at sizes that two cores check in seconds.

What decides how the model computes stays: query heads for each key and value head, ties, biases, the kind of experts,
the form and the scaling of the rotary embedding, the pattern of layers. What only decides how much the model computes
is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan_rl import platform
from torchtitan_rl.families import BUILT_IN

__all__ = ["CONTEXT", "debug_config", "small_config"]

CONTEXT = 288
"""Positions of the small model: two blocks of the engine's prefix cache on a CPU, and some more."""
_ORIGINAL_CONTEXT = 32
"""Positions of the original training, of a small model whose rotary embedding is scaled."""
_VOCABULARY = 97
"""More than the tokens of the tokenizer `chars`, and odd: tensor-parallel ranks get parts of unequal size."""
_EXPERTS, _EXPERTS_PER_TOKEN, _WINDOW = 8, 2, 16
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def debug_config(name: str) -> dict[str, Any]:
    """The content of a `config.json` of the built-in family of this name, in which `-` and `_` are alike. Raises
    ValueError for another name."""
    family = next((family for family in BUILT_IN if family.name.replace("_", "-") == name.replace("_", "-")), None)
    if family is None:
        raise ValueError(
            f"model={name!r}: is neither a directory nor a family of this package; give a directory with a config.json "
            f"or one of {', '.join(family.name for family in BUILT_IN)}"
        )
    sizes: dict[str, Any] = dict(
        vocab_size=_VOCABULARY, dim=96, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=_head_dim(), hidden_dim=160
    )
    return small_config(family.debug(**sizes, max_seq_len=CONTEXT).to_hf(1, 0))


def small_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A smaller model of the same kind, in float32. `hf` describes a model that a family has read; of a model that sees
    images too, its text part stays."""
    if hf.get("text_config"):
        hf = {"tie_word_embeddings": hf.get("tie_word_embeddings")} | hf["text_config"]
    small = dict(hf)
    heads, kv_heads = hf["num_attention_heads"], hf.get("num_key_value_heads") or hf["num_attention_heads"]
    group, head_dim, hidden = heads // kv_heads, _head_dim(), hf["hidden_size"]
    small["num_key_value_heads"] = small_kv = min(kv_heads, 4 if group <= 2 else 2)
    small["num_attention_heads"] = small_kv * group
    width = small["num_attention_heads"] * head_dim
    if (hf.get("head_dim") or hidden // heads) * heads == hidden:
        small["hidden_size"] = width
    else:
        small["hidden_size"] = 96 if width != 96 else 64
    if hf.get("kv_lora_rank"):
        small |= _small_latents(hf, head_dim)
    elif hf.get("head_dim"):
        small["head_dim"] = head_dim
    if hf.get("linear_num_key_heads"):
        small |= _small_delta_nets(hf)
    for name in ("intermediate_size", "moe_intermediate_size"):
        if hf.get(name):
            small[name] = max(32, 32 * round(min(hf[name] / hidden, 4) * small["hidden_size"] / 32))
    for name in _EXPERT_COUNTS:
        if hf.get(name):
            small[name] = min(hf[name], _EXPERTS)
    if hf.get("num_experts_per_tok"):
        small["num_experts_per_tok"] = min(hf["num_experts_per_tok"], _EXPERTS_PER_TOKEN)
    kinds = hf.get("layer_types")
    small["num_hidden_layers"] = layers = _num_layers(hf["num_hidden_layers"], kinds)
    if kinds:
        small["layer_types"] = list(kinds[:layers])
    if hf.get("max_window_layers") is not None:
        small["max_window_layers"] = min(hf["max_window_layers"], layers)
    if hf.get("sliding_window"):
        small["sliding_window"] = min(hf["sliding_window"], _WINDOW)
    for name in ("rope_scaling", "rope_parameters"):
        if (hf.get(name) or {}).get("original_max_position_embeddings"):
            small[name] = hf[name] | {"original_max_position_embeddings": _ORIGINAL_CONTEXT}
    small |= {"vocab_size": _VOCABULARY, "max_position_embeddings": CONTEXT, "eos_token_id": 1, "bos_token_id": None}
    small["pad_token_id"] = None  # transformers gives the embedding of a padding token no gradient
    small.pop("torch_dtype", None)
    return small | {"dtype": "float32"}


def _small_latents(hf: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Sizes of latent attention: half of a head is rotated, and values are as large as keys."""
    small: dict[str, Any] = dict(qk_nope_head_dim=head_dim // 2, qk_rope_head_dim=head_dim // 2, v_head_dim=head_dim)
    small |= {"head_dim": head_dim // 2, "kv_lora_rank": min(hf["kv_lora_rank"], 48)}  # transformers': the rotated half
    small["first_k_dense_replace"] = min(hf["first_k_dense_replace"], 1)
    return small | {"q_lora_rank": hf["q_lora_rank"] and min(hf["q_lora_rank"], 40)}


def _small_delta_nets(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of gated delta nets: as many value heads for a key head, and states that are not square."""
    keys, values = hf["linear_num_key_heads"], hf["linear_num_value_heads"]
    small = min(keys, 2)
    return dict(
        linear_num_key_heads=small,
        linear_num_value_heads=small * (values // keys),
        linear_key_head_dim=min(hf["linear_key_head_dim"], 16),
        linear_value_head_dim=min(hf["linear_value_head_dim"], 32),
    )


def _head_dim() -> int:
    return min(platform.head_dims(), default=64)


def _num_layers(number: int, kinds: Sequence[str] | None) -> int:
    """Two layers, or as many as it takes to have one of every kind."""
    if not kinds:
        return min(number, 2)
    return max(min(number, 2), max(list(kinds).index(kind) for kind in set(kinds)) + 1)
