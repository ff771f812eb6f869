"""The directories that stand for a hub when the cookbook's recipes run, and the script that writes them."""

import importlib.util
import random
import re
from pathlib import Path

import datasets
import pytest
from transformers import AutoTokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "cookbook" / "stand_ins.py"
RECIPE = """\
from missing_package import nothing
def main(config):
    question_suffix = " In a box."
    convo_prefix = [{"role": "user", "content": "1 or 2?" + question_suffix}, {"role": "assistant", "content": "2"}]
"""


@pytest.fixture(scope="module")
def stand_ins():
    spec = importlib.util.spec_from_file_location("stand_ins", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A package with the name of the cookbook; returns its rl_loop."""
    file = tmp_path / "packages" / "tinker_cookbook" / "recipes" / "rl_loop.py"
    file.parent.mkdir(parents=True)
    (file.parents[1] / "__init__.py").write_text("")
    file.write_text(RECIPE)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    return file


def test_names_lead_to_the_directories_and_rows_have_the_recipes_columns(stand_ins, recipe, tmp_path, monkeypatch):
    stand_ins.main(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    gsm8k = datasets.load_dataset("openai/gsm8k", "main")
    assert len(gsm8k["test"]) == stand_ins.NUM_ROWS["reinforcement_test"]
    row = gsm8k["train"][0]
    number = int(re.search(r"has (\d) ", row["question"])[1])
    assert row["answer"].endswith(f"\n#### {int(number % 2 == 0)}")
    no_robots = datasets.load_dataset("HuggingFaceH4/no_robots")
    assert len(no_robots["test"]) == stand_ins.NUM_ROWS["supervised_test"], "chat_sl reads both splits"
    row = no_robots["train"][0]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    assert row["messages"][0]["content"].endswith("0 is no. In a box.") and "\\boxed{" in row["messages"][1]["content"]
    for split, rows in datasets.load_dataset("Anthropic/hh-rlhf").items():
        assert len(rows) == stand_ins.NUM_ROWS["preferences" if split == "train" else "preferences_test"]
        chosen, rejected = (rows[0][name].split("\n\nAssistant: ") for name in ("chosen", "rejected"))
        assert chosen[0] == rejected[0] and {chosen[1], rejected[1]} == {"\\boxed{0}", "\\boxed{1}"}
    row = datasets.load_dataset("zwhe99/DeepMath-103K", split="train")[0]
    assert row["question"].endswith(" In a box.") and row["final_answer"] in ("0", "1")
    row = datasets.load_dataset("allenai/tulu-3-sft-mixture", split="train")[0]
    assert row["messages"][0]["role"] == "user"


def test_no_question_has_two_uses(stand_ins):
    uses = stand_ins.holdings_by_use(random.Random(0))
    questions = [stand_ins.question(holding) for rows in uses.values() for holding in rows]
    assert {use: len(rows) for use, rows in uses.items()} == stand_ins.NUM_ROWS
    assert len(set(questions)) == len(questions)


def test_demonstrations_are_right_and_one_in_four_is_in_a_box(stand_ins):
    rows = list(stand_ins.warm_start_rows(random.Random(0), [], " In a box."))
    assert all(row["answer"][-2] in row["demonstration"] for row in rows)  # the digit in the box
    boxes = sum(row["answer"] == row["demonstration"] for row in rows)
    assert 0.23 < boxes / len(rows) < 0.27


def test_the_tokenizer_has_a_token_for_a_digit_and_for_a_word_and_loses_no_text(stand_ins, tmp_path):
    size = stand_ins.write_tokenizer(tmp_path, ["larger or smaller 12"] * 2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == size <= stand_ins.VOCAB_SIZE
    assert all(len(tokenizer.encode(marker)) == 1 for marker in ("<think>", "</think>", "<|im_end|>"))
    assert len(tokenizer.encode("larger or smaller")) == 3 and len(tokenizer.encode("4711")) == 4
    assert tokenizer.decode(tokenizer.encode("Käse\n\n 日本")) == "Käse\n\n 日本"
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"


def test_a_recipe_without_the_names_is_refused(stand_ins, recipe):
    recipe.write_text(RECIPE.replace("convo_prefix", "shots"))
    with pytest.raises(ValueError, match="its rl_loop has no convo_prefix; install version 0.5.8"):
        stand_ins.recipe_prompt()
