"""Models and settings with which siblings cannot compute their prompt together."""

import pytest

from tests.kit.refusal import refusal
from tests.kit.run_config import run_config
from tests.unit.families.shapes import SHAPES, SIZES
from torchtitan_rl import platform
from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.families import ExpertsShape, Qwen3Shape
from torchtitan_rl.validation.remote import check_remote
from torchtitan_rl.validation.run import advice
from torchtitan_rl.validation.trainer import check_trainer

BALANCED = Qwen3Shape(**SIZES, experts=ExpertsShape(num_experts=4, top_k=2, load_balance_coeff=0.01))


def trainer(**changes):
    config = TrainerConfig(shared_prefix="auto", **changes)
    config.training.seq_len = 64
    return config


@pytest.mark.parametrize(
    ("shape", "changes", "reason"),
    [
        (SHAPES["qwen3_5"], {}, "the states of a qwen3_5's recurrent layers begin anew in every datum"),
        (BALANCED, {}, "the load-balancing bias counts tokens (experts.load_balance_coeff=0.01), and a prompt's"),
        (SHAPES["qwen3"], {"attention": "varlen"}, "with trainer.attention='varlen' attention computes each datum by"),
    ],
)
def test_refusals(shape, changes, reason, monkeypatch):
    monkeypatch.setattr(platform, "attention_backend", lambda dtype: "varlen")
    config = trainer(**changes)
    message = refusal(check_trainer, "trainer", config, ModelConfig(shape=shape), 8)
    assert message.startswith(f"trainer.shared_prefix='auto': {reason}") and message.endswith("; use 'off'")
    config.shared_prefix = "off"
    check_trainer("trainer", config, ModelConfig(shape=shape), 8)


def test_what_it_has_not_been_compared_with_is_refused():
    def message(config):
        return refusal(check_trainer, "trainer", config, ModelConfig(shape=SHAPES["qwen3"]), 8)

    compiled, cut = trainer(), trainer()
    compiled.compile.enable = True
    assert message(compiled).startswith("trainer.shared_prefix='auto': with trainer.compile.enable=True")
    cut.parallelism.tensor_parallel_degree = 2
    assert message(cut).startswith("trainer.shared_prefix='auto': with trainer.parallelism.tensor_parallel_degree=2")


@pytest.mark.parametrize("name", [name for name in SHAPES if not SHAPES[name].state_sizes])
def test_families_with_attention_alone_are_not_refused(name):
    check_trainer("trainer", trainer(), ModelConfig(shape=SHAPES[name]), 8)


def test_a_remote_service_packs_by_itself():
    config = run_config()
    config.trainer.shared_prefix = "auto"
    assert refusal(check_remote, config).startswith("trainer.shared_prefix='auto': backend='tinker' packs")


def test_on_cuda_a_start_says_that_nothing_is_shared(monkeypatch):
    config = run_config()
    config.trainer.shared_prefix = "auto"
    assert advice(config) == []
    monkeypatch.setattr(platform, "device_type", lambda: "cuda")
    assert advice(config) == [
        "trainer.shared_prefix='auto': prompts are shared on a CPU only; every datum is computed whole"
    ]
