"""Demonstrations become the tokens of the rollouts they stand for."""

import pytest

from tests.kit.sampler import CHARS, policy
from torchtitan_rl.rollout.demonstrate import demonstrate
from torchtitan_rl.rollout.group import workflow_of
from torchtitan_rl.rollout.multi_turn import Limits
from torchtitan_rl.tasks.calculator import Calculator
from torchtitan_rl.types import Task

FAMILY = Calculator.Config().build()


async def demonstrated(task, *, max_turns=4, max_tokens=32):
    limits = Limits(max_turns=max_turns, max_tokens=64, timeout_s=10, step_timeout_s=5)
    pairs = await demonstrate(workflow_of(FAMILY.environment, limits), task, policy(max_tokens=max_tokens))
    return [(CHARS.decode(prompt), CHARS.decode(said)) for prompt, said in pairs]


def task(demonstration, prompt="12*34="):
    return Task(id="calculator/train/1", prompt=prompt, answer="408", demonstration=demonstration)


async def test_a_text_is_one_completion():
    assert await demonstrated(task("408")) == [("12*34=", "408<eos>")]


async def test_a_list_is_played_in_the_environment():
    assert await demonstrated(task(["[12*34]", "408"])) == [("12*34=", "[12*34]"), ("12*34=[12*34]408;", "408<eos>")]


async def test_a_list_is_played_through_the_chat_template():
    assert await demonstrated(task(["[12*34]", "408"], [{"role": "user", "content": "12*34"}])) == [
        ("<user>:12*34\n<assistant>:", "[12*34]"),
        ("<user>:12*34\n<assistant>:[12*34]<eos>\n<tool>:408\n<assistant>:", "408<eos>"),
    ]


async def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="has no demonstration; set supervised.num_steps=0"):
        await demonstrated(task(None))
    with pytest.raises(ValueError, match="goes on after the 1 turns"):
        await demonstrated(task(["[12*34]"]))
    with pytest.raises(ValueError, match=r"has 2 turns, its environment ended \(done\) after 1"):
        await demonstrated(task(["408", "408"]))
    with pytest.raises(ValueError, match=r"has 2 turns, its environment ended \(turns\) after 1"):
        await demonstrated(task(["[12*34]", "408"]), max_turns=1)
    with pytest.raises(ValueError, match="turn 1 of its demonstration has 7 tokens, 5 are left to it"):
        await demonstrated(task(["[12*34]", "408"]), max_tokens=5)
