"""No altered config.json is silently another model: it is refused, or the model computes what transformers computes."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.kit.view import VIEW
from tests.unit.families.shapes import DELTA, LATENT, LLAMA, SIZES, WINDOW, YARN
from tests.unit.families.test_families import LENGTH, logprobs, perturbed, reference_logprobs
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.families import (
    DeepseekV3Shape,
    ExpertsShape,
    GptOssShape,
    Llama3Shape,
    Qwen2Shape,
    Qwen3Shape,
    Qwen35Shape,
    shape_of_hf,
)
from torchtitan_rl.model.spec import build_spec, training_spec
from torchtitan_rl.weights.hf import write_hf_dir

yarn, llama = YARN.to_hf() | {"rope_theta": 1e4}, LLAMA.to_hf() | {"rope_theta": 1e4}
ALTERED = [  # each is tried with every family; None leaves a key out
    {"hidden_act": "gelu"},
    {"hidden_act": "relu"},
    {"attention_bias": True},
    {"attention_bias": False},
    {"mlp_bias": True},
    {"attention_dropout": 0.1},
    {"tie_word_embeddings": True},
    {"tie_word_embeddings": False},
    {"rms_norm_eps": 1e-3},
    {"rope_theta": 123.0, "rope_parameters": None},
    {"rope_theta": 123.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "rope_theta": None},
    {"rope_parameters": None, "rope_theta": None},
    {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": None, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": yarn},
    {"rope_parameters": yarn, "rope_theta": None},
    {"rope_parameters": yarn | {"beta_fast": 8.0}, "rope_theta": None},
    {"rope_parameters": yarn | {"attention_factor": 1.5}, "rope_theta": None},
    {"rope_parameters": yarn | {"mscale": 0.5, "mscale_all_dim": 0.7}, "rope_theta": None},
    {"rope_parameters": yarn | {"truncate": False}, "rope_theta": None},
    {"rope_parameters": llama, "rope_theta": None},
    {"rope_parameters": llama | {"low_freq_factor": 2.0}, "rope_theta": None},
    {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": llama},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "rope_theta": None},
    {"partial_rotary_factor": 0.5},
    {"head_dim": None, "hidden_size": 128, "num_attention_heads": 4},
    {"num_key_value_heads": None},
    {"num_attention_heads": 32, "num_key_value_heads": None, "head_dim": 32},
    {"head_dim": None},
    {"rms_norm_eps": None},
    {"tie_word_embeddings": None},
    {"max_position_embeddings": None},
    {"num_key_value_heads": 1},
    {"sliding_window": 16},
    {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "layer_types": None},
    {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16},
    {"layer_types": ["full_attention", "full_attention"]},
    {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
    {"vocab_size": 67},
    {"intermediate_size": 80},
    {"num_hidden_layers": 3},
    {"max_position_embeddings": 256},
    {"use_qk_norm": False},
    {"qk_layernorm": True},
    {"clip_qkv": 1.0},
    {"logits_scaling": 8.0},
    {"final_logit_softcapping": 30.0},
    {"embedding_multiplier": 12.0},
    {"norm_topk_prob": False},
    {"num_experts_per_tok": 1},
    {"mlp_only_layers": [0]},
    {"decoder_sparse_step": 2},
    {"moe_intermediate_size": 80},
    {"initializer_range": 0.5},
    {"use_cache": False},
    {"pretraining_tp": 2},
    {"attn_output_gate": False},
    {"mamba_ssm_dtype": "bfloat16"},
    {"full_attention_interval": 2},
    {"full_attention_interval": 2, "layer_types": None},
    {"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]},
    {"layer_types": ["linear_attention", "full_attention"] * 2},
    {"linear_conv_kernel_dim": 3},
    {"linear_num_key_heads": 4},
    {"linear_num_value_heads": 2},
    {"linear_key_head_dim": 8},
    {"linear_value_head_dim": 16},
    {"linear_value_head_dim": None},
    {"partial_rotary_factor": None, "rope_parameters": None},
    {"mlp_only_layers": [1]},
    {"shared_expert_intermediate_size": 16},
    {"swiglu_limit": 0.3},
    {"swiglu_limit": None},
    {"swiglu_alpha": 1.0},
    {"sliding_window": 3},
    {"sliding_window": None},
    {"layer_types": ["full_attention", "sliding_attention"]},
    {"num_local_experts": 3},
    {"experts_per_token": 1},
    {"routed_scaling_factor": 1.0},
    {"n_group": 2, "topk_group": 1},
    {"topk_group": None},
    {"scoring_func": "softmax"},
    {"topk_method": "greedy"},
    {"moe_layer_freq": 2},
    {"first_k_dense_replace": 2},
    {"n_shared_experts": 1},
    {"n_routed_experts": 6},
    {"q_lora_rank": 12},
    {"q_lora_rank": None},
    {"kv_lora_rank": 12},
    {"qk_rope_head_dim": 16, "head_dim": 16},
    {"v_head_dim": 16},
    {"rope_interleave": False},
    {"num_nextn_predict_layers": 1},
]
BASES = {
    "qwen3": Qwen3Shape(**SIZES, rope_theta=1e4).to_hf(1, 0),
    "qwen3-moe": Qwen3Shape(**SIZES, rope_theta=1e4, experts=ExpertsShape(num_experts=4, top_k=2)).to_hf(1, 0),
    "llama3": Llama3Shape(**SIZES, rope_theta=1e4).to_hf(1, 0),
    "qwen2": Qwen2Shape(**SIZES, rope_theta=1e4).to_hf(1, 0),
    "qwen3_5": Qwen35Shape(**SIZES | {"n_layers": 4}, **DELTA, rope_theta=1e4).to_hf(1, 0),
    "gpt-oss": GptOssShape(
        **SIZES, rope_theta=1e4, experts=ExpertsShape(num_experts=4, top_k=2), sliding_window=WINDOW
    ).to_hf(1, 0),
    "deepseek": DeepseekV3Shape(**LATENT | {"n_layers": 2}, rope_theta=1e4).to_hf(1, 0),
}


def of(base, altered):
    """The content of a config.json; a key whose new value is None is left out."""
    content = BASES[base] | altered | {"pad_token_id": None}
    return {key: value for key, value in content.items() if value is not None or altered.get(key, 0) is not None}


DAMAGED = [
    {"hidden_size": "128"},
    {"num_attention_heads": 0, "head_dim": None},
    {"num_attention_heads": "4"},
    {"rope_parameters": [1]},
    {"rope_parameters": None, "rope_scaling": [1]},
    {"rope_parameters": None, "rope_theta": "x"},
    {"rope_parameters": {"rope_theta": [1]}},
    {"layer_types": 3},
    {"max_position_embeddings": {}},
    {"num_hidden_layers": "2"},
]


@pytest.mark.parametrize("damaged", DAMAGED, ids=json.dumps)
@pytest.mark.parametrize("base", BASES)
def test_a_damaged_value_is_refused_or_left_to_the_checks_of_fields(base, damaged):
    accepted(of(base, damaged))


@pytest.mark.parametrize("base", BASES)
def test_a_key_that_is_missing_or_null_is_no_traceback(base):
    for key in BASES[base]:
        accepted({name: value for name, value in BASES[base].items() if name != key})
        accepted(BASES[base] | {key: None})


def test_a_mistral_says_that_it_has_no_window_and_how_many_key_heads():
    mistral = BASES["llama3"] | {"model_type": "mistral", "sliding_window": None}
    assert accepted(mistral) is not None
    for key, words in (("sliding_window", "with which a Mistral's is 4096"), ("num_key_value_heads", "fetch the")):
        without = {name: value for name, value in mistral.items() if name != key}
        with pytest.raises(ValueError, match=f"its config.json has no {key}.*{words}"):
            shape_of_hf(without, "m")


def accepted(content):
    try:
        return shape_of_hf(content, "m")
    except ValueError as error:
        assert str(error).startswith("m: ") and ";" in str(error)
        return None


@pytest.mark.parametrize("altered", ALTERED, ids=lambda keys: json.dumps(keys)[:60])
@pytest.mark.parametrize("base", BASES)
def test_an_altered_config_is_refused_or_computed(base, altered, tmp_path):
    content = of(base, altered)
    if (shape := accepted(content)) is None:
        return
    spec = training_spec(build_spec(ModelConfig(shape=shape)), VIEW, attention="sdpa", chunk_bytes=2**20)
    torch.manual_seed(0)
    ours = spec.model.build()
    ours.init_weights()
    perturbed(ours)
    (tmp_path / "config.json").write_text(json.dumps(content))
    write_hf_dir(ours.state_dict(), spec.state_dict_adapter(spec.model, None), tmp_path)
    theirs, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    tokens = torch.randint(0, shape.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(logprobs(ours, tokens), reference_logprobs(theirs, tokens), atol=2e-5, rtol=0)


def test_most_alterations_are_refused_somewhere_and_some_are_read_everywhere():
    """Neither a reader that refuses all nor one that takes all passes the test above for that reason alone."""
    verdicts = {
        json.dumps(altered): {base: accepted(of(base, altered)) is not None for base in BASES} for altered in ALTERED
    }
    assert sum(not all(verdict.values()) for verdict in verdicts.values()) >= 30
    assert sum(all(verdict.values()) for verdict in verdicts.values()) >= 12
