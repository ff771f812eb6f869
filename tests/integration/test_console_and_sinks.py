"""A run whose console is JSON and whose metrics go everywhere, one place of which is broken."""

import json
import subprocess
import sys

import pytest

from tests.integration.conftest import ROOT, SHORT
from tests.integration.leftovers import nothing_left
from tests.unit.record.test_sinks import curves, float32, read_tensorboard, read_wandb
from torchtitan_rl.record.run_dir import RunDir

SINKS = """
import json

def note(line):
    with open("heard.jsonl", "a") as file:
        file.write(json.dumps(line) + chr(10))

def broken(line):
    raise ValueError("no disk")
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", "actors"])
def test_every_line_is_json_and_every_sink_has_the_runs_numbers(tmp_path, backend):
    (tmp_path / "my_sinks.py").write_text(SINKS)
    command = [sys.executable, "-m", "torchtitan_rl.cli", "train", str(ROOT / "configs" / "quickstart.py"), *SHORT]
    options = [
        "--backend",
        backend,
        "--output-dir",
        "run",
        "--json-logs",
        "--record.tensorboard",
        "--record.wandb.project",
        "letters",
    ]
    sinks = ["--record.sinks", "my_sinks.py:note", "my_sinks.py:broken"]
    with nothing_left():
        done = subprocess.run([*command, *options, *sinks], cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    out, err = ([json.loads(line) for line in text.splitlines()] for text in (done.stdout, done.stderr))
    assert all(entry.keys() == {"time", "level", "event", "fields"} for entry in out + err)
    lines = RunDir(tmp_path / "run").read_metrics()
    assert [entry["fields"] for entry in out if entry["event"] == "metrics"] == lines
    assert out[-1]["event"] == "summary" and out[-1]["fields"]["look at it"] == "torchtitan-rl view run"
    (reported,) = [entry["fields"] for entry in err if entry["level"] == "warning" and "record." in str(entry)]
    assert "my_sinks:broken: ValueError: no disk" in reported["message"]
    assert [json.loads(line) for line in (tmp_path / "heard.jsonl").read_text().splitlines()] == lines
    scalars, texts, images = read_tensorboard(tmp_path / "run" / "tensorboard")
    assert scalars == {name: float32(points) for name, points in curves(lines).items()}
    assert '"group_size": 4' in texts["config/text_summary"] and images["curve"].startswith(b"\x89PNG")
    (file,) = (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb")
    assert read_wandb(file) == curves(lines)


@pytest.mark.slow
def test_after_a_resume_tensorboard_has_the_steps_that_count_and_wandb_both_attempts(tmp_path):
    command = [sys.executable, "-m", "torchtitan_rl.cli", "train", str(ROOT / "configs" / "quickstart.py"), *SHORT]
    options = ["--backend", "local", "--record.tensorboard", "--record.wandb", "True"]
    cadence = ["--controller.num-steps", "4", "--controller.checkpoint-every", "1", "--controller.keep-last", "-1"]
    for where in (["--output-dir", "run"], ["--resume", "run/checkpoints/step-2"]):
        done = subprocess.run(
            [*command, *options, *cadence, *where], cwd=tmp_path, capture_output=True, text=True, timeout=150
        )
        assert done.returncode == 0, done.stderr
    lines = RunDir(tmp_path / "run").read_metrics()
    scalars, _, _ = read_tensorboard(tmp_path / "run" / "tensorboard")
    expected = {name: float32(points) for name, points in curves(lines).items()}
    # The line of the checkpoint that was gone on from was written after it: no step, so it is not taken again.
    scalars, expected = ({n: x for n, x in found.items() if "checkpoint/" not in n} for found in (scalars, expected))
    assert scalars == expected
    files = sorted((tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.parent.name)
    first, second = (read_wandb(file) for file in files)
    assert [step for step, _ in first["reward/mean"]] == [1, 2, 3, 4]
    assert [step for step, _ in second["reward/mean"]] == [3, 4] and files[0].name == files[1].name
    assert second["reward/mean"] == curves(lines)["reward/mean"][2:]
