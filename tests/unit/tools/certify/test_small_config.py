"""Configs made small: what decides how a model computes stays."""

import pytest

from tests.kit.refusal import refusal
from tests.unit.families.test_published import PUBLISHED
from torchtitan_rl.families import BUILT_IN, Qwen3Shape, shape_of_hf
from torchtitan_rl.families.rope import Llama3Scaling, YarnScaling
from torchtitan_rl.tools.certify.small_config import CONTEXT, debug_config, small_config

LLAMA_3_2_1B = dict(
    model_type="llama",
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=32,
    num_key_value_heads=8,
    num_hidden_layers=16,
    head_dim=64,
    vocab_size=128256,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=dict(
        rope_type="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
    eos_token_id=[128001, 128008],
)
QWEN_2_5_7B = dict(
    model_type="qwen2",
    hidden_size=3584,
    intermediate_size=18944,
    num_attention_heads=28,
    num_key_value_heads=4,
    num_hidden_layers=28,
    vocab_size=152064,
    max_position_embeddings=131072,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    sliding_window=131072,
    use_sliding_window=False,
    max_window_layers=28,
    tie_word_embeddings=False,
)
QWEN_3_30B_A3B = dict(
    model_type="qwen3_moe",
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    num_attention_heads=32,
    num_key_value_heads=4,
    num_hidden_layers=48,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
)


def small(hf):
    return shape_of_hf(small_config(hf), "m")


def test_heads_ties_constants_and_scaling_of_a_llama_stay():
    shape = small(LLAMA_3_2_1B)
    assert (shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.dim) == (
        8,
        2,
        32,
        256,
    )  # 4 queries a key, 4 x hidden
    assert shape.hidden_dim == 4 * shape.dim and shape.n_layers == 2 and shape.max_seq_len == CONTEXT
    assert (shape.rope_theta, shape.norm_eps, shape.tie_embeddings) == (500000.0, 1e-5, True)
    assert shape.rope_scaling == Llama3Scaling(factor=32.0, original_max_seq_len=32)


def test_a_head_size_that_follows_from_the_width_goes_on_following():
    content = small_config(QWEN_2_5_7B)
    shape = shape_of_hf(content, "m")
    assert "head_dim" not in content and shape.head_dim == 32
    assert (shape.n_heads, shape.n_kv_heads, shape.dim) == (14, 2, 448) and not shape.tie_embeddings


def test_a_mixture_stays_a_mixture_and_heads_wider_than_the_model_stay_wider():
    shape = small(QWEN_3_30B_A3B)
    assert (shape.experts.num_experts, shape.experts.top_k) == (8, 2)
    assert shape.n_heads * shape.head_dim == 512 > shape.dim and shape.n_heads == 8 * shape.n_kv_heads
    assert shape.rope_scaling == YarnScaling(factor=4.0, original_max_seq_len=32)


def test_one_layer_of_every_kind_is_left():
    kinds = ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 4
    content = small_config(QWEN_2_5_7B | {"layer_types": kinds, "num_hidden_layers": 8, "sliding_window": 4096})
    assert content["num_hidden_layers"] == 4 and content["layer_types"] == kinds[:4]
    assert content["sliding_window"] == 16 and content["max_window_layers"] == 4


def test_the_text_part_of_a_model_that_sees_images_is_left():
    shape = small(PUBLISHED["Qwen3.5-27B, its text part"][0])
    assert (shape.n_key_heads, shape.n_value_heads) == (2, 6)  # of 16 and 48
    assert (shape.key_head_dim, shape.value_head_dim, shape.conv_size, shape.rotary_factor) == (16, 32, 4, 0.25)
    assert shape.n_layers == shape.full_attention_interval == 4 and not shape.tie_embeddings
    assert small(PUBLISHED["Qwen3.5-0.8B, its text part"][0]).tie_embeddings


@pytest.mark.parametrize("family", BUILT_IN)
def test_every_family_has_a_debug_size(family):
    shape = shape_of_hf(debug_config(family.name), "m")
    assert type(shape) is family and shape.num_parameters < 1_000_000


def test_another_name_is_refused():
    assert "model='qwen4': is neither a directory nor a family" in refusal(debug_config, "qwen4")
    assert Qwen3Shape.name in refusal(debug_config, "qwen4")
