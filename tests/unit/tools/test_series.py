"""Metrics as columns, while the file grows and is cut back."""

import json
import math

from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tools.series import Series


def line(step, **more):
    return {"step": step, "phase": "reinforcement", "reward/mean": step / 10} | more


def test_lines_are_read_once_they_are_complete(tmp_path):
    run_dir = RunDir.create(tmp_path)
    series = Series(run_dir.metrics_file)
    assert series.refresh().phases() == [] and series.column("reward/mean") == ([], [])
    run_dir.log_metrics(line(1, **{"mismatch/kl": math.nan}))
    run_dir.log_metrics({"step": 1, "phase": "evaluation", "eval/name": "sort", "eval/accuracy": 0.5})
    with run_dir.metrics_file.open("a") as file:
        file.write(json.dumps(line(2))[:10])
    first = series.refresh().version
    assert series.column("reward/mean") == ([1], [0.1]) and math.isnan(series.last("mismatch/kl")[0])
    assert series.evaluations()[0]["eval/accuracy"] == 0.5 and series.names() == ["mismatch/kl", "reward/mean"]
    with run_dir.metrics_file.open("a") as file:
        file.write(json.dumps(line(2))[10:] + "\nnot json\n")
    assert series.refresh().column("reward/mean") == ([1, 2], [0.1, 0.2]) and series.num_bad == 1
    assert series.version > first and series.version == series.refresh().version


def test_a_file_that_was_cut_back_is_read_anew(tmp_path):
    run_dir = RunDir.create(tmp_path)
    for step in (1, 2, 3):
        run_dir.log_metrics(line(step))
    series = Series(run_dir.metrics_file).refresh()
    lines = run_dir.metrics_file.read_text().splitlines(keepends=True)
    run_dir.metrics_file.write_text(lines[0])
    for step in (2, 3, 4):
        run_dir.log_metrics(line(step, **{"reward/mean": 9.0}))
    assert series.refresh().column("reward/mean") == ([1, 2, 3, 4], [0.1, 9.0, 9.0, 9.0])
    run_dir.metrics_file.unlink()
    assert series.refresh().column("reward/mean") == ([], [])
