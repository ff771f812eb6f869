"""What a fork refuses, and what it copies, without a run."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.kit.run_config import run_config
from torchtitan_rl.cli import main
from torchtitan_rl.config.derive import settled
from torchtitan_rl.config.resolve import resolved
from torchtitan_rl.record import attempts
from torchtitan_rl.record.fork_point import ForkPoint, fork_point
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.train.fork import existing_fork, make_fork, plan_fork
from torchtitan_rl.train.resume import find
from torchtitan_rl.weights import checkpoint


@pytest.fixture
def parent(tmp_path) -> RunDir:
    """A run of four steps with checkpoints at 2 and 4; the records of steps 1 to 4 are three parts."""
    run_dir = RunDir.create(tmp_path / "parent")
    attempts.begin(run_dir, None)
    plain = resolved(settled(run_config()))
    run_dir.write_config(plain)
    for step in range(1, 5):
        run_dir.log_metrics({"step": step, "phase": "reinforcement", "reward/mean": 0.5})
        run_dir.record("ledger", step, [{"draw": f"{step}/0", "event": "trained"}])
        if step % 2 == 0:
            saved = run_dir.checkpoint_path(step)
            checkpoint.begin(checkpoint.beside(saved))
            checkpoint.write_json(checkpoint.beside(saved) / checkpoint.RUN_CONFIG, plain)
            (checkpoint.beside(saved) / "model").mkdir()
            (checkpoint.beside(saved) / "model" / "weights").write_bytes(bytes(100))
            state = {"step": step, "metrics_bytes": run_dir.metrics_size(), "kl_coef": 0.03}
            checkpoint.commit(checkpoint.beside(saved), saved, state, {})
            run_dir.tables["ledger"].rotate()
            run_dir.tables["ledger"].seal()
    return run_dir


def files(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_fork_has_what_its_parent_had_at_the_checkpoint(parent, tmp_path):
    before, path = files(parent.path), tmp_path / "fork"
    config, point = plan_fork(parent.path, 2, ["algorithm.group_size=16"], output_dir=str(path))
    made = make_fork(config, point)
    assert files(parent.path) == before and not (tmp_path / "fork.forking").exists()
    assert [line["step"] for line in made.read_metrics()] == [1, 2]
    assert [record["step"] for record in made.tables["ledger"].read()] == [1, 2]  # the part of steps 3 and 4 stays away
    assert [p.name for p in made.checkpoints.iterdir() if p.is_dir()] == ["step-2"]
    assert checkpoint.latest(made.checkpoints).name == "step-2" and checkpoint.is_complete(made.checkpoint_path(2))
    inodes = [(run.checkpoint_path(2) / "model" / "weights").stat().st_ino for run in (parent, made)]
    assert inodes[0] == inodes[1]
    assert config.name == "unit-at-2" and json.loads(made.config_file.read_text())["algorithm"]["group_size"] == 16
    assert fork_point(path) == point
    assert point.changes == {"algorithm.group_size": (8, 16)} and point.parent == str(parent.path.resolve())
    assert point.summary() == f"fork of {point.parent} at step 2: algorithm.group_size 8 -> 16"
    with pytest.raises(ValueError, match="holds files already"):
        make_fork(config, point)


@pytest.mark.parametrize(("settings", "left"), [(["algorithm.kl_coef=0.5"], ()), ([], ("kl_coef",))])
def test_a_coefficient_that_a_fork_sets_is_not_the_one_that_its_parent_adapted(parent, tmp_path, settings, left):
    """With `kl_target` a run adapts it, and its checkpoints have it."""
    path = tmp_path / "fork"
    config, point = plan_fork(parent.path, 2, [*settings, "algorithm.group_size=16"], output_dir=str(path))
    make_fork(config, point)
    assert [name for name in find(config, "latest").state if name == "kl_coef"] == list(left)


@pytest.mark.parametrize(
    ("setting", "again"),
    [
        ("algorithm.loss_config.clip_high=0.3", False),
        ("trainer.optimizer.lr=0.1", False),
        ("algorithm.group_size=16", True),
        ("algorithm.temperature=0.9", True),
        ("sampling.max_tokens=3", True),
        ("task.reward=torchtitan_rl.tasks.letter_sort:partial_credit", True),
    ],
)
def test_groups_that_the_parent_has_played_are_played_again_where_a_fork_plays_or_judges_otherwise(
    parent, tmp_path, setting, again
):
    path = tmp_path / "fork"
    config, point = plan_fork(parent.path, 2, [setting], output_dir=str(path))
    make_fork(config, point)
    assert find(config, "latest").plays_again == again


def test_a_fork_that_is_there_already_is_gone_on_with_and_another_one_is_refused(parent, tmp_path):
    path, settings = tmp_path / "fork", ["algorithm.group_size=16"]
    assert existing_fork(path, parent.path, 2, settings) is None
    config, point = plan_fork(parent.path, 2, settings, output_dir=str(path))
    make_fork(config, point)
    shutil.rmtree(parent.checkpoint_path(2))  # as a parent does that goes on
    assert resolved(settled(existing_fork(path, parent.path, 2, settings))) == resolved(settled(config))
    with pytest.raises(ValueError, match="algorithm.group_size is set otherwise now; give another directory"):
        existing_fork(path, parent.path, 2, ["algorithm.group_size=4"])
    with pytest.raises(ValueError, match="holds a fork of .* at step 2: .*; give another directory, or that parent"):
        existing_fork(path, parent.path, 4, settings)
    with pytest.raises(ValueError, match="give another directory, or that parent and step"):
        existing_fork(path, tmp_path / "other", 2, settings)


def test_a_fork_that_was_made_with_a_setting_is_not_gone_on_with_without_it(parent, tmp_path):
    path, settings = tmp_path / "fork", ["algorithm.group-size=16", "trainer.optimizer.lr=5e-4"]
    make_fork(*plan_fork(parent.path, 2, settings, output_dir=str(path)))
    same = ["trainer.optimizer.lr=0.0005", "algorithm.group_size=16"]
    assert existing_fork(path, parent.path, 2, same).algorithm.group_size == 16
    with pytest.raises(ValueError, match="trainer.optimizer.lr is not set now; give another directory, or the setti"):
        existing_fork(path, parent.path, 2, settings[:1])
    content = json.loads((path / "fork.json").read_text())
    del content["settings"]  # as an older version wrote it
    (path / "fork.json").write_text(json.dumps(content))
    assert existing_fork(path, parent.path, 2, settings[:1]).trainer.optimizer.lr == 5e-4


@pytest.mark.parametrize(
    ("step", "settings", "arguments", "message"),
    [
        (3, [], {}, "--at=3: .* has no checkpoint after this step, there are checkpoints at 2, 4; give one of them"),
        (2, ["seed=1"], {}, "--set seed: changes which tasks .* before step 2.*add --new-draws"),
        (2, ["task.max_letters=5"], {}, "--set task.max_letters: changes which tasks"),
        (2, ["model.shape.dim=32"], {}, "--set model.shape.dim: decides what the checkpoint holds"),
        (2, ["algorithm.tasks_per_step=4"], {}, "--set algorithm.tasks_per_step: decides what the checkpoint"),
        (2, ["algorithm.group_size=4"], {"new_draws": True}, "--new-draws: nothing that is set changes the draws"),
        (2, ["algorithm.group_sise=4"], {}, "there is no such field; did you mean --algorithm.group-size"),
        (2, ["algorithm.group_size"], {}, "is no setting; write PATH=VALUE"),
        (2, ["algorithm.group_size=many"], {}, "is not of type int"),
    ],
)
def test_what_a_fork_refuses(parent, tmp_path, step, settings, arguments, message):
    before = files(tmp_path)
    with pytest.raises(ValueError, match=message):
        plan_fork(parent.path, step, settings, **arguments)
    assert files(tmp_path) == before


def test_a_damaged_checkpoint_and_a_directory_without_runs_are_refused(parent, tmp_path):
    (parent.checkpoint_path(2) / "model" / "weights").write_bytes(bytes(99))
    with pytest.raises(ValueError, match="--at=2: the checkpoint cannot be used: .*99 bytes, 100 were written"):
        plan_fork(parent.path, 2, [])
    with pytest.raises(ValueError, match="is no run directory, it has no checkpoints"):
        plan_fork(tmp_path, 2, [])


def test_lines_that_were_cut_off_since_cannot_be_forked(parent, tmp_path):
    config, point = plan_fork(parent.path, 4, [], output_dir=str(tmp_path / "fork"))
    lines = parent.metrics_file.read_bytes()
    parent.metrics_file.write_bytes(lines[: len(lines) // 2])
    before = files(tmp_path)
    with pytest.raises(ValueError, match="the run went on from an earlier step since; fork at a later one"):
        make_fork(config, point)
    assert files(tmp_path) == before


def test_a_checkpoint_before_the_first_line_of_metrics_can_be_forked(tmp_path):
    run_dir = RunDir.create(tmp_path / "pretrained")
    attempts.begin(run_dir, None)
    plain = resolved(settled(run_config()))
    run_dir.write_config(plain)
    saved = run_dir.checkpoint_path(0)
    checkpoint.begin(checkpoint.beside(saved))
    checkpoint.write_json(checkpoint.beside(saved) / checkpoint.RUN_CONFIG, plain)
    (checkpoint.beside(saved) / "model").mkdir()
    checkpoint.commit(checkpoint.beside(saved), saved, {"step": 0, "metrics_bytes": 0, "kl_coef": 0.03}, {})
    run_dir.log_metrics({"step": 1, "phase": "reinforcement", "reward/mean": 0.5})
    fork = make_fork(*plan_fork(run_dir.path, 0, [], output_dir=str(tmp_path / "fork")))
    assert fork.metrics_file.read_bytes() == b"" and fork.checkpoint_path(0).is_dir()


def test_functions_of_a_users_file_need_the_file(parent, tmp_path, capsys):
    saved = parent.checkpoint_path(2)
    plain = json.loads((saved / checkpoint.RUN_CONFIG).read_text())
    plain["algorithm"]["loss_fn"] = {"function": "torchtitan_rl_config_elsewhere:loss", "source_sha256": ""}
    (saved / checkpoint.RUN_CONFIG).write_text(json.dumps(plain))
    checkpoint.write_checksums(saved, {})
    assert main.main(["fork", str(parent.path), "--at", "2"]) == 1
    assert "names functions or classes of elsewhere.py" in capsys.readouterr().err


def test_a_changed_source_is_a_change(parent):
    saved = parent.checkpoint_path(2)
    plain = json.loads((saved / checkpoint.RUN_CONFIG).read_text())
    plain["algorithm"]["loss_fn"]["source_sha256"] = "0"
    (saved / checkpoint.RUN_CONFIG).write_text(json.dumps(plain))
    checkpoint.write_checksums(saved, {})
    _, point = plan_fork(parent.path, 2, [])
    assert [*point.changes] == ["algorithm.loss_fn.source_sha256"]


def test_a_damaged_fork_json_is_named(tmp_path):
    assert fork_point(tmp_path) is None
    (tmp_path / "fork.json").write_text('{"changes": {}}')
    with pytest.raises(ValueError, match="fork.json: is not what a fork writes"):
        fork_point(tmp_path)
    point = ForkPoint(parent="/runs/a", step=2, checkpoint="step-2", checkpoint_xxh3="ab", changes={"seed": (0, 1)})
    point.write(tmp_path)
    assert fork_point(tmp_path) == point


def test_a_fork_is_not_gone_on_with_as_a_run_without_its_settings(parent, tmp_path):
    path = tmp_path / "fork"
    config, point = plan_fork(parent.path, 2, ["trainer.optimizer.lr=0.5"], output_dir=str(path))
    make_fork(config, point)
    assert find(config, "latest").checkpoint is not None
    plain = run_config()
    plain.output_dir = str(path)
    with pytest.raises(ValueError, match=r"trainer.optimizer.lr=.* with 0.5; go on with torchtitan-rl fork .*parent"):
        find(plain, "latest")


def test_a_fork_that_is_there_names_functions_of_the_files_in_its_settings(parent, tmp_path):
    file, path = tmp_path / "my_losses.py", tmp_path / "fork"
    file.write_text("def mine(**columns):\n    return columns['token_weights'], {}\n")
    settings = [f"algorithm.loss_fn={file}:mine"]
    config, point = plan_fork(parent.path, 2, settings, output_dir=str(path))
    make_fork(config, point)
    del sys.modules["torchtitan_rl_config_my_losses"]
    assert existing_fork(path, parent.path, 2, settings).algorithm.loss_fn.__name__ == "mine"
