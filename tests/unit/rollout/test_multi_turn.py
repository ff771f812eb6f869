"""Rollouts of several turns, token by token, with a sampler that says what the test tells it to."""

import asyncio
import threading

import pytest
import torch

from tests.kit.environment import AsyncScriptedEnv
from tests.kit.family import Family
from tests.kit.sampler import CHARS, policy
from torchtitan_rl.algorithm.datums import to_datums
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.rollout.episode import EnvironmentFailed
from torchtitan_rl.rollout.group import run_group, workflow_of
from torchtitan_rl.rollout.multi_turn import Limits, multi_turn
from torchtitan_rl.rollout.policy import single_turn
from torchtitan_rl.tasks.calculator import Calculator
from torchtitan_rl.tasks.env import Attempts, Env, Step
from torchtitan_rl.tasks.family import stable_hash
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.tasks.rewards import Rewards
from torchtitan_rl.types import Task


def limits(max_turns=4, max_tokens=64, timeout_s=10.0):
    return Limits(max_turns=max_turns, max_tokens=max_tokens, timeout_s=timeout_s, step_timeout_s=5.0)


LIMITS = limits()
TASK = Task(id="calculator/train/1", prompt="12*34=", answer="408")
EOS = CHARS.eos_token_id


async def play(env, policy, limits=LIMITS, task=TASK, seed=7):
    return await multi_turn(task, policy, rollout_id="0/0/0", seed=seed, env=env, limits=limits)


def calculator(task=TASK):
    return Calculator.Config(call_reward=0.25).build().environment(task)


def text(tokens):
    return CHARS.decode(tokens)


def echo(observation="on", **step):
    """Answers every completion with a fixed observation, for ever."""
    return AsyncScriptedEnv(Step(observation=observation, **{"reward": 0.5} | step))


async def test_a_call_is_answered_and_the_answer_rewarded():
    policy_ = policy("[12*34]", "408<eos>")
    rollout = await play(calculator(), policy_)
    assert [turn.reward for turn in rollout.turns] == [0.25, 0.75]
    assert (rollout.reward, rollout.end_reason, rollout.text) == (1.0, "done", "[12*34]408;408")
    first, second = rollout.turns
    assert text(first.prompt_tokens) == "12*34="
    assert text(second.prompt_tokens) == "12*34=[12*34]408;"
    assert second.completion.tokens == CHARS.encode("408") + [EOS]
    assert [params.stop for _, params in policy_.generator.asked] == [["]"], ["]"]]


async def test_the_next_prompt_is_the_tokens_that_were_sampled_even_where_tokenising_again_would_give_others():
    unknown = CHARS.unk_token_id  # decodes to <unk>, or to nothing
    policy_ = policy([20, unknown, 0, EOS, 21], "b<eos>")
    rollout = await play(echo(), policy_, limits(max_turns=2))
    prompt = CHARS.encode("go")
    assert rollout.turns[1].prompt_tokens == [*prompt, 20, unknown, 0, EOS, 21, *CHARS.encode("on")]


async def test_tokens_as_observations_are_taken_as_they_are():
    rollout = await play(
        AsyncScriptedEnv(Step(observation=[7, EOS]), first=[5, 6]), policy([8], [9]), limits(max_turns=2)
    )
    assert [turn.prompt_tokens for turn in rollout.turns] == [[5, 6], [5, 6, 8, 7, EOS]]


async def test_what_was_sampled_is_what_is_trained():
    family, one = Calculator.Config().build(), policy("[12*34]", "408<eos>", "[1*3]", "3<eos>")
    group = await run_group(
        workflow_of(family.environment, LIMITS), TASK, one, 1, group_id="0/0", seed=0, reward=family, reward_timeout_s=5
    )
    sampler = one.generator
    assert group.rewards == [1.0]
    data = to_datums([group], AlgorithmConfig())
    whole = torch.cat([data[-1].tokens, data[-1].target_tokens[-1:]]).tolist()
    assert whole == CHARS.encode("12*34=[12*34]408;408") + [EOS]
    assert whole[: len(sampler.asked[1][0])] == sampler.asked[1][0]
    # Every sampled token is the target of exactly one position with a loss, no other token of any.
    trained = [
        token
        for datum in data
        for token, mask in zip(datum.target_tokens.tolist(), datum.loss_inputs["loss_mask"])
        if mask
    ]
    assert trained == CHARS.encode("[12*34]408") + [EOS]


async def test_limits_of_turns_tokens_and_time():
    three = await play(echo(), policy("a<eos>", "a<eos>", "a<eos>"), limits(max_turns=3))
    assert (three.end_reason, len(three.turns), three.reward) == ("turns", 3, 1.5)

    # "go" 2, "ab" 2, "on" 2: of the ten tokens allowed four are left, of which the second completion may use all.
    policy_ = policy("ab", "abcdefgh")
    tokens = await play(echo(), policy_, limits(max_turns=9, max_tokens=10))
    assert (tokens.end_reason, len(tokens.turns)) == ("tokens", 2)
    assert [params.max_tokens for _, params in policy_.generator.asked] == [10 - 2, 10 - 6]
    assert tokens.turns[1].completion.truncated and text(tokens.turns[1].completion.tokens) == "abcd"
    assert max(len(turn.prompt_tokens) + len(turn.completion.tokens) for turn in tokens.turns) == 10

    async def slow(said):
        if said == "b":
            await asyncio.sleep(5)
        return Step(observation="on", reward=0.5)

    time_ = await play(AsyncScriptedEnv(slow), policy("a", "b"), limits(max_turns=9, timeout_s=0.1))
    assert (time_.end_reason, len(time_.turns), time_.reward) == ("time", 2, 0.5)


async def test_a_completion_is_no_longer_than_the_policys_own_limit():
    policy_ = policy("a", "b", max_tokens=3)
    await play(echo(), policy_, limits(max_turns=2))
    assert [params.max_tokens for _, params in policy_.generator.asked] == [3, 3]


async def test_every_turn_samples_from_a_stream_of_its_own():
    async def seeds(seed):
        policy_ = policy("a", "b")
        await play(echo(), policy_, limits(max_turns=2), seed=seed)
        return [params.seed for _, params in policy_.generator.asked]

    assert await seeds(7) == [stable_hash(7, 0) >> 1, stable_hash(7, 1) >> 1] == await seeds(7)
    assert len({*await seeds(7), *await seeds(8)}) == 4


async def test_it_is_closed_however_it_ends():
    done, broken = echo(), echo(observation=None)
    await play(done, policy("a"), limits(max_turns=1))
    with pytest.raises(RuntimeError, match="environment=AsyncScriptedEnv: step gave NoneType"):
        await play(broken, policy("a"))
    assert (done.closed, broken.closed) == (1, 1)


async def test_a_first_prompt_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="its prompt has 70 tokens, sampling.max_prompt_tokens=64"):
        await play(AsyncScriptedEnv(first="a" * 70), policy("a"), limits(max_turns=1, max_tokens=99))


async def test_observations_keep_to_one_kind():
    with pytest.raises(ValueError, match="is messages where the first was text"):
        await play(echo(observation=[{"role": "user", "content": "x"}]), policy("a"))


async def test_a_family_without_environments_is_played_in_one_turn_and_judged():
    family = LetterSort.Config().build()
    task = Task(id="letter_sort/train/0", prompt="cab=", answer="abc")
    group = await run_group(
        single_turn, task, policy("abc<eos>", "cba<eos>"), 2, group_id="0/0", seed=0, reward=family, reward_timeout_s=5
    )
    assert group.rewards == [1.0, 0.0] and group.rollouts[0].turns[0].reward is None
    assert [rollout.end_reason for rollout in group.rollouts] == ["", ""]


async def test_a_family_may_have_environments_for_some_tasks_only():
    family = Family(
        environment=lambda task: echo() if task.id == "several" else None,
        reward=lambda task, completions: [9.0] * len(completions),
    )

    async def run(task_id, *said):
        workflow = workflow_of(family.environment, limits(max_turns=2))
        return await run_group(
            workflow,
            Task(id=task_id, prompt="go"),
            policy(*said),
            1,
            group_id="0/0",
            seed=0,
            reward=family,
            reward_timeout_s=5,
        )

    assert (await run("several", "a", "b")).rewards == [1.0]
    assert (await run("one", "a")).rewards == [9.0]


async def test_rewards_of_steps_that_add_up_to_more_than_a_million_are_a_failure_of_the_environment():
    with pytest.raises(
        EnvironmentFailed, match="environment=AsyncScriptedEnv: the rewards of its steps add up to 1.2e.06 for"
    ):
        await play(echo(reward=6e5), policy("a", "b"), limits(max_turns=2))
    with pytest.raises(
        EnvironmentFailed, match="environment=AsyncScriptedEnv: the parts 'size' of its steps add up to 1.2e.06"
    ):
        await play(echo(reward_parts={"size": 6e5}), policy("a", "b"), limits(max_turns=2))


async def test_a_workflow_that_returns_something_else_is_told_so():
    async def workflow(task, policy, *, rollout_id, seed):
        return None

    with pytest.raises(RuntimeError, match="algorithm.workflow: returned NoneType for task 'calculator/train/1'"):
        await run_group(workflow, TASK, policy(), 1, group_id="0/0", seed=0, reward=None, reward_timeout_s=5)


async def test_attempts_lets_a_single_turn_task_be_mended():
    family = LetterSort.Config().build()
    task = Task(id="letter_sort/train/0", prompt="cab=", answer="abc")

    def attempts():
        return Attempts(task, family.reward, num_attempts=2, remark=" no:")

    mended = await play(attempts(), policy("acb", "abc"), task=task)
    assert ([turn.reward for turn in mended.turns], mended.end_reason) == ([0.0, 1.0], "done")
    assert text(mended.turns[1].prompt_tokens) == "cab=acb no:"
    lost = await play(attempts(), policy("acb", "ba"), task=task)
    # ba: no pair of its one is in order.
    assert ([turn.reward for turn in lost.turns], lost.end_reason) == ([0.0, 0.0], "done")


async def test_parts_of_an_environments_reward_add_up_over_its_steps():
    steps = [Step(reward_parts={"said": 2.0, "called": 1.0}) for _ in range(2)]
    last = Step(reward_parts={"said": 3.0}, done=True)
    rollout = await play(AsyncScriptedEnv(*steps, last), policy("12", "34", "408<eos>"))
    assert rollout.reward_parts == {"said": 7.0, "called": 2.0}

    with pytest.raises(
        RuntimeError, match="step gave reward part 'said' nan for task 'calculator/train/1'; give a fin"
    ):
        await play(echo(reward_parts={"said": float("nan")}), policy("12"))


async def test_several_attempts_take_any_reward_and_keep_its_parts():
    async def exact(task, completions):
        return [float(completion == task.answer) for completion in completions]

    task = Task(id="t/0", prompt="12*34=", answer="408")
    rollout = await play(Attempts(task, Rewards({"exact": (exact, 2.0)}), num_attempts=3), policy("7<eos>", "408<eos>"))
    assert [turn.reward for turn in rollout.turns] == [0.0, 2.0]
    assert rollout.reward_parts == {"exact": 1.0}


class Closed(AsyncScriptedEnv):
    """Counts the calls of `close`; `how` closes."""

    def __init__(self, how, **step):
        super().__init__(Step(observation="on", reward=0.5, done=True))
        self.how, self.closed = how, 0


class ClosedAsync(Closed):
    async def close(self):
        await asyncio.sleep(0)
        self.closed += 1
        await self.how()


class ClosedInThread(Closed):
    def close(self):
        self.closed += 1
        self.how()


async def test_an_async_close_is_awaited():
    async def nothing():
        pass

    env = ClosedAsync(nothing)
    assert (await play(env, policy("a<eos>"))).reward == 0.5 and env.closed == 1


async def test_a_close_that_takes_long_stops_neither_the_loop_nor_the_run():
    waits = threading.Event()
    env, short = ClosedInThread(waits.wait), Limits(max_turns=4, max_tokens=64, timeout_s=10.0, step_timeout_s=0.2)
    with pytest.raises(EnvironmentFailed, match="environment=ClosedInThread: close gave no answer .* within 0.2 s"):
        await play(env, policy("a<eos>"), short)
    waits.set()


async def test_a_close_that_raises_names_the_environment():
    def gone():
        raise OSError("gone")

    with pytest.raises(EnvironmentFailed, match="environment=ClosedInThread: close raised OSError: gone for task"):
        await play(ClosedInThread(gone), policy("a<eos>"))


async def test_a_close_that_fails_after_the_rollout_has_failed_hides_no_cause(caplog):
    class HalfMade(Env):
        def reset(self):
            raise ValueError("the data set is not mounted")

        def step(self, text):
            raise AssertionError

        def close(self):
            self.browser.quit()

    with pytest.raises(EnvironmentFailed, match="HalfMade: reset raised ValueError: the data set is not mounted for"):
        await play(HalfMade(), policy("a<eos>"))
    assert "HalfMade: close raised AttributeError" in caplog.text and "the rollout had failed before" in caplog.text


async def test_an_environment_that_cannot_be_made_is_a_failure_of_the_environment():
    def environment(task):
        raise ConnectionError("no simulator on port 5000")

    message = r"environment\(task\) raised ConnectionError: no simulator on port 5000 for task 'calculator/train/1'"
    with pytest.raises(EnvironmentFailed, match=message):
        await workflow_of(environment, LIMITS)(TASK, policy(), rollout_id="0/0/0", seed=7)


async def test_a_reset_that_is_late_is_closed_after_it_has_ended():
    released, calls = threading.Event(), []

    class Slow(Env):
        def reset(self):
            released.wait(10)
            calls.append("reset")
            return "x"

        def step(self, text):
            raise AssertionError

        def close(self):
            calls.append("close")

    short = Limits(max_turns=4, max_tokens=64, timeout_s=10.0, step_timeout_s=0.1)
    with pytest.raises(EnvironmentFailed, match="reset gave no answer"):
        await play(Slow(), policy("a<eos>"), short)
    assert calls == []
    released.set()
    for _ in range(200):
        if len(calls) == 2:
            break
        await asyncio.sleep(0.01)
    assert calls == ["reset", "close"]
