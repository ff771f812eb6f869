"""A run whose console is JSON and whose metrics go everywhere, one place of which is broken."""

import json
import subprocess
import sys

from tests.integration.conftest import ROOT, SHORT
from tests.integration.leftovers import nothing_left
from tests.unit.observability.test_sinks import curves, float32, read_tensorboard, read_wandb
from torchtitan_rl.observability.run_dir import RunDir

SINKS = """
import json

def note(line):
    with open("heard.jsonl", "a") as file:
        file.write(json.dumps(line) + chr(10))

def broken(line):
    raise ValueError("no disk")
"""


def test_every_line_is_json_and_every_sink_has_the_runs_numbers(tmp_path):
    (tmp_path / "my_sinks.py").write_text(SINKS)
    command = [sys.executable, "-m", "torchtitan_rl.cli", "train", str(ROOT / "configs" / "quickstart.py"), *SHORT]
    options = ["--output-dir", "run", "--json-logs", "--record.tensorboard", "--record.wandb.project", "letters"]
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
