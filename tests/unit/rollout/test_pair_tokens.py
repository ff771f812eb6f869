"""Preference pairs as tokens, and pairs that are none."""

import pytest

from tests.kit.refusal import refusal
from tests.kit.sampler import CHARS, policy
from torchtitan_rl.rollout.pair_tokens import pair_tokens
from torchtitan_rl.types import Task


def task(chosen, rejected, prompt="cab="):
    return Task(id="pairs/train/1", prompt=prompt, chosen=chosen, rejected=rejected)


def test_both_completions_follow_the_prompt_and_end():
    pairs = pair_tokens(task("abc", "cab"), policy())
    assert [(CHARS.decode(prompt), CHARS.decode(said)) for prompt, said in pairs] == [
        ("cab=", "abc<eos>"),
        ("cab=", "cab<eos>"),
    ]


def test_messages_go_through_the_chat_template():
    (prompt, _), _ = pair_tokens(task("abc", "cab", [{"role": "user", "content": "cab"}]), policy())
    assert CHARS.decode(prompt) == "<user>:cab\n<assistant>:"


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        (None, "cab", "has no chosen completion"),
        ("abc", None, "has no rejected completion"),
        (["abc"], "cab", "has no chosen completion"),
        ("abc", "abc", "chosen and rejected are the same completion, 'abc'; drop the pair"),
        ("abC", "abD", "differ in characters that the tokenizer cannot express"),
    ],
)
def test_what_is_no_pair_is_refused(chosen, rejected, expected):
    message = refusal(pair_tokens, task(chosen, rejected), policy())
    assert message.startswith("task='pairs/train/1': ") and expected in message


def test_a_prompt_that_is_too_long_is_refused():
    assert "sampling.max_prompt_tokens=2" in refusal(pair_tokens, task("abc", "cab"), policy(max_prompt_tokens=2))
