"""Why trainer and generator disagree: in runs of the real stack, healthy and with faults put into them."""

import json
import subprocess
import sys

import pytest

from benchmarks import mismatch_faults
from tests.integration.conftest import ROOT
from torchtitan_rl.record.attempts import read_rollouts
from torchtitan_rl.tools.explain_mismatch import explain, text
from torchtitan_rl.train.controller import Controller

pytestmark = pytest.mark.whole


def played(loop, directory, every: int):
    """The directory of a short local run with an explanation every so many steps and a checkpoint after each step, and
    the run's explainer."""
    config = mismatch_faults.config_of(
        str(directory), controller__checkpoint_every=1, controller__keep_last=-1, controller__num_steps=4
    )
    config.record.explain_mismatch_every = every

    async def to_its_end():
        async with await Controller.launch(config, backend="local") as controller:
            await controller.train()
            return controller.run_dir, controller.explainer

    return loop.run_until_complete(to_its_end())


@pytest.fixture(scope="module")
def run(loop, tmp_path_factory):
    run_dir, explained = played(loop, tmp_path_factory.mktemp("explained") / "run", every=2)
    return run_dir, explained.cause


@pytest.mark.slow
def test_every_other_step_has_the_parts_of_the_gap_and_nothing_is_left_unexplained(run):
    run_dir, cause = run
    lines = [line for line in run_dir.read_metrics() if line["phase"] == "reinforcement"]
    assert ["mismatch/noise_mean" in line for line in lines] == [False, True, False, True]
    assert cause is None
    for line in lines[1::2]:
        assert line["mismatch/explained_tokens"] > 20 and line["mismatch/stale_max"] == 0
        assert line["mismatch/unexplained_max"] <= 1e-6 and 0 < line["mismatch/noise_max"] < 1e-5


@pytest.mark.slow
def test_a_run_that_has_ended_is_explained_from_its_records_and_checkpoints(loop, run):
    run_dir, _ = run
    found = loop.run_until_complete(explain(run_dir.path, num_rollouts=4))
    assert found.step == 4 and [one.rsplit("/", 1)[-1] for one in found.versions.values()] == ["step-3"]
    assert not found.causes and len({sample.rollout for sample in found.samples}) == 4
    parts = found.parts
    assert abs(parts.rest_N).max() <= 1e-6 and abs(parts.stale_N).max() <= 1e-6 and abs(parts.noise_N).max() < 1e-5
    assert "nothing unusual" in text(found) and "step-3" in text(found)


@pytest.mark.slow
def test_records_that_lie_are_explained_by_what_would_have_given_them(loop, run, monkeypatch):
    from torchtitan_rl.tools import explain_mismatch

    run_dir, _ = run
    read = explain_mismatch.read_rollouts

    def of_the_version_before(directory):
        for record in read(directory):
            for turn in record["turns"]:
                turn["policy_versions"] = [version - 1 for version in turn["policy_versions"]]
            yield record | {"policy_version_min": record["policy_version_min"] - 1}

    monkeypatch.setattr(explain_mismatch, "read_rollouts", of_the_version_before)
    found = loop.run_until_complete(explain(run_dir.path, step=3))
    assert [cause.name for cause in found.causes] == ["older_version"], text(found)
    assert "cause (rest: older_version): version 32 sampled the tokens" in text(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--step", "77"], "step=77: has no recorded rollouts that trained"),
        (["--rollouts", "0"], "--rollouts=0: must be at least 1"),
    ],
)
def test_what_cannot_be_explained_is_said_in_a_sentence(here, run, arguments, said):
    done = here("explain-mismatch", str(run[0].path), *arguments)
    assert done.returncode == 1 and said in done.stderr


@pytest.mark.slow
def test_a_run_without_tokens_or_checkpoints_is_not_explained(here, run, tmp_path):
    config = json.loads((run[0].path / "config.json").read_text())
    for tokens, said in ((True, "has no complete checkpoint"), (False, "controller.record_tokens=False")):
        config["controller"]["record_tokens"] = tokens
        (tmp_path / "config.json").write_text(json.dumps(config))
        done = here("explain-mismatch", str(tmp_path))
        assert done.returncode == 1 and said in done.stderr


def test_a_directory_without_a_run_is_said_to_be_one(here, tmp_path):
    done = here("explain-mismatch", str(tmp_path))
    assert done.returncode == 1 and "has no readable config.json" in done.stderr


@pytest.mark.slow
def test_a_run_samples_and_trains_the_same_without_explanations_and_nothing_listens_then(loop, run, tmp_path):
    without, listening = played(loop, tmp_path / "run", every=0)
    assert listening is None
    one, other = (list(read_rollouts(run_dir)) for run_dir in (run[0], without))
    for name in ("turns", "sequences", "reward", "advantage"):
        assert [record[name] for record in one] == [record[name] for record in other], name


@pytest.mark.slow
@pytest.mark.parametrize("name", list(mismatch_faults.FAULTS))
def test_a_fault_is_named(name):
    command = [sys.executable, "-m", "benchmarks.mismatch_faults", "faults", "--only", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_clean_runs_give_no_alarm():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.mismatch_faults", "clean"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout
    assert "0 alarms in" in done.stdout
