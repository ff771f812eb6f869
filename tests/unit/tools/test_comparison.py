"""Runs compared: groups of seeds, fields that differ, differences beside their spread."""

import json
import math
import shutil

import pytest

from tests.recorded import RECORDED
from torchtitan_rl.cli import main
from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.tools.comparison import MetricRow, compare, text

NAMES = ("quickstart-seed0", "groups-seed0", "quickstart-seed1", "groups-seed1")
PATHS = [str(RECORDED / name) for name in NAMES]


def rows(comparison):
    return {row.name: row for row in comparison.rows}


def test_runs_that_differ_in_the_seed_alone_are_one_group():
    comparison = compare([Run.open(path) for path in PATHS])
    assert [(group.letter, group.names, group.seeds) for group in comparison.groups] == [
        ("A", ["quickstart-seed0", "quickstart-seed1"], [0, 1]),
        ("B", ["groups-seed0", "groups-seed1"], [0, 1]),
    ]
    assert comparison.config == {"algorithm.group_size": [4, 8]}
    assert not [note for note in comparison.notes if "one seed" in note]


def test_values_are_last_evaluations_and_means_of_the_last_quarter():
    found = rows(compare([Run.open(path) for path in PATHS]))
    lines = Run.open(PATHS[0]).lines()
    last = [line["reward/mean"] for line in lines if line["phase"] == "reinforcement" and line["step"] > 6]
    assert len(last) == 2 and found["reward/mean"].values[0][0] == sum(last) / 2
    test = next(line for line in lines if line.get("eval/split") == "test")
    assert found["eval/letter_sort/test/reward_mean"].values[0][0] == test["eval/reward_mean"]
    losses = [line["loss/mean"] for line in lines if line["phase"] == "supervised" and line["step"] > 9]
    assert found["supervised/loss/mean"].values[0][0] == pytest.approx(sum(losses) / 3)
    assert list(found)[0].startswith("eval/") and "optim/num_steps" not in found  # equal in all runs


def test_spread_and_standard_error_are_pooled_over_groups():
    row = MetricRow(name="x", values=[[1.0, 3.0], [4.0, 6.0, 8.0], [5.0]])
    assert row.mean(1) == 6.0 and row.spread(0) == pytest.approx(math.sqrt(2)) and row.spread(2) is None
    pooled = (2 * 1 + 4 * 2) / 3  # variances 2 and 4 with 1 and 2 degrees of freedom
    assert row.standard_error(0, 1) == pytest.approx(math.sqrt(pooled * (1 / 2 + 1 / 3)))
    assert row.standard_error(0, 2) == pytest.approx(math.sqrt(pooled * 1.5))
    assert MetricRow(name="x", values=[[1.0], [2.0]]).standard_error(0, 1) is None


def changed(path, to, **fields):
    """A copy of a run with another config."""
    shutil.copytree(path, to)
    config = json.loads((to / "config.json").read_text()) | fields
    (to / "config.json").write_text(json.dumps(config))
    return Run.open(to)


def test_the_command_prints_it(capsys):
    assert main.main(["compare", *PATHS, "--metrics", "eval/reward_mean,reward/mean"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[:3] == [
        "group  seeds  runs",
        "A      0, 1   quickstart-seed0, quickstart-seed1",
        "B      0, 1   groups-seed0, groups-seed1",
    ]
    assert "algorithm.group_size  4  8" in lines
    (row,) = [line.split() for line in lines if line.startswith("reward/mean")]
    found = rows(compare([Run.open(path) for path in PATHS]))["reward/mean"]
    assert row[1] == f"{found.mean(0):.4g}" and row[3] == f"{found.spread(0):.2g}"
    assert float(row[7]) == pytest.approx(found.mean(1) - found.mean(0), rel=1e-3)
    assert out.count("reward_mean") == 2 and "policy/entropy" not in out


def test_one_seed_only_is_said(tmp_path, capsys):
    runs = [Run.open(PATHS[0]), Run.open(PATHS[1])]
    shown = text(compare(runs))
    assert "one seed only in every group: nobody knows which of these differences are chance" in shown
    assert " x)" not in shown
    one_alone = text(compare([*runs, Run.open(PATHS[2])]))
    assert "one seed only in B: the spread is taken from the other groups" in one_alone and " x)" in one_alone
    seeds = text(compare([Run.open(PATHS[0]), Run.open(PATHS[2])]))
    assert "the runs differ in nothing but the seed" in seeds and "config" not in seeds.split("metric")[0]
    recorded_otherwise = changed(PATHS[0], tmp_path / "copy", record={"tensorboard": True}, name="other")
    copies = text(compare([runs[0], recorded_otherwise, runs[1]]))
    assert "group A has runs of one seed: they are copies" in copies


def test_runs_that_are_not_whole_are_compared_with_what_they_have(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    broken = tmp_path / "broken"
    broken.mkdir()
    lines = (RECORDED / "groups-seed0" / "metrics.jsonl").read_text()
    (broken / "metrics.jsonl").write_text(lines[: len(lines) // 2])
    shown = text(compare([Run.open(PATHS[0]), Run.open(broken), Run.open(tmp_path)]))
    assert "broken: config.json is missing or cut off" in shown and "metrics.jsonl has no complete line yet" in shown
    assert "the runs made different numbers of steps of reinforcement: 0, 2, 8" in shown


def test_numbers_that_are_not_finite_are_told(tmp_path):
    """A mean over three seeds of which one has diverged is a mean over two."""
    diverged = changed(PATHS[2], tmp_path / "diverged", seed=2)
    file = tmp_path / "diverged" / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [line | {"reward/mean": "NaN"} if "reward/mean" in line else line for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs = [Run.open(path) for path in PATHS]
    comparison = compare([*runs, diverged], ["reward/mean"])
    assert [len(values) for values in rows(comparison)["reward/mean"].values] == [2, 2]
    assert "reward/mean: not finite in diverged, which its means leave out" in comparison.notes
    with pytest.raises(ValueError, match="metrics=reward/mean: no run has finite numbers at its end"):
        compare([diverged, diverged], ["reward/mean"])


def test_a_metric_of_one_run_alone_is_not_equal_in_all_runs(tmp_path):
    alone = changed(PATHS[2], tmp_path / "alone", seed=2)
    file = tmp_path / "alone" / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line | {"reward/own_mean": 0.5}) + "\n" for line in lines))
    comparison = compare([Run.open(PATHS[0]), alone], ["reward/own_mean"])
    assert rows(comparison)["reward/own_mean"].values == [[0.5]]
    assert not [note for note in comparison.notes if "equal in all runs" in note]


def test_mistakes_are_sentences(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("")
    for arguments, message in (
        ([PATHS[0]], "there is nothing to compare it with; give two runs or more"),
        ([PATHS[0], "nowhere"], "run='nowhere': is no directory"),
        ([*PATHS, "--metrics", "reward/men"], "metrics=reward/men: the runs have no such numbers"),
        ([*PATHS, "--metrics", "reward/mean,reward/men"], "metrics=reward/men: the runs have no such numbers; without"),
        ([str(tmp_path), str(tmp_path)], "runs: they have no numbers to compare; let them make some steps"),
    ):
        assert main.main(["compare", *arguments]) == 1
        told = capsys.readouterr()
        assert message in told.err and "Traceback" not in told.err and not told.out
