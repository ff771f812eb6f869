"""A tokenizer whose end-of-sequence token does not end a turn of its chat template."""

import datasets
import pytest

from tests.kit.environment import AsyncScriptedEnv
from tests.kit.family import Family
from tests.kit.sampler import CHARS
from tests.unit.rollout.templates import QWEN_LIKE, byte_bpe
from torchtitan_rl.rollout.turn_end import warn_open_turns
from torchtitan_rl.tasks.calculator import Calculator
from torchtitan_rl.tasks.curriculum import Curriculum
from torchtitan_rl.tasks.dataset import Dataset
from torchtitan_rl.tasks.mixture import Mixture
from torchtitan_rl.types import Task

BASE = byte_bpe(QWEN_LIKE)  # its eos is <|endoftext|>, as in Qwen's base models
END = BASE.convert_tokens_to_ids("<|im_end|>")
ROWS = datasets.Dataset.from_list([{"prompt": f"{i}?", "answer": str(i)} for i in range(9)])


async def test_a_turn_that_would_not_end_is_said_with_what_to_set(caplog):
    await warn_open_turns(BASE, Dataset.Config(data=ROWS).build(), [], timeout_s=5)
    (record,) = caplog.records
    assert record.getMessage() == (
        "tokenizer.eos_token='<|endoftext|>': the chat template ends a turn with '<|im_end|>', where a completion "
        f"would not stop; set --sampling.stop-token-ids {END}"
    )


@pytest.mark.parametrize(
    "wrapped", [lambda task: Curriculum.Config(task=task), lambda task: Mixture.Config(tasks={"one": task})]
)
async def test_a_family_around_another_is_warned_of_too(wrapped, caplog):
    """It has a method `environment`, which gives None for a task of one turn."""
    await warn_open_turns(BASE, wrapped(Dataset.Config(data=ROWS)).build(), [], timeout_s=5)
    assert "where a completion would not stop" in caplog.text


@pytest.mark.parametrize(
    "tokenizer, task, stop_token_ids",
    [
        (BASE, Dataset.Config(data=ROWS), [END]),
        (CHARS, Dataset.Config(data=ROWS), []),  # its eos ends turns
        (BASE, Dataset.Config(data=ROWS, chat=False), []),
        (BASE, Calculator.Config(chat=True), []),  # of several turns, which stop there
    ],
)
async def test_a_turn_that_ends_is_silent(tokenizer, task, stop_token_ids, caplog):
    await warn_open_turns(tokenizer, task.build(), stop_token_ids, timeout_s=5)
    assert not caplog.records


async def test_messages_without_a_template_are_refused_at_the_start():
    with pytest.raises(ValueError, match="has no chat template"):
        await warn_open_turns(byte_bpe(None), Dataset.Config(data=ROWS).build(), [], timeout_s=5)


async def test_the_environment_that_is_made_to_find_out_is_closed_and_none_is_made_for_text(caplog):
    made = []

    class Played(Family):
        prompt = [{"role": "user", "content": "x"}]

        def task(self, split, index):
            return Task(id="t", prompt=self.prompt)

        def environment(self, task):
            made.append(AsyncScriptedEnv())
            return made[-1]

    family = Played()
    await warn_open_turns(BASE, family, [], timeout_s=5)
    assert [env.closed for env in made] == [1] and not caplog.records
    family.prompt = "x"
    await warn_open_turns(BASE, family, [], timeout_s=5)
    assert len(made) == 1
