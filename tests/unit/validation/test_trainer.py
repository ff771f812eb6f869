"""What a trainer's layout and settings cannot be on this device, and functions that are none."""

import pytest
import torch

from tests.kit.refusal import refusal
from tests.kit.run_config import run_config
from torchtitan_rl.validation.run import validate


@pytest.mark.parametrize(
    ("has_gpu", "dtype", "place"),
    [
        (False, "bfloat16", "bfloat16 on cpu"),
        (False, "float32", "float32 on cpu"),
        (True, "float32", "float32 on cuda"),
    ],
)
def test_variable_length_attention_is_refused_where_it_cannot_compute_in_the_models_dtype(
    monkeypatch, has_gpu, dtype, place
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    config = run_config()
    config.trainer.attention, config.trainer.training.mixed_precision_param = "varlen", dtype
    assert refusal(validate, config) == (
        f"trainer.attention='varlen': is a kernel for bfloat16 on a GPU, and the trainer computes in {place}; use "
        "'auto' or 'sdpa'"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config.trainer.training.mixed_precision_param = "bfloat16"
    validate(config)


@pytest.mark.parametrize(
    ("section", "name"),
    [("algorithm", "workflow"), ("algorithm", "batch_source"), ("trainer", "post_optimizer_build_fn")],
)
def test_the_name_of_a_function_is_not_a_function(section, name):
    config = run_config()
    setattr(getattr(config, section), name, "mine.py:play")
    assert refusal(validate, config) == (
        f"{section}.{name}='mine.py:play': is not a function; give the function itself, not its name"
    )
