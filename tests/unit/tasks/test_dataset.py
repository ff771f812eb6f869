"""Tasks from a user's data: files and objects, columns and functions, splits, and what is refused."""

import datetime
import functools
import json
import logging
from pathlib import Path

import datasets
import pytest

from tests.kit.refusal import refusal
from torchtitan_rl.config.config_difference import differences
from torchtitan_rl.config.load import apply_overrides
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.resolve import flat, resolved
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.tasks.dataset import Dataset, _warn_once
from torchtitan_rl.tasks.family import source_of
from torchtitan_rl.tasks.row_files import read_file
from torchtitan_rl.types import Task


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty directory to write files in, and nothing cached elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    _warn_once.cache_clear()
    return tmp_path


def rows(num, first=0):
    return [{"question": f"What is {i}+{i}?", "answer": str(2 * i), "how": f"{i} twice"} for i in range(first, num)]


def test_whole_answers_beside_fractions_stay_whole(here):
    """A column of both is one of floats, in which 18 is 18.0."""
    family = Dataset.Config(
        train=write("numbers.jsonl", [{"prompt": f"{n}?", "answer": n} for n in (18, 2.5, 3)])
    ).build()
    tasks = {
        family.task("train", i).prompt[0]["content"]: family.task("train", i) for i in range(family.num_tasks("train"))
    }
    assert family.reward(tasks["18?"], ["18", "18.0"]) == [1.0, 0.0]


def write(name, made):
    with open(name, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in made)
    return name


def family(**config):
    return Dataset.Config(**{"prompt": "question", **config}).build()


def prompts(made, split):
    return [made.task(split, i).prompt[-1]["content"] for i in range(made.num_tasks(split))]


def run_config(task):
    return RunConfig(name="x", task=task, model=ModelConfig(assets="chars"))


def test_jsonl_parquet_csv_and_objects_give_the_same_tasks():
    made = {"train": rows(40), "test": rows(45, 40)}
    held = {split: datasets.Dataset.from_list(of) for split, of in made.items()}
    for split, of in held.items():
        write(f"{split}.jsonl", made[split])
        of.to_parquet(f"{split}.parquet")
        of.to_csv(f"{split}.csv")
    columns = {"system": "Be brief.", "demonstration": "how"}
    expected = family(train="train.jsonl", test="test.jsonl", **columns)
    assert [expected.num_tasks(split) for split in ("train", "validation", "test")] == [38, 2, 5]
    assert expected.task("test", 3) == Task(
        id="dataset/test/3",
        prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 43+43?"}],
        answer="86",
        demonstration=None,
    )
    assert expected.task("train", 0).demonstration == "0 twice"
    for other in (
        family(train="train.parquet", test="test.parquet", **columns),
        family(train="train.csv", test="test.csv", **columns),
        family(data=datasets.DatasetDict(held), **columns),
        family(data=functools.partial(datasets.DatasetDict, held), **columns),
        family(data=held["train"], test_fraction=5 / 40, **columns),
    ):
        assert other.num_tasks("test") == 5
        assert other.task("train", 0) == expected.task("train", 0)


def test_columns_of_messages_and_of_system_prompts_and_values_inside_columns():
    row = {
        "prompt": [{"role": "user", "content": "1+1?"}],
        "style": "Be brief.",
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    other = row | {"prompt": [{"role": "user", "content": "2+1?", "name": "Ann"}]}  # a key that the first row lacks
    third = row | {"prompt": [{"role": "user", "content": "3+1?"}]}
    write("rows.jsonl", [row, other, third])
    made = family(train="rows.jsonl", prompt="prompt", system_column="style", answer="reward_model.ground_truth")
    tasks = [made.task(split, 0) for split in ("train", "validation", "test")]
    assert {task.answer for task in tasks} == {"2"}
    assert all(task.prompt[0] == {"role": "system", "content": "Be brief."} for task in tasks)
    users = sorted((task.prompt[1] for task in tasks), key=lambda message: message["content"])
    assert users[0] == {"role": "user", "content": "1+1?"} and users[1]["name"] == "Ann"


def test_plain_text_where_chat_is_off():
    made = family(data=datasets.Dataset.from_list(rows(9)), chat=False)
    tasks = [made.task(split, i) for split in ("train", "validation", "test") for i in range(made.num_tasks(split))]
    assert sorted(task.prompt for task in tasks) == [row["question"] for row in rows(9)]


def test_a_function_of_a_row_makes_tasks():
    def from_row(row):
        return {"prompt": row["question"], "system": "Hm.", "answer": {"is": row["answer"]}, "demonstration": "x"}

    made = family(data=datasets.Dataset.from_list(rows(9)), from_row=from_row, reward=lambda task, texts: [0.5])
    task = made.task("train", 0)
    assert task.prompt[0] == {"role": "system", "content": "Hm."} and task.demonstration == "x"
    assert task.answer["is"].isdigit() and made.task("test", 0).demonstration is None
    assert made.reward(task, ["a"]) == [0.5]


def test_the_reward_is_an_exact_match_unless_the_config_has_one():
    made = family(data=datasets.Dataset.from_list([{"question": str(i), "answer": i} for i in range(9)]))
    task = made.task("train", 0)
    assert made.reward(task, [str(task.answer), f" {task.answer}\n", f"{task.answer}.0", ""]) == [1.0, 1.0, 0.0, 0.0]


def test_a_small_fraction_is_compared_as_a_plain_decimal():
    made = family(data=datasets.Dataset.from_list([{"question": str(i), "answer": 1e-05} for i in range(9)]))
    assert made.reward(made.task("train", 0), ["0.00001", "1e-05"]) == [1.0, 0.0]


def test_csv_keeps_the_text_of_the_file():
    with open("rows.csv", "w") as file:
        file.write("question,answer\n" + "".join(f'"{i}, please",00{i}\n' for i in range(8)) + "NA,null\n")
    made = family(train="rows.csv")
    tasks = [made.task(split, i) for split in ("train", "validation", "test") for i in range(made.num_tasks(split))]
    assert sorted(t.prompt[0]["content"] + ":" + t.answer for t in tasks)[0] == "0, please:000"
    assert any(t.prompt[0]["content"] == "NA" and t.answer == "null" for t in tasks)


@pytest.mark.parametrize("as_list", [False, True])
def test_json_keeps_the_text_of_dates(as_list):
    """Arrow reads them as times."""
    made = [{"question": f"{i}?\u2028", "answer": f"2024-01-0{i}", "of": {"day": "2024-01-05"}} for i in range(1, 9)]
    del made[0]["of"]
    if as_list:
        Path("rows.json").write_text(json.dumps(made))
    else:
        lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in made)
        Path("rows.jsonl").write_text("\ufeff" + lines)  # as some editors begin a file
    read = read_file("rows.json" if as_list else "rows.jsonl", "train")
    assert [row["answer"] for row in read] == [row["answer"] for row in made]
    assert [row["of"] for row in read] == [None] + 7 * [{"day": "2024-01-05"}]


def test_drawn_splits_depend_on_seed_and_prompts_and_not_on_the_order_of_rows():
    def drawn(of, **config):
        made = family(data=datasets.Dataset.from_list(of), test_fraction=0.2, validation_fraction=0.1, **config)
        return {split: set(prompts(made, split)) for split in ("train", "validation", "test")}

    first = drawn(rows(100))
    assert [len(found) for found in first.values()] == [70, 10, 20] and len(set.union(*first.values())) == 100
    assert drawn(rows(100)[::-1]) == first
    assert drawn(rows(100), seed=1) != first
    grown = drawn(rows(110))
    assert len(grown["test"] & first["test"]) >= 16  # of 20: most rows keep their split


def test_repeated_prompts_stay_in_one_split_and_are_said_once(caplog):
    data = datasets.Dataset.from_list(rows(20) + rows(20))
    with caplog.at_level(logging.WARNING):
        made = family(data=data, test_fraction=0.2)
        family(data=data, test_fraction=0.2)
    assert made.num_tasks("test") == 8 and made.num_tasks("train") == 30 and made.num_tasks("validation") == 2
    said = [record.getMessage() for record in caplog.records]
    assert sorted(said) == [
        "dataset: 1 of 2 validation rows have the prompt of an earlier validation row",
        "dataset: 15 of 30 train rows have the prompt of an earlier train row",
        "dataset: 4 of 8 test rows have the prompt of an earlier test row",
    ]


def test_overlap_is_refused_dropped_or_allowed(caplog):
    files = {"train": write("train.jsonl", rows(40)), "test": write("test.jsonl", rows(50, 37))}
    common = "of train.jsonl"
    found = refusal(family, **files)
    assert "dataset.overlap='refuse': " in found and common in found and "set 'drop' to leave such rows out" in found
    dropped = family(**files, overlap="drop")
    assert not set(prompts(dropped, "test")) & (set(prompts(dropped, "train")) | set(prompts(dropped, "validation")))
    assert dropped.num_tasks("train") + dropped.num_tasks("validation") == 37 and dropped.num_tasks("test") == 13
    allowed = family(**files, overlap="allow")
    assert allowed.num_tasks("train") + allowed.num_tasks("validation") == 40
    assert any("they are left out" in record.getMessage() for record in caplog.records)
    assert any("its scores count what was trained on" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    "config, complaint",
    [
        ({"prompt": "questoin"}, "train.jsonl, which has question, answer, how; name one; did you mean 'question'?"),
        ({"answer": "anwser"}, "dataset.answer='anwser': is no column of train.jsonl"),
        ({"demonstration": "why"}, "dataset.demonstration='why': is no column of train.jsonl"),
        ({"system_column": "sytem"}, "dataset.system_column='sytem': is no column"),
        (
            {"train": "trian.jsonl"},
            "no such file; name a .jsonl, .json, .parquet or .csv file; did you mean 'train.jsonl'",
        ),
        ({"train": "notes.txt"}, "dataset.train='notes.txt': is of a kind that cannot be read; name a .jsonl"),
        ({"train": "empty.jsonl"}, "dataset.train='empty.jsonl': is empty; give a file with rows"),
        ({"test": "header.csv"}, "dataset.test='header.csv': has no rows"),
        ({"train": "broken.jsonl"}, "dataset.train='broken.jsonl': cannot be read (line 2 is no JSON"),
        ({"train": "number.jsonl"}, "cannot be read (line 2 is no JSON object)"),
        ({"train": "wide.csv"}, "dataset.train='wide.csv': cannot be read"),
        ({"train": "lacking.jsonl"}, "dataset.answer='answer': row 3 of lacking.jsonl has no answer; fill it in"),
        ({"train": "flag.jsonl"}, "row 1 of flag.jsonl has the bool True, which has no one text; give text"),
        (
            {"train": "big.jsonl"},
            "row 1 of big.jsonl has the float 9007199254740992.0, which has lost digits; give text",
        ),
        ({"train": "blank.jsonl"}, "row 1 of blank.jsonl has no answer; fill it in"),
        ({"train": "lacking.jsonl", "answer": "how", "demonstration": "answer"}, "row 3 of lacking.jsonl has no d"),
        ({"prompt": "answer", "train": "typed.jsonl"}, "row 1 of typed.jsonl has a int, not text or messages"),
        ({"answer": "inner", "train": "typed.jsonl"}, "row 1 of typed.jsonl has a dict, which no text can equal; give"),
        ({"answer": "inner.y", "train": "typed.jsonl"}, "dataset.answer='inner.y': is no column"),
        ({"prompt": "talk", "train": "typed.jsonl"}, "row 1 of typed.jsonl ends with the assistant's message"),
        ({"prompt": "led", "system": "Hi", "train": "typed.jsonl"}, "has a system message already; leave out dataset"),
        ({"train": "one.jsonl"}, "leave no train rows of 1 different prompts"),
        ({"from_row": lambda row: row["q"]}, "raised KeyError: 'q' for row 1 of train.jsonl; mend the function"),
        ({"from_row": lambda row: []}, "returned a list for row 1 of train.jsonl; return a dict with prompt"),
        ({"from_row": lambda row: {"promt": ""}}, "returned 'promt' for row 1 of train.jsonl; return a dict"),
        ({"from_row": lambda row: {"prompt": "x"}}, "its answer for row 1 of train.jsonl: has no answer"),
        ({"answer": None}, "dataset.answer=None: the reward compares with it"),
        ({"chat": False, "system": "Hi"}, "dataset.chat=False"),
        ({"system": "a", "system_column": "how"}, "dataset.system_column='how': dataset.system is set too"),
        ({"test_fraction": 0.0}, "dataset.test_fraction=0.0: is no share of the rows"),
        ({"data": "train.jsonl"}, "dataset.data='train.jsonl': is no data; give a datasets.Dataset"),
        ({"data": lambda: {}["x"], "error": RuntimeError}, "dataset.data: its function raised KeyError: 'x'"),
        (
            {"data": datasets.Dataset.from_list(rows(9)), "test": "tset"},
            "'tset': is no split of dataset.data, which is",
        ),
        (
            {"data": datasets.DatasetDict(train=datasets.Dataset.from_list(rows(9))), "train": "trian"},
            "which has the splits train; name one; did you mean 'train'",
        ),
        ({"data": datasets.Dataset.from_list(rows(9)).to_iterable_dataset()}, "is a IterableDataset; give a datasets"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_name_and_row(config, complaint):
    write("train.jsonl", rows(9))
    write("one.jsonl", rows(1))
    for name, text in {
        "notes.txt": "x\n",
        "empty.jsonl": "",
        "header.csv": "question,answer\n",
        "broken.jsonl": '{"question": "a", "answer": "b"}\n{"question": "a",\n',
        "number.jsonl": '{"question": "a"}\n1\n',
        "wide.csv": 'question,answer\n"a",1,2,3\n',
    }.items():
        Path(name).write_text(text)
    write("flag.jsonl", [{"question": "a", "answer": True}])
    write("big.jsonl", [{"question": "a", "answer": 2**53 + 1}, {"question": "b", "answer": 0.5}])
    write("blank.jsonl", [{"question": "a", "answer": " \n"}])
    write("lacking.jsonl", [*rows(2), {"question": "a", "how": "b"}, *rows(9, 3)])
    user = {"role": "user", "content": "x"}
    talk = [user, {"role": "assistant", "content": "y"}]
    led = [{"role": "system", "content": "x"}, user]
    write("typed.jsonl", [{"question": "a", "answer": 1, "inner": {"x": "1"}, "talk": talk, "led": led}])
    assert complaint in refusal(family, **{"train": "train.jsonl", **config} if "data" not in config else config)


def test_a_config_is_shown_written_overridden_and_compared():
    data = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows(9))})
    config = run_config(task=Dataset.Config(data=data, prompt="question"))
    shown = dict(flat(config))
    assert repr(shown["task.data"]) == "DatasetDict(train: Dataset(9 rows of question, answer, how))"
    before = json.loads(json.dumps(resolved(config)))
    assert before["task"]["data"] == repr(shown["task.data"])
    apply_overrides(config, ["--task.test", "t.jsonl", "--task.overlap", "drop", "--task.test-fraction", "0.2"])
    assert (config.task.test, config.task.overlap, config.task.test_fraction) == ("t.jsonl", "drop", 0.2)
    assert set(differences(before, resolved(config))) == {"task.test", "task.overlap", "task.test_fraction"}
    with pytest.raises(ValueError, match="--task.overlap=keep"):
        apply_overrides(config, ["--task.overlap", "keep"])
    assert Dataset.Config(**{"data": config.task.data}).build  # a config made again from its fields is the same
    fewer = run_config(task=Dataset.Config(data=data["train"].select(range(8)), prompt="question"))
    assert "task.data" in differences(before, resolved(fewer))


def test_a_run_goes_on_where_it_was_and_not_with_other_data():
    made = family(data=datasets.Dataset.from_list(rows(30)))
    source = source_of(made, "train", 3)
    source.next(20)
    state = json.loads(json.dumps(source.state_dict()))
    expected = [task.id for task in source.next(20)]
    again = source_of(family(data=datasets.Dataset.from_list(rows(30))), "train", 3)
    again.load_state_dict(state)
    assert [task.id for task in again.next(20)] == expected
    changed = rows(30)
    changed[4]["answer"] = "no"
    other = source_of(family(data=datasets.Dataset.from_list(changed)), "train", 3)
    with pytest.raises(ValueError, match="rows are not those that the run started with"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    "answer, complaint", [({"b", "a"}, "type set reads differently"), ({1: 2, "a": 3}, "not supp")]
)
def test_an_answer_that_has_no_hash_is_refused_with_its_row(answer, complaint):
    def build(answer):
        def from_row(row):
            return {"prompt": row["question"], "answer": answer if row["answer"] == "4" else row["answer"]}

        return family(data=datasets.Dataset.from_list(rows(9)), from_row=from_row, reward=lambda task, completions: [0])

    message = refusal(build, answer=answer)
    assert "the prompt or the answer of row 3 of data cannot be hashed" in message and complaint in message
    assert "type object reads differently" in refusal(build, answer=object())
    # Of a run that was recorded before: a date is hashed by its repr.
    assert build(answer=datetime.date(2024, 1, 5)).digest == "18b69a1a87b5e1a6"


def test_short_floats_are_the_numbers_that_their_column_has():
    column = datasets.Features({"prompt": datasets.Value("string"), "answer": datasets.Value("float32")})
    answers = {"a": 0.1, "b": 2.0, "c": 0.5}
    made = datasets.Dataset.from_dict({"prompt": list(answers), "answer": list(answers.values())}, features=column)
    built = Dataset.Config(data=made, chat=False).build()
    tasks = [built.task(split, 0) for split in ("train", "validation", "test")]
    assert {task.prompt: task.answer for task in tasks} == {"a": 0.1, "b": 2, "c": 0.5}
    lost = datasets.Dataset.from_dict({"prompt": ["a"], "answer": [2.0**24]}, features=column)
    assert "has the float 16777216.0, which has lost digits" in refusal(Dataset.Config(data=lost).build)


def test_a_split_that_is_named_is_no_other_split_too():
    data = {"train": datasets.Dataset.from_list(rows(30)), "validation": datasets.Dataset.from_list(rows(35, 30))}
    made = family(data=datasets.DatasetDict(data), test="validation")
    assert prompts(made, "test") == [f"What is {i}+{i}?" for i in range(30, 35)]
    assert made.num_tasks("validation") == 2 and made.num_tasks("train") == 28  # drawn from train


def pair_rows(num):
    return [{"prompt": f"Say {i}.", "chosen": f"{i}", "rejected": f"{i + 1}"} for i in range(num)]


def test_rows_of_preferences_are_pairs():
    write("pairs.jsonl", pair_rows(40))
    columns = {"answer": "chosen", "chosen": "chosen", "rejected": "rejected"}
    made = Dataset.Config(train="pairs.jsonl", **columns).build()
    for split in ("train", "validation", "test"):  # all drawn from train
        task = made.task(split, 0)
        assert (task.chosen, int(task.rejected)) == (task.answer, int(task.answer) + 1)
    messages = [
        {**row, "prompt": [{"role": "user", "content": row["prompt"]}]}
        | {part: [{"role": "assistant", "content": row[part]}] for part in ("chosen", "rejected")}
        | {"answer": row["chosen"]}
        for row in pair_rows(40)
    ]
    write("messages.jsonl", messages)
    said = Dataset.Config(train="messages.jsonl", chosen="chosen", rejected="rejected").build()
    assert [said.task("train", i) for i in range(30)] == [made.task("train", i) for i in range(30)]
    write("plain.jsonl", [{"prompt": f"Ask {i}", "answer": "1", "chosen": "only"} for i in range(3)])
    apart = Dataset.Config(
        train="pairs.jsonl", validation="pairs.jsonl", test="plain.jsonl", overlap="allow", **columns
    )
    apart.answer = "chosen"
    assert apart.build().task("test", 0).chosen is None and apart.build().task("validation", 0).chosen is not None
    write("inner.jsonl", [{"prompt": row["prompt"], "answer": "1", "pair": row} for row in pair_rows(40)])
    inner = Dataset.Config(
        train="inner.jsonl", validation="inner.jsonl", chosen="pair.chosen", rejected="pair.rejected", overlap="allow"
    )
    assert inner.build().task("validation", 3).chosen == "3"
    swapped = [{**row, "rejected": "other"} for row in pair_rows(40)]
    write("swapped.jsonl", swapped)
    assert Dataset.Config(train="swapped.jsonl", **columns).build().digest != made.digest


def test_rows_that_are_no_pairs_are_refused():
    def message(*made, **config):
        write("pairs.jsonl", [*pair_rows(5), *made])
        columns = {"answer": "prompt", "chosen": "chosen", "rejected": "rejected"}
        return refusal(Dataset.Config(train="pairs.jsonl", **columns | config).build)

    row = {"prompt": "Say 9.", "chosen": "9", "rejected": "8"}
    assert message({**row, "rejected": "9"}) == (
        "dataset.rejected='rejected': row 6 of pairs.jsonl has the same text as chosen; drop the row"
    )
    assert message({**row, "rejected": ""}).startswith(
        "dataset.rejected='rejected': row 6 of pairs.jsonl has no rejected"
    )
    assert "'choosen': is no column of pairs.jsonl" in message(chosen="choosen")
    half = refusal(Dataset.Config, chosen="chosen")
    assert half == "dataset.rejected=None: a pair has two completions; name the column of the other"

    def one(row):
        return {"prompt": row["prompt"], "answer": "x", "chosen": row["chosen"]}

    assert "row 1 of pairs.jsonl: has half of a pair, no rejected" in message(from_row=one, chosen=None, rejected=None)
    turns = [{"role": "user", "content": "Say 9."}, {"role": "assistant", "content": "9"}]
    write(
        "talks.jsonl",
        [{"prompt": f"Say {i}.", "answer": "x", "chosen": turns, "rejected": turns[:1]} for i in range(9)],
    )
    config = Dataset.Config(train="talks.jsonl", chosen="chosen", rejected="rejected")
    assert "has a list of 2; give text or one message of the assistant" in refusal(config.build)
