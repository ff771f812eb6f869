"""The trainer's LoRA section: values, overrides and refusals."""

import pytest

from tests.kit.refusal import refusal
from torchtitan_rl.config.load import apply_overrides
from torchtitan_rl.config.meshes import LoRAConfig, TrainerConfig
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.validation.run import validate

TARGETS = "qkv_proj, o_proj, gate_proj, up_proj, down_proj"


def run_config(**trainer):
    config = RunConfig(
        name="unit",
        task=LetterSort.Config(),
        model=ModelConfig(
            assets="chars",
            shape=Qwen3Shape(vocab_size=64, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=24),
        ),
        trainer=TrainerConfig(**trainer),
    )
    return config


def test_it_is_set_from_the_shell_where_the_config_has_it():
    config = run_config(lora=LoRAConfig())
    apply_overrides(config, ["--trainer.lora.rank", "4", "--trainer.lora.target-modules", "qkv_proj", "o_proj"])
    assert config.trainer.lora == LoRAConfig(rank=4, target_modules=["qkv_proj", "o_proj"])
    validate(config)


def test_the_first_field_switches_it_on():
    config = run_config()
    apply_overrides(config, ["--trainer.lora.rank", "4"])
    assert config.trainer.lora == LoRAConfig(rank=4)
    apply_overrides(config, ["--trainer.lora", "None"])
    assert config.trainer.lora is None
    apply_overrides(config, ["--trainer.lora", "True"])
    assert config.trainer.lora == LoRAConfig()
    assert refusal(apply_overrides, run_config(), ["--trainer.lora.rang", "4"]).startswith(
        "--trainer.lora.rang=4: there"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "trainer.lora.rank=0: must be at least 1"),
        ({"alpha": 0.0}, "trainer.lora.alpha=0.0: must be positive; use the rank, or twice the rank"),
        (
            {"alpha": float("nan")},
            "trainer.lora.alpha=nan: must be finite and positive; use the rank, or twice the rank",
        ),
        ({"target_modules": []}, f"trainer.lora.target_modules=[]: nothing would train; name some of {TARGETS}"),
        (
            {"target_modules": ["o_prj"]},
            "trainer.lora.target_modules='o_prj': is not a layer that can have an adapter; did you mean 'o_proj'?",
        ),
        (
            {"target_modules": ["lm_head"]},
            f"trainer.lora.target_modules='lm_head': is not a layer that can have an adapter; use some of {TARGETS}",
        ),
        (
            {"target_modules": ["k_proj"]},
            "trainer.lora.target_modules='k_proj': query, key and value are one layer; use 'qkv_proj'",
        ),
    ],
)
def test_values_that_make_no_sense_are_refused(changes, message):
    assert refusal(validate, run_config(lora=LoRAConfig(**changes))) == message


def test_values_set_later_are_checked_before_a_start():
    config = run_config(lora=LoRAConfig())
    apply_overrides(config, ["--trainer.lora.rank", "0"])
    assert refusal(validate, config) == "trainer.lora.rank=0: must be at least 1"


def test_converters_are_checked_before_a_start():
    from torchtitan.components.lora import LoRAConverter

    assert refusal(validate, run_config(converters=[LoRAConverter.Config()])).startswith("trainer.converters[0]=")
