"""Text that a vocabulary cannot express, and prompts of a user's data under a chat template like Qwen's."""

import logging

import datasets
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.kit.sampler import CHARS, policy
from tests.unit.rollout.templates import QWEN_LIKE, byte_bpe
from torchtitan_rl.tasks.dataset import Dataset
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.tasks.vocabulary import unknown_characters, warn_unknown_text

QWEN = byte_bpe(QWEN_LIKE)
NUM_ROWS = 40


@pytest.fixture
def family():
    rows = [{"question": f"what is {i}+{i}?", "answer": str(2 * i), "style": f"style {i}"} for i in range(NUM_ROWS)]
    rows[7]["question"] = "was kostet ein Käse für 3€?"

    def made(**config):
        return Dataset.Config(data=datasets.Dataset.from_list(rows), prompt="question", **config).build()

    return made


def tasks(made):
    return [made.task(split, i) for split in ("train", "validation", "test") for i in range(made.num_tasks(split))]


@pytest.mark.parametrize(
    "config, system", [({"system": "answer with a number"}, "answer with a number"), ({"system_column": "style"}, None)]
)
def test_system_prompts_go_through_the_template_of_a_qwen_tokenizer(family, config, system):
    found = tasks(family(**config))
    assert len(found) == NUM_ROWS
    for task in found:
        said = system or f"style {int(task.answer) // 2}"
        tokens = policy(tokenizer=QWEN, max_prompt_tokens=256).prompt_tokens(task)
        question = task.prompt[-1]["content"]
        assert QWEN.decode(tokens) == (
            f"<|im_start|>system\n{said}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        )
        assert tokens.count(QWEN.convert_tokens_to_ids("<|im_start|>")) == 3


def test_a_vocabulary_without_a_prompts_characters_warns_once_with_an_example_and_counts(family, caplog):
    made = family()
    warn_unknown_text(CHARS, [made, made])
    (record,) = caplog.records
    (odd,) = [task.id for task in tasks(made) if "Käse" in task.prompt[0]["content"]]
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "tokenizer: cannot express 'K', 'ä', 'ü', '€', in 1 of the 40 tasks looked at, such as "
        f"{odd} ('was kostet ein Käse für 3€?'); such text is lost on the policy: name another tokenizer in "
        "model.assets, or change the data"
    )


def test_a_vocabulary_that_has_everything_is_silent(family, caplog):
    warn_unknown_text(QWEN, [family(system="Größe"), LetterSort.Config().build()])
    warn_unknown_text(CHARS, [LetterSort.Config().build()])
    assert not caplog.records


def test_characters_that_a_tokenizer_drops_without_an_unknown_token_are_found():
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    silent = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert silent.encode("ab xc") == [0, 1, 2]  # the x is gone
    assert unknown_characters(silent, "ab xc") == ["x"]
    assert unknown_characters(CHARS, "ab\tXc") == ["\t", "X"]
