"""A call of the run's reward on two made-up completions of a real task, before a process starts."""

from __future__ import annotations

import inspect

from torchtitan_rl.algorithm.advantages import estimate_advantages, sees_group
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.tasks.env import Env
from torchtitan_rl.tasks.family import TaskFamily
from torchtitan_rl.tasks.judging import judge
from torchtitan_rl.tasks.mixture import Mixture
from torchtitan_rl.tasks.reward_parts import Parts
from torchtitan_rl.types import Task
from torchtitan_rl.types.score_parts import SCORE, TASK_REWARD
from torchtitan_rl.validation.functions import made_up_group

__all__ = ["check_reward"]


async def check_reward(config: RunConfig, family: TaskFamily) -> None:
    """Raises RuntimeError where a reward fails on two made-up completions, one of them empty, of the first train task;
    of a mixture, of each family's first. Raises ValueError where the estimator asks for a reward part that they lack.

    Not where the task's environment or a workflow of the user's own gives the rewards, nor with
    `controller.check_reward=False`.
    """
    if not config.controller.check_reward or config.algorithm.workflow is not None:
        return
    for index in range(len(family.families) if isinstance(family, Mixture) else 1):
        task = family.task("train", index)
        environment = getattr(family, "environment", None)
        if environment is not None and (env := environment(task)) is not None:
            if isinstance(env, Env) and inspect.isawaitable(closing := env.close()):
                await closing
            continue
        texts = (task.demonstration, task.answer, "made up")
        completions = ["", next(text for text in texts if isinstance(text, str) and text)]
        parts: Parts = {}
        rewards = await _judged(config, family, task, completions, parts)
        if config.roles.reward_model is not None:
            _check_names(parts)
            parts |= {TASK_REWARD: rewards, SCORE: [0.0] * len(rewards)}
        _check_parts(config.algorithm, rewards, parts)


async def _judged(
    config: RunConfig, family: TaskFamily, task: Task, completions: list[str], parts: Parts
) -> list[float]:
    """Asks a reward once, or as often as the run would where rollouts may fail."""
    algorithm = config.algorithm
    for left in reversed(range(1 if algorithm.on_rollout_failure == "fail" else 1 + algorithm.rollout_retries)):
        try:
            return await judge(family, task, completions, config.controller.reward_timeout_s, parts)
        except RuntimeError as error:
            if not left:
                called = "called on two made-up completions; --no-reward-check skips this call"
                raise RuntimeError(f"{error}\n{called}") from error
    raise AssertionError("the last attempt returns or raises")


def _check_names(parts: Parts) -> None:
    """Refuses parts by the names that a reward model's parts have."""
    if taken := [name for name in (TASK_REWARD, SCORE) if name in parts]:
        raise ValueError(
            f"reward part {taken[0]!r}: is the name of a part that roles.reward_model adds; give yours another name"
        )


def _check_parts(algorithm: AlgorithmConfig, rewards: list[float], parts: Parts) -> None:
    """Calls an estimator that sees groups on the two completions, with their rewards and reward parts."""
    hooks = algorithm.trajectory_grouping_hook, algorithm.after_rewards  # may add parts
    estimator = algorithm.advantage_fn
    if isinstance(estimator, dict) or not sees_group(estimator) or any(hook is not None for hook in hooks):
        return
    group = made_up_group("probe/0", rewards, algorithm)
    for i, rollout in enumerate(group.rollouts):
        rollout.reward_parts = {name: numbers[i] for name, numbers in parts.items()}
    try:
        estimate_advantages([group], algorithm)
    except ValueError as error:
        text = str(error)
        setting = "" if text.startswith("algorithm.") else "algorithm.advantage_fn: "
        raise ValueError(
            f"{setting}{text}\ncalled on two made-up completions; --no-reward-check skips this call"
        ) from error
