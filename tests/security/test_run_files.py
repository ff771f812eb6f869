"""Files of a run that were damaged after they were written, and lines of JSON that break a reader."""

import os

import pytest

from torchtitan_rl.cli.main import main
from torchtitan_rl.record import attempts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.rollout import finished
from torchtitan_rl.tools.audit import audit

pytestmark = pytest.mark.whole

DEEP = "[" * 5000 + "]" * 5000


def made(path, steps=3):
    """A run of one attempt, sealed before its last step as a checkpoint seals it, and ended."""
    run_dir = RunDir.create(path)
    with attempts.locked(run_dir):
        attempts.begin(run_dir, None)
        run_dir.write_config({"name": "made", "seed": 0})
    for step in range(1, steps + 1):
        if step == steps:
            sealed(run_dir)
        wrote(run_dir, step)
    attempts.unlock(run_dir)
    return run_dir


def wrote(run_dir, step):
    draw = f"{step - 1}/0"
    run_dir.log_metrics({"step": step, "phase": "reinforcement", "reward/mean": 0.5})
    run_dir.record("ledger", step - 1, [{"draw": draw, "event": "admitted", "task_id": "t"}])
    run_dir.record("ledger", step, [{"draw": draw, "event": "trained", "task_id": "t"}])
    run_dir.record("rollouts", step, [{"draw": draw, "reward": 0.5, "text": "x" * 50}])


def sealed(run_dir):
    for table in run_dir.tables.values():
        table.rotate()
        table.seal(run_dir.checksums)
    run_dir.note_checksums()


def flip(file, at=0.5):
    content = bytearray(file.read_bytes())
    content[int(len(content) * at)] ^= 1
    file.write_bytes(content)


def test_a_whole_run_has_no_problem(tmp_path):
    made(tmp_path / "run")
    assert audit(RunDir(tmp_path / "run"))[1] == []


@pytest.mark.parametrize(
    "name", ["config.json", "metrics.jsonl", "rollouts/000001.parquet", "rollouts/000002.jsonl", "ledger/000002.jsonl"]
)
def test_one_flipped_bit_is_named_with_its_file(name, tmp_path, capsys):
    made(tmp_path / "run")
    assert main(["audit", str(tmp_path / "run")]) == 0
    flip(tmp_path / "run" / name)
    assert [text for text in RunDir(tmp_path / "run").checksums.problems() if text.startswith(f"{name}: ")]
    capsys.readouterr()
    assert main(["audit", str(tmp_path / "run")]) == 1
    printed = capsys.readouterr()
    assert name in printed.out + printed.err and "Traceback" not in printed.err


def test_a_missing_and_a_shortened_file_are_named(tmp_path):
    run_dir = made(tmp_path / "run")
    os.truncate(run_dir.metrics_file, 10)
    (tmp_path / "run" / "rollouts" / "000001.parquet").unlink()
    problems = RunDir(tmp_path / "run").checksums.problems()
    assert any(text.startswith("metrics.jsonl: has 10 bytes, ") for text in problems)
    assert any(text.startswith("rollouts/000001.parquet: cannot be read") for text in problems)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_resumed_run_appends_and_keeps_a_damage_that_was_there(damaged, tmp_path):
    first = made(tmp_path / "run")
    size = len(b"".join(first.metrics_file.read_bytes().splitlines(True)[:2]))
    if damaged:
        flip(first.metrics_file, at=0.1)
    run_dir = RunDir(tmp_path / "run")
    with attempts.locked(run_dir):
        run_dir.note_checksums()
        number = attempts.begin(run_dir, "step-2", "reinforcement", 2)
        assert attempts.cut_metrics(run_dir, size, number) == 1
        run_dir.write_config({"name": "made", "seed": 0, "again": True})
    wrote(run_dir, 3)
    sealed(run_dir)
    attempts.unlock(run_dir)
    problems = RunDir(tmp_path / "run").checksums.problems()
    assert [text.partition(":")[0] for text in problems] == (["metrics.jsonl"] if damaged else [])


def test_a_run_that_was_killed_has_no_problem(tmp_path):
    run_dir = RunDir.create(tmp_path / "run")
    run_dir.write_config({})
    wrote(run_dir, 1)
    run_dir.note_checksums()
    wrote(run_dir, 2)
    with open(run_dir.metrics_file, "ab") as stream:
        stream.write(b'{"step": 3, "pha')
    assert RunDir(tmp_path / "run").checksums.problems() == []


def test_a_line_that_is_nested_thousands_deep_is_named(tmp_path):
    run_dir = made(tmp_path / "run")
    with open(run_dir.metrics_file, "a") as stream:
        stream.write(f'{{"step": 4, "phase": "reinforcement", "reward/mean": {DEEP}}}\n')
    with pytest.raises(RuntimeError, match=r"metrics.jsonl, line 4: holds a line that is not JSON \(Nested too deeply"):
        run_dir.read_metrics()
    with open(run_dir.path / "rollouts" / "000002.jsonl", "a") as stream:
        stream.write(f'{{"step": 4, "attempt": 1, "text": {DEEP}}}\n')
    with pytest.raises(RuntimeError, match=r"rollouts/000002.jsonl, line 2: is not JSON \(Nested too deeply"):
        list(RunDir(run_dir.path).tables["rollouts"].read())
    file = tmp_path / "finished.jsonl"
    file.write_text(DEEP + "\n")
    with pytest.raises(ValueError, match="finished.jsonl, line 1: is not JSON .Nested too deeply"):
        finished.read(file)


def test_audit_says_so_in_a_sentence(tmp_path, capsys):
    run_dir = made(tmp_path / "run")
    with open(run_dir.path / "ledger" / "000002.jsonl", "a") as stream:
        stream.write(DEEP + "\n")
    assert main(["audit", str(run_dir.path)]) == 1
    said = capsys.readouterr().err
    assert "ledger/000002.jsonl, line 3: is not JSON (Nested too deeply" in said and "Traceback" not in said
