"""Environments of verifiers 0.4, unmodified: their tasks, and episodes that meet the policy at the gateway."""

import os
import shutil
import sys
import types
from pathlib import Path

import pytest

from tests.kit.sampler import policy
from tests.unit.serve.opened import BYTES, END
from torchtitan_rl.rollout.external import AgentFailed, SessionLimits, external
from torchtitan_rl.serve.gateway import Gateway
from torchtitan_rl.tasks.verifiers import Verifiers

vf = pytest.importorskip("verifiers.v1", reason="an extra of its own: bash scripts/setup.sh verifiers")

ENVIRONMENTS = str(Path(__file__).parents[3] / "environments")
LAST_LETTER = {"taskset": {"id": "last_letter"}}


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.syspath_prepend(ENVIRONMENTS)


class NumberData(vf.TaskData):
    number: int


class NumberTask(vf.Task[NumberData]):
    @vf.reward(weight=2.0)
    async def found(self, task, trace) -> float:
        return float(trace.last_reply == str(task.number))

    @vf.metric
    async def replies(self, trace) -> float:
        return float(trace.num_turns)


class Numbers(vf.Taskset[NumberTask]):
    def load(self):
        for number in range(10):
            yield NumberTask(NumberData(prompt=f"{number}?", number=number, system_prompt="find"), self.config.task)


class HigherConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Higher(vf.Env[HigherConfig]):
    """Says whether the number is higher or lower."""

    async def run(self, task, agents):
        async with agents.player.interaction(task) as game:
            segment = await game.turn()
            for _ in range(2):
                if segment.terminated or segment.last_reply == str(task.data.number):
                    return
                segment = await game.turn("higher" if task.data.number > int(segment.last_reply) else "lower")


class TwoConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class Two(vf.Env[TwoConfig]):
    async def run(self, task, agents):
        await agents.first.run(task)


class Endless(Numbers):
    INFINITE = True


def package(name, *classes):
    module = types.ModuleType(name)
    module.__all__ = [cls.__name__ for cls in classes]
    for cls in classes:
        setattr(module, cls.__name__, cls)
    sys.modules[name] = module
    return {"taskset": {"id": name}}


HIGHER = package("higher_v1", Numbers, Higher)
PLAIN = package("numbers_v1", Numbers)
TWO = package("two_v1", Numbers, Two)
ENDLESS = package("endless_v1", Endless)


class Measure(vf.Toolset[vf.ToolsetConfig, vf.State]):
    """A tool server that no file defines."""


class MeasuredTask(NumberTask):
    @classmethod
    def toolsets(cls, config):
        return [Measure(vf.ToolsetConfig())]


class Measured(vf.Taskset[MeasuredTask]):
    def load(self):
        for number in range(10):
            yield MeasuredTask(NumberData(prompt=f"{number}?", number=number), self.config.task)


Measure.__module__ = "nowhere_v1"
TOOLS_OF_NO_FILE = package("measured_v1", Measured)


def family(env=HIGHER, **config):
    return Verifiers.Config(env=env, **({"num_validation": 2, "num_test": 3} | config)).build()


async def play(env, task, *texts, context_tokens=256, timeout_s=120, **settings):
    made = policy(*texts, tokenizer=BYTES, for_training=True, max_tokens=64)
    async with Gateway(context_tokens=context_tokens) as gateway:
        workflow = external(Verifiers.agent(env), timeout_s=timeout_s, **settings)
        workflow.attach(gateway)
        return await workflow(task, made, rollout_id="0/0/0", seed=5), made.generator


def test_the_splits_share_no_task():
    numbers = family()
    ids = [
        numbers.task(s, i).answer["idx"] for s in ("train", "validation", "test") for i in range(numbers.num_tasks(s))
    ]
    assert sorted(ids) == list(range(10)) and [numbers.num_tasks(s) for s in ("train", "test")] == [5, 3]
    assert numbers.task("train", 1).prompt[0] == {"role": "system", "content": "find"}
    with pytest.raises(RuntimeError, match="judges its own rollouts"):
        numbers.reward(numbers.task("train", 0), ["1"])


async def test_an_episode_of_several_turns_has_the_tokens_that_were_sampled():
    task = family().task("train", 0)
    number = task.answer["number"]
    rollout, sampler = await play(HIGHER, task, f"{number - 1}{END}", f"{number}{END}")
    assert (rollout.reward, rollout.reward_parts) == (2.0, {"found": 2.0, "replies": 2.0})
    assert [turn.prompt_tokens for turn in rollout.turns] == [tokens for tokens, _ in sampler.asked]
    assert BYTES.decode(rollout.turns[1].prompt_tokens) == (
        f"<|system|>find{END}<|user|>{number}?{END}<|assistant|>{number - 1}{END}<|user|>higher{END}<|assistant|>"
    )
    assert rollout.counts["drift"] == 0
    assert not [name for name in os.environ if name.startswith("SESSION_API_KEY")]


async def test_the_environment_of_the_example():
    letters = family(LAST_LETTER, num_validation=64, num_test=128, demonstrate=lambda data, rng: data.prompt[0])
    task = letters.task("train", 3)
    word = task.prompt[0]["content"]
    assert (task.answer["answer"], task.demonstration) == (word[-1], word[0])
    assert letters.task("test", 3).demonstration is None
    assert (await play(LAST_LETTER, task, word[-1] + END))[0].reward == 1.0
    assert (await play(LAST_LETTER, task, "?" + END))[0].reward == 0.0


async def test_a_limit_of_the_session_ends_the_rollout_and_a_fault_is_a_failure():
    task = family().task("train", 0)
    rollout, _ = await play(HIGHER, task, f"77{END}", f"78{END}", session=SessionLimits(max_turns=1))
    assert (rollout.end_reason, rollout.reward, len(rollout.turns)) == ("turns", 0.0, 1)
    with pytest.raises(AgentFailed, match="ValueError"):
        await play(HIGHER, task, f"no number{END}")


@pytest.mark.slow
async def test_tools_by_the_packages_own_harness(tmp_path, monkeypatch):
    """The harness `null` installs its program with uv, and starts a process and a tool server for the rollout; this
    process alone has the environment's directory on its path."""
    if shutil.which("uv") is None:
        pytest.skip("uv is not on PATH, and the package would fetch it")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "word_lengths.py").write_text(TOOLS)
    env = {"taskset": {"id": "word_lengths"}, "agent": {"harness": {"id": "null"}}}
    task = family(env).task("train", 0)
    word = task.prompt[0]["content"]
    texts = [f'[lengths_length_of(word="{word}")]{END}', f"{len(word)}{END}"]
    rollout, sampler = await play(env, task, *texts, tool_parser="pythonic", context_tokens=4096)
    first, second = rollout.turns
    assert "length_of" in BYTES.decode(first.prompt_tokens)
    assert rollout.reward == 1.0 and rollout.counts["malformed"] == 0
    assert second.prompt_tokens[: len(first.prompt_tokens)] == first.prompt_tokens
    assert f"<|tool|>{len(word)}{END}" in BYTES.decode(second.prompt_tokens)


TOOLS = """
import verifiers.v1 as vf

__all__ = ["WordLengths"]


class Lengths(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = "lengths"

    @vf.tool
    async def length_of(self, word: str) -> str:
        "length"
        return str(len(word))


class LengthData(vf.TaskData):
    answer: str


class LengthTask(vf.Task[LengthData]):
    @classmethod
    def toolsets(cls, config):
        return [Lengths(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)


class WordLengths(vf.Taskset[LengthTask]):
    def load(self):
        for length in range(1, 11):
            yield LengthTask(LengthData(prompt="a" * length, answer=str(length)), self.config.task)


if __name__ == "__main__":
    Lengths.run()
"""


@pytest.mark.parametrize(
    "env, config, message",
    [
        (
            TOOLS_OF_NO_FILE,
            {},
            "Measure is of module 'nowhere_v1', which a process of its own cannot import .*No module",
        ),
        (TWO, {}, "has 2 agents"),
        (ENDLESS, {}, "is endless"),
        (PLAIN, {"num_test": 8}, "leave nothing to train on of 10 tasks"),
    ],
)
def test_what_does_not_fit_is_refused(env, config, message):
    with pytest.raises(ValueError, match=message):
        family(env, **config)
