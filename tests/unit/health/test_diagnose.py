"""Run directories, whole and not: what the verb says of them, and what it says it could not look at."""

import fcntl
import json
import os
import shutil
import socket

import pytest

from torchtitan_rl.cli import main
from torchtitan_rl.health import newest
from torchtitan_rl.health.diagnosis import diagnose, examine
from torchtitan_rl.health.facts import RunFacts
from torchtitan_rl.health.newest import newest_rollouts
from torchtitan_rl.health.rules.table import RULES
from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.tables import Table

SETTINGS = {
    "algorithm": {"max_policy_lag": 0},
    "generator": {"dtype": "float32", "num_replicas": 1},
    "trainer": {"training": {"mixed_precision_param": "float32"}},
    "controller": {"num_steps": 20, "correct_reward": 1.0},
    "sampling": {"max_tokens": 12},
    "record": {"thresholds": {}},
}
TEST = {"step": 20, "phase": "evaluation", "eval/split": "test", "eval/accuracy": 0.9}


@pytest.fixture
def run_dir(tmp_path):
    """A finished run of 20 healthy batches."""
    run_dir = RunDir.create(tmp_path / "run")
    run_dir.write_config(SETTINGS)
    (run_dir.path / "run.lock").write_text(f"pid 99999999 on {socket.gethostname()}")
    (run_dir.path / "status.json").write_text(json.dumps({"attempt": 1, "spans": [], "ended": "finished"}))
    for step in range(1, 21):
        line = {"step": step, "phase": "reinforcement", "time/step_s": 1.0, "reward/mean": 0.5, "mismatch/kl": 1e-13}
        line |= {"completion/truncated_frac": 0.2, "reward/zero_std_frac": 0.1, "completion/length_mean": 6.0}
        line |= {"policy/entropy": 0.1, "policy/lag_max": 0, "policy/clip_frac": 0.0, "trainer/idle_frac": 0.5}
        run_dir.log_metrics(line | {"loss/mean": 0.1})
        records = [{"group_id": f"{i}/0", "task_id": f"t{i}", "text": f"{step} {i}", "reward": 0.5} for i in range(8)]
        run_dir.record("rollouts", step, records)
        run_dir.record("samples", step, [{"who": "controller", "pid": 7, "rss_mib": 900.0}])
        if step in (5, 10):
            run_dir.log_metrics(TEST | {"step": step, "eval/split": "validation"})
    run_dir.log_metrics(TEST)
    (run_dir.path / "attempts").mkdir()
    return run_dir


def said(run_dir, *arguments):
    return main.main(["diagnose", str(run_dir.path), *arguments])


def test_a_healthy_run(run_dir, capsys):
    assert examine(Run(run_dir)).missing == [] and diagnose(Run(run_dir)) == []
    assert said(run_dir) == 0
    assert capsys.readouterr().out == f"{run_dir.path}: nothing wrong found\n"


def test_what_is_wrong_is_told_with_its_evidence(run_dir, capsys):
    assert said(run_dir, "--threshold", "truncation=0.1", "--threshold", "slow-step=0.01") == 3
    out = capsys.readouterr().out
    assert "learning / truncation: 20% of the completions are cut off at sampling.max_tokens=12" in out
    assert "  threshold: 0.1\n  completion/truncated_frac: 0.2 (step 16), 0.2 (step 17)" in out
    assert "  to do: raise sampling.max_tokens" in out and out.endswith(
        f"1 of {len(RULES)} rules have found something\n"
    )


def test_an_attempt_that_began_in_another_phase_excuses_no_slow_step(run_dir):
    run_dir.record("attempts", 14, [{"phase": "supervised"}])
    text = run_dir.metrics_file.read_text()
    slow = text.replace(
        '"step":15,"phase":"reinforcement","time/step_s":1.0', '"step":15,"phase":"reinforcement","time/step_s":12.0'
    )
    assert slow != text
    run_dir.metrics_file.write_text(slow)
    assert [finding.rule for finding in diagnose(Run(run_dir))] == ["slow_step"]


def test_as_json(run_dir, capsys):
    assert said(run_dir, "--threshold", "truncation=0.1", "--json") == 3
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["rule"] == "truncation" and finding["area"] == "learning"
    assert finding["evidence"][0] == {"name": "completion/truncated_frac", "step": 16, "value": 0.2}


def test_liveness_comes_first(run_dir, capsys):
    lines = run_dir.metrics_file.read_text().splitlines()
    run_dir.metrics_file.write_text("\n".join(lines[:-1]) + "\n")
    (run_dir.path / "status.json").write_text(json.dumps({"attempt": 1, "spans": [], "ended": ""}))
    assert said(run_dir, "--threshold", "truncation=0.1") == 3
    out = capsys.readouterr().out
    assert out.index("liveness / gone: the run ended in the reinforcement phase at step 20") < out.index("truncation")
    assert f"pid on {socket.gethostname()}: 99999999\n" in out


def test_json_holds_no_number_that_json_has_not(run_dir, capsys):
    lines = run_dir.metrics_file.read_text().replace('"loss/mean":0.1', '"loss/mean":"NaN"')
    run_dir.metrics_file.write_text(lines)
    assert said(run_dir, "--json") == 3
    json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_thresholds_of_the_config_count_and_those_of_the_command_win(run_dir):
    run_dir.write_config(SETTINGS | {"record": {"thresholds": {"truncation": 0.1}}})
    assert [finding.rule for finding in diagnose(Run(run_dir))] == ["truncation"]
    assert diagnose(Run(run_dir), {"truncation": 0.5}) == []


@pytest.mark.parametrize(
    "text, error",
    [
        ("truncaton=1", "--threshold truncaton=1.0: there is no such rule; did you mean truncation?"),
        ("truncation", "--threshold truncation: write NAME=VALUE, such as truncation=0.5"),
        ("truncation=much", "--threshold truncation=much: write NAME=VALUE, such as truncation=0.5"),
    ],
)
def test_thresholds_that_do_not_fit(run_dir, capsys, text, error):
    assert said(run_dir, "--threshold", text) == 1
    assert capsys.readouterr().err == f"error: {error}\n"


def test_no_directory(tmp_path, capsys):
    assert main.main(["diagnose", str(tmp_path / "none")]) == 1
    assert "is no directory" in capsys.readouterr().err


def test_an_empty_directory(tmp_path, capsys):
    assert main.main(["diagnose", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "not looked at: metrics.jsonl: is not there; nothing is known about steps" in out
    assert "not looked at: config.json: is not there" in out and "nothing wrong" not in out
    assert "nothing is known: there is nothing that a rule could look at" in out
    assert main.main(["diagnose", str(tmp_path), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert len(data["lacks"]) == len(RULES) and "nothing is known" in data["verdict"]


def test_rules_without_data_are_named_with_what_they_lack(run_dir, capsys):
    """A run of four batches, without evaluations: most rules need more."""
    lines = [json.loads(line) for line in run_dir.metrics_file.read_text().splitlines()]
    young = [line for line in lines if line["phase"] == "reinforcement"][:4]
    for line in young:
        del line["policy/clip_frac"]
    run_dir.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in young))
    (run_dir.path / "status.json").write_text(json.dumps({"attempt": 1, "ended": "finished"}))
    assert said(run_dir) == 0
    out = capsys.readouterr().out
    assert "not looked at: rule truncation: needs `completion/truncated_frac` of 5 batches; there are 4\n" in out
    assert "not looked at: rule clip_share: needs `policy/clip_frac` of 5 batches; there are none\n" in out
    assert (
        "not looked at: rules no_signal, saturation: needs `reward/zero_std_frac` of 10 batches; there are 4\n" in out
    )
    assert "not looked at: rule eval_falls: needs `eval/accuracy` of 2 evaluations on validation tasks; there" in out
    # dead_replica, slow_replica (one replica: nobody to compare with), stall, gone, overdue, memory, lag,
    # steps_skipped, duplicates, unparsable
    assert out.endswith("10 of 20 rules could look, and found nothing; what was not looked at may be wrong\n")


@pytest.mark.parametrize("broken", ["config.json", "status.json", "metrics.jsonl"])
def test_a_broken_directory_is_never_well(run_dir, capsys, broken):
    file = run_dir.path / broken
    file.write_text(file.read_text()[:-10])
    said(run_dir)
    out = capsys.readouterr().out
    assert f"not looked at: {broken}: " in out and "nothing wrong" not in out


def test_a_directory_that_is_half_written(run_dir, capsys):
    with run_dir.metrics_file.open("a") as stream:
        stream.write('{"step": 21, "phase": "reinf')
    run_dir.config_file.write_text(run_dir.config_file.read_text()[:40])
    (run_dir.path / "status.json").write_text("")
    newest = max((run_dir.path / "rollouts").iterdir())
    newest.write_text(newest.read_text()[:-20])
    shutil.rmtree(run_dir.path / "samples")
    assert said(run_dir, "--threshold", "truncation=0.1") == 3  # what is there is looked at
    out = capsys.readouterr().out
    for sentence in (
        "the last line is cut off",
        "config.json: is cut off",
        "status.json: is cut off",
        "samples/: is not",
    ):
        assert sentence in out


def test_a_directory_of_a_newer_version(run_dir, capsys):
    lines = run_dir.metrics_file.read_text().splitlines()
    lines[3] = "[1, 2]"
    lines[4] = json.dumps({"step": 5, "phase": "reinforcement", "new/metric": {"of": "another form"}})
    lines[5] = json.dumps({"step": 6, "phase": "reinforcement", "mismatch/kl": "much", "time/step_s": 1.0})
    run_dir.metrics_file.write_text("\n".join(lines) + "\n")
    (run_dir.path / "samples" / "000001.jsonl").write_text("{]\n")
    run_dir.write_config(SETTINGS | {"algorithm": "elsewhere"})
    assert said(run_dir, "--threshold", "truncation=0.1") == 3
    out = capsys.readouterr().out
    assert "metrics.jsonl: line 4 is no line of metrics (1 such lines are left out)" in out
    assert "samples/: cannot be read" in out and "Traceback" not in out


def test_records_that_a_rule_cannot_read_are_named(run_dir, capsys):
    run_dir.record("rollouts", 20, [{"group_id": "9/0", "task_id": "t9", "text": "x", "reward": 0.5}] * 40)
    part = max((run_dir.path / "rollouts").iterdir())
    part.write_text(part.read_text().replace('"text":"x"', '"text":7'))
    assert said(run_dir) == 0
    assert "rule unparsable: cannot read the records (AttributeError" in capsys.readouterr().out


def test_a_run_that_holds_its_lock_is_running(run_dir):
    lock = run_dir.path / "run.lock"
    lock.write_text(f"pid {os.getpid()} on {socket.gethostname()}")
    assert RunFacts.of(Run(run_dir)).whereabouts.state == "gone"  # the process is there, the run is not
    with open(lock, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        facts = RunFacts.of(Run(run_dir))
        assert (facts.whereabouts.state, facts.whereabouts.pid) == ("running", os.getpid())
        late = facts.whereabouts.written + 100
        assert [finding.rule for finding in examine(Run(run_dir), now=late).findings] == ["stall"]
    lock.write_text("pid 1 on another-host")
    assert RunFacts.of(Run(run_dir)).whereabouts.state == "elsewhere"


def test_the_newest_rollouts_of_either_form(run_dir):
    records = newest_rollouts(run_dir)
    assert [record["step"] for record in records] == [step for step in range(16, 21) for _ in range(8)]
    table: Table = run_dir.tables["rollouts"]
    table.rotate()
    run_dir.record(
        "rollouts", 21, [{"group_id": "0/0", "task_id": "t0", "text": "late", "reward_parts": {"form": 1.0}}]
    )
    table.seal()
    table.rotate(), table.seal()
    assert {file.suffix for file in table.directory.iterdir()} == {".parquet"}
    again = newest_rollouts(run_dir)
    assert [record["step"] for record in again] == [step for step in range(17, 21) for _ in range(8)] + [21]
    assert again[-1]["text"] == "late" and dict(again[-1]["reward_parts"]) == {"form": 1.0}


def test_of_a_long_growing_part_the_tail_alone_is_read_and_no_older_part(run_dir, monkeypatch):
    table: Table = run_dir.tables["rollouts"]
    table.rotate()
    table.seal()
    for number in range(100):
        run_dir.record("rollouts", 115, [{"group_id": f"0/{number}", "task_id": "t0", "text": str(number)}])
    monkeypatch.setattr(newest, "_TAIL_BYTES", 4096)
    rollouts = newest_rollouts(run_dir)
    assert {record["step"] for record in rollouts} == {115} and 1 < len(rollouts) < 100
    assert rollouts[-1]["text"] == "99"


def test_rollouts_of_earlier_attempts_do_not_count(run_dir):
    run_dir.attempt = 2
    run_dir.record("rollouts", 18, [{"group_id": "0/0", "task_id": "t0", "text": "again"}])
    assert [record["text"] for record in newest_rollouts(run_dir)] == ["again"]


def test_no_rollouts_were_recorded(run_dir):
    shutil.rmtree(run_dir.path / "rollouts")
    assert newest_rollouts(run_dir) == [] and diagnose(Run(run_dir)) == []
