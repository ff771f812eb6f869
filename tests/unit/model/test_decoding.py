"""How an engine decodes where the config leaves it open."""

import pytest

from torchtitan_rl import platform
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import Qwen3Shape
from torchtitan_rl.model.decoding import runs_eager, schedules_ahead

SHAPE = Qwen3Shape(vocab_size=11, dim=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=32, hidden_dim=24)


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
