"""Checkpoints of somebody who means harm: whatever their files name is not run."""

import dataclasses
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.config.resolve import rebuilt, resolved
from torchtitan_rl.weights import checkpoint
from torchtitan_rl.weights.saved_state import load_state, saved_names

pytestmark = pytest.mark.whole

ROOT = Path(__file__).parents[2]


class Runs:
    """Unpickled, it makes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def saved(directory):
    """A checkpoint of a model and an optimizer that has stepped, and the state that it was saved from."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=str(directory), no_dist=True)
    return state


def emptied(state):
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {name: emptied(value) for name, value in state.items()}
    return state


def test_a_checkpoint_comes_back_as_torch_reads_it(tmp_path):
    state = saved(tmp_path)
    read, expected = emptied(state), emptied(state)
    read["optimizer"]["param_groups"][0]["lr"] = 7.0
    load_state(read, tmp_path)
    dcp.load(expected, checkpoint_id=str(tmp_path), no_dist=True)
    assert read["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    for name, tensor in state["model"].items():
        assert torch.equal(read["model"][name], tensor) and torch.equal(expected["model"][name], tensor)
    assert {"model.weight", "model.bias"} < set(saved_names(tmp_path))


def test_metadata_that_names_a_function_is_refused(tmp_path):
    state, marker = saved(tmp_path), tmp_path / "marker"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Runs(marker)))
    for read in (lambda: saved_names(tmp_path), lambda: load_state(state, tmp_path)):
        with pytest.raises(ValueError, match=r"\.metadata': names posix.system, which is no part of a checkpoint"):
            read()
    assert not marker.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"ctorch.distributed.checkpoint.metadata\nos.system\n(S'touch marker'\ntR.",
        b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x0btorch.load\x93.",
        b"\x80\x04\x8c\x05torch\x8c\x04load\x93.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.",
        pickle.dumps({"no": "metadata"}),
        b"",
        b"\x80\x04\x95\xff\xff\xff",
    ],
)
def test_other_metadata_is_refused(content, tmp_path):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match="use a checkpoint from somebody whom you trust, or a copy that is whole"):
        saved_names(tmp_path)


def with_value(directory, content):
    """Puts `content` in the place of the learning rate of a saved checkpoint."""
    metadata = dcp.FileSystemReader(str(directory)).read_metadata()
    [info] = [info for index, info in metadata.storage_data.items() if index.fqn == "optimizer.param_groups.0.lr"]
    file = directory / info.relative_path
    info.offset, info.length = file.stat().st_size, len(content)
    with open(file, "ab") as stream:
        stream.write(content)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_value_that_names_a_function_is_refused(tmp_path):
    state, marker, content = saved(tmp_path), tmp_path / "marker", io.BytesIO()
    torch.save(Runs(marker), content)
    with_value(tmp_path, content.getvalue())
    with pytest.raises(ValueError, match="optimizer.param_groups.0.lr of a checkpoint"):
        load_state(emptied(state), tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (lambda state, file: state["model"].update(gate=torch.zeros(1)), "Missing key .* model.gate"),
        (lambda state, file: file.unlink(), "No such file or directory: '.*__0_0.distcp'"),
    ],
    ids=["key", "file"],
)
def test_a_checkpoint_that_does_not_load_is_an_error_that_an_actor_survives(spoil, reason, tmp_path):
    """torch's own is a `BaseException`, for which Monarch ends the actor's process."""
    state = emptied(saved(tmp_path))
    spoil(state, tmp_path / "__0_0.distcp")
    with pytest.raises(RuntimeError, match=f"^checkpoint='{tmp_path}': rank 0 cannot load it: .*{reason}.*; give a "):
        load_state(state, tmp_path)


def test_data_outside_of_the_directory_are_refused(tmp_path):
    saved(tmp_path)
    metadata = dcp.FileSystemReader(str(tmp_path)).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="outside of its directory"):
        saved_names(tmp_path)


def test_a_config_of_somebody_else_imports_classes_of_the_two_packages_alone(tmp_path):
    marker = tmp_path / "marker"
    for hostile in (
        {"class": "subprocess:Popen", "args": ["touch", str(marker)]},
        {"class": "torchtitan_rl.config.resolve:importlib.import_module", "name": "this"},
        {"class": "torchtitan_rl.launch.local:LocalLauncher"},
        {"function": "os:system", "source_sha256": ""},
        {"function": "torchtitan_rl.config.resolve:hashlib.sha256", "source_sha256": ""},
    ):
        with pytest.raises(
            ValueError, match="nothing of it was run; where you know who wrote the file, add --trust-code"
        ):
            rebuilt({"shape": hostile}, trusted=False)
    assert not marker.exists()
    for config in (TrainerConfig(), ModelConfig(shape=tiny())):
        plain = json.loads(json.dumps(resolved(config) | {"post_optimizer_build_fn": None}))
        plain = {name: value for name, value in plain.items() if name in {f.name for f in dataclasses.fields(config)}}
        rebuilt({**plain, "class": f"{type(config).__module__}:{type(config).__qualname__}"}, trusted=False)


def tiny():
    return Qwen3Shape(vocab_size=64, dim=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, hidden_dim=64)


def committed(directory, model_dir):
    """A complete checkpoint, as far as its checksums and its marker say, with `model_dir` as its weights."""
    written = directory.with_name("step-1.writing")
    written.mkdir()
    shutil.copytree(model_dir, checkpoint.model_dir(written))
    config = {
        "name": "x",
        "seed": 0,
        "model": resolved(ModelConfig(shape=tiny())),
        "trainer": resolved(TrainerConfig()),
    }
    checkpoint.write_json(written / checkpoint.RUN_CONFIG, config)
    checkpoint.commit(written, directory, {"step": 1, "phase": "reinforcement", "phase_step": 1}, {})
    return directory


@pytest.mark.parametrize("hostile", ["metadata", "config"])
def test_export_refuses_a_hostile_checkpoint(hostile, tmp_path):
    marker, weights = tmp_path / "marker", tmp_path / "weights"
    saved(weights)
    if hostile == "metadata":
        (weights / ".metadata").write_bytes(pickle.dumps(Runs(marker)))
    path = committed(tmp_path / "step-1", weights)
    if hostile == "config":
        config = json.loads((path / checkpoint.RUN_CONFIG).read_text())
        config["model"]["shape"] = {"class": "subprocess:Popen", "args": ["touch", str(marker)]}
        checkpoint.write_json(path / checkpoint.RUN_CONFIG, config)
        files = json.loads((path / "files.json").read_text())
        files |= checkpoint.checksums(path, [path / checkpoint.RUN_CONFIG])
        checkpoint.write_json(path / "files.json", files)
    made = subprocess.run(
        [sys.executable, "-m", "torchtitan_rl.cli", "export", str(path), str(tmp_path / "made")],
        capture_output=True, text=True, timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert made.returncode == 1 and not marker.exists(), made.stderr
    assert (
        "names posix.system" if hostile == "metadata" else "'subprocess:Popen' is no class of a config"
    ) in made.stderr
    assert "Traceback" not in made.stderr


def test_bad_steps_are_written_for_a_reader_that_runs_nothing(tmp_path):
    from torchtitan_rl.record.run_dir import RunDir
    from torchtitan_rl.train.numeric_guard import count_step
    from torchtitan_rl.train.role_step import RoleStep
    from torchtitan_rl.types import Datum, OptimStepOutput
    from torchtitan_rl.types.run_state import RunState

    ones = torch.ones(3)
    datum = Datum(
        tokens=torch.tensor([5, 9, 7]),
        target_tokens=torch.tensor([9, 7, 2]),
        loss_inputs={"token_weights": ones, "loss_mask": ones},
    )
    state = RunState(seed=0)
    state.skipped_in_a_row["policy"] = 1
    output = OptimStepOutput(**{f.name: 0.0 for f in dataclasses.fields(OptimStepOutput)})
    count_step(RunDir(tmp_path), state, {"policy": RoleStep(output, float("nan"))}, [datum], max_skipped=3)
    [file] = (tmp_path / "bad_steps").iterdir()
    [read] = torch.load(file, weights_only=True)["data"]
    assert torch.equal(read["tokens"], datum.tokens) and Datum(**read).loss_inputs.keys() == datum.loss_inputs.keys()
