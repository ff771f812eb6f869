"""The keys of a Hugging Face `config.json`: which a family reads, which must have one value, which change nothing.

A model whose `config.json` asks for another computation than the family's would train and sample without an error, and
with other log-probabilities than the model that its authors trained. So every key is on a list here or in the family's
file, in the spelling of transformers 4 (`rope_theta`, `rope_scaling`) and of transformers 5 (`rope_parameters`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["HfKeys", "KeyRule", "check_keys", "rope_of", "required"]

KeyRule = Literal["read", "one value", "changes nothing", "unknown"]

_READ_BY_ALL = frozenset(
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim max_position_embeddings rms_norm_eps tie_word_embeddings rope_theta rope_scaling rope_parameters".split()
)
"""Keys that every family reads."""

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
    "shared_expert_intermediate_size": (0,),
    "n_shared_experts": (0,),
    "layer_types": (["full_attention"],),  # of any number of layers
}
"""Key -> the values, beside null, with which a key changes nothing in any family that does not read it."""

_CHANGES_NOTHING = frozenset(
    # Where a model comes from, and in which type its weights lie on disk.
    "architectures auto_map dtype torch_dtype transformers_version model_name unsloth_fixed unsloth_version "
    "tokenizer_class use_bfloat16 torchscript tf_legacy_loss finetuning_task task_specific_params prefix "
    "initializer_range id2label label2id num_labels problem_type "
    # How a program calls it: what it returns, caches, and how large its pieces are.
    "use_cache return_dict output_attentions output_hidden_states output_router_logits chunk_size_feed_forward "
    "attn_implementation pretraining_tp use_mrope "
    # Only in transformers' own training of a mixture.
    "router_aux_loss_coef "
    # Token ids and settings of generation: a run has its own.
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id "
    "forced_eos_token_id max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores "
    "return_dict_in_generate remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens".split()
)
"""Keys that do not change what any model here computes."""


@dataclass(frozen=True, kw_only=True)
class HfKeys:
    """What a family knows about keys beyond those that all families share."""

    title: str
    """The family in messages, with its article: `a Qwen3`."""
    read: Collection[str] = ()
    """Keys that the family reads into its shape."""
    one_value: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Key -> the values, beside null, with which the model is the one that is built; they replace those of all
    families. Without any value the key must be absent."""
    changes_nothing: Collection[str] = ()
    """Keys that do not change what this family computes."""
    rope: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Kind of rotary embedding that the family has -> the names in the key's value that are read."""

    def rule(self, key: str) -> KeyRule:
        """What the family does with a key: reads it, wants one of `values(key)`, ignores it because it changes nothing,
        or does not know it and refuses the model. `docs/config_keys.md` is written from this method."""
        if key in _CHANGES_NOTHING or key in self.changes_nothing or key.startswith("_"):
            return "changes nothing"
        if key in _READ_BY_ALL or key in self.read:
            return "read"
        return "one value" if key in self.one_value or key in _ONE_VALUE else "unknown"

    def values(self, key: str) -> tuple[Any, ...]:
        """The values of a "one value" key, beside null, with which the model is the one that is built; none: the key
        must be absent."""
        return self.one_value[key] if key in self.one_value else _ONE_VALUE[key]

    def known(self) -> list[str]:
        """Every key on a list, this family's or that of all families, in alphabetical order."""
        return sorted(
            {*_READ_BY_ALL, *_ONE_VALUE, *_CHANGES_NOTHING, *self.read, *self.one_value, *self.changes_nothing}
        )


def check_keys(hf: Mapping[str, Any], keys: HfKeys, where: str) -> None:
    """Refuses the content of a `config.json` that asks for another computation than the family's, by a key with another
    value or by a key that is on no list. A key with null is as good as none.

    `where` begins the messages of ValueErrors.
    """
    for key, value in hf.items():
        rule = keys.rule(key)
        if value is None or rule == "changes nothing":
            continue
        if key in ("rope_scaling", "rope_parameters"):
            _check_rope(key, value, keys, where)
        elif rule == "one value":
            if key == "layer_types":
                if any(kind != "full_attention" for kind in value):
                    _refuse(where, key, sorted(set(map(str, value))), keys.title, ["full_attention"])
            elif not any(value == same for same in keys.values(key)):
                _refuse(where, key, value, keys.title, *keys.values(key))
        elif rule == "unknown":
            raise ValueError(
                f"{where}: its config.json says {key}={str(value)[:80]}, which no {_bare(keys.title)} of this package "
                "reads; use another model, or delete the key where it does not change what the model computes"
            )


def required(hf: Mapping[str, Any], names: Collection[str], where: str) -> None:
    """Raises ValueError that names the keys that a `config.json` lacks."""
    if missing := [name for name in names if hf.get(name) is None]:
        raise ValueError(f"{where}: its config.json has no {', '.join(missing)}; fetch the directory again")


def rope_of(hf: Mapping[str, Any], where: str) -> tuple[float, dict[str, Any]]:
    """(base of the rotary embedding's frequencies, its scaling with `rope_type`), in either spelling. Without a base
    10,000, as in transformers; without scaling an empty dictionary. YaRN without an original number of positions has
    the model's, as in transformers. Raises ValueError for two bases, and for two scalings."""
    parts = {name: hf.get(name) or {} for name in ("rope_scaling", "rope_parameters")}
    bases = {"rope_theta": hf.get("rope_theta")} | {name: part.get("rope_theta") for name, part in parts.items()}
    bases = {place: _number(base, "rope_theta", where) for place, base in bases.items() if base is not None}
    if len(set(bases.values())) > 1:
        both = " and ".join(f"{base:g} in {place}" for place, base in bases.items())
        raise ValueError(f"{where}: its config.json has two bases of the rotary embedding, {both}; keep the right one")
    scalings = [scaling for part in parts.values() if (scaling := _scaling(part))]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise ValueError(
            f"{where}: its config.json has two scalings of the rotary embedding, "
            f"rope_scaling={parts['rope_scaling']!r} and rope_parameters={parts['rope_parameters']!r}; "
            "keep the right one"
        )
    scaling = scalings[0] if scalings else {}
    if scaling.get("rope_type") == "yarn" and hf.get("max_position_embeddings") is not None:
        scaling.setdefault("original_max_position_embeddings", hf["max_position_embeddings"])
    return next(iter(bases.values()), 10_000.0), scaling


def _scaling(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part.get("rope_type") or part.get("type") or "default"
    if kind == "default":
        return {}
    numbers = {name: value for name, value in part.items() if name not in ("rope_theta", "rope_type", "type")}
    return {"rope_type": kind} | {name: value for name, value in numbers.items() if value is not None}


def _number(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{where}: its config.json says {key}={value!r}, no number; fetch the directory again")
    return float(value)


def _refuse(where: str, key: str, value: Any, title: str, *needed: Any) -> None:
    """Raises the ValueError about a key with another value than the needed ones; without any the key must be gone."""
    supported = " or ".join(f"{key}={one!r}" for one in needed) if needed else f"no {key}"
    raise ValueError(f"{where}: its config.json says {key}={value!r}; only {title} with {supported} is supported")


def _bare(title: str) -> str:
    """The title without its article."""
    return title.partition(" ")[2]


def _check_rope(key: str, value: Mapping[str, Any], keys: HfKeys, where: str) -> None:
    kind = value.get("rope_type") or value.get("type") or "default"
    known = {"rope_theta", "rope_type", "type", *(keys.rope.get(kind, ()) if isinstance(kind, str) else ())}
    unread = [name for name, number in value.items() if number is not None and name not in known]
    neutral = [name for name in unread if name == "partial_rotary_factor" and value[name] == 1]
    if kind != "default" and kind not in keys.rope or len(unread) > len(neutral):
        kinds = " or ".join(f"{name!r}" for name in dict.fromkeys(("default", *keys.rope)))
        reads = "".join(f"; of {name!r} it reads {', '.join(parts)}" for name, parts in keys.rope.items())
        raise ValueError(
            f"{where}: its config.json says {key}={dict(value)!r}; only {keys.title} whose rotary embedding has "
            f"rope_type {kinds} is supported{reads}; its weights expect the scaled positions"
        )
