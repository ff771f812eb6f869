"""Workflows of one's own: the example of docs/environments.md, and those that cannot train."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kit.family import Family
from tests.kit.sampler import policy
from tests.unit.serve.opened import BYTES
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.rollout.group import run_attempts, run_group
from torchtitan_rl.rollout.policy import single_turn
from torchtitan_rl.types import Rollout, Task, Turn

TASK = Task(id="capital/1", prompt="Oslo?", answer="Norway")
CALL = {"group_id": "0/0", "seed": 0, "reward_timeout_s": 5.0}


async def test_the_pages_example_looks_up_and_answers():
    page = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "with_lookups" in block)
    config = SimpleNamespace(algorithm=AlgorithmConfig())
    exec(code, {"config": config})
    sampler = policy("look up Oslo", "Norway", tokenizer=BYTES)

    def judged(task, completions):
        return [float(text == task.answer) for text in completions]

    group = await run_group(config.algorithm.workflow, TASK, sampler, 1, reward=judged, **CALL)
    (rollout,) = group.rollouts
    assert rollout.reward == 1.0 and rollout.text == "Norway"
    first, second = rollout.turns
    before = [*first.prompt_tokens, *first.completion.tokens]
    assert second.prompt_tokens[: len(before)] == before
    assert BYTES.decode(second.prompt_tokens) == "Oslo?look up OsloNorway"


async def without_text(task, policy, *, rollout_id, seed):
    tokens = policy.prompt_tokens(task)
    completion = await policy.complete(tokens, seed=seed)
    return Rollout(id=rollout_id, task=task, turns=[Turn(prompt_tokens=tokens, completion=completion)])


@pytest.mark.parametrize("play", [run_group, run_attempts])
async def test_a_rollout_without_the_text_that_the_reward_judges_is_refused(play):
    task = Task(id="sort/1", prompt="ba=", answer="ab")
    with pytest.raises(RuntimeError, match=r"gave task 'sort/1' a rollout without text.*set Rollout.text"):
        await play(without_text, task, policy("ab"), 1, reward=Family(), **CALL)
    await play(without_text, task, policy(""), 1, reward=Family(), **CALL)  # it has said nothing

    async def rewarded(task, policy, **keywords):
        rollout = await without_text(task, policy, **keywords)
        rollout.reward = 1.0
        return rollout

    await play(rewarded, task, policy("ab"), 1, reward=Family(), **CALL)

    async def last_answer(task, policy, **keywords):
        first, second = [await without_text(task, policy, **keywords) for _ in range(2)]
        first.turns += second.turns
        first.text = policy.text(second.turns[0].completion)
        return first

    await play(last_answer, task, policy("ab", ""), 1, reward=Family(), **CALL)  # whose text is empty


async def test_a_workflow_that_is_not_awaited_is_named():
    def plain(task, policy, *, rollout_id, seed):
        return Rollout(id=rollout_id, task=task, turns=[])

    task = Task(id="sort/1", prompt="ba=", answer="ab")
    with pytest.raises(RuntimeError, match="returned Rollout for task 'sort/1' without being awaited; write it as"):
        await run_group(plain, task, policy("ab"), 1, reward=Family(), **CALL)

    def hands_on(task, policy, *, rollout_id, seed):
        return single_turn(task, policy, rollout_id=rollout_id, seed=seed)

    group = await run_group(hands_on, task, policy("ab"), 1, reward=Family(), **CALL)
    assert group.rollouts[0].text == "ab"


@pytest.mark.parametrize(
    "given, kind",
    [
        ({"counts": {"tool calls": 3}}, "a count named 'tool calls'"),
        ({"reward_parts": {"in time": 1.0}}, "a reward part named 'in time'"),
        ({"role": "the judge"}, "a role named 'the judge'"),
    ],
    ids=["count", "part", "role"],
)
async def test_a_name_that_no_metric_can_contain_is_refused_when_it_is_played(given, kind):
    async def named(task, policy, *, rollout_id, seed):
        return Rollout(id=rollout_id, task=task, turns=[], text="ab", reward=1.0, **given)

    with pytest.raises(RuntimeError, match=f"{kind}, which cannot stand in the name of a metric; use letters"):
        await run_group(named, TASK, policy("ab"), 1, reward=Family(), **CALL)
