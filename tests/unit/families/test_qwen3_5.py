"""Qwen3.5's config.json: that of the whole model, which sees images, and that of the text part alone."""

import dataclasses
import importlib.util
import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3_5Config

from tests.kit.refusal import refusal
from tests.unit.families.shapes import SHAPES
from torchtitan_rl import platform
from torchtitan_rl.config.meshes import GeneratorConfig, LoRAConfig, TrainerConfig
from torchtitan_rl.config.model import ModelConfig, Qwen35Shape
from torchtitan_rl.engine.plan import generator_spec
from torchtitan_rl.families import shape_of_hf
from torchtitan_rl.model.lora import lora_spec
from torchtitan_rl.model.memory import num_adapter_parameters
from torchtitan_rl.model.shape import kv_bytes_per_token, state_bytes
from torchtitan_rl.model.spec import build_spec, critic_spec
from torchtitan_rl.validation.generator import check_engine, check_own_model
from torchtitan_rl.validation.trainer import check_degree, check_trainer
from torchtitan_rl.weights.hf import load_hf_weights, weights_misfit, write_hf_dir

SHAPE = SHAPES["qwen3_5"]
CHANGES = {
    "hidden_act": "gelu",
    "attention_bias": True,
    "attn_output_gate": False,
    "mamba_ssm_dtype": "bfloat16",
    "num_experts": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e7},
    "partial_rotary_factor": 0.5,  # beside 0.25 in rope_parameters
    "quantization_config": {"quant_method": "fp8"},
}


def read(content):
    return shape_of_hf(content, "model='m'")


def whole(text, **outer):
    """The config.json of a whole model as it is published."""
    return dict(
        architectures=["Qwen3_5ForConditionalGeneration"],
        model_type="qwen3_5",
        image_token_id=7,
        video_token_id=8,
        vision_start_token_id=9,
        vision_end_token_id=10,
        tie_word_embeddings=text["tie_word_embeddings"],
        text_config=text,
        vision_config={"depth": 12, "hidden_size": 768},
        **outer,
    )


def test_the_text_part_of_a_whole_model_is_read():
    text = SHAPE.to_hf(1, 0) | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "mlp_only_layers": [],
    }
    assert read(whole(text)) == SHAPE
    of_outer = whole(text)
    del text["tie_word_embeddings"]
    assert read(of_outer) == SHAPE
    written = Qwen3_5Config(text_config=SHAPE.to_hf(1, 0), tie_word_embeddings=True).to_dict()
    assert read(written) == SHAPE


@pytest.mark.parametrize("key", CHANGES)
def test_a_key_that_changes_the_computation_is_refused_by_name(key):
    for content in (SHAPE.to_hf(1, 0) | {key: CHANGES[key]}, whole(SHAPE.to_hf(1, 0) | {key: CHANGES[key]})):
        message = refusal(read, content)
        assert message.startswith("model='m': its config.json ") and f"{key}=" in message


def test_a_whole_model_that_contradicts_itself_is_refused():
    text = SHAPE.to_hf(1, 0)
    message = refusal(read, whole(text) | {"tie_word_embeddings": False})
    assert message == (
        "model='m': its config.json says tie_word_embeddings=False, and True in text_config; keep the right one"
    )
    assert "says quantization_config=" in refusal(read, whole(text, quantization_config={"quant_method": "fp8"}))
    assert "has no text_config" in refusal(read, {"model_type": "qwen3_5"})


def test_the_files_of_a_whole_model_are_read_under_their_names(tmp_path):
    """The published names; images' and guessing heads' tensors stay unread."""
    torch.manual_seed(0)
    model = build_spec(ModelConfig(shape=SHAPE)).model.build()
    model.init_weights()
    spec = build_spec(ModelConfig(shape=SHAPE))
    state = spec.state_dict_adapter(spec.model, None).to_hf(model.state_dict())
    published = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in state.items()}
    others = {"model.visual.patch_embed.proj.weight": torch.ones(3), "mtp.fc.weight": torch.ones(2)}
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in (published | others).items()},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps(whole(SHAPE.to_hf(1, 0))))
    assert weights_misfit(ModelConfig(assets=str(tmp_path))) == ""  # as before every run
    fresh = build_spec(ModelConfig(shape=SHAPE)).model.build()
    fresh.init_weights()
    load_hf_weights(fresh, spec.state_dict_adapter(spec.model, str(tmp_path)), tmp_path, SHAPE)
    for name, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name


def test_a_critic_keeps_its_head(tmp_path):
    """torchtitan's adapter makes a missing head of the embedding, and a critic has one value per position."""
    torch.manual_seed(0)
    spec = build_spec(ModelConfig(shape=SHAPE))
    policy = spec.model.build()
    policy.init_weights()
    write_hf_dir(policy.state_dict(), spec.state_dict_adapter(spec.model, None), tmp_path)
    of_critic = critic_spec(spec)
    critic = of_critic.model.build()
    critic.init_weights()
    adapter = of_critic.state_dict_adapter(of_critic.model, str(tmp_path))
    load_hf_weights(critic, adapter, tmp_path, SHAPE, head=False)
    state, expected = critic.state_dict(), policy.state_dict()
    assert state["lm_head.weight"].shape == (1, SHAPE.dim) and not state["lm_head.weight"].any()
    assert all(torch.equal(state[name], expected[name]) for name in expected.keys() - {"lm_head.weight"})


def test_the_cache_of_an_engine_has_keys_of_a_quarter_of_the_layers_and_states_of_the_others():
    """At the sizes of the model of 0.8B."""
    generator = GeneratorConfig(dtype="bfloat16", max_model_len=1024, tensor_parallel_degree=2)
    sizes = dict(vocab_size=248320, dim=1024, n_layers=24, n_heads=8, n_kv_heads=2, head_dim=256, hidden_dim=3584)
    shape = Qwen35Shape(**sizes, n_key_heads=16, n_value_heads=16, key_head_dim=128, value_head_dim=128)
    assert kv_bytes_per_token(generator, shape) == 2 * 6 * 2 * 256 * 2 // 2
    channels = (16 + 16 + 16) * 128
    assert state_bytes(generator, shape) == 18 * (3 * channels * 2 + 16 * 128 * 128 * 4) // 2


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"enforce_eager": False}, "generator.enforce_eager=False: layers of a qwen3_5 lay out each step's requests"),
        ({"compile": True}, "generator.compile=True: layers of a qwen3_5 lay out each step's requests on the host"),
        ({"kv_cache_gib": 1e-5}, "bytes of states, and one sequence of generator.max_model_len=64 needs "),
    ],
    ids=["graphs", "compiled", "cache"],
)
def test_an_engine_that_cannot_run_the_states_is_refused(changes, words):
    config = GeneratorConfig(dtype="float32", max_model_len=64, **{"max_num_seqs": 64} | changes)
    assert words in refusal(check_engine, config, SHAPE)


def test_the_model_of_vllm_is_refused_where_it_cannot_run(monkeypatch):
    config = GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=64, model_impl="vllm")
    monkeypatch.setattr(platform, "device_type", lambda: "cpu")
    assert refusal(check_own_model, config, SHAPE) == (
        "generator.model_impl='vllm': on a CPU the kernels of vLLM's own qwen3_5 take bfloat16 alone, and the trainer "
        "has float32; use 'torchtitan'"
    )
    monkeypatch.setattr(platform, "device_type", lambda: "cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal(check_own_model, config, SHAPE) == (
        "generator.model_impl='vllm': vLLM's own qwen3_5 is in one module with the whole model, which imports "
        "torchvision, and torchvision is not installed; use 'torchtitan'"
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    check_own_model(config, SHAPE)


def test_a_degree_divides_the_heads_of_delta_nets():
    shape = dataclasses.replace(SHAPE, n_key_heads=1)
    assert refusal(check_degree, "generator.tensor_parallel_degree", 2, shape) == (
        "generator.tensor_parallel_degree=2: must divide the model's n_key_heads=1; use one of [1]"
    )
    with pytest.raises(ValueError, match="must divide the model's n_key_heads=1"):
        generator_spec(build_spec(ModelConfig(shape=shape)), 2)


def test_adapters_are_of_the_feed_forward_alone():
    trainer = TrainerConfig(lora=LoRAConfig(rank=2, target_modules=["gate_proj", "o_proj"]))
    message = refusal(check_trainer, "trainer", trainer, ModelConfig(shape=SHAPE), 16)
    assert message == (
        "trainer.lora.target_modules='o_proj': is no layer of a qwen3_5 that can have adapters here; use some of "
        "gate_proj, up_proj, down_proj"
    )
    lora = LoRAConfig(rank=2, target_modules=["gate_proj", "up_proj", "down_proj"])
    model = lora_spec(build_spec(ModelConfig(shape=SHAPE)), lora).model.build()
    adapters = [p.numel() for name, p in model.named_parameters() if ".lora_" in name]
    assert sum(adapters) == num_adapter_parameters(lora, SHAPE)
