"""What an environment may not do, and what is said when it does."""

import asyncio
import time

import pytest

from tests.kit.environment import AsyncScriptedEnv, ScriptedEnv
from torchtitan_rl.rollout.episode import Episode
from torchtitan_rl.tasks.env import Step
from torchtitan_rl.types import Task

TASK = Task(id="play/1", prompt="?")


async def steps_of(env, *texts, timeout_s=5.0):
    episode = Episode(env, TASK, timeout_s)
    return await episode.reset(), [await episode.step(text) for text in texts]


async def test_reset_then_steps():
    env = ScriptedEnv(Step(observation="on", reward=0.5), Step(reward=1, done=True))
    first, (one, two) = await steps_of(env, "a", "b")
    assert first == "go" and (one.observation, one.reward, two.done) == ("on", 0.5, True)


async def test_an_async_environment_runs_on_the_event_loop():
    async def step(text):
        await asyncio.sleep(0)
        return Step(done=True)

    assert (await steps_of(AsyncScriptedEnv(step, first=[3, 4]), "a"))[0] == [3, 4]


async def test_it_is_played_once():
    env = ScriptedEnv(Step(done=True))
    await steps_of(env, "a")
    with pytest.raises(
        RuntimeError, match="environment=ScriptedEnv: has been played before, for task 'play/1'; make a"
    ):
        await steps_of(env)


async def test_a_step_before_reset_or_after_the_end_is_refused():
    with pytest.raises(RuntimeError, match="step before reset or after the end"):
        await Episode(ScriptedEnv(), TASK, 5.0).step("a")
    with pytest.raises(RuntimeError, match="step before reset or after the end"):
        await steps_of(ScriptedEnv(Step(done=True), Step(done=True)), "a", "b")


async def test_something_that_is_no_environment_is_refused():
    with pytest.raises(RuntimeError, match="environment=dict: is not an Env, for task 'play/1'"):
        await steps_of({})


@pytest.mark.parametrize(
    "answer, message",
    [
        (None, "step returned NoneType .*return a Step"),
        (Step(reward=float("nan"), done=True), "step gave reward nan .*finite number"),
        (Step(reward="1", done=True), "step gave reward '1'"),
        (Step(reward=1.7e308, done=True), "step gave reward 1.7e.308 .*between -1e.06 and 1e.06"),
        (Step(reward_parts={"size": -1e7}), "step gave reward part 'size' -10000000.0 .*between -1e.06 and 1e.06"),
        (Step(observation=None), "step gave NoneType None .*give text, a list of messages or a list of tokens"),
        (Step(observation=[]), r"step gave list \[\]"),
        (Step(observation=[{"content": "no role"}]), "step gave list"),
        (Step(observation=[1, "2"]), "step gave list"),
    ],
)
async def test_answers_that_make_no_sense_are_refused(answer, message):
    with pytest.raises(RuntimeError, match=message):
        await steps_of(ScriptedEnv(answer), "a")


@pytest.mark.parametrize("raised", [KeyError("x"), StopIteration("x"), SystemExit("x")])
async def test_what_it_raises_names_it_and_the_task(raised):
    def broken(text):
        raise raised

    with pytest.raises(RuntimeError, match="environment=ScriptedEnv: step raised .*x.* for task 'play/1'; mend it"):
        await steps_of(ScriptedEnv(broken), "a")


@pytest.mark.parametrize("raised", [SystemExit("x"), asyncio.CancelledError("x")])
async def test_an_async_environment_that_leaves_fails_its_attempt_alone(raised):
    async def broken(text):
        raise raised

    with pytest.raises(RuntimeError, match="environment=AsyncScriptedEnv: step raised .*x for task 'play/1'; mend it"):
        await steps_of(AsyncScriptedEnv(broken), "a")


async def test_an_episode_that_is_cancelled_is_no_failure():
    async def wait(text):
        await asyncio.Event().wait()

    playing = asyncio.ensure_future(steps_of(AsyncScriptedEnv(wait), "a"))
    await asyncio.sleep(0.01)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


async def test_a_plain_step_may_return_what_is_awaited():
    async def step(text):
        return Step(done=True)

    assert (await steps_of(ScriptedEnv(lambda text: step(text)), "a"))[1][0].done


async def test_a_plain_step_that_never_returns_ends_at_its_deadline():
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="step gave no answer for task 'play/1' within 0.1 s"):
        await steps_of(ScriptedEnv(lambda text: time.sleep(2)), "a", timeout_s=0.1)
    assert time.monotonic() - start < 1.5


async def test_an_async_step_that_waits_for_ever_ends_at_its_deadline():
    async def wait(text):
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="environment=AsyncScriptedEnv: step gave no answer"):
        await steps_of(AsyncScriptedEnv(wait), "a", timeout_s=0.5)


async def test_a_timeout_of_its_own_is_an_error_like_others():
    def broken(text):
        raise TimeoutError("the socket")

    with pytest.raises(RuntimeError, match="step raised TimeoutError: the socket"):
        await steps_of(ScriptedEnv(broken), "a")
