"""What benchmarks refuse before they measure, and what they do not call passed."""

import json
import random
import sys
from types import SimpleNamespace

import pytest

from benchmarks import bad_batch, checkpoint_cost, diagnose_faults, endurance, generator_stall
from scripts import chaos


@pytest.mark.parametrize(
    "program, words, said",
    [
        (checkpoint_cost, ["--checkpoints", "1"], "--checkpoints 1: the first one does not count; give 2 or more"),
        (generator_stall, ["--loads", "1"], "--loads 1: the first one does not count; give 2 or more"),
        (chaos, ["--kills", "1"], "--kills 1: the run is killed twice in a row at its end; give 2 or more"),
        (diagnose_faults, ["faults", "DIR", "slow"], "invalid choice: 'faults'"),
        (diagnose_faults, ["fault", "DIR"], "fault: names nothing to run; use "),
        (diagnose_faults, ["clean", "DIR", "nowhere"], "clean nowhere: there is no such name; use "),
    ],
)
def test_arguments_that_measure_nothing_are_refused(program, words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program", *words])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2 and said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_report_on_no_run_does_not_pass(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program", "report", str(tmp_path)])
    assert diagnose_faults.main() == 1
    assert "holds no run; make some with `warm`, `fault` and `clean`" in capsys.readouterr().err


def test_a_run_too_short_to_compare_does_not_pass(tmp_path, monkeypatch, capsys):
    ended = SimpleNamespace(poll=lambda: 0, wait=lambda: 0)
    monkeypatch.setattr(endurance.psutil, "Popen", lambda *arguments, **named: ended)
    monkeypatch.setattr(sys, "argv", ["program", "--steps", "100", "--output-dir", str(tmp_path / "run")])
    assert endurance.main() == 1
    assert "nothing was compared; give --steps 400 or more" in capsys.readouterr().err


def test_another_number_of_steps_is_another_run(tmp_path, monkeypatch):
    trained = []

    def command(verb, source, *words):
        if verb == "train":
            trained.append(source)
            return
        output, steps = words[words.index("--output-dir") + 1], (100, 10)[len(trained) - 1]
        lines = [{"step": step, "deviations": float(step)} for step in range(1, steps + 1)]
        (tmp_path / output).mkdir()
        (tmp_path / output / "influence.jsonl").write_text("\n".join(map(json.dumps, lines)))

    monkeypatch.setattr(bad_batch, "command", command)
    for steps in (100, 10):
        bad = random.Random(0).randrange(steps) + 1
        assert bad_batch.rank(tmp_path, 0, steps, 3) == (bad, bad, float(bad))
    assert len(set(trained)) == 2
