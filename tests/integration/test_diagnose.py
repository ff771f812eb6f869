"""The rules on real runs: a short healthy one, and one whose reward is constant. `scripts.diagnose_faults` has more."""

import pytest

from tests.integration.conftest import SHORT, watched
from torchtitan_rl import cli
from torchtitan_rl.inspection.diagnose import examine
from torchtitan_rl.inspection.run import Run
from torchtitan_rl.observability.run_dir import RunDir

CONSTANT = """
from torchtitan_rl.config.load import load_config

def constant(task, completions):
    return [0.25] * len(completions)

def config():
    config = load_config("configs/quickstart.py")
    config.task.reward = constant
    return config
"""


def test_nothing_is_said_of_a_short_run(short_run, capsys):
    diagnosis = examine(Run.open(short_run.path))
    assert diagnosis.findings == [] and diagnosis.missing == []
    assert cli.main(["diagnose", str(short_run.path)]) == 0
    assert "nothing wrong found" in capsys.readouterr().out


def test_samples_name_the_processes_of_a_run(short_run):
    samples = list(RunDir(short_run.path).tables["samples"].read())
    assert {"controller", "policy-0", "generator-0-0"} <= {sample["who"] for sample in samples}
    assert all(sample["rss_mib"] > 1 for sample in samples) and len(samples) > 10


@pytest.mark.slow
def test_a_run_says_once_what_is_wrong_with_it(tmp_path):
    file = tmp_path / "constant.py"
    file.write_text(CONSTANT)
    steps = ["--controller.num-steps", "14", "--controller.eval-every", "0"]
    run = watched(["train", str(file), *SHORT, *steps], tmp_path / "run")
    events = list(RunDir(run.path).tables["events"].read())
    assert [event["who"] for event in events if event["kind"] == "finding"].count("no_signal") == 1
    assert "no_signal" in [finding.rule for finding in examine(Run.open(run.path)).findings]
