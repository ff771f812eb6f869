"""Checks of filters, grouping, precomputed advantages and a curriculum before a process starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torchtitan_rl.algorithm.advantages import estimate_advantages, estimators_of
from torchtitan_rl.algorithm.group_estimators import gdpo
from torchtitan_rl.config.algorithm import AlgorithmConfig, FilterConfig
from torchtitan_rl.config.resolve import function_name
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.health.siblings import compares_siblings
from torchtitan_rl.tasks.curriculum import Curriculum
from torchtitan_rl.tasks.mixture import Mixture
from torchtitan_rl.tasks.pass_rate_filter import PassRateFilter
from torchtitan_rl.validation.algorithm import check_function
from torchtitan_rl.validation.functions import made_up_group

__all__ = ["check_batches"]


def check_batches(config: RunConfig) -> None:
    """Raises ValueError for the first mistake in filters, grouping, precomputed advantages or a curriculum; changes
    nothing."""
    _check_filters(config)
    _check_grouping(config.algorithm)
    _check_group_of_one(config)
    _check_source(config.algorithm)
    _check_curriculum(config)


def _check_source(algorithm: AlgorithmConfig) -> None:
    source = algorithm.batch_source
    if source is None:
        return
    check_function("algorithm.batch_source", source)
    if algorithm.max_policy_lag:
        raise ValueError(
            f"algorithm.batch_source={function_name(source)}: makes batches one at a time, and "
            f"algorithm.max_policy_lag={algorithm.max_policy_lag} plays them ahead; use max_policy_lag=0"
        )
    try:
        inspect.signature(source).bind(None, None, None)
    except TypeError as error:
        raise ValueError(
            f"algorithm.batch_source={function_name(source)}: cannot be called with (player, draws, state): {error}; "
            "give it these three parameters"
        ) from None


def _check_curriculum(config: RunConfig) -> None:
    """Refuses a curriculum that would draw without counting."""
    for inner in _inner_tasks(config.task):
        if isinstance(inner, Curriculum.Config):
            raise ValueError(
                f"task={type(config.task).__qualname__.partition('.')[0]}: has a Curriculum inside, whose pass rates "
                "nothing would count; make the Curriculum the run's task, around one family"
            )
    if not isinstance(config.task, Curriculum.Config):
        return
    algorithm = config.algorithm
    if algorithm.max_policy_lag:
        raise ValueError(
            f"algorithm.max_policy_lag={algorithm.max_policy_lag}: draws tasks before the batches ahead of them are "
            "counted, and task=Curriculum draws by these counts; use max_policy_lag=0, or PassRateFilter"
        )
    if algorithm.batch_source is not None:
        raise ValueError(
            f"algorithm.batch_source={function_name(algorithm.batch_source)}: takes the place of the batches that "
            "task=Curriculum counts; leave out one of the two"
        )


def _inner_tasks(task: Any) -> list[Any]:
    """The configs of the families inside the task of a run, at every depth."""
    if isinstance(task, Mixture.Config):
        inner = list(task.tasks.values())
    else:
        inner = [task.task] if isinstance(task, (PassRateFilter.Config, Curriculum.Config)) else []
    return inner + [deeper for one in inner for deeper in _inner_tasks(one)]


def _check_group_of_one(config: RunConfig) -> None:
    algorithm = config.algorithm
    if algorithm.group_size != 1 or not compares_siblings(config) or isinstance(algorithm.advantage_fn, dict):
        return
    groups = [made_up_group(f"probe/{i}", [float(i)], algorithm) for i in range(3)]
    estimate_advantages(groups, algorithm)
    if not any(advantage for group in groups for advantage in group.advantages or ()):
        raise ValueError(
            f"algorithm.group_size=1: {function_name(algorithm.advantage_fn)} compares the rollouts of a task, so one "
            "alone has the advantage 0 and nothing trains; use 2 or more, advantages.reinforce, or a critic"
        )


def _check_filters(config: RunConfig) -> None:
    """Refuses a filter that no group can pass, a share of groups without signal that every batch has, and a setting
    that no filter reads."""
    algorithm, filters, where = config.algorithm, config.algorithm.filters, "algorithm.filters"
    if filters.max_resamples and not filters.drops and algorithm.on_rollout_failure == "fail":
        raise ValueError(
            f"{where}.max_resamples={filters.max_resamples}: has no effect, as no filter leaves groups "
            f"out; set {where}.zero_variance or {where}.overlong='drop', or use 0"
        )
    compared = algorithm.trajectory_grouping_hook is None and algorithm.precomputed_advantages != "require"
    if algorithm.group_size == 1 and compared:
        if filters.zero_variance:
            raise ValueError(
                f"{where}.zero_variance=True: can never pass a group of algorithm.group_size=1, whose reward "
                "is equal to itself; raise group_size or use False"
            )
        if share := config.controller.stop.max_no_signal:
            raise ValueError(
                f"controller.stop.max_no_signal={share:g}: would end every run of algorithm.group_size=1, as the "
                "reward of a group of one is equal to itself; raise group_size or use 0"
            )
    if filters.overlong == "penalty" and algorithm.precomputed_advantages == "require" and config.roles.critic is None:
        raise ValueError(
            f"{where}.overlong='penalty': lowers the reward, and with algorithm.precomputed_advantages='require' "
            "advantages come with the turns; use 'mask' or 'drop'"
        )
    if filters.overlong == "penalty" and any(map(_reads_parts_alone, estimators_of(algorithm).values())):
        raise ValueError(
            f"{where}.overlong='penalty': lowers the reward, and gdpo reads reward parts alone; use 'mask' or 'drop', "
            "or make the length a part of the reward"
        )
    if filters.overlong != "penalty":
        for name in ("overlong_buffer", "overlong_penalty"):
            value, default = getattr(filters, name), getattr(FilterConfig(), name)
            if value != default:
                raise ValueError(
                    f"{where}.{name}={value}: has no effect with overlong={filters.overlong!r}; use "
                    f"overlong='penalty' or {default}"
                )
        return
    if filters.overlong_buffer > config.sampling.max_tokens:
        raise ValueError(
            f"{where}.overlong_buffer={filters.overlong_buffer}: must be between 0 and "
            f"sampling.max_tokens={config.sampling.max_tokens}"
        )


def _reads_parts_alone(estimator: Callable) -> bool:
    return (estimator.func if isinstance(estimator, partial) else estimator) is gdpo


def _check_grouping(algorithm: AlgorithmConfig) -> None:
    hook = algorithm.trajectory_grouping_hook
    if hook is None:
        return
    if not callable(hook) or inspect.iscoroutinefunction(hook):
        raise ValueError(
            f"algorithm.trajectory_grouping_hook={hook!r}: is not a plain function; give a function "
            "(rollouts, config) -> list[RolloutGroup]"
        )
    try:
        inspect.signature(hook).bind([], algorithm)
    except TypeError as error:
        raise ValueError(
            f"algorithm.trajectory_grouping_hook={function_name(hook)}: cannot be called with (rollouts, "
            f"config): {error}; give it these two parameters"
        ) from None
