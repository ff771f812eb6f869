"""What is particular about gpt-oss: its config.json, its checkpoints, and faults that a test must see."""

import copy
import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, Mxfp4Config

from tests.kit.refusal import refusal
from tests.kit.view import VIEW
from tests.unit.families.shapes import SHAPES
from tests.unit.families.test_families import LENGTH, logprobs, perturbed
from torchtitan_rl import platform
from torchtitan_rl.config.meshes import LoRAConfig, TrainerConfig
from torchtitan_rl.config.model import ExpertsShape, GptOssShape, ModelConfig
from torchtitan_rl.families import shape_of_directory, shape_of_hf
from torchtitan_rl.families.rope import YarnScaling
from torchtitan_rl.model import attention
from torchtitan_rl.model.attention import PackedDocuments, attend
from torchtitan_rl.model.experts import _rows
from torchtitan_rl.model.lora import base_state, lora_spec, merge, whole_adapters
from torchtitan_rl.model.spec import build_spec, training_spec
from torchtitan_rl.validation.trainer import check_trainer

SMALL = SHAPES["gpt-oss"]
PUBLISHED = dict(  # config.json of gpt-oss-20b
    architectures=["GptOssForCausalLM"],
    attention_bias=True,
    attention_dropout=0.0,
    eos_token_id=200002,
    experts_per_token=4,
    head_dim=64,
    hidden_act="silu",
    hidden_size=2880,
    initial_context_length=4096,
    initializer_range=0.02,
    intermediate_size=2880,
    layer_types=["sliding_attention", "full_attention"] * 12,
    max_position_embeddings=131072,
    model_type="gpt_oss",
    num_attention_heads=64,
    num_experts_per_tok=4,
    num_hidden_layers=24,
    num_key_value_heads=8,
    num_local_experts=32,
    output_router_logits=False,
    pad_token_id=199999,
    rms_norm_eps=1e-05,
    rope_scaling=dict(
        beta_fast=32.0,
        beta_slow=1.0,
        factor=32.0,
        original_max_position_embeddings=4096,
        rope_type="yarn",
        truncate=False,
    ),
    rope_theta=150000,
    router_aux_loss_coef=0.9,
    sliding_window=128,
    swiglu_limit=7.0,
    tie_word_embeddings=False,
    transformers_version="4.55.0.dev0",
    use_cache=True,
    vocab_size=201088,
)


def read(content):
    return shape_of_hf(content, "m")


def built(shape, attention="sdpa"):
    spec = training_spec(build_spec(ModelConfig(shape=shape)), VIEW, attention=attention, chunk_bytes=2**20)
    model = spec.model.build()
    torch.manual_seed(0)
    model.init_weights()
    return perturbed(model), spec


def test_the_published_config_gives_the_sizes_and_the_count_of_parameters():
    shape = read(PUBLISHED)
    assert shape == GptOssShape(
        vocab_size=201088,
        dim=2880,
        n_layers=24,
        n_heads=64,
        n_kv_heads=8,
        head_dim=64,
        hidden_dim=2880,
        max_seq_len=131072,
        experts=ExpertsShape(num_experts=32, top_k=4),
        rope_scaling=YarnScaling(factor=32.0, original_max_seq_len=4096, truncate=False),
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GptOssConfig(**copy.deepcopy(PUBLISHED)))
    assert shape.num_parameters == sum(p.numel() for p in model.parameters()) == 20_914_757_184
    assert read(GptOssConfig(**copy.deepcopy(PUBLISHED)).to_dict()) == shape


@pytest.mark.parametrize(
    "key, value",
    [
        ("attention_bias", False),
        ("swiglu_alpha", 1.0),
        ("hidden_act", "gelu"),
        ("layer_types", ["full_attention", "sliding_attention"] * 12),
        ("layer_types", ["full_attention"] * 24),
        ("attention_dropout", 0.1),
        ("rope_scaling", {"rope_type": "yarn", "factor": 32.0, "mscale": 0.7}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("quantization_config", {"quant_method": "mxfp4"}),
        ("n_shared_experts", 1),
        ("attention_chunk_size", 64),
    ],
    ids=str,
)
def test_a_key_that_changes_the_computation_is_refused_by_name(key, value):
    assert f"its config.json says {key}" in refusal(read, PUBLISHED | {key: value})


@pytest.mark.parametrize("key", ["sliding_window", "head_dim", "num_local_experts", "rope_scaling", "rope_theta"])
def test_no_value_is_made_up_for_a_key_that_is_missing(key):
    without = {name: value for name, value in PUBLISHED.items() if name != key}
    assert "its config.json has no " in refusal(read, without)
    assert "its config.json has no " in refusal(read, PUBLISHED | {key: None})


FOUR_BITS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def test_a_quantised_checkpoint_loads_after_the_conversion_that_its_refusal_names(tmp_path):
    shape = dataclasses.replace(SMALL, hidden_dim=32)
    content = shape.to_hf(1, 0) | {"pad_token_id": None}
    quantised, converted = tmp_path / "quantised", tmp_path / "converted"
    quantised.mkdir()
    (quantised / "config.json").write_text(json.dumps(content))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(quantised)).to(torch.bfloat16)
    state, expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}, {}
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        num, inputs, outputs = state.pop(name).shape
        blocks = torch.randint(0, 256, (num, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (num, outputs, inputs // 32), dtype=torch.uint8)
        state[f"{name}_blocks"], state[f"{name}_scales"] = blocks, scales
        pairs = torch.stack([FOUR_BITS[(blocks & 15).long()], FOUR_BITS[(blocks >> 4).long()]], -1).flatten(-2)
        expected[name] = (pairs * 2.0 ** (scales.float() - 127)[..., None]).flatten(-2).transpose(-2, -1)
    save_file(state, quantised / "model.safetensors", metadata={"format": "pt"})
    kept = {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]}
    (quantised / "config.json").write_text(
        json.dumps(content | {"quantization_config": {"quant_method": "mxfp4"} | kept})
    )
    message = refusal(shape_of_directory, quantised)
    assert "quant_method='mxfp4'" in message and "save_pretrained(NEW_DIR, save_original_format=False)" in message
    AutoModelForCausalLM.from_pretrained(
        quantised, quantization_config=Mxfp4Config(dequantize=True), dtype="bfloat16"
    ).save_pretrained(converted, save_original_format=False)
    assert shape_of_directory(converted) == shape
    ours, spec = built(shape)
    adapter = spec.state_dict_adapter(spec.model, None)
    written = load_file(converted / "model.safetensors")
    assert written.keys() == adapter.to_hf(ours.state_dict()).keys()
    assert len(expected) == 6 and all(torch.equal(written[name].float(), tensor) for name, tensor in expected.items())
    loaded = adapter.from_hf(written)
    assert {name: tensor.shape for name, tensor in loaded.items()} == {
        name: tensor.shape for name, tensor in ours.state_dict().items()
    }


FAULTS = {
    "a window of one more": lambda s: dataclasses.replace(s, sliding_window=s.sliding_window + 1),
    "a window of one less": lambda s: dataclasses.replace(s, sliding_window=s.sliding_window - 1),
    "a bound that is 7": lambda s: dataclasses.replace(s, swiglu_limit=7.0),
    "another epsilon": lambda s: dataclasses.replace(s, norm_eps=1e-3),
    "no growth of queries and keys": lambda s: dataclasses.replace(
        s, rope_scaling=dataclasses.replace(s.rope_scaling, attention_factor=1.0)
    ),
    "bounds of frequencies that are rounded": lambda s: dataclasses.replace(
        s, rope_scaling=dataclasses.replace(s.rope_scaling, truncate=True)
    ),
}
ZEROED = ("sinks", "mlp1_bias_EG", "mlp2_bias_ED", "gate.bias", "wo.bias", "wqkv.bias")


@pytest.mark.parametrize("fault", [*FAULTS, *ZEROED])
def test_each_part_shows_in_the_log_probabilities(fault):
    """By more than twenty times what `test_families.py` allows between this package and transformers."""
    tokens = torch.randint(0, SMALL.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    right, _ = built(SMALL)
    wrong, _ = built(FAULTS[fault](SMALL) if fault in FAULTS else SMALL)
    with torch.no_grad():
        for name, parameter in wrong.named_parameters():
            if name.endswith(fault):
                parameter.zero_()
        assert (logprobs(right, tokens) - logprobs(wrong, tokens)).abs().max() > 4e-4


def test_the_gradient_of_an_experts_bias_is_summed_in_float32_and_in_one_order():
    """Indexing sums it by threads in any order, in the dtype: 2,000 times .01 is 4 in bfloat16."""
    expert_R = torch.arange(9).repeat_interleave(700)
    bias_ED, grad_RD = torch.zeros(9, 400, requires_grad=True), torch.randn(len(expert_R), 400)

    def gradient():
        (grad,) = torch.autograd.grad(_rows(bias_ED, expert_R), bias_ED, grad_RD)
        return grad

    with platform.one_thread():
        expected = gradient()
    assert all(torch.equal(gradient(), expected) for _ in range(5))
    bias_ED = torch.zeros(2, 8, dtype=torch.bfloat16, requires_grad=True)
    rows = _rows(bias_ED, torch.zeros(2000, dtype=torch.long))
    (grad,) = torch.autograd.grad(rows, bias_ED, torch.full_like(rows, 0.01))
    assert rows.dtype == grad.dtype == torch.bfloat16 and grad.tolist() == [[20.0] * 8, [0.0] * 8]


def test_documents_packed_together_do_not_see_each_other():
    model, _ = built(SMALL)
    lengths = [30, 1, 12, 31, 9]
    tokens = torch.randint(0, SMALL.vocab_size, (1, sum(lengths)))

    def hidden(lengths, tokens):
        states, positions = model.tok_embeddings(tokens), torch.cat([torch.arange(length) for length in lengths])
        for layer in model.layers.values():
            states = layer(states, PackedDocuments.build(lengths), positions[None])
        return states[0]

    alone = torch.cat([hidden([part.shape[1]], part) for part in tokens.split(lengths, 1)])
    torch.testing.assert_close(hidden(lengths, tokens), alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 1, 5, 8, 100])
def test_attention_in_blocks_of_queries_is_attention_at_once(monkeypatch, window):
    monkeypatch.setattr(attention, "_QUERIES_AT_ONCE", 8)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 21, 4, generator=generator, dtype=torch.double).requires_grad_() for _ in range(3))
    distance = torch.arange(21)[:, None] - torch.arange(21)
    scores = (q @ k.transpose(-2, -1) / 2).masked_fill((distance < 0) | (distance >= (window or 100)), -torch.inf)
    out, log_sum_exp = attend(q, k, v, None, window)
    torch.testing.assert_close(out, scores.softmax(-1) @ v, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(log_sum_exp.double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
    weights = torch.randn(2, 3, 21, 5, generator=generator, dtype=torch.double)

    def gradients(out, log_sum_exp):
        return torch.autograd.grad((torch.cat([out, log_sum_exp[..., None]], -1) * weights).sum(), (q, k, v))

    for mine, expected in zip(
        gradients(out, log_sum_exp), gradients(scores.softmax(-1) @ v, scores.logsumexp(-1)), strict=True
    ):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)


def test_adapters_of_attention_are_the_merged_weights():
    lora = LoRAConfig(rank=4, alpha=8.0, target_modules=["qkv_proj", "o_proj"])
    model, spec = built(SMALL)
    adapted = lora_spec(spec, lora).model.build()
    adapted.init_weights()
    perturbed(adapted)
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert len(trained) == 4 * SMALL.n_layers and all(".lora_" in name for name in trained)
    state = adapted.state_dict()
    adapters = whole_adapters(state, SMALL.n_kv_heads, lora)
    assert len(adapters) == 4 * SMALL.n_layers
    model.load_state_dict({name: merge(name, tensor, adapters) for name, tensor in base_state(state).items()})
    tokens = torch.randint(0, SMALL.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(logprobs(model, tokens), logprobs(adapted, tokens), atol=2e-5, rtol=0)
    assert "no linear layer of this model is one" in refusal(
        lora_spec, spec, LoRAConfig(rank=4, alpha=8.0, target_modules=["up_proj"])
    )


def test_what_would_lose_gradients_or_end_in_a_worker_is_refused_before():
    model, lora = ModelConfig(shape=SMALL), LoRAConfig(target_modules=["qkv_proj", "o_proj"])
    config = TrainerConfig(attention="varlen", lora=lora)
    config.training.seq_len = 64
    assert "trainer.attention='varlen': torch's kernel" in refusal(check_trainer, "trainer", config, model, 8)
    config.attention = "auto"
    check_trainer("trainer", config, model, 8)
    config.parallelism.tensor_parallel_degree = 2
    assert "lora.target_modules='o_proj'" in refusal(check_trainer, "trainer", config, model, 8)
    lora.target_modules = ["qkv_proj"]
    check_trainer("trainer", config, model, 8)
