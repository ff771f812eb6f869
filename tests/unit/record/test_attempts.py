"""Attempts of a run: the lock, the list, what is put aside, and which rollouts count."""

import errno
import json

import pytest

from tests.kit.runs import completion, write_evaluation
from torchtitan_rl.record import attempts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tools.audit import audit


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def test_a_run_directory_has_one_live_run(run_dir):
    with attempts.locked(run_dir):
        pass
    with pytest.raises(ValueError, match=r"a run is going on there \(pid \d+ on .*\); wait for its end"):
        with attempts.locked(run_dir):
            pass
    attempts.unlock(run_dir)
    with pytest.raises(OSError, match="full"), attempts.locked(run_dir):
        raise OSError("full")
    with attempts.locked(run_dir):  # a block that failed has not kept the lock
        attempts.unlock(run_dir)


def test_a_file_system_without_locks_is_no_run_that_goes_on(run_dir, monkeypatch):
    def no_lock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_lock)
    with pytest.raises(ValueError, match=r"its file system has no locks \(No locks available\); give a directory on"):
        with attempts.locked(run_dir):
            pass


def test_attempts_are_numbered_and_a_line_cut_off_by_a_crash_does_not_count(run_dir):
    assert attempts.begin(run_dir, None) == 1
    assert attempts.begin(run_dir, "step-20", "reinforcement", 20) == 2 == run_dir.attempt
    with open(run_dir.path / "attempts" / "000002.jsonl", "a") as file:
        file.write('{"attempt": 3, "resu')
    run_dir.record("ledger", 20, [{"draw": "0/0", "event": "admitted"}])
    with open(run_dir.path / "ledger" / "000001.jsonl", "a") as file:
        file.write('{"draw": "1/0", "eve')
    first, second = attempts.attempts(run_dir)
    run_dir = RunDir(run_dir.path)  # another process
    assert attempts.begin(run_dir, "step-40", "reinforcement", 40) == 3  # behind no half line
    run_dir.record("ledger", 40, [{"draw": "1/0", "event": "admitted"}])
    assert [record["draw"] for record in attempts.read_ledger(run_dir)] == ["0/0", "1/0"]
    assert len(attempts.attempts(run_dir)) == 3
    assert (first["resumed_from"], second["resumed_from"], second["step"]) == (None, "step-20", 20)


def test_metrics_after_a_checkpoint_are_put_aside(run_dir):
    run_dir.log_metrics({"step": 1, "phase": "reinforcement", "reward/mean": 0.5})
    size = run_dir.metrics_size()
    run_dir.log_metrics({"step": 2, "phase": "reinforcement", "reward/mean": 0.6})
    with run_dir.metrics_file.open("a") as file:
        file.write('{"step": 3, "pha')  # killed there
    assert attempts.cut_metrics(run_dir, size, 2) == 1
    assert [line["step"] for line in run_dir.read_metrics()] == [1]
    aside = (run_dir.path / "metrics.before-attempt-2.jsonl").read_text()
    assert json.loads(aside.splitlines()[0])["step"] == 2 and aside.endswith('"pha')
    assert (
        attempts.cut_metrics(run_dir, size, 3) == 0 and not (run_dir.path / "metrics.before-attempt-3.jsonl").exists()
    )
    with pytest.raises(ValueError, match="the checkpoint was written after"):
        attempts.require_metrics(run_dir, size + 1)
    with pytest.raises(ValueError, match="no line ends after"):
        attempts.require_metrics(run_dir, size - 1)


def test_rollouts_of_steps_that_were_taken_again_do_not_count(run_dir):
    def rollout(attempt, step):
        assert attempt == run_dir.attempt
        run_dir.record("rollouts", step, [{"rollout_id": "0/0/0"}])
        run_dir.record("versions", step, [{"version": step}])

    attempts.begin(run_dir, None)
    for step in (1, 2, 3, 4):
        rollout(1, step)
    attempts.begin(run_dir, "step-3", "reinforcement", 3)
    rollout(2, 4)
    attempts.begin(run_dir, "step-2", "reinforcement", 2)  # step-3 was damaged
    rollout(3, 3)
    found = [(record["step"], record["attempt"]) for record in attempts.read_rollouts(run_dir)]
    assert found == [(1, 1), (2, 1), (3, 3)]
    assert [record["version"] for record in attempts.read_versions(run_dir)] == [1, 2, 3]


def test_a_step_that_is_evaluated_again_counts_once(run_dir):
    def evaluate(step, texts, split="validation"):
        records = [completion(i, text, 0.0) | {"split": split} for i, text in enumerate(texts)]
        write_evaluation(run_dir, step, records)

    attempts.begin(run_dir, None)
    evaluate(2, ["before the checkpoint"])
    evaluate(3, ["old", "left over"])  # after step-3 was written: the next attempt evaluates it again
    evaluate(3, ["made once"], split="test")
    evaluate(4, ["taken back"])
    attempts.begin(run_dir, "step-3", "reinforcement", 3)
    evaluate(3, ["new"])
    evaluate(4, ["twice"])
    evaluate(4, ["twice, again"])
    for _ in range(2):  # as JSON lines, and as Parquet
        found = [(record["step"], record["text"]) for record in attempts.read_evaluations(run_dir)]
        assert found == [(2, "before the checkpoint"), (3, "made once"), (3, "new"), (4, "twice, again")]
        run_dir.tables["evaluations"].rotate()
        run_dir.tables["evaluations"].seal(run_dir.checksums)
    assert {file.suffix for file in (run_dir.path / "evaluations").iterdir()} == {".parquet"}
    part = run_dir.tables["evaluations"].files()[0]
    part.write_bytes(part.read_bytes()[:-20])
    assert any(text.startswith("evaluations/000001.parquet: has ") for text in audit(run_dir)[1])


def test_a_run_resumed_in_its_supervised_phase_begins_reinforcement_anew(run_dir):
    attempts.begin(run_dir, None)
    run_dir.record("rollouts", 1, [{"rollout_id": "0/0/0"}])
    attempts.begin(run_dir, "supervised-200", "supervised", 200)
    assert list(attempts.read_rollouts(run_dir)) == []


def test_an_end_that_a_restart_cannot_mend_is_noted(run_dir):
    assert attempts.reason_of_end(run_dir) == ""
    attempts.end_for_good(run_dir, "the filters left nothing")
    assert attempts.reason_of_end(run_dir) == "the filters left nothing"
    attempts.forget_end(run_dir)
    assert attempts.reason_of_end(run_dir) == ""
