"""Which directories count as checkpoints."""

import json

import pytest

from torchtitan_rl.weights.checkpoint import (
    adapter_dir,
    hf_dir,
    hf_weights,
    model_dir,
    read_state,
    require_complete,
    require_lora,
    write_lora,
    write_state,
)

STATE = {"step": 80, "phase": "reinforcement", "policy_version": 380, "source": {"epoch": 0, "cursor": 2560}, "seed": 0}


def refusal(function, path):
    with pytest.raises(ValueError) as caught:
        function(path)
    return str(caught.value)


@pytest.mark.parametrize("function", [require_complete, hf_weights])
def test_a_missing_checkpoint_is_refused(function, tmp_path):
    path = tmp_path / "step-80"
    assert refusal(function, path) == (
        f"checkpoint={str(path)!r}: there is no such directory; give a run's checkpoints/step-N"
    )


@pytest.mark.parametrize("function", [require_complete, hf_weights])
def test_a_half_written_checkpoint_is_refused(function, tmp_path):
    model_dir(tmp_path).mkdir()
    hf_dir(tmp_path).mkdir()
    (tmp_path / "state.json").write_text(json.dumps(STATE))
    assert refusal(function, tmp_path) == (
        f"checkpoint={str(tmp_path)!r}: is incomplete (no COMPLETE marker: it was cut off while being written, or is "
        "not a checkpoint); use another checkpoints/step-N"
    )


def test_a_complete_checkpoint_gives_back_its_state_and_its_weights(tmp_path):
    write_state(tmp_path, STATE)
    assert require_complete(tmp_path) == tmp_path
    assert read_state(tmp_path) == STATE
    assert hf_weights(tmp_path) == tmp_path / "hf"
    assert (model_dir(tmp_path), hf_dir(tmp_path)) == (tmp_path / "model", tmp_path / "hf")


def test_the_marker_is_not_there_when_the_state_could_not_be_written(tmp_path):
    (tmp_path / "state.json").mkdir()  # something that cannot be opened as a file
    with pytest.raises(IsADirectoryError):
        write_state(tmp_path, STATE)
    assert refusal(require_complete, tmp_path).startswith(f"checkpoint={str(tmp_path)!r}: is incomplete")


def test_a_hugging_face_directory_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "is incomplete" in refusal(hf_weights, tmp_path)  # a config without weights is not enough
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert hf_weights(tmp_path) == tmp_path


RECORD = {"rank": 8, "alpha": 16.0, "target_modules": ["o_proj"], "base_xxh3": "0123456789abcdef"}


def test_adapters_are_loaded_where_they_belong(tmp_path):
    require_lora(tmp_path, None)
    write_lora(tmp_path / "step-80", RECORD)
    require_lora(tmp_path / "step-80", RECORD)
    write_lora(tmp_path / "step-80", None)  # written again without adapters
    require_lora(tmp_path / "step-80", None)
    assert adapter_dir(tmp_path) == tmp_path / "adapter"


@pytest.mark.parametrize(
    ("saved", "here", "complaint"),
    [
        (None, RECORD, "holds a whole model and trainer.lora is set"),
        (RECORD, None, "holds LoRA adapters only and trainer.lora is None"),
        (RECORD, RECORD | {"rank": 4}, "was saved with trainer.lora.rank=8, here it is 4"),
        (RECORD, RECORD | {"alpha": 8.0}, "was saved with trainer.lora.alpha=16.0, here it is 8.0"),
        (RECORD, RECORD | {"target_modules": ["qkv_proj"]}, "was saved with trainer.lora.target_modules=['o_proj']"),
        (RECORD, RECORD | {"base_xxh3": "f" * 16}, "other base weights (0123456789abcdef, here ffffffffffffffff)"),
    ],
)
def test_adapters_of_another_kind_or_base_are_refused(saved, here, complaint, tmp_path):
    write_lora(tmp_path, saved)
    message = refusal(lambda path: require_lora(path, here), tmp_path)
    assert message.startswith(f"checkpoint={str(tmp_path)!r}: ") and complaint in message and "; " in message
