"""Train tasks chosen by how often they were passed."""

import json

import pytest

from torchtitan_rl.tasks.family import TaskSource, source_of
from torchtitan_rl.tasks.judging import judge
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.tasks.mixture import Mixture
from torchtitan_rl.tasks.pass_rate_filter import (
    PassRate,
    PassRateFilter,
    prompt_hash,
    read_pass_rates,
    write_pass_rates,
)

FAMILY = LetterSort.Config().build()


def measured(path, counts, split="train"):
    """A file in which task i was passed counts[i] times in 8."""
    write_pass_rates(
        path,
        [
            PassRate(
                split=split, index=i, num_samples=8, num_correct=count, prompt_hash=prompt_hash(FAMILY.task(split, i))
            )
            for i, count in enumerate(counts)
        ],
    )
    return str(path)


def filtered(path, **kwargs):
    return PassRateFilter.Config(task=LetterSort.Config(), pass_rates=str(path), **kwargs)


def test_tasks_within_the_bounds_are_kept(tmp_path):
    measured(tmp_path / "rates", [0, 1, 4, 7, 8])

    def kept(**bounds):
        family = filtered(tmp_path / "rates", **bounds).build()
        return [family.task("train", i).id for i in range(family.num_tasks("train"))]

    assert kept() == [f"letter_sort/train/{i}" for i in (1, 2, 3)]
    assert kept(min_pass_rate=0.125, max_pass_rate=0.5) == [f"letter_sort/train/{i}" for i in (1, 2)]  # bounds count
    assert kept(min_pass_rate=0.0, max_pass_rate=0.0) == ["letter_sort/train/0"]
    assert kept(min_pass_rate=0.0, max_pass_rate=1.0) == [f"letter_sort/train/{i}" for i in range(5)]


async def test_other_splits_and_rewards_are_the_familys(tmp_path):
    family = filtered(measured(tmp_path / "rates", [4])).build()
    assert family.num_tasks("validation") == FAMILY.num_tasks("validation")
    task = family.task("validation", 3)
    assert task == FAMILY.task("validation", 3)
    assert await judge(family, task, [task.answer, ""], 5.0) == [1.0, 0.0]
    assert family.reward(task, [task.answer]) == [1.0]


def test_environments_are_the_familys(tmp_path):
    family = filtered(measured(tmp_path / "rates", [4])).build()
    assert family.environment(family.task("train", 0)) is None  # LetterSort has none
    family.family.environment = lambda task: f"environment of {task.id}"
    assert family.environment(family.task("train", 0)) == "environment of letter_sort/train/0"


async def test_it_is_visited_in_epochs_and_can_be_mixed(tmp_path):
    config = filtered(measured(tmp_path / "rates", [0, 1, 4, 7, 8]))
    source = TaskSource(config.build(), "train", seed=0)
    assert {task.id for task in source.next(3)} == {f"letter_sort/train/{i}" for i in (1, 2, 3)}
    mixed = Mixture.Config(tasks={"hard": config}).build()
    (task,) = mixed.source("train", 0).next(1)
    assert task.id.startswith("hard/letter_sort/train/")
    assert await judge(mixed, task, [task.answer], 5.0) == [1.0]


def test_measurements_of_other_splits_do_not_count(tmp_path):
    path = measured(tmp_path / "rates", [4], split="validation")
    with pytest.raises(ValueError, match="none of its 0 train tasks has a pass rate from 0.05 to 0.95; widen"):
        filtered(path).build()


def test_data_that_have_changed_since_are_refused(tmp_path):
    path = measured(tmp_path / "rates", [4])
    family = PassRateFilter.Config(task=LetterSort.Config(seed=1), pass_rates=path).build()
    with pytest.raises(ValueError, match="task 'letter_sort/train/0' has another prompt than the one that was m"):
        family.task("train", 0)


@pytest.mark.parametrize("low, high", [(-0.1, 0.5), (0.6, 0.5), (0.5, 1.1)])
def test_bounds_that_do_not_fit_are_refused(low, high):
    with pytest.raises(ValueError, match=f"min_pass_rate={low}, max_pass_rate={high}: do not fit"):
        filtered("rates", min_pass_rate=low, max_pass_rate=high)


def test_files_that_are_missing_or_broken_are_refused_with_the_line(tmp_path):
    path = tmp_path / "rates"
    with pytest.raises(ValueError, match=r"pass_rates='.*rates': cannot be read \(No such file or directory\); "):
        read_pass_rates(path)
    good = json.loads((tmp_path / measured(path, [4])).read_text())
    changes = ({"num_correct": 9}, {"num_samples": 0}, {"index": 1.5})
    for bad in ("", "{", "[]", "{}", *(json.dumps(good | change) for change in changes)):
        path.write_text(json.dumps(good) + "\n" + bad + "\n")
        with pytest.raises(ValueError, match="line 2 is no measured task; measure them again"):
            read_pass_rates(path)
    path.write_text(json.dumps(good) + "\n" + json.dumps(good) + "\n")
    with pytest.raises(ValueError, match="line 2 measures train task 0 a second time; keep one"):
        read_pass_rates(path)
    path.write_bytes(b"PAR1\xff\xfe\x00")
    with pytest.raises(ValueError, match="rates': is no text; name a file of measured pass rates"):
        read_pass_rates(path)
    with pytest.raises(ValueError, match="cannot be written"):
        write_pass_rates(tmp_path / "nowhere" / "rates", [])


def test_a_task_that_the_family_no_longer_has_is_refused_at_the_start(tmp_path, monkeypatch):
    rates = measured(tmp_path / "rates", [4, 4, 4])
    monkeypatch.setattr(LetterSort, "num_tasks", lambda self, split: 2)
    with pytest.raises(ValueError, match="measures train task 2, and letter_sort now has 2; measure the data as they"):
        filtered(rates).build()


def test_a_run_does_not_go_on_with_other_tasks(tmp_path):
    measured(tmp_path / "rates", [0, 1, 4, 7, 8])
    config = filtered(tmp_path / "rates")
    source = source_of(config.build(), "train", 0)
    source.next(2)
    state = source.state_dict()
    source_of(config.build(), "train", 0).load_state_dict(state)
    measured(tmp_path / "rates", [1, 1, 4, 7, 8])
    with pytest.raises(
        ValueError, match="pass_rate_filter.pass_rates=.*: rows are not those that the run started with"
    ):
        source_of(config.build(), "train", 0).load_state_dict(state)
    del state["data"]  # of a run before this was kept
    source_of(config.build(), "train", 0).load_state_dict(state)
