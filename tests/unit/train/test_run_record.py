"""What a run records of itself, and the check that two runs are the same."""

import json
from dataclasses import asdict

import pytest

from tests.kit.runs import made_run
from torchtitan_rl.cli import main
from torchtitan_rl.record import attempts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.train.run_record import begin_record, finish_record, read_record
from torchtitan_rl.weights import checkpoint


def recorded(path, *, lr=0.001, task="sort/train/1", weights=b"weights") -> RunDir:
    run_dir = made_run(path, lr=lr)
    begin_record(run_dir)
    run_dir.record("ledger", 1, [{"draw": "2/0", "event": "trained", "task_id": task}])
    saved = run_dir.checkpoint_path(3)
    checkpoint.begin(checkpoint.beside(saved))
    (checkpoint.beside(saved) / "model").mkdir()
    (checkpoint.beside(saved) / "model" / "__0_0.distcp").write_bytes(weights)
    checkpoint.commit(checkpoint.beside(saved), saved, {"step": 3, "metrics_bytes": run_dir.metrics_size()}, {})
    run_dir.note_checksums()
    finish_record(run_dir)
    return run_dir


def test_a_record_has_the_environment_of_each_attempt_and_digests_of_the_end(tmp_path):
    run_dir = recorded(tmp_path / "run")
    record = read_record(run_dir.path)
    (environment,) = record.environments
    assert environment["attempt"] == 1 and len(environment["code"]) == 16 and environment["cores"] >= 1
    assert environment["versions"].keys() >= {"Python", "torch", "torchtitan"} and environment["machine"]
    assert record.digests.keys() == {"config", "draws", "metrics", "checkpoints/step-3"}
    attempts.begin(run_dir, "step-3", "reinforcement", 3)
    begin_record(run_dir)
    record = read_record(run_dir.path)
    assert [environment["attempt"] for environment in record.environments] == [1, 2] and record.digests == {}


def test_names_times_and_directories_do_not_make_another_run(tmp_path, capsys):
    first, second = recorded(tmp_path / "a"), recorded(tmp_path / "b")
    lines = second.metrics_file.read_text().replace('"time/step_s":1.0', '"time/step_s":2.0')
    second.metrics_file.write_text(lines)
    second.checksums.replace(second.metrics_file)
    config = json.loads(second.config_file.read_text()) | {"name": "other", "output_dir": "runs/other"}
    second.write_config(config)
    assert main.main(["verify", str(first.path), str(second.path)]) == 0
    assert capsys.readouterr().out == "the same run\n"
    assert main.main(["verify", str(first.path)]) == 0
    assert capsys.readouterr().out == "the files are as they were written\n"


def test_the_first_difference_of_each_kind_is_named(tmp_path, capsys):
    first = recorded(tmp_path / "a")
    second = recorded(tmp_path / "b", lr=0.002, task="sort/train/7", weights=b"WEIGHTS")
    lines = second.metrics_file.read_text().replace('"policy/entropy":2.0', '"policy/entropy":2.5', 1)
    second.metrics_file.write_text(lines)
    second.checksums.replace(second.metrics_file)
    finish_record(second)
    record = read_record(second.path)
    record.environments[0]["versions"]["torch"] = "1.0"
    (second.path / "record.json").write_text(json.dumps(asdict(record)))
    assert main.main(["verify", str(first.path), str(second.path)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("note: torch is ") and out[0].endswith(" and 1.0")
    assert out[1:] == [
        "config: trainer.optimizer.lr is 0.001 and 0.002",
        "draws: 2/0 trained: sort/train/1 and sort/train/7",
        "first batch that differs: step 1: policy/entropy 2 and 2.5",
        "checkpoints/step-3: other weights or optimizer states",
    ]


def test_every_metric_that_no_clock_decides_makes_another_run(tmp_path, capsys):
    def pair(name, values):
        runs = [recorded(tmp_path / f"{name.replace('/', '-')}-{i}") for i in range(2)]
        for run_dir, value in zip(runs, values):
            text = run_dir.metrics_file.read_text()
            run_dir.metrics_file.write_text(text.replace('"policy/entropy"', f'"{name}":{value},"policy/entropy"', 1))
            run_dir.checksums.replace(run_dir.metrics_file)
            finish_record(run_dir)
        return [str(run_dir.path) for run_dir in runs]

    for name in ("critic/loss", "tokens/trained", "distill/kl", "my_loss/gap"):
        assert main.main(["verify", *pair(name, (1, 2))]) == 1
        assert capsys.readouterr().out == f"first batch that differs: step 1: {name} 1 and 2\n"
    assert main.main(["verify", *pair("completion/long_played_frac", (1, 2))]) == 0


def test_a_digest_of_the_metrics_of_an_older_rule_is_a_note(tmp_path, capsys):
    run_dir = recorded(tmp_path / "run")
    file = run_dir.path / "record.json"
    record = json.loads(file.read_text())
    record["digests"]["metrics"] = "of other metrics"
    del record["metrics_rule"]
    file.write_text(json.dumps(record))
    assert main.main(["verify", str(run_dir.path)]) == 0
    note, verdict = capsys.readouterr().out.splitlines()
    assert note.startswith(f"note: {run_dir.path}: another version recorded the digest of other metrics")
    assert verdict == "the files are as they were written"
    file.write_text(json.dumps(record | {"metrics_rule": 2}))
    assert main.main(["verify", str(run_dir.path)]) == 1
    assert "metrics: has the digest" in capsys.readouterr().out


def test_a_field_that_an_older_version_lacked_is_none_and_another_value_is_a_difference(tmp_path, capsys):
    first, second = recorded(tmp_path / "older"), recorded(tmp_path / "newer")
    second.write_config(json.loads(second.config_file.read_text()) | {"preference": None})
    finish_record(second)
    assert main.main(["verify", str(first.path), str(second.path)]) == 0
    assert capsys.readouterr().out == "the same run\n"
    second.write_config(json.loads(second.config_file.read_text()) | {"preference": None, "rounds": 2})
    finish_record(second)
    assert main.main(["verify", str(first.path), str(second.path)]) == 1
    assert capsys.readouterr().out == "config: rounds is not recorded and 2\n"


def test_damage_is_named(tmp_path, capsys):
    path = recorded(tmp_path / "run").path
    weights = path / "checkpoints" / "step-3" / "model" / "__0_0.distcp"
    weights.write_bytes(b"weightz")
    assert main.main(["verify", str(path)]) == 1
    assert f"{weights}: its checksum is" in capsys.readouterr().out
    weights.write_bytes(b"weights")
    (path / "checkpoints" / "step-3").rename(path / "kept elsewhere")
    assert main.main(["verify", str(path)]) == 1
    assert "checkpoints/step-3: is recorded and not there" in capsys.readouterr().out
    (path / "kept elsewhere").rename(path / "checkpoints" / "step-3")
    ledger = RunDir(path)
    ledger.record("ledger", 1, [{"draw": "9/0", "event": "trained", "task_id": "x"}])  # a line more than was written
    assert main.main(["verify", str(path)]) == 1
    assert "draws: has the digest" in capsys.readouterr().out


def test_runs_without_a_record_or_an_end_are_sentences(tmp_path, capsys):
    path = made_run(tmp_path / "run").path
    assert main.main(["verify", str(path)]) == 1
    assert "has no record.json, an older version made it" in capsys.readouterr().err
    begin_record(RunDir(path))
    assert main.main(["verify", str(path)]) == 1
    assert "has no digests, because the run has not come to its end" in capsys.readouterr().out
    (path / "record.json").write_text("{")
    assert main.main(["verify", str(path)]) == 1
    assert "record.json: is damaged" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is damaged"):
        read_record(path)
