"""Which directories count as checkpoints, and which files make one unusable."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kit.refusal import refusal
from torchtitan_rl.weights.checkpoint import (
    FORMAT,
    RUN_CONFIG,
    adapter_dir,
    begin,
    beside,
    checksums,
    commit,
    hf_dir,
    hf_weights,
    is_complete,
    latest,
    mark,
    model_dir,
    point_to,
    problem,
    read_state,
    remove,
    require_complete,
    require_lora,
    write_lora,
)
from torchtitan_rl.weights.origin import Origin, origin

STATE = {"step": 80, "phase": "reinforcement", "policy_version": 380, "source": {"epoch": 0, "cursor": 2560}, "seed": 0}


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


def written(checkpoint, content=b"weights", export=True):
    """Writes a checkpoint of one file as a run does."""
    begin(beside(checkpoint))
    model_dir(beside(checkpoint)).mkdir()
    file = model_dir(beside(checkpoint)) / "__0_0.distcp"
    file.write_bytes(content)
    if export:
        hf_dir(beside(checkpoint)).mkdir()
    commit(beside(checkpoint), checkpoint, STATE, checksums(beside(checkpoint), [file]))
    return checkpoint


def test_a_complete_checkpoint_gives_back_its_state_and_its_weights(tmp_path):
    path = written(tmp_path / "step-80")
    assert require_complete(path) == path and problem(path) == ""
    assert read_state(path) == STATE
    assert hf_weights(path) == path / "hf"
    assert not beside(path).exists()
    files = json.loads((path / "files.json").read_text())
    assert files.keys() == {"model/__0_0.distcp", "state.json"} and files["model/__0_0.distcp"][0] == 7


def test_a_checkpoint_takes_the_place_of_the_one_before_under_its_name(tmp_path):
    written(tmp_path / "step-80")
    path = written(tmp_path / "step-80", b"newer weights")
    assert problem(path) == "" and (model_dir(path) / "__0_0.distcp").read_bytes() == b"newer weights"


def test_a_checkpoint_without_an_export_says_how_to_make_one(tmp_path):
    path = written(tmp_path / "step-80", export=False)
    assert f"torchtitan-rl export {path} DIRECTORY" in refusal(hf_weights, path)


def test_the_marker_is_all_that_a_kill_after_the_rename_takes(tmp_path):
    path = written(tmp_path / "step-80")
    (path / "COMPLETE").unlink()
    assert not is_complete(path) and problem(path) == ""
    mark(path)
    assert require_complete(path) == path


@pytest.mark.parametrize("damage", ["missing", "truncated", "bit flipped", "no list", "state cut off"])
def test_a_damaged_checkpoint_is_a_problem_that_names_the_file(damage, tmp_path):
    path = written(tmp_path / "step-80")
    file = model_dir(path) / "__0_0.distcp"
    if damage == "missing":
        file.unlink()
        assert problem(path) == f"{file}: is missing"
    elif damage == "truncated":
        file.write_bytes(b"weig")
        assert problem(path) == f"{file}: has 4 bytes, 7 were written"
    elif damage == "bit flipped":
        file.write_bytes(b"weightr")
        assert problem(path).startswith(f"{file}: its checksum is ")
    elif damage == "no list":
        (path / "files.json").unlink()
        assert problem(path) == f"{path / 'files.json'}: No such file or directory"
    else:
        (path / "state.json").write_text('{"step":')
        assert problem(path).startswith(f"{path}: state.json is not JSON")


def test_a_newer_format_is_refused(tmp_path):
    path = written(tmp_path / "step-80")
    (path / "state.json").write_text(json.dumps({"format": FORMAT + 1, **STATE}))
    assert f"has format {FORMAT + 1}, and this version reads up to format {FORMAT}" in refusal(read_state, path)


def test_latest_is_the_checkpoint_pointed_to_last(tmp_path):
    assert latest(tmp_path) is None
    for step in (20, 40):
        point_to(written(tmp_path / f"step-{step}"))
        assert latest(tmp_path) == tmp_path / f"step-{step}"
    assert not (tmp_path / "latest.new").exists()


def test_what_is_left_of_a_removed_checkpoint_is_incomplete(tmp_path, monkeypatch):
    path = written(tmp_path / "step-80")
    monkeypatch.setattr("shutil.rmtree", lambda *args, **kwargs: None)  # killed there
    remove(path)
    assert path.exists() and not is_complete(path)


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


def test_a_checkpoint_says_which_run_and_step_its_weights_come_from(tmp_path):
    path = tmp_path / "step-80"
    written(path)
    (path / RUN_CONFIG).write_text(json.dumps({"name": "sums"}))
    for place in (path, hf_dir(path)):
        assert origin(place) == Origin(name="sums", step=80, text="step 80")
    state = STATE | {"step": 0, "phase": "supervised", "phase_step": 20}
    (path / "state.json").write_text(json.dumps(state))
    assert origin(path) == Origin(name="sums", step=0, text="supervised step 20")
    assert origin(tmp_path / "Qwen3-0.6B") == Origin(name="Qwen3-0.6B")


def test_ranks_that_delete_the_same_directory_do_not_disturb_each_other(tmp_path):
    for number in range(20):
        directory = tmp_path / f"step-{number}"
        for part in ("model", "optimizer"):
            (directory / part).mkdir(parents=True)
            for file in range(20):
                (directory / part / f"{file}.pt").touch()
        with ThreadPoolExecutor(4) as ranks:
            list(ranks.map(remove, [directory] * 4))
        assert not directory.exists()
