"""The keys of a Hugging Face `config.json`: which are read, which must have one value, which change nothing.

A model whose `config.json` asks for another computation than this package's Qwen3 would train and sample without an
error, and with other log-probabilities than the model that its authors trained. So every key is on a list here, in the
spelling of transformers 4 (`rope_theta`, `rope_scaling`) and of transformers 5 (`rope_parameters`).
"""

from __future__ import annotations

from typing import Any

__all__ = ["check_keys", "rope_theta"]

_READ = frozenset(
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim max_position_embeddings rms_norm_eps tie_word_embeddings rope_theta moe_intermediate_size num_experts "
    "num_local_experts num_experts_per_tok load_balance_coeff".split()
)
"""`Qwen3Shape.from_hf_config` reads them."""

_ONE_VALUE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "hidden_dropout": (0,),
    "resid_pdrop": (0,),
    "embd_pdrop": (0,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "use_qk_norm": (True,),
    "logits_scaling": (1,),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "quantization_config": (),
    "compression_config": (),
    "is_encoder_decoder": (False,),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "mlp_only_layers": ([],),
    "decoder_sparse_step": (1,),
    "norm_topk_prob": (True,),
    "shared_expert_intermediate_size": (0,),
    "n_shared_experts": (0,),
}
"""Key -> the values, beside null, with which the model is the one that is built here."""

_EXPERTS_ONLY = ("mlp_only_layers", "decoder_sparse_step", "norm_topk_prob")
"""Keys that a dense model does not read."""

_CHANGES_NOTHING = frozenset(
    # Where a model comes from, and in which type its weights lie on disk.
    "architectures auto_map dtype torch_dtype transformers_version model_name unsloth_fixed unsloth_version "
    "tokenizer_class use_bfloat16 torchscript tf_legacy_loss finetuning_task task_specific_params prefix "
    "initializer_range id2label label2id num_labels problem_type "
    # How a program calls it: what it returns, caches, and how large its pieces are.
    "use_cache return_dict output_attentions output_hidden_states output_router_logits chunk_size_feed_forward "
    "attn_implementation pretraining_tp use_mrope "
    # Only with a sliding window, and only in transformers' own training of a mixture.
    "sliding_window max_window_layers router_aux_loss_coef "
    # Token ids and settings of generation: a run has its own.
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id "
    "forced_eos_token_id max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores "
    "return_dict_in_generate remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens".split()
)
"""Keys that do not change what the model computes."""

_NEUTRAL_ROPE: dict[str, tuple[Any, ...]] = {
    "rope_type": ("default",),
    "type": ("default",),
    "partial_rotary_factor": (1,),
}


def check_keys(hf: dict[str, Any], where: str) -> None:
    """Refuses the content of a `config.json` that asks for another computation than this package's Qwen3, by a key
    with another value or by a key that is on no list. A key with null is as good as none.

    `where` begins the messages of ValueErrors.
    """
    has_experts = hf.get("model_type") == "qwen3_moe"
    for key, value in hf.items():
        if value is None or key in _READ or key in _CHANGES_NOTHING or key.startswith("_"):
            continue
        if key in _ONE_VALUE:
            if not has_experts and key in _EXPERTS_ONLY:
                continue
            if not any(value == same for same in _ONE_VALUE[key]):
                _refuse(where, key, value, *_ONE_VALUE[key])
        elif key == "layer_types":
            if any(kind != "full_attention" for kind in value):
                _refuse(where, key, sorted(set(map(str, value))), ["full_attention"])
        elif key in ("rope_scaling", "rope_parameters"):
            _check_rope(key, value, where)
        else:
            raise ValueError(
                f"{where}: its config.json says {key}={str(value)[:80]}, which no Qwen3 of this package reads; use "
                "another model, or delete the key where it does not change what the model computes"
            )


def rope_theta(hf: dict[str, Any], where: str) -> float:
    """The base of the rotary embedding's frequencies, in either spelling; 10,000 where none is said, as in
    transformers. Raises ValueError for two bases."""
    places = {"rope_theta": hf, "rope_scaling": hf.get("rope_scaling"), "rope_parameters": hf.get("rope_parameters")}
    bases = {place: (keys or {}).get("rope_theta") for place, keys in places.items()}
    bases = {place: float(base) for place, base in bases.items() if base is not None}
    if len(set(bases.values())) > 1:
        both = " and ".join(f"{base:g} in {place}" for place, base in bases.items())
        raise ValueError(f"{where}: its config.json has two bases of the rotary embedding, {both}; keep the right one")
    return next(iter(bases.values()), 10_000.0)


def _refuse(where: str, key: str, value: Any, *needed: Any) -> None:
    """Raises the ValueError about a key with another value than the needed ones; without any the key must be gone."""
    supported = " or ".join(f"{key}={one!r}" for one in needed) if needed else f"no {key}"
    raise ValueError(f"{where}: its config.json says {key}={value!r}; only a Qwen3 with {supported} is supported")


def _check_rope(key: str, value: dict[str, Any], where: str) -> None:
    for name, number in value.items():
        if number is None or name == "rope_theta":
            continue
        if not any(number == same for same in _NEUTRAL_ROPE.get(name, ())):
            raise ValueError(
                f"{where}: its config.json says {key}={value!r}; only a Qwen3 whose rotary embedding is not scaled is "
                "supported, with rope_type 'default': its weights expect the scaled positions"
            )
