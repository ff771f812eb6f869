"""What a run leaves on disk."""

import json
import math

import pytest

from torchtitan_rl import metrics
from torchtitan_rl.record.run_dir import RunDir

LINE = {"step": 3, "phase": "reinforcement", "reward/mean": 0.1, "time/step_s": 1e-300, "optim/lr": 1 / 3}


def test_layout(tmp_path):
    path = tmp_path / "runs" / "a b"
    run_dir = RunDir.create(path)
    assert sorted(entry.name for entry in path.iterdir()) == ["checkpoints", "logs", "metrics.jsonl"]
    assert run_dir.checkpoint_path(40) == path / "checkpoints" / "step-40"
    assert not run_dir.checkpoint_path(40).exists()
    assert run_dir.read_metrics() == []


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"output_dir='.*/file/run': cannot be written \(Not a directory: .*\); ch"):
        RunDir.create(tmp_path / "file" / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").write_text("in the way")
    with pytest.raises(ValueError, match="cannot be written"):
        RunDir.create(tmp_path / "run")


def test_a_directory_that_holds_a_run(tmp_path):
    RunDir.create(tmp_path)
    run_dir = RunDir.create(tmp_path)  # nothing happened in it yet
    run_dir.log_metrics(LINE)
    with pytest.raises(ValueError, match=r"already holds a run .*; pick another output_dir, or .*--resume auto"):
        RunDir.create(tmp_path)
    assert RunDir(tmp_path).read_metrics() == [LINE]


def test_metrics_keep_every_bit_and_are_on_disk_at_once(tmp_path):
    run_dir = RunDir.create(tmp_path)
    run_dir.log_metrics(LINE)
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step":3,"phase":"reinforcement","reward/mean":0.1,"time/step_s":1e-300,"optim/lr":0.3333333333333333}\n'
    )
    run_dir.log_metrics({"step": 4, "phase": "evaluation", "eval/split": "test", "eval/pass@8": 1})
    assert run_dir.read_metrics() == [LINE, {"step": 4, "phase": "evaluation", "eval/split": "test", "eval/pass@8": 1}]


def test_what_is_not_finite_stays_valid_json(tmp_path):
    run_dir = RunDir.create(tmp_path)
    run_dir.log_metrics({"step": 0, "phase": "supervised", "loss/mean": math.nan, "optim/grad_norm": -math.inf})

    def no_constants(name):
        raise AssertionError(name)

    json.loads(run_dir.metrics_file.read_text(), parse_constant=no_constants)
    (line,) = run_dir.read_metrics()
    assert math.isnan(line["loss/mean"]) and line["optim/grad_norm"] == -math.inf


def test_names_of_parts_and_roles_are_written_as_they_are(tmp_path):
    run_dir = RunDir.create(tmp_path)
    names = ["reward/part_Format_mean", "eval/reward_part_style.length_mean", "reward/exact-match_mean"]
    names += ["reward/Solver_mean", "reward/1st_mean", "rollout/_x_mean"]
    run_dir.log_metrics({"step": 0, "phase": "reinforcement"} | dict.fromkeys(names, 1.0))
    assert set(names) < run_dir.read_metrics()[0].keys()
    assert metrics.entry(names[0]) == "reward/part_NAME_mean" and metrics.entry(names[2]) == "reward/ROLE_mean"


@pytest.mark.parametrize("name", ["loss", "loss/", "/mean", "Loss/mean", "loss/mean/x", "loss mean", "loss/mean "])
def test_names_of_another_form_are_refused(tmp_path, name):
    run_dir = RunDir.create(tmp_path)
    with pytest.raises(ValueError, match="is not of the form area/what"):
        run_dir.log_metrics({"step": 0, "phase": "supervised", name: 1.0})
    assert run_dir.read_metrics() == []


def test_lines_without_step_or_phase_and_values_that_are_not_plain_are_refused(tmp_path):
    run_dir = RunDir.create(tmp_path)
    with pytest.raises(ValueError, match="has no 'phase'"):
        run_dir.log_metrics({"step": 0, "loss/mean": 1.0})
    with pytest.raises(ValueError, match=r"loss/mean=\[1.0\]: is a list; give a Python number"):
        run_dir.log_metrics({"step": 0, "phase": "supervised", "loss/mean": [1.0]})


def test_a_line_cut_off_by_a_crash_is_left_out_and_a_broken_one_is_an_error(tmp_path):
    run_dir = RunDir.create(tmp_path)
    run_dir.log_metrics(LINE)
    with run_dir.metrics_file.open("a") as file:
        file.write('{"step": 4, "pha')
    assert run_dir.read_metrics() == [LINE]
    with run_dir.metrics_file.open("a") as file:
        file.write("\n")
    with pytest.raises(RuntimeError, match="holds a line that is not JSON"):
        run_dir.read_metrics()


def test_a_line_that_is_no_text_is_named(tmp_path):
    run_dir = RunDir.create(tmp_path)
    run_dir.log_metrics(LINE)
    with run_dir.metrics_file.open("ab") as file:
        file.write(b'{"step": 4, "phase": "\xff"}\n')
    with pytest.raises(RuntimeError, match=r"line 2: holds a line that is not JSON .*byte 0xff.*; remove that line"):
        run_dir.read_metrics()


def test_config(tmp_path):
    run_dir = RunDir.create(tmp_path)
    run_dir.write_config({"seed": 0, "trainer": {"lr": 0.003, "betas": (0.9, 0.95)}, "clip_high": math.inf})
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "seed": 0,
        "trainer": {"lr": 0.003, "betas": [0.9, 0.95]},
        "clip_high": "Infinity",
    }
