"""Every key of a Hugging Face config.json is read, has the one value that is supported, or changes nothing."""

import json
import re

import pytest
from transformers import AutoConfig, Qwen3Config, Qwen3MoeConfig

from tests import config_keys
from tests.kit.refusal import refusal
from tests.unit.families.shapes import SHAPES
from torchtitan_rl.config.model import ExpertsShape, ModelConfig, Qwen3Shape
from torchtitan_rl.families import shape_of_hf
from torchtitan_rl.families.hf_keys import check_keys
from torchtitan_rl.families.rope import YarnScaling
from torchtitan_rl.model.shape import resolve_shape

DENSE = Qwen3Shape(vocab_size=64, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=24)
MIXTURE = Qwen3Shape(
    vocab_size=64,
    dim=16,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    hidden_dim=24,
    experts=ExpertsShape(num_experts=4, top_k=2),
)

CHANGES = {
    "hidden_act": "gelu",
    "attention_bias": True,
    "attention_dropout": 0.1,
    "use_sliding_window": True,
    "layer_types": ["full_attention", "sliding_attention"],
    "quantization_config": {"quant_method": "fp8"},
    "compression_config": {"format": "pack-quantized"},
    "partial_rotary_factor": 0.5,
    "is_encoder_decoder": True,
    "pruned_heads": {"0": [1]},
    "rope_scaling": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32768},
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "mscale": 0.7},
    "clip_qkv": 8.0,  # of another model, and on no list
}


def read(content):
    return Qwen3Shape.from_hf_config(content, "model='m'")


def complaint(content):
    return refusal(read, content)


@pytest.mark.parametrize("shape", [DENSE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("key", CHANGES)
def test_a_key_that_changes_the_computation_is_refused_by_name(key, shape):
    content = shape.to_hf(1, 0)
    assert read(content) == shape
    message = complaint(content | {key: CHANGES[key]})
    assert message.startswith(f"model='m': its config.json says {key}=")
    assert read(content | {key: None} if key != "rope_parameters" else content) == shape  # null is as good as none


@pytest.mark.parametrize(
    "key, value",
    [("norm_topk_prob", False), ("norm_topk_prob", None), ("mlp_only_layers", [1]), ("decoder_sparse_step", 2)],
)
def test_a_mixture_of_another_kind_is_refused(key, value):
    assert f"says {key}={value or False!r}; only a Qwen3 with {key}=" in complaint(MIXTURE.to_hf(1, 0) | {key: value})
    assert read(DENSE.to_hf(1, 0) | {key: value}) == DENSE  # where it means nothing


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
    ],
    ids=str,
)
def test_a_scaled_rotary_embedding_is_refused_in_both_spellings(rope):
    message = complaint(DENSE.to_hf(1, 0) | rope)
    assert "only a Qwen3 whose rotary embedding has rope_type 'default' or 'yarn' is supported" in message


def test_a_scaling_that_lacks_a_name_or_has_two_values_is_refused():
    content = DENSE.to_hf(1, 0)
    lacking = content | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}
    assert complaint(lacking).endswith("rope_scaling: its config.json has no factor; fetch the directory again")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert read(content | {"rope_scaling": yarn}).rope_scaling == YarnScaling(factor=4.0, original_max_seq_len=32)
    two = content | {"rope_scaling": yarn, "rope_parameters": yarn | {"rope_theta": 1e6, "factor": 8.0}}
    assert "has two scalings of the rotary embedding" in complaint(two)


def test_yarn_covers_its_factor_times_the_original_positions():
    content = DENSE.to_hf(1, 0) | {"max_position_embeddings": 32}
    yarn = {"rope_type": "yarn", "factor": 4.0}
    original = {"original_max_position_embeddings": 32}
    assert read(content | {"rope_scaling": yarn | original}).max_seq_len == 128
    extended = content | {"max_position_embeddings": 160, "rope_scaling": yarn | original}
    assert read(extended).max_seq_len == read(read(extended).to_hf(1, 0)).max_seq_len == 160
    shape = read(content | {"rope_scaling": yarn})  # the original number is the model's, as in transformers
    assert shape.max_seq_len == 128 and shape.rope_scaling.original_max_seq_len == 32
    parameters = {"rope_theta": 1e6} | yarn
    bare = {name: value for name, value in content.items() if not name.startswith("rope")}
    theirs = Qwen3Config(**bare, rope_parameters=parameters).rope_parameters
    assert theirs["original_max_position_embeddings"] == 32


def test_a_key_with_null_is_as_good_as_none():
    content = DENSE.to_hf(1, 0)
    shape = read(content | {"tie_word_embeddings": None, "rms_norm_eps": None})
    assert (shape.tie_embeddings, shape.norm_eps) == (False, 1e-6)
    content = SHAPES["gpt-oss"].to_hf(1, 0) | {"swiglu_limit": None, "rms_norm_eps": None}
    shape = shape_of_hf(content, "m")
    assert (shape.swiglu_limit, shape.norm_eps) == (7.0, 1e-5)


def test_the_base_of_the_rotary_embedding_in_both_spellings():
    bare = {name: value for name, value in DENSE.to_hf(1, 0).items() if not name.startswith("rope")}
    assert read(bare | {"rope_theta": 5e5}).rope_theta == 5e5
    assert read(bare | {"rope_theta": 5e5, "rope_scaling": None}).rope_theta == 5e5
    assert read(bare | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}).rope_theta == 5e5
    assert read(bare | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}}).rope_theta == 5e5
    assert read(bare).rope_theta == Qwen3Config(**bare).rope_parameters["rope_theta"] == 1e4
    two = bare | {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert complaint(two).endswith(
        "two bases of the rotary embedding, 10000 in rope_theta and 1e+06 in rope_parameters; keep the right one"
    )


@pytest.mark.parametrize("kind", [Qwen3Config, Qwen3MoeConfig])
def test_every_key_that_transformers_writes_is_on_a_list(kind):
    content = kind(norm_topk_prob=True).to_dict()
    assert read(content).n_layers == content["num_hidden_layers"]
    older = {
        "max_length": 20,
        "do_sample": False,
        "temperature": 1.0,
        "torch_dtype": "bfloat16",
        "tie_encoder_decoder": False,
    }
    assert read(content | older | {"unsloth_version": "2025.9"}) == read(content)


def test_sliding_windows_as_transformers_reads_them(tmp_path):
    published = DENSE.to_hf(1, 0) | {"sliding_window": 4096, "max_window_layers": 1, "use_sliding_window": False}
    assert read(published) == DENSE
    (tmp_path / "config.json").write_text(json.dumps(published | {"use_sliding_window": True}))
    assert "sliding_attention" in AutoConfig.from_pretrained(str(tmp_path)).layer_types
    message = refusal(resolve_shape, ModelConfig(assets=str(tmp_path)))
    assert "says use_sliding_window=True; only a Qwen3 with use_sliding_window=False is supported" in message


def test_the_page_of_keys_is_that_of_the_families():
    assert config_keys.PAGE.read_text() == config_keys.page(), "run `python -m tests.config_keys`"


@pytest.mark.parametrize("keys", config_keys.FAMILIES.values(), ids=config_keys.FAMILIES)
def test_a_key_of_every_rule_is_treated_as_the_page_says(keys):
    """Alone in a `config.json`, a value that the page does not allow is refused, and the others are not."""
    for key in keys.known():
        if key in ("rope_scaling", "rope_parameters"):
            continue
        content = {key: "a value of no model"}
        if keys.rule(key) == "one value":
            with pytest.raises(ValueError, match=re.escape(key)):
                check_keys(content, keys, "here")
            content = {key: keys.values(key)[0] if keys.values(key) else None}
        check_keys(content, keys, "here")
    with pytest.raises(ValueError, match="of_no_list"):
        check_keys({"of_no_list": 1}, keys, "here")
