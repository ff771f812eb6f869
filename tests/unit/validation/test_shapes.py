"""Sizes of a model that do not go together are refused before a process starts, by overrides too."""

import dataclasses

import pytest

from tests.kit.refusal import refusal
from tests.kit.run_config import run_config
from tests.unit.families.shapes import SHAPES
from torchtitan_rl.config.load import apply_overrides
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RoleConfig
from torchtitan_rl.validation.run import validate


def with_shape(name, *overrides):
    config = run_config()
    config.model = ModelConfig(assets="chars", shape=dataclasses.replace(SHAPES[name], vocab_size=64))
    apply_overrides(config, list(overrides))
    return config


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("qwen3", ("--model.shape.n_kv_heads", "3"), "model.shape.n_kv_heads=3: every key head serves as many query"),
        ("llama3", ("--model.shape.n_kv_heads", "8"), "model.shape.n_kv_heads=8: every key head serves as many query"),
        ("qwen2", ("--model.shape.head_dim", "33"), "model.shape.head_dim=33: the rotary embedding turns pairs of"),
        ("qwen3_5", ("--model.shape.rotary_factor", "0.3"), "model.shape.rotary_factor=0.3: the rotary embedding"),
        ("qwen3_5", ("--model.shape.rotary_factor", "0.01"), "model.shape.rotary_factor=0.01: the rotary embedding"),
        ("qwen3_5", ("--model.shape.n_value_heads", "5"), "model.shape.n_value_heads=5: every key head of a gated"),
        ("qwen3_5", ("--model.shape.n_layers", "3"), "model.shape.n_layers=3: none of them has attention, which"),
        ("deepseek", ("--model.shape.n_kv_heads", "2"), "model.shape.n_kv_heads=2: every head of latent attention has"),
        ("deepseek", ("--model.shape.n_dense_layers", "3"), "model.shape.n_dense_layers=3: must be below n_layers=3"),
        ("deepseek", ("--model.shape.num_shared_experts", "0"), "model.shape.num_shared_experts=0: must be at least 1"),
        ("deepseek", ("--model.shape.rotated_dim", "7"), "model.shape.rotated_dim=7: the rotary embedding turns"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(name, overrides, message):
    assert refusal(validate, with_shape(name, *overrides)).startswith(message)


def test_a_roles_model_is_named():
    config = run_config()
    config.roles.reference = RoleConfig(model=with_shape("qwen3").model)
    config.roles.reference.model.shape.n_kv_heads = 3
    assert refusal(validate, config).startswith("roles.reference.model.shape.n_kv_heads=3: every key head")
    config.roles.reference.model.shape.n_kv_heads, config.roles.reference.model.shape.max_seq_len = 2, 16
    assert refusal(validate, config) == (
        "roles.reference: sampling.max_prompt_tokens + max_tokens = 20: exceed the model's max_seq_len=16; lower one "
        "of them"
    )
