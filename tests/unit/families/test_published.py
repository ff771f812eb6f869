"""The config.json of published models: read, and counted as transformers counts them.

The contents are written by hand, as the models' pages on the Hub showed them; Qwen3.5's sizes are those of torchtitan's
registry.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from torchtitan_rl.config.load import load_config
from torchtitan_rl.families import shape_of_hf
from torchtitan_rl.model.shape import resolve_shape

QWEN3 = dict(
    architectures=["Qwen3ForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    bos_token_id=151643,
    eos_token_id=151645,
    head_dim=128,
    hidden_act="silu",
    initializer_range=0.02,
    max_position_embeddings=40960,
    model_type="qwen3",
    num_key_value_heads=8,
    rms_norm_eps=1e-06,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=None,
    torch_dtype="bfloat16",
    transformers_version="4.51.0",
    use_cache=True,
    use_sliding_window=False,
    vocab_size=151936,
)
QWEN3_MOE = QWEN3 | dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    decoder_sparse_step=1,
    mlp_only_layers=[],
    norm_topk_prob=True,
    num_experts=128,
    num_experts_per_tok=8,
    num_key_value_heads=4,
    output_router_logits=False,
    router_aux_loss_coef=0.001,
    tie_word_embeddings=False,
)
LLAMA = dict(
    architectures=["LlamaForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    bos_token_id=128000,
    eos_token_id=[128001, 128008, 128009],
    hidden_act="silu",
    initializer_range=0.02,
    max_position_embeddings=131072,
    mlp_bias=False,
    model_type="llama",
    num_key_value_heads=8,
    pretraining_tp=1,
    rms_norm_eps=1e-05,
    rope_scaling=dict(
        factor=8.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192, rope_type="llama3"
    ),
    rope_theta=500000.0,
    torch_dtype="bfloat16",
    transformers_version="4.43.0.dev0",
    use_cache=True,
    vocab_size=128256,
)
QWEN2 = dict(
    architectures=["Qwen2ForCausalLM"],
    attention_dropout=0.0,
    bos_token_id=151643,
    eos_token_id=151645,
    hidden_act="silu",
    initializer_range=0.02,
    max_position_embeddings=32768,
    model_type="qwen2",
    rms_norm_eps=1e-06,
    rope_theta=1000000.0,
    sliding_window=32768,
    torch_dtype="bfloat16",
    transformers_version="4.43.1",
    use_cache=True,
    use_sliding_window=False,
    use_mrope=False,
    vocab_size=151936,
)

QWEN3_5_TEXT = dict(
    attention_bias=False,
    attention_dropout=0.0,
    attn_output_gate=True,
    bos_token_id=None,
    dtype="bfloat16",
    eos_token_id=248044,
    full_attention_interval=4,
    head_dim=256,
    hidden_act="silu",
    initializer_range=0.02,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_num_key_heads=16,
    linear_value_head_dim=128,
    mamba_ssm_dtype="float32",
    max_position_embeddings=262144,
    mlp_only_layers=[],
    model_type="qwen3_5_text",
    mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False,
    partial_rotary_factor=0.25,
    rms_norm_eps=1e-06,
    rope_parameters=dict(
        mrope_interleaved=True,
        mrope_section=[11, 11, 10],
        partial_rotary_factor=0.25,
        rope_theta=10000000,
        rope_type="default",
    ),
    use_cache=True,
    vocab_size=248320,
)


def sizes(dim, inner, layers, heads, *, kv=None, tied, **more):
    fields = dict(hidden_size=dim, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads)
    return fields | ({} if kv is None else {"num_key_value_heads": kv}) | {"tie_word_embeddings": tied} | more


LONGER = dict(LLAMA["rope_scaling"], factor=32.0)


def qwen3_5(text, *, tied):
    """The config.json of a whole model, which sees images."""
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    return dict(
        architectures=["Qwen3_5ForConditionalGeneration"],
        image_token_id=248056,
        model_type="qwen3_5",
        text_config=QWEN3_5_TEXT | text | {"layer_types": kinds * (text["num_hidden_layers"] // 4)},
        tie_word_embeddings=tied,
        video_token_id=248057,
        vision_config={"depth": 12, "hidden_size": 768, "model_type": "qwen3_5"},
        vision_end_token_id=248054,
        vision_start_token_id=248053,
    )


PUBLISHED = {  # name -> (config.json, parameters)
    "Qwen3-0.6B": (QWEN3 | sizes(1024, 3072, 28, 16, tied=True, max_window_layers=28), 596_049_920),
    "Qwen3-1.7B": (QWEN3 | sizes(2048, 6144, 28, 16, tied=True, max_window_layers=28), 1_720_574_976),
    "Qwen3-4B": (QWEN3 | sizes(2560, 9728, 36, 32, tied=True, max_window_layers=36), 4_022_468_096),
    "Qwen3-8B": (QWEN3 | sizes(4096, 12288, 36, 32, tied=False, max_window_layers=36), 8_190_735_360),
    "Qwen3-14B": (QWEN3 | sizes(5120, 17408, 40, 40, tied=False, max_window_layers=40), 14_768_307_200),
    "Qwen3-32B": (QWEN3 | sizes(5120, 25600, 64, 64, tied=False, max_window_layers=64), 32_762_123_264),
    "Qwen3-30B-A3B": (QWEN3_MOE | sizes(2048, 6144, 48, 32, tied=False, moe_intermediate_size=768), 30_532_122_624),
    "Qwen3-235B-A22B": (
        QWEN3_MOE | sizes(4096, 12288, 94, 64, tied=False, moe_intermediate_size=1536),
        235_093_634_560,
    ),
    "Llama-3.1-8B": (LLAMA | sizes(4096, 14336, 32, 32, tied=False), 8_030_261_248),
    "Llama-3.1-70B": (LLAMA | sizes(8192, 28672, 80, 64, tied=False), 70_553_706_496),
    "Llama-3.2-1B": (LLAMA | sizes(2048, 8192, 16, 32, tied=True, head_dim=64, rope_scaling=LONGER), 1_235_814_400),
    "Llama-3.2-3B": (LLAMA | sizes(3072, 8192, 28, 24, tied=True, head_dim=128, rope_scaling=LONGER), 3_212_749_824),
    "SmolLM2-135M": (
        LLAMA
        | sizes(576, 1536, 30, 9, kv=3, tied=True, rope_scaling=None, rope_theta=100000, vocab_size=49152)
        | {"is_llama_config": True, "rope_interleaved": False, "max_position_embeddings": 8192, "pad_token_id": 2}
        | {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}},
        134_515_008,
    ),
    "DeepSeek-R1-Distill-Llama-8B": (LLAMA | sizes(4096, 14336, 32, 32, tied=False, head_dim=128), 8_030_261_248),
    "Mistral-7B-v0.3": (
        LLAMA
        | sizes(4096, 14336, 32, 32, tied=False, vocab_size=32768, rope_scaling=None, rope_theta=1000000.0)
        | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
        7_248_023_552,
    ),
    "Qwen2.5-0.5B": (QWEN2 | sizes(896, 4864, 24, 14, kv=2, tied=True, max_window_layers=24), 494_032_768),
    "Qwen2.5-1.5B": (QWEN2 | sizes(1536, 8960, 28, 12, kv=2, tied=True, max_window_layers=28), 1_543_714_304),
    "Qwen2.5-3B": (QWEN2 | sizes(2048, 11008, 36, 16, kv=2, tied=True, max_window_layers=36), 3_085_938_688),
    "Qwen2.5-7B": (QWEN2 | sizes(3584, 18944, 28, 28, kv=4, tied=False, vocab_size=152064), 7_615_616_512),
    "Qwen2.5-14B": (QWEN2 | sizes(5120, 13824, 48, 40, kv=8, tied=False, vocab_size=152064), 14_770_033_664),
    "Qwen2.5-32B": (QWEN2 | sizes(5120, 27648, 64, 40, kv=8, tied=False, vocab_size=152064), 32_763_876_352),
    "Qwen3.5-0.8B, its text part": (
        qwen3_5(sizes(1024, 3584, 24, 8, kv=2, tied=True, linear_num_value_heads=16), tied=True),
        752_393_024,
    ),
    "Qwen3.5-27B, its text part": (
        qwen3_5(sizes(5120, 17408, 64, 24, kv=4, tied=False, linear_num_value_heads=48), tied=False),
        26_895_998_464,
    ),
    "Qwen2.5-72B": (QWEN2 | sizes(8192, 29568, 80, 64, kv=8, tied=False, vocab_size=152064), 72_706_203_648),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_and_counted(name):
    content, parameters = PUBLISHED[name]
    shape = shape_of_hf(dict(content), f"model.assets={name!r}")
    assert shape.num_parameters == parameters
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content).get_text_config())
    assert sum(parameter.numel() for parameter in theirs.parameters()) == parameters
    assert shape_of_hf(theirs.config.to_dict(), name) == shape  # as this transformers writes it
    assert shape_of_hf(shape.to_hf(1, 0), name) == shape


@pytest.mark.parametrize(
    ("config", "model"),
    {
        "llama3_2_1b_gsm8k": "Llama-3.2-1B",
        "qwen2_5_1_5b_gsm8k": "Qwen2.5-1.5B",
        "qwen3_0_6b_gsm8k": "Qwen3-0.6B",
        "qwen3_4b_gsm8k": "Qwen3-4B",
        "qwen3_5_0_8b_gsm8k": "Qwen3.5-0.8B, its text part",
    }.items(),
)
def test_the_configs_of_this_package_have_the_sizes_of_the_models_that_they_are_for(config, model, tmp_path):
    shape = resolve_shape(load_config(str(Path(__file__).parents[3] / "configs" / f"{config}.py")).model)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[model][0]))
    shape.require_described_by(tmp_path / "config.json")
