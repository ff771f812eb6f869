"""Values of another type than their field's, advice, rewards called before the start, groups of one."""

import dataclasses
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.kit.family import Family
from tests.kit.refusal import refusal
from tests.kit.run_config import run_config
from torchtitan_rl.algorithm import advantages, group_estimators
from torchtitan_rl.config.meshes import AdamWConfig, LoRAConfig
from torchtitan_rl.config.run import RoleConfig
from torchtitan_rl.tasks.calculator import Calculator
from torchtitan_rl.tasks.env import Env
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.tasks.mixture import Mixture
from torchtitan_rl.validation.rewards import check_reward
from torchtitan_rl.validation.run import advice, validate


def with_value(path: str, value: Any):
    config = run_config()
    *parents, last = path.split(".")
    target = config
    for name in parents:
        target = getattr(target, name)
    setattr(target, last, value)
    return config


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("trainer.optimizer.lr", "1e-3", "trainer.optimizer.lr='1e-3': is of type str, the field takes float; write"),
        ("seed", "3", "seed='3': is of type str, the field takes int; write seed=3, without quotes"),
        ("algorithm.group_size", 8.0, "algorithm.group_size=8.0: is of type float, the field takes int; give"),
        ("algorithm.group_size", True, "algorithm.group_size=True: is of type bool, the field takes int; give"),
        ("weight_sync.verify", 1, "weight_sync.verify=1: is of type int, the field takes bool; give"),
        ("sampling.stop", "x", "sampling.stop='x': is of type str, the field takes list[str]; give"),
        ("trainer.optimizer.betas", (0.9,), "trainer.optimizer.betas=(0.9,): is of type tuple, the field takes tu"),
        ("generator.model_runner", "v3", "generator.model_runner='v3': there is no such choice; use one of 'auto',"),
        ("generator.dtype", "float23", "generator.dtype='float23': there is no such choice; did you mean 'float32' or"),
        ("trainer.lora", 8, "trainer.lora=8: is of type int, the field takes meshes.LoRAConfig | None; give"),
        ("trainer.optimizer", AdamWConfig, "trainer.optimizer=AdamWConfig: is a class; write optimizer=AdamWConfig()"),
        ("task", LetterSort, "task=LetterSort: is a class, not a config of one; write task=LetterSort.Config()"),
        ("task", LetterSort.Config, "task=LetterSort.Config: is a class, not a config of one; write task"),
        ("supervised.task", LetterSort(LetterSort.Config()), "supervised.task: is a LetterSort, which has no build()"),
        ("algorithm.loss_config", {"clip_low": "0.2"}, "algorithm.loss_config.clip_low='0.2': is of type str, the fi"),
        ("task.max_letters", "6", "task.max_letters='6': is of type str, the field takes int; write max_letters=6"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_by_its_field(path, value, message):
    assert refusal(validate, with_value(path, value)).startswith(message)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("trainer.optimizer.lr", 1),
        ("trainer.optimizer.lr", np.float64(1e-3)),
        ("trainer.optimizer.betas", [0.9, 0.99]),
        ("trainer.training.max_norm", None),
        ("trainer.lora", LoRAConfig()),
        ("algorithm.advantage_fn", {"policy": advantages.grpo}),
    ],
)
def test_what_python_calls_another_type_and_means_the_same_is_accepted(path, value):
    validate(with_value(path, value))


def test_a_config_of_ones_own_may_have_loose_types():
    @dataclasses.dataclass
    class Loose:
        rows: int = None  # type: ignore[assignment]
        of: "SomewhereElse" = None  # type: ignore[name-defined]  # noqa: F821

        def build(self): ...

    config = with_value("task", Loose())
    validate(config)
    config.task.row = 3
    assert refusal(validate, config).endswith("Loose has no such field; did you mean rows?")


def test_advice():
    def said(**changes):
        config = run_config()
        config.controller.num_steps = 10
        for path, value in changes.items():
            *parents, last = path.split("__")
            target = config
            for name in parents:
                target = getattr(target, name)
            setattr(target, last, value)
        return [line.split(":")[0] for line in advice(config)]

    assert said() == []
    assert said(trainer__optimizer__lr=0.5) == ["trainer.optimizer.lr=0.5"]
    assert said(trainer__optimizer__lr=1e-12) == ["trainer.optimizer.lr=1e-12"]
    assert said(trainer__optimizer__lr=0.5, controller__num_steps=0) == []  # no step has this rate
    assert said(supervised__lr=2.0, supervised__num_steps=3) == ["supervised.lr=2"]
    assert said(algorithm__group_size=2) == ["algorithm.group_size=2"]
    assert said(algorithm__group_size=2, roles__critic=RoleConfig()) == []  # nothing is compared
    assert said(algorithm__group_size=1024) == ["algorithm.group_size=1024"]


@pytest.mark.parametrize("advantage_fn", [advantages.grpo, advantages.rloo, advantages.reinforce_pp_baseline])
def test_a_group_of_one_without_anything_to_compare_with_is_refused(advantage_fn):
    config = run_config()
    config.algorithm.group_size, config.algorithm.advantage_fn = 1, advantage_fn
    message = refusal(validate, config)
    assert message.startswith(f"algorithm.group_size=1: {advantage_fn.__module__}:{advantage_fn.__name__} compares")
    config.algorithm.advantage_fn = advantages.reinforce
    validate(config)
    config.algorithm.advantage_fn, config.controller.num_steps = advantage_fn, 0
    validate(config)


@pytest.mark.parametrize("norm", [0, 0.0, -1.0, float("nan")])
def test_a_gradient_clip_that_leaves_nothing_is_refused(norm):
    message = refusal(validate, with_value("trainer.training.max_norm", norm))
    assert message == f"trainer.training.max_norm={norm}: would scale every gradient to 0; use None for no clip"


# The reward before the start.


async def asked(task_config, **controller):
    config = run_config()
    config.task = task_config
    for name, value in controller.items():
        setattr(config.controller, name, value)
    await check_reward(config, config.task.build())


async def test_a_reward_sees_an_empty_completion_and_another():
    seen = []

    def reward(task, completions):
        seen.append((task.id, completions))
        return [0.0, 1.0]

    await asked(LetterSort.Config(reward=reward))
    ((task_id, completions),) = seen
    assert task_id == "letter_sort/train/0" and completions[0] == "" and completions[1]


async def test_a_reward_that_fails_names_its_line_and_the_way_out():
    def reward(task, completions):
        return [1.0 / len(completion) for completion in completions]

    for config in (LetterSort.Config(reward=reward), Mixture.Config(tasks={
        "fine": LetterSort.Config(), "other": LetterSort.Config(reward=reward)
    })):  # fmt: skip
        with pytest.raises(RuntimeError) as caught:
            await asked(config)
        line = reward.__code__.co_firstlineno + 1
        assert "raised ZeroDivisionError: float division by zero" in str(caught.value)
        assert f"(test_fields.py:{line})\ncalled on two made-up completions; --no-reward-check" in str(caught.value)
        await asked(config, check_reward=False)


async def test_an_environment_of_the_check_is_closed_by_an_async_close_too():
    closed = []

    class Opened(Env):
        async def reset(self):
            return "?"

        async def step(self, text):
            raise AssertionError("nothing is played")

        async def close(self):
            closed.append(self)

    config = run_config()
    await check_reward(config, Family(1, environment=lambda task: Opened()))
    assert len(closed) == 1


def in_parts(task, completions):
    return [0.5, 1.0], {"exact": [0.0, 1.0], "form": [1.0, 1.0]}


async def test_a_reward_has_the_parts_that_the_estimator_asks_for():
    def whole(task, completions):
        return [0.5, 1.0]

    async def asked_for(reward, advantage_fn, **controller):
        config = run_config()
        config.task, config.algorithm.advantage_fn = LetterSort.Config(reward=reward), advantage_fn
        validate(config)  # no reward is called here, so any part may be there
        for name, value in controller.items():
            setattr(config.controller, name, value)
        await check_reward(config, config.task.build())

    await asked_for(in_parts, group_estimators.gdpo)
    await asked_for(in_parts, partial(group_estimators.gdpo, weights={"exact": 1.0}))
    await asked_for(whole, group_estimators.opo)
    with pytest.raises(ValueError) as caught:
        await asked_for(whole, group_estimators.gdpo)
    assert str(caught.value) == (
        "algorithm.advantage_fn: gdpo: the rollouts of group probe/0 have no reward part in common; let the reward "
        "return (rewards, parts), as rewards.Rewards does, or name parts in weights\n"
        "called on two made-up completions; --no-reward-check skips this call"
    )
    misspelt = partial(group_estimators.gdpo, weights={"exact": 1.0, "format": 0.5})
    with pytest.raises(ValueError, match="^algorithm.advantage_fn: reward part 'format': .* has 'exact', 'form'; let"):
        await asked_for(in_parts, misspelt)
    await asked_for(in_parts, misspelt, check_reward=False)


async def test_a_reward_that_may_fail_is_asked_again():
    asks = []

    def reward(task, completions):
        asks.append(1)
        return [1.0 / (len(asks) - 1)] * 2

    config = run_config()
    config.task = LetterSort.Config(reward=reward)
    with pytest.raises(RuntimeError):
        await check_reward(config, config.task.build())
    asks.clear()
    config.algorithm.on_rollout_failure = "retry"
    await check_reward(config, config.task.build())
    assert len(asks) == 2


async def test_an_environments_rewards_are_its_own():
    await asked(Calculator.Config())


# What is said during a run, and how.


def test_a_closed_pipe_is_no_error():
    program = (
        "import sys, time; from torchtitan_rl.record.console.progress import Progress; p = Progress();"
        "[(p.line('line ' * 500), time.sleep(0.001)) for _ in range(200)]; p.final_table([('a', 'b')]);"
        "sys.stderr.write('the end')"
    )
    for command in ([sys.executable, "-c", program], [sys.executable, "-m", "torchtitan_rl.cli", "show",
                                                      "configs/quickstart.py"]):  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout and process.stderr
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(60) == 0 and "Error" not in errors and "rror:" not in errors, errors
        if "-c" in command:
            assert errors == "the end"
