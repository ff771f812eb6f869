"""How an engine decodes where the config leaves it open."""

import pytest

from torchtitan_rl import platform
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import ExpertsShape, Qwen3Shape, Qwen35Shape
from torchtitan_rl.model.decoding import runs_eager, schedules_ahead

SIZES = dict(vocab_size=11, dim=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=32, hidden_dim=24)
SHAPE = Qwen3Shape(**SIZES)


def test_a_cpu_has_no_graphs_and_schedules_nothing_ahead():
    assert runs_eager(GeneratorConfig(), SHAPE) and not schedules_ahead(GeneratorConfig(), SHAPE)


@pytest.mark.parametrize(
    "changes, eager, ahead",
    [
        ({}, False, True),
        ({"model_runner": "v1"}, False, False),
        ({"tensor_parallel_degree": 2}, True, False),
        ({"model_impl": "vllm"}, True, False),
        ({"record_routing": True}, True, False),
        ({"enforce_eager": True}, True, True),
        ({"async_scheduling": False}, False, False),
        ({"tensor_parallel_degree": 2, "enforce_eager": False}, False, False),
    ],
)
def test_a_gpu_decodes_as_was_measured_unless_the_config_says_otherwise(monkeypatch, changes, eager, ahead):
    monkeypatch.setattr(platform, "device_type", lambda: "cuda")
    config = GeneratorConfig(**changes)
    assert (runs_eager(config, SHAPE), schedules_ahead(config, SHAPE)) == (eager, ahead)


@pytest.mark.parametrize(
    "changes, eager",
    [
        ({"dtype": "bfloat16"}, False),
        ({"dtype": "float32"}, True),  # torch's product asks the host then
        ({"dtype": "bfloat16", "model_runner": "v1"}, True),
        ({"dtype": "bfloat16", "record_routing": True}, True),
    ],
)
def test_experts_are_decoded_by_graphs_where_no_product_asks_the_host(monkeypatch, changes, eager):
    monkeypatch.setattr(platform, "device_type", lambda: "cuda")
    monkeypatch.setattr(platform, "experts_ask_the_host", lambda dtype: dtype == "float32")
    config, shape = GeneratorConfig(**changes), Qwen3Shape(**SIZES, experts=ExpertsShape(num_experts=4, top_k=2))
    assert runs_eager(config, shape) is eager and schedules_ahead(config, shape) is not eager


def test_layers_with_states_have_no_graphs_on_a_gpu_either(monkeypatch):
    monkeypatch.setattr(platform, "device_type", lambda: "cuda")
    heads = dict(n_key_heads=2, n_value_heads=2, key_head_dim=32, value_head_dim=32)
    shape = Qwen35Shape(**SIZES | {"n_layers": 2}, full_attention_interval=2, **heads)
    assert runs_eager(GeneratorConfig(), shape) and not schedules_ahead(GeneratorConfig(), shape)
