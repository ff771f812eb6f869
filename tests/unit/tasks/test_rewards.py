"""Rewards in parts, weighted sums of reward functions, and limits per function."""

import asyncio
import json
import logging
import pickle
import re
import time
from pathlib import Path

import numpy as np
import pytest

from tests.kit.refusal import refusal
from tests.kit.run_config import run_config
from torchtitan_rl.config.load import apply_overrides
from torchtitan_rl.config.resolve import flat, rebuilt, resolved
from torchtitan_rl.rollout.group import run_group
from torchtitan_rl.tasks.env import Attempts
from torchtitan_rl.tasks.judging import judge
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.tasks.limited import Limited
from torchtitan_rl.tasks.math_reward import math_equal
from torchtitan_rl.tasks.mixture import Mixture
from torchtitan_rl.tasks.reward_process import cpu_bound
from torchtitan_rl.tasks.rewards import Rewards
from torchtitan_rl.types import Task
from torchtitan_rl.validation.run import validate

TASK = Task(id="t/0", prompt="p", answer="ab")


def exact(task, completions):
    return [float(completion == task.answer) for completion in completions]


async def short(task, completions):
    await asyncio.sleep(0)
    return [1.0 / len(completion) for completion in completions]


@cpu_bound
def vowels(task, completions):
    return [float(sum(letter in "aeiou" for letter in completion)) for completion in completions]


def in_parts(task, completions):
    import torch

    kept = [float(len(completion)) for completion in completions]
    return torch.tensor(kept) / 2, {"length": kept, "exact": exact(task, completions)}


async def judged(reward, *completions, timeout_s=20.0):
    """(rewards, parts)."""
    parts = {}
    return await judge(reward, TASK, list(completions), timeout_s, parts), parts


async def test_an_answer_in_parts():
    assert await judged(in_parts, "ab", "abcd") == ([1.0, 2.0], {"length": [2.0, 4.0], "exact": [1.0, 0.0]})
    assert await judged(exact, "ab") == ([1.0], {})
    assert await judge(in_parts, TASK, ["ab"], 5.0) == [1.0]  # who asks for rewards alone gets them alone


@pytest.mark.parametrize(
    "parts, message",
    [
        ({"a": [1.0]}, "part 'a': returned 1 rewards for the 2 completions of task 't/0'; return a list of 2 finite"),
        ({"a": [1.0, float("nan")]}, "part 'a': returned nan at position 1 for task 't/0'"),
        ({"a": None}, "part 'a': returned None for task 't/0'"),
        ({3: [1.0, 1.0]}, "returned a part named 3; name each part by a text"),
        ({"in time": [1.0, 1.0]}, "returned a part named 'in time'; name each part by a text of letters and digits"),
    ],
)
async def test_a_wrong_part_is_refused_with_its_name(parts, message):
    kept = {}
    with pytest.raises(RuntimeError) as caught:
        await judge(lambda task, completions: ([0.0, 0.0], parts), TASK, ["a", "b"], 5.0, kept)
    assert message in str(caught.value) and str(caught.value).startswith("reward=") and not kept


async def test_a_weighted_sum_calls_functions_of_every_kind():
    reward = Rewards({"exact": (exact, 1.0), "short": (short, -0.5), "vowels": (vowels, 0.25), "own": in_parts})
    rewards, parts = await judged(reward, "ab", "eeee")
    assert parts == {
        "exact": [1.0, 0.0],
        "short": [0.5, 0.25],
        "vowels": [1.0, 4.0],
        "own": [1.0, 2.0],
        "own.length": [2.0, 4.0],
        "own.exact": [1.0, 0.0],
    }
    assert rewards == [1.0 - 0.25 + 0.25 + 1.0, 0.0 - 0.125 + 1.0 + 2.0]


async def test_functions_of_a_sum_run_side_by_side_and_the_late_one_is_named():
    async def waits(task, completions):
        await asyncio.sleep(0.3)
        return [1.0]

    began = time.monotonic()
    assert (await judged(Rewards({name: waits for name in ("a", "b", "c")}), "x"))[0] == [3.0]
    assert time.monotonic() - began < 0.8

    async def hangs(task, completions):
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match=r"hangs: gave no answer for task 't/0' within 0.1 s"):
        await judged(Rewards({"good": exact, "late": hangs}), "x", timeout_s=0.1)


async def test_a_family_may_have_a_sum_as_its_reward_and_be_mixed():
    mixture = Mixture.Config(
        tasks={"sort": LetterSort.Config(reward=Rewards({"exact": (exact, 2.0), "short": (short, 1.0)}))}
    ).build()
    task, parts = mixture.task("validation", 0), {}
    assert await judge(mixture, task, [task.answer], 5.0, parts) == [2.0 + 1 / len(task.answer)]
    assert parts == {"exact": [1.0], "short": [1 / len(task.answer)]}
    assert (await mixture.reward(task, [task.answer]))[1] == parts  # called by hand: (rewards, parts)


def test_a_weight_may_be_one_of_numpys_numbers():
    weights = Rewards({"a": (exact, np.float32(0.5))}).weights
    assert weights == {"a": 0.5} and type(weights["a"]) is float


@pytest.mark.parametrize(
    "functions, weights, message",
    [
        ({}, {}, "rewards.functions={}: is empty"),
        ({"a b": exact}, {}, "rewards.functions['a b']: metrics and flags contain the name; use a Python identifier"),
        ({"a": "exact"}, {}, "rewards.functions.a='exact': is not callable"),
        ({"a": (exact, float("nan"))}, {}, "rewards.weights.a=nan: is not finite"),
        ({"a": (exact, "1")}, {}, "rewards.weights.a='1': is not finite; give a number"),
        ({"a": (exact, 0.0)}, {}, "rewards.weights={'a': 0.0}: are all 0"),
        ({"a": exact}, {"b": 1.0}, "rewards.weights['b']: there is no such function; use a"),
    ],
)
def test_impossible_sums_are_refused(functions, weights, message):
    assert refusal(Rewards, functions, weights).startswith(message)


def test_a_sum_is_shown_set_and_read_back_like_any_section():
    config = run_config()
    limited = Limited(short, concurrency=2, retries=1, timeout_s=3.0)
    config.task.reward = Rewards({"exact": (math_equal, 1.0), "limited": (limited, 0.5)})
    apply_overrides(config, ["--task.reward.weights.limited", "0.25", "--task.reward.functions.limited.retries", "4"])
    validate(config)
    shown = dict(flat(config.task, "task."))
    assert shown["task.reward.functions.exact"] is math_equal
    assert shown["task.reward.functions.limited.function"] is short
    assert (shown["task.reward.weights.limited"], shown["task.reward.functions.limited.retries"]) == (0.25, 4)
    plain = json.loads(json.dumps(resolved(config)))["task"]["reward"]
    assert plain["functions"]["exact"]["function"] == "torchtitan_rl.tasks.math_reward:math_equal"
    plain["functions"] = {"exact": plain["functions"]["exact"]}  # a test's functions cannot be imported
    plain["weights"] = {"exact": 3.0}
    assert rebuilt(plain) == Rewards({"exact": (math_equal, 3.0)})


@pytest.mark.parametrize(
    "flag, value, message",
    [
        ("functions.limited.concurrency", "0", "limited.concurrency=0: allows no call"),
        ("weights.exact", "nan", "rewards.weights.exact=nan: is not finite"),
    ],
)
def test_an_override_inside_a_sum_is_checked_before_the_start(flag, value, message):
    config = run_config()
    config.task.reward = Rewards({"exact": (exact, 1.0), "limited": Limited(short)})
    apply_overrides(config, [f"--task.reward.{flag}", value])
    assert refusal(validate, config).startswith(message)


# Limited


class Flaky:
    """Fails the first `failures` calls; counts the calls under way."""

    def __init__(self, failures=0, wait_s=0.0):
        self.failures, self.wait_s, self.calls, self.now, self.most = failures, wait_s, 0, 0, 0

    async def __call__(self, task, completions):
        self.calls, self.now = self.calls + 1, self.now + 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.wait_s)
            if self.calls <= self.failures:
                raise OSError("the service is away")
            return [1.0] * len(completions), {"calls": [float(self.calls)] * len(completions)}
        finally:
            self.now -= 1


async def test_a_limited_function_is_tried_again_and_what_it_hid_is_logged(caplog):
    flaky = Flaky(failures=2)
    with caplog.at_level(logging.WARNING):
        assert await judged(Limited(flaky, retries=2, wait_s=0.01), "x") == ([1.0], {"calls": [3.0]})
    (warning,) = [record.getMessage() for record in caplog.records]  # the first retry; the 10th would be the next
    assert warning.startswith("retry 1 of a reward: reward=") and "the service is away" in warning


async def test_the_last_retry_raises_with_the_functions_name():
    with pytest.raises(RuntimeError, match=r"Flaky: raised OSError: the service is away .* \(1 retries\)"):
        await judged(Limited(Flaky(failures=9), retries=1, wait_s=0.01), "x")


def test_at_most_so_many_calls_at_a_time():
    flaky = Flaky(wait_s=0.02)
    limited = Limited(flaky, concurrency=3)
    both = Rewards({"a": (limited, 1.0), "b": (limited, 1.0)})  # one limit for all who use it

    async def calls():
        return await asyncio.gather(*(judge(both, TASK, ["x"], 5.0) for _ in range(10)))

    assert asyncio.run(calls()) == [[2.0]] * 10
    assert (flaky.calls, flaky.most) == (20, 3)
    assert asyncio.run(calls()) == [[2.0]] * 10  # on another event loop


async def test_a_deadline_of_its_own_is_longer_or_shorter_than_the_runs():
    with pytest.raises(RuntimeError, match=r"within 0.05 s; .* \(0 retries\)"):
        await judged(Limited(Flaky(wait_s=5.0), retries=0, timeout_s=0.05), "x", timeout_s=9.0)
    assert (await judged(Limited(Flaky(wait_s=0.2), timeout_s=5.0), "x", timeout_s=0.05))[0] == [1.0]
    with pytest.raises(RuntimeError, match=r"within 0.05 s"):
        await judged(Limited(Flaky(wait_s=5.0), retries=0), "x", timeout_s=0.05)  # it has none: the run's


async def test_the_deadline_counts_too_for_a_function_with_one_of_its_own():
    class Patient:
        async def __call__(self, task, completions):
            await asyncio.sleep(5.0)

        async def judged(self, task, completions, timeout_s, parts=None):
            return await self(task, completions)

    with pytest.raises(RuntimeError, match=r"Patient: gave no answer for task .* within 0.05 s; .* \(0 retries\)"):
        await judged(Limited(Patient(), retries=0, timeout_s=0.05), "x", timeout_s=9.0)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"concurrency": 0}, "limited.concurrency=0: allows no call"),
        ({"concurrency": 2.5}, "limited.concurrency=2.5: is no whole number"),
        ({"retries": -1}, "limited.retries=-1: is not possible"),
        ({"retries": 1.5}, "limited.retries=1.5: is no whole number; use 0 or more"),
        ({"timeout_s": float("inf")}, "limited.timeout_s=inf: is not possible"),
    ],
)
def test_impossible_limits_are_refused(fields, message):
    assert refusal(lambda: Limited(exact, **fields)).startswith(message)
    assert refusal(Limited, 3).startswith("limited.function=3: is not callable")


async def test_a_limited_function_that_has_been_used_can_be_pickled():
    limited = Limited(exact)
    await judged(limited, "ab")
    assert (await judged(pickle.loads(pickle.dumps(limited)), "ab"))[0] == [1.0]


async def test_the_parts_stand_in_the_rollouts_of_a_group():
    from tests.unit.rollout.test_failures import attempts

    reward = Rewards({"exact": (exact, 1.0), "short": (short, 0.5)})
    group = await run_group(attempts(), TASK, None, 2, group_id="0/0", seed=0, reward=reward, reward_timeout_s=5)
    assert [rollout.reward for rollout in group.rollouts] == [0.5, 0.5]  # each said "x"
    assert [rollout.reward_parts for rollout in group.rollouts] == [{"exact": 0.0, "short": 1.0}] * 2


async def test_the_examples_of_the_page_run():
    page = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()
    scope = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, scope)
    assert await judged(scope["task"].reward, "ab", "b") == ([1.2, 0.2], {"exact": [1.0, 0.0], "format": [1.0, 1.0]})
    assert await judged(scope["graded"], "a") == ([0.5], {"length": [1.0]})
    assert list(scope["reward"].functions) == ["exact", "judge"]


def test_attempts_without_an_end_are_refused():
    message = refusal(lambda: Attempts(TASK, exact, num_attempts=0))
    assert message == "attempts.num_attempts=0: allows no attempt; use 1 or more"
