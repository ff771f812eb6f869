"""Questions about recorded completions of evaluations, in Parquet and in JSON lines that grow."""

import json

import pytest

from tests.kit.runs import completion, write_evaluation
from torchtitan_rl.record import attempts
from torchtitan_rl.record.attempts import read_evaluations
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tools import evaluation_completions
from torchtitan_rl.tools.evaluation_completions import CompletionQuery, Completions


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    """A run that was evaluated twice on two tasks; the first evaluation is Parquet."""
    run_dir = RunDir.create(tmp_path / "lr=[0-1]*" / "run")
    attempts.begin(run_dir, None)
    write_evaluation(run_dir, 0, [completion(0, "right at once", 1.0), completion(1, "Hopeless", 0.0)])
    run_dir.tables["evaluations"].rotate()
    run_dir.tables["evaluations"].seal()
    write_evaluation(
        run_dir,
        4,
        [
            completion(0, "right still", 1.0),
            completion(1, "learnt", 1.0),
            completion(1, "not quite", 0.5, sample=1),
            completion(1, "unjudged", None, sample=2, failed="the judge is away"),
        ],
    )
    return run_dir


def texts(completions, **query):
    return [row["text"] for row in completions.find(CompletionQuery(**query)).rows]


def test_wrong_ones_come_first_and_newest_steps_before_older_ones(run_dir):
    found = Completions(run_dir).find(CompletionQuery())
    assert [row["text"] for row in found.rows] == [
        *("not quite", "unjudged", "Hopeless"),
        *("right still", "learnt", "right at once"),
    ]
    assert (found.total, found.notes) == (6, []) and found.rows[1]["failed"] == "the judge is away"


def test_lists_are_searched_filtered_and_cut_into_pages(run_dir):
    completions = Completions(run_dir)
    assert texts(completions, step=4) == ["not quite", "unjudged", "right still", "learnt"]
    assert texts(completions, text="hopeLESS") == ["Hopeless"] and texts(completions, text="100%_") == []
    assert texts(completions, text="QUESTION 0") == ["right still", "right at once"]
    assert texts(completions, verdict="failed") == ["unjudged"] and len(texts(completions, verdict="wrong")) == 3
    assert texts(completions, task="/1", verdict="right") == ["learnt"]
    assert texts(completions, name="sort", split="test") == [] and len(texts(completions, split="validation")) == 6
    page = completions.find(CompletionQuery(per_page=4, page=2))
    assert (len(page.rows), page.total) == (2, 6)
    assert completions.counts() == {(0, "sort", "validation"): (2, 1), (4, "sort", "validation"): (4, 2)}
    with pytest.raises(ValueError, match="verdict='good'"):
        completions.find(CompletionQuery(verdict="good"))


def test_one_task_is_followed_over_steps(run_dir, monkeypatch):
    completions = Completions(run_dir)
    rows = completions.of_task("sort", "validation", "sort/validation/1", length=5)
    assert [(row["step"], row["sample"], row["text"], row["is_right"]) for row in rows] == [
        *((0, 0, "Hopel", False), (4, 0, "learn", True)),
        *((4, 1, "not q", False), (4, 2, "unjud", False)),
    ]
    for step, sample in ((0, 0), (4, 2)):
        whole = completions.whole("sort", "validation", step, "sort/validation/1", sample)
        (written,) = [
            record
            for record in read_evaluations(run_dir)
            if (record["step"], record["sample"], record["task_index"]) == (step, sample, 1)
        ]
        assert {name: value for name, value in written.items() if whole.get(name) != value} == {}
    assert completions.whole("sort", "validation", 2, "sort/validation/1", 0) is None
    assert completions.of_task("sort", "test", "sort/validation/1", length=5) == []
    monkeypatch.setattr(evaluation_completions, "MOST_OF_TASK", 1)
    assert completions.of_task("sort", "validation", "sort/validation/1", length=5) == rows[-1:]


def test_it_counts_what_the_reader_of_the_table_counts(run_dir):
    completions = Completions(run_dir)
    assert completions.find(CompletionQuery()).total == 6
    attempts.begin(run_dir, "step-2", "reinforcement", 2)
    write_evaluation(run_dir, 4, [completion(1, "again", 0.0)])
    attempts.begin(run_dir, "step-4", "reinforcement", 4)
    write_evaluation(run_dir, 4, [completion(1, "and again", 0.0)])
    counted = sorted(record["text"] for record in read_evaluations(run_dir))
    found = completions.find(CompletionQuery())
    assert sorted(row["text"] for row in found.rows) == counted == ["Hopeless", "and again", "right at once"]
    assert found.notes == ["4 completions of steps that a later attempt took again are left out"]
    assert completions.whole("sort", "validation", 4, "sort/validation/1", 0)["text"] == "and again"
    assert completions.whole("sort", "validation", 4, "sort/validation/0", 0) is None


def test_what_is_damaged_or_of_another_version_hides_nothing_else(run_dir):
    with open(run_dir.path / "evaluations" / "000002.jsonl", "a") as file:
        record = {"step": 9, "text": "new", "name": "sort", "novel": [1], "sample": "?", "correct": None}
        file.write("no json\n" + json.dumps(record) + '\n{"step": 10, "te')
    (row,) = Completions(run_dir).find(CompletionQuery(step=9)).rows
    assert (row["text"], row["sample"], row["is_right"]) == ("new", None, False)
    assert len(Completions(run_dir).find(CompletionQuery()).rows) == 7


def test_a_run_without_evaluations_has_none(tmp_path):
    completions = Completions(RunDir(tmp_path))
    assert completions.find(CompletionQuery(text="x")).rows == [] and completions.counts() == {}
