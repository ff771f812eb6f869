"""The rules on real runs: a healthy one, and one with a constant reward. `benchmarks.diagnose_faults` has more."""

import subprocess
import sys

import pytest

from tests.integration.conftest import ROOT, SHORT, watched
from torchtitan_rl.cli import main
from torchtitan_rl.health.diagnosis import examine
from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.record.run_dir import RunDir

pytestmark = pytest.mark.whole

CONFIG = """
from torchtitan_rl.config.load import load_config

asked = []

def constant(task, completions):
    return [0.25] * len(completions)

def tired(task, completions):
    asked.append(task.id)
    if len(asked) > 30:
        raise RuntimeError("the judge is tired")
    return [float(len(text)) for text in completions]

def config():
    config = load_config("configs/quickstart.py")
    config.task.reward = REWARD
    return config
"""


def test_nothing_is_said_of_a_short_run(short_run, capsys):
    diagnosis = examine(Run.open(short_run.path))
    assert diagnosis.findings == [] and diagnosis.missing == []
    assert main.main(["diagnose", str(short_run.path)]) == 0
    told = capsys.readouterr().out  # two steps are too few for most rules
    assert "rules could look, and found nothing" in told and "nothing wrong" not in told
    assert "not looked at: rule truncation: needs `completion/truncated_frac` of 5 batches; there are 2" in told


def test_samples_name_the_processes_of_a_run(short_run):
    samples = list(RunDir(short_run.path).tables["samples"].read())
    assert {"controller", "policy-0", "generator-0-0"} <= {sample["who"] for sample in samples}
    assert all(sample["rss_mib"] > 1 for sample in samples) and len(samples) > 10


@pytest.mark.slow
def test_a_run_says_once_what_is_wrong_with_it(tmp_path):
    file = tmp_path / "constant.py"
    file.write_text(CONFIG.replace("REWARD", "constant"))
    steps = ["--controller.num-steps", "14", "--controller.eval-every", "0"]
    run = watched(["train", str(file), *SHORT, *steps], tmp_path / "run")
    events = list(RunDir(run.path).tables["events"].read())
    assert [event["who"] for event in events if event["kind"] == "finding"].count("no_signal") == 1
    assert "no_signal" in [finding.rule for finding in examine(Run.open(run.path)).findings]


@pytest.mark.slow
def test_a_run_that_failed_says_why(tmp_path):
    file, path = tmp_path / "tired.py", tmp_path / "run"
    file.write_text(CONFIG.replace("REWARD", "tired"))
    command = [sys.executable, "-m", "torchtitan_rl.cli", "train", str(file), *SHORT, "--output-dir", str(path)]
    done = subprocess.run(
        [*command, "--controller.num-steps", "20"], cwd=ROOT, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 1 and "the judge is tired" in done.stderr
    (finding,) = examine(Run.open(path)).findings
    assert finding.rule == "gone" and "the judge is tired" in finding.what
