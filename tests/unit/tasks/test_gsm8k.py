"""GSM8K: reading rows, splitting them, and the number at the end of a solution."""

import json
from fractions import Fraction

import datasets
import pytest

from tests.kit.refusal import refusal
from torchtitan_rl.tasks.family import source_of
from torchtitan_rl.tasks.gsm8k import Gsm8k, final_number
from torchtitan_rl.types import Task


def rows(first, num):
    return [
        {"question": f"What is {i}+{i}?", "answer": f"It is {i}+{i}=<<{i}+{i}={2 * i}>>{2 * i}.\n#### {2 * i}"}
        for i in range(first, first + num)
    ]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Ten train rows and three test rows on disk, and nothing cached elsewhere."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, content in {"train": rows(0, 10), "test": rows(100, 3)}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return tmp_path


def from_files(files, **config):
    paths = {"path": str(files / "train.jsonl"), "test_path": str(files / "test.jsonl")}
    return Gsm8k.Config(**{"num_validation": 4, **paths, **config}).build()


def test_validation_is_the_end_of_train(files):
    family = from_files(files)
    assert [family.num_tasks(split) for split in ("train", "validation", "test")] == [6, 4, 3]

    def questions(split):
        return [family.task(split, i).prompt[-1]["content"] for i in range(family.num_tasks(split))]

    assert questions("train") == [f"What is {i}+{i}?" for i in range(6)]
    assert questions("validation") == [f"What is {i}+{i}?" for i in range(6, 10)]
    assert questions("test") == [f"What is {i}+{i}?" for i in range(100, 103)]
    with pytest.raises(IndexError, match="index=6: gsm8k has 6 tasks in train"):
        family.task("train", 6)


def test_a_task_holds_messages_the_number_and_for_train_the_solution(files):
    family = from_files(files, instruction="Be brief.")
    assert family.task("train", 3) == Task(
        id="gsm8k/train/3",
        prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3+3?"}],
        answer="6",
        demonstration="It is 3+3=6.\n#### 6",
    )
    assert family.task("validation", 0).demonstration is None and family.task("test", 0).demonstration is None
    assert "#### <number>" in Gsm8k.Config().instruction


def test_parquet_files_read_the_same(files):
    datasets.Dataset.from_list(rows(0, 10)).to_parquet(files / "train.parquet")
    family = from_files(files, path=str(files / "train.parquet"))
    assert family.task("train", 3) == from_files(files).task("train", 3)


@pytest.mark.parametrize(
    "text, number",
    [
        ("2+2 is 4.\n#### 4", 4),
        ("#### 1,000", 1000),
        ("#### $1,000.", 1000),
        ("#### \\$1,000.50 in all, for 2 people", Fraction(2001, 2)),
        ("#### -$7", -7),
        ("#### $-7", -7),
        ("#### **18**", 18),
        ("####18.00", 18),
        ("#### \u22127", -7),  # the typographic minus sign
        ("#### 1/2", Fraction(1, 2)),
        ("\\boxed{42}", 42),
        ("\\boxed{1{,}000}", 1000),
        ("\\boxed{\\$1\\,234}", 1234),
        ("\\boxed{x = -5}", -5),
        ("\\boxed{18 \\text{ apples for 2}}", 18),
        ("\\boxed{\\text{total: } 18}", 18),
        ("\\boxed{\\frac{3}{4}} of 9", Fraction(3, 4)),
        ("#### 3\nNo, wait: \\boxed{4} of 5", 4),
        ("\\boxed{3}\n#### 4", 4),
        ("#### 3\n#### 4", 4),
        ("#### Step 2: add them\nSo she has 18", 18),
        ("\\boxed{}  so 12", 12),
        ("The answer is 1,000,000.", 1000000),
        ("10 - 4 = 6 dollars", 6),
        ("a range of 3-5", 5),
        ("it is -5.", -5),
        ("$.50", Fraction(1, 2)),
        ("0.1", Fraction(1, 10)),
        ("and so on...18", 18),
        ("50%", 50),
        ("#### 1,2345", 2345),  # no number is written like that: not 1
        ("\\boxed{- 3}", -3),
        ("#### - 3", -3),
        ("so x=- 3", -3),
        ("10 = 13 - 3", 3),
        ("Apples:\n- 3 red", 3),  # a list
        ("\\boxed{-\\text{3}}", -3),
        ("\\boxed{- \\frac{1}{2}}", Fraction(-1, 2)),
        ("\\boxed{\\frac{1}{-2}}", Fraction(-1, 2)),
        ("\\boxed{\\frac{-1}{2}}", Fraction(-1, 2)),
        ("\\boxed{\\frac{-1}{-2}}", Fraction(1, 2)),
        ("\\boxed{\\frac12}", Fraction(1, 2)),
        ("\\boxed{\\frac1{2}}", Fraction(1, 2)),
        ("\\boxed{1\\frac{1}{2}}", Fraction(3, 2)),
        ("\\boxed{-1 \\dfrac{1}{2}}", Fraction(-3, 2)),
        ("#### 1 1/2", Fraction(3, 2)),
        ("#### 18 3/2", 18),
        ("#### Answer: 18\nThanks 5", 18),
        ("#### The final answer is **$18** of 20", 18),
        ("#### 1e5", 100000),
        ("\\boxed{2.5E-1}", Fraction(1, 4)),
        ("#### 3e5x", 3),
        ("no number", None),
        ("", None),
        ("#### ", None),
        ("5/0", None),
        ("9" * 5000, None),  # more digits than Python will read
    ],
)
def test_the_final_number(text, number):
    assert final_number(text) == number


def test_junk_of_a_collapsed_policy_is_judged_at_once():
    for junk in ("=" * 20000, "= " * 9000, "1\\frac" * 5000, "1 1/" * 9000, "-\\text{" * 5000, "#### answer" * 5000):
        final_number(junk)
    for junk in ("#" * 20000, "\\boxed{" * 3000, "{" * 20000, "1," * 10000, "\\boxed{" + "a" * 20000, "-" * 20000):
        final_number(junk)


def test_reward_compares_numbers_however_they_are_written(files):
    family = from_files(files)
    task = Task(id="t", prompt="", answer="1,000")
    completions = ["#### 1000", "\\boxed{1{,}000.00}", "$1,000", "#### -1000", "#### 100", "", "#### 1000.001"]
    assert family.reward(task, completions) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_a_reward_of_ones_own_takes_the_place_of_the_familys(files):
    family = from_files(files, reward=lambda task, completions: [7.0])
    assert family.reward(family.task("train", 0), ["#### 0"]) == [7.0]


def test_files_that_will_not_do_are_refused(files):
    absent, same = str(files / "absent.jsonl"), str(files / "train.jsonl")
    for paths, split, complaint in (
        ({"path": absent}, "train", f"gsm8k.path={absent!r}: there is no such file"),
        ({"test_path": None}, "test", "gsm8k.test_path=None: a local data set has no test rows"),
        ({"test_path": same}, "test", f"gsm8k.test_path={same!r}: is the train file"),
        ({"num_validation": 10}, "train", "gsm8k.num_validation=10: cannot be taken from the 10 rows"),
    ):
        assert complaint in refusal(from_files(files, **paths).task, split, 0)


@pytest.mark.parametrize(
    "content, complaint",
    [
        ('{"question": "1+1?", "solution": "2"}\n', "has no column 'answer'; give question and answer"),
        ('{"question": "1+1?", "answer": "2"}\n', "row 1 has no answer that ends with '#### <number>'"),
        ('{"question": "1+1?", "answer": "#### two"}\n', "row 1 has no answer that ends with"),
        ('{"question": "a", "answer": "#### 1"}\n{"question": "b", "answer": null}\n', "row 2 has no answer"),
        ('{"question": "1+1?", "answer": 2}\n', "row 1 has no answer"),
        ('{"question": " ", "answer": "#### 1"}\n', "row 1 has no question; fill it in"),
        ("not json\n", "cannot be read"),
        ("", "is empty"),
    ],
)
def test_rows_that_will_not_do_are_refused(files, content, complaint):
    (files / "test.jsonl").write_text(content)
    message = refusal(from_files(files).task, "test", 0)
    assert message.startswith("gsm8k.test_path='") and complaint in message


def test_a_run_does_not_go_on_with_other_rows(files):
    state = source_of(from_files(files), "train", 0).state_dict()
    source_of(from_files(files), "train", 0).load_state_dict(state)
    (files / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(1, 10)))
    with pytest.raises(ValueError, match="gsm8k.path='.*train.jsonl': rows are not those that the run started with"):
        source_of(from_files(files), "train", 0).load_state_dict(state)


def test_a_hub_out_of_reach_is_said_in_one_line(monkeypatch):
    def offline(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'openai/gsm8k'\non the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    message = refusal(Gsm8k.Config().build().task, "train", 0, error=RuntimeError)
    assert message == (
        "gsm8k.path='openai/gsm8k': could not be loaded from the hub (ConnectionError: Couldn't reach 'openai/gsm8k' "
        "on the Hub); check the name and the network, or name local files in gsm8k.path and gsm8k.test_path"
    )


def test_the_hub_is_asked_for_the_subset_and_each_file_once(monkeypatch):
    asked = []

    def load_dataset(path, subset, split):
        asked.append((path, subset, split))
        return datasets.Dataset.from_list(rows(0, 300))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    family = Gsm8k.Config().build()
    assert asked == []
    assert [family.num_tasks(split) for split in ("train", "validation", "test")] == [44, 256, 300]
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
