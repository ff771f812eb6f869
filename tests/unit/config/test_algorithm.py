"""The deprecated stepwise mode, and settings of filters and grouping that are refused before a run."""

import copy
import dataclasses
import math
import warnings
from functools import partial
from pathlib import Path

import pytest

from tests.kit.refusal import refusal
from torchtitan_rl.algorithm import presets
from torchtitan_rl.algorithm.group_estimators import gdpo
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.config.load import apply_overrides, load_config
from torchtitan_rl.config.resolve import resolved
from torchtitan_rl.validation.run import validate

QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.py")


def test_per_step_warns_once_and_is_broadcast():
    with pytest.warns(DeprecationWarning) as caught:
        config = AlgorithmConfig(stepwise_mode="per_step")
    assert [str(warning.message) for warning in caught] == [
        "algorithm.stepwise_mode='per_step': is deprecated and now means 'broadcast'; to weigh turns one by one set "
        "algorithm.trajectory_grouping_hook (docs/grouping.md)"
    ]
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config.stepwise_mode == copy.deepcopy(config).stepwise_mode == "broadcast"
        assert dataclasses.replace(config) == AlgorithmConfig() == AlgorithmConfig(stepwise_mode="broadcast")


def test_per_step_from_the_shell_is_broadcast_too():
    run = load_config(QUICKSTART)
    with pytest.warns(DeprecationWarning, match="trajectory_grouping_hook"):
        apply_overrides(run, ["--algorithm.stepwise-mode", "per_step"])
    assert resolved(run)["algorithm"]["stepwise_mode"] == "broadcast"


@pytest.mark.parametrize("mode", ["per-step", "", None, 1])
def test_any_other_mode_is_refused_at_once(mode):
    message = f"algorithm.stepwise_mode={mode!r}: is not a mode; use 'broadcast'"
    with pytest.raises(ValueError) as caught:
        AlgorithmConfig(stepwise_mode=mode)
    assert str(caught.value) == message
    with pytest.raises(ValueError, match="^algorithm.stepwise_mode="):
        AlgorithmConfig().stepwise_mode = mode


def refused(**settings):
    """The message with which the quickstart is refused with other settings of `algorithm`; `filters__x` sets a
    filter."""
    run = load_config(QUICKSTART)
    for name, value in settings.items():
        target = run.algorithm.filters if name.startswith("filters__") else run.algorithm
        setattr(target, name.removeprefix("filters__"), value)
    return refusal(validate, run)


def accepted(**settings):
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refused(**settings)


def test_a_filter_that_nothing_can_pass_is_refused():
    assert refused(filters__zero_variance=True, group_size=1) == (
        "algorithm.filters.zero_variance=True: can never pass a group of algorithm.group_size=1, whose reward is equal "
        "to itself; raise group_size or use False"
    )
    accepted(filters__zero_variance=True, group_size=2)
    accepted(filters__zero_variance=True, group_size=1, precomputed_advantages="require")


def test_a_penalty_that_no_advantage_would_see_is_refused():
    message = refused(filters__overlong="penalty", precomputed_advantages="require")
    assert message.startswith("algorithm.filters.overlong='penalty': lowers the reward, and with algorithm.precomputed")
    accepted(filters__overlong="penalty")


def test_groups_of_one_cannot_end_a_run_for_want_of_signal():
    run = load_config(QUICKSTART)
    run.algorithm = presets.reinforce_pp(group_size=1)
    run.controller.stop.max_no_signal = 0.9
    assert refusal(validate, run) == (
        "controller.stop.max_no_signal=0.9: would end every run of algorithm.group_size=1, as the reward of a group of "
        "one is equal to itself; raise group_size or use 0"
    )


def test_a_penalty_on_a_reward_that_the_estimator_does_not_read_is_refused():
    for estimator in (gdpo, partial(gdpo, weights={"exact": 1.0}), {"solver": gdpo}):
        assert refused(filters__overlong="penalty", advantage_fn=estimator) == (
            "algorithm.filters.overlong='penalty': lowers the reward, and gdpo reads reward parts alone; use 'mask' or "
            "'drop', or make the length a part of the reward"
        )
    accepted(filters__overlong="mask", advantage_fn=gdpo)


def test_groups_that_failures_drop_can_be_replaced():
    accepted(filters__max_resamples=2, on_rollout_failure="drop_group")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"filters__max_resamples": 2},
            "algorithm.filters.max_resamples=2: has no effect, as no filter leaves groups out",
        ),
        (
            {"filters__max_resamples": 2, "filters__overlong": "penalty"},
            "algorithm.filters.max_resamples=2: has no effect",
        ),
        ({"filters__max_resamples": -1}, "algorithm.filters.max_resamples=-1: must not be negative"),
        ({"filters__max_stalled_rounds": 0}, "algorithm.filters.max_stalled_rounds=0: must be at least 1"),
        ({"filters__overlong": "cut"}, "algorithm.filters.overlong='cut': there is no such choice; use one of 'keep',"),
        ({"filters__overlong_buffer": 4}, "algorithm.filters.overlong_buffer=4: has no effect with overlong='keep'"),
        (
            {"filters__overlong_penalty": 0.5},
            "algorithm.filters.overlong_penalty=0.5: has no effect with overlong='keep'",
        ),
        (
            {"filters__overlong": "penalty", "filters__overlong_buffer": 13},
            "algorithm.filters.overlong_buffer=13: must be between 0 and sampling.max_tokens=12",
        ),
        (
            {"filters__overlong": "penalty", "filters__overlong_penalty": 0.0},
            "algorithm.filters.overlong_penalty=0.0: must be positive; use what a completion at the limit loses",
        ),
        (
            {"filters__overlong": "penalty", "filters__overlong_penalty": math.nan},
            "algorithm.filters.overlong_penalty=nan: must be finite and positive",
        ),
        (
            {"precomputed_advantages": "yes"},
            "algorithm.precomputed_advantages='yes': there is no such choice; use one of 'auto',",
        ),
        ({"trajectory_grouping_hook": 3}, "algorithm.trajectory_grouping_hook=3: is not a plain function"),
        (
            {"trajectory_grouping_hook": math.sqrt},
            "algorithm.trajectory_grouping_hook=math:sqrt: cannot be called with",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    assert refused(**settings).startswith(message)


async def waiting_hook(rollouts, config):
    return []


def test_a_hook_is_a_plain_function_of_two():
    assert "is not a plain function" in refused(trajectory_grouping_hook=waiting_hook)
    accepted(trajectory_grouping_hook=lambda rollouts, config: [])
    accepted(trajectory_grouping_hook=lambda rollouts, config, *, verbose=False: [])


def test_filters_are_set_from_the_shell():
    run = load_config(QUICKSTART)
    apply_overrides(
        run,
        [
            "--algorithm.filters.zero-variance",
            "True",
            "--algorithm.filters.overlong",
            "penalty",
            "--algorithm.filters.overlong-buffer=4",
            "--algorithm.filters.max-resamples",
            "3",
        ],
    )
    validate(run)
    filters = run.algorithm.filters
    assert (filters.zero_variance, filters.overlong, filters.overlong_buffer, filters.max_resamples) == (
        True,
        "penalty",
        4,
        3,
    )
