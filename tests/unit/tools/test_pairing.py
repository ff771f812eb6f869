"""Pairs of runs: which belong together, differences on the same tasks, where two runs part."""

import json

import numpy as np
import pytest

from tests.kit.runs import completion, group, write_evaluation, write_step
from torchtitan_rl.cli import main
from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.record import attempts
from torchtitan_rl.record.fork_point import ForkPoint
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tools.first_difference import first_difference
from torchtitan_rl.tools.pairing import Needed, PairedAccuracy, needed, paired_accuracies, run_pairs


def written(path, *, seed=0, lr=0.1, correct="1100", reward=0.5, steps=2, text="right", fork_step=None) -> Run:
    """A run with an evaluation after its last step, one digit per task, and a group of two rollouts per step."""
    run_dir = RunDir.create(path)
    attempts.begin(run_dir, None)
    run_dir.write_config({"seed": seed, "lr": lr})
    for step in range(1, steps + 1):
        last = step == steps
        write_step(run_dir, step, [group(step, [text if last else "same", "b"], [reward if last else 0.25, 0.0])])
    records = [completion(index, "abc", float(digit)) for index, digit in enumerate(correct)]
    write_evaluation(run_dir, steps, records)
    if fork_step is not None:
        ForkPoint(
            parent="/runs/parent", step=fork_step, checkpoint=f"step-{fork_step}", checkpoint_xxh3="", changes={}
        ).write(path)
    return Run.open(path)


def test_runs_are_paired_by_seed_and_fork_point(tmp_path):
    first = [
        written(tmp_path / "a0", seed=0),
        written(tmp_path / "a1", seed=1),
        written(tmp_path / "a20", fork_step=20),
        written(tmp_path / "a40", fork_step=40),
    ]
    second = [
        written(tmp_path / "b40", fork_step=40),
        written(tmp_path / "b1", seed=1),
        written(tmp_path / "b60", fork_step=60),
    ]
    names = [(a.name, b.name) for a, b in run_pairs(first, second)]
    assert names == [("a1", "b1"), ("a40", "b40")]
    own = written(tmp_path / "own")
    ForkPoint(parent=str(first[0].path), step=2, checkpoint="step-2", checkpoint_xxh3="", changes={}).write(own.path)
    assert [(a.name, b.name) for a, b in run_pairs(first, [own])] == [("a0", "own")]  # a parent and its fork
    assert run_pairs(first[:1], second[2:]) == []  # the fork of another run
    assert run_pairs(first[:1], second[1:2]) == []  # other seeds


def test_differences_are_counted_on_the_tasks_that_all_runs_have(tmp_path):
    pairs = [
        (written(tmp_path / "a0", correct="1100"), written(tmp_path / "b0", correct="1110")),
        (written(tmp_path / "a1", correct="0100", seed=1), written(tmp_path / "b1", correct="111", seed=1)),
    ]
    (accuracy,) = paired_accuracies(pairs)
    assert (accuracy.name, accuracy.split, accuracy.steps) == ("sort", "validation", [2, 2])
    assert accuracy.first_PT.tolist() == [[1, 1, 0], [0, 1, 0]]
    assert accuracy.second_PT.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert accuracy.difference == 0.5
    assert paired_accuracies([]) == []


def test_the_paired_interval_of_equal_runs_is_a_point_and_the_other_is_not():
    correct = np.array([[1.0, 0.0] * 50])
    accuracy = PairedAccuracy(name="sort", split="test", steps=[8], first_PT=correct, second_PT=correct)
    assert accuracy.interval(paired=True) == (0.0, 0.0)
    low, high = accuracy.interval(paired=False)
    assert low == pytest.approx(-1.96 * np.sqrt(0.5 / 100), abs=0.02) and high == pytest.approx(-low, abs=0.02)
    assert needed(accuracy, 0.02) == Needed(
        tasks_paired=None,
        tasks_unpaired=9911,  # 2 x 0.2525 x (2.8016 / 0.02)^2
        runs_paired=None,
        runs_unpaired=None,
    )


def test_the_interval_covers_the_true_difference_as_often_as_it_says():
    rng, hits = np.random.default_rng(1), 0
    for _ in range(200):
        first = (rng.random((1, 100)) < 0.6).astype(float)
        second = np.where(rng.random((1, 100)) < 0.2, rng.random((1, 100)) < 0.9, first).astype(float)
        accuracy = PairedAccuracy(name="", split="", steps=[], first_PT=first, second_PT=second)
        low, high = accuracy.interval(paired=True)
        hits += low <= 0.2 * (0.9 - 0.6) <= high
    assert 178 <= hits <= 199  # 190 expected, standard deviation 3.1


def test_pairs_of_runs_needed_follow_from_their_spread():
    # Accuracies 0.5 and 0.7 against 0.6 and 0.9: differences 0.1 and 0.2, variance 0.005; apart 0.02 + 0.045.
    first, second = (np.array([[1.0] * k + [0.0] * (10 - k) for k in counts]) for counts in ((5, 7), (6, 9)))
    accuracy = PairedAccuracy(name="", split="", steps=[], first_PT=first, second_PT=second)
    sizes = needed(accuracy, 0.1)
    assert (sizes.runs_paired, sizes.runs_unpaired) == (4, 52)  # 0.005 x 784.9 = 3.9, 0.065 x 784.9 = 51.02


def test_the_first_batch_that_differs_is_named(tmp_path):
    run = written(tmp_path / "a")
    assert first_difference(run, written(tmp_path / "same")) is None
    assert first_difference(run, written(tmp_path / "longer", steps=3)) is None  # as far as both have come
    other = written(tmp_path / "tokens")
    (part,) = (other.path / "rollouts").iterdir()
    first_step, second_step = part.read_text().rsplit('"rollout_id":"2/0/1"', 1)
    part.write_text(first_step + '"rollout_id":"2/0/1"' + second_step.replace('"tokens":[6]', '"tokens":[7]'))
    assert first_difference(run, other).summary() == "step 2: token 2 of rollout 2/0/1"
    by_number = RunDir(tmp_path / "same")
    lines = by_number.metrics_file.read_text().replace('"policy/entropy":2.0', '"policy/entropy":2.5', 1)
    by_number.metrics_file.write_text(lines)
    assert first_difference(run, Run.open(tmp_path / "same")).summary() == "step 1: policy/entropy 2 and 2.5"
    not_numbers = [written(tmp_path / name) for name in ("nan", "also_nan")]
    for file, entropy in zip([other.path / "metrics.jsonl" for other in not_numbers], ("2.0", "2.5")):
        text = file.read_text().replace('"policy/entropy":2.0', f'"policy/entropy":{entropy},"loss/mean":"NaN"', 1)
        file.write_text(text)
    assert first_difference(*not_numbers).summary() == "step 1: policy/entropy 2 and 2.5"
    lines = by_number.metrics_file.read_text().replace('"time/step_s":1.0', '"time/step_s":9.0')
    by_number.metrics_file.write_text(lines.replace("2.5", "2.0"))
    assert first_difference(run, Run.open(tmp_path / "same")) is None  # times do not count


def test_a_run_that_recorded_no_tokens_is_compared_by_its_texts(tmp_path):
    run, without = written(tmp_path / "a"), written(tmp_path / "without")
    (part,) = (without.path / "rollouts").iterdir()
    lines = [json.loads(line) | {"turns": None} for line in part.read_text().splitlines()]
    part.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert first_difference(run, without) is None
    part.write_text(part.read_text().replace('"text": "right"', '"text": "ripe"'))
    assert first_difference(run, without).summary() == "step 2: token 2 of rollout 2/0/0"


def test_copies_are_paired_in_whatever_order_they_come(tmp_path, capsys):
    for name, seed in (("first", 0), ("other", 1), ("again", 0)):
        written(tmp_path / name, seed=seed)
    assert main.main(["compare", *(str(tmp_path / name) for name in ("first", "other", "again"))]) == 0
    assert "first batch that differs, first and again: none" in capsys.readouterr().out


def test_the_command_shows_pairs(tmp_path, capsys):
    for name, lr, correct in (("a", 0.1, "11000000"), ("b", 0.2, "11111100")):
        for seed in (0, 1):
            written(tmp_path / f"{name}{seed}", seed=seed, lr=lr, correct=correct)
    paths = [str(tmp_path / name) for name in ("a0", "b0", "a1", "b1")]
    assert main.main(["compare", *paths, "--detect", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "first batch that differs, a0 and b0: none" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("sort validation")]
    assert rows[0][:6] == ["sort", "validation", "2", "2", "8", "+0.500"]
    assert rows[1] == ["sort", "validation", "225", "337", "-", "-"]  # 2/7 and 3/14 + 3/14 by 784.9
    assert main.main(["compare", *paths]) == 0 and "4 of 5" not in capsys.readouterr().out
    assert main.main(["compare", *paths, "--detect", "2"]) == 1
    assert "--detect=2: is no difference of accuracy; give one above 0, up to 1" in capsys.readouterr().err
