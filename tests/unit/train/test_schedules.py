"""The factor of every step of short schedules, by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.config.algorithm import ScheduleConfig
from torchtitan_rl.train.step import lr_factor


def factors(num_steps, **config):
    schedule = ScheduleConfig(**config)
    return [lr_factor(schedule, step, num_steps) for step in range(num_steps)]


def test_constant():
    assert factors(3) == [1.0, 1.0, 1.0]


def test_linear_reaches_its_end_on_the_last_step():
    assert factors(5, decay="linear") == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert factors(3, decay="linear", final_factor=0.5) == [1.0, 0.75, 0.5]


def test_cosine_reaches_its_end_on_the_last_step():
    # Thirds of a half turn: cos 0 = 1, cos 60 = 1/2, cos 120 = -1/2, cos 180 = -1.
    assert factors(4, decay="cosine") == pytest.approx([1.0, 0.75, 0.25, 0.0], abs=1e-15)
    assert factors(3, decay="cosine", final_factor=0.2) == pytest.approx([1.0, 0.6, 0.2])


def test_warm_up_trains_from_the_first_step_and_ends_at_the_peak():
    assert factors(5, warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors(6, warmup_steps=1, decay="linear") == [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_a_run_of_one_step_trains_at_the_peak(decay):
    assert factors(1, decay=decay) == [1.0]


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_a_run_that_is_all_warm_up(decay):
    assert factors(3, decay=decay, warmup_steps=3) == [0.25, 0.5, 0.75]
    assert factors(2, decay=decay, warmup_steps=3) == [0.25, 0.5]
    assert factors(3, decay=decay, warmup_steps=2) == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_steps_after_the_end_stay_at_the_final_factor():
    for decay in ("linear", "cosine"):
        schedule = ScheduleConfig(decay=decay, final_factor=0.1)
        assert lr_factor(schedule, 4, 5) == lr_factor(schedule, 9, 5) == pytest.approx(0.1)


def test_warm_up_as_a_part_of_all_steps():
    assert factors(6, warmup_ratio=0.5) == factors(6, warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert factors(5, warmup_ratio=0.3) == factors(5, warmup_steps=2)  # 1.5 steps, rounded up
    assert factors(100, warmup_ratio=0.07) == factors(100, warmup_steps=7)  # 7.000000000000001 in floating point


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_a_warm_up_of_all_steps_never_divides_by_zero_and_always_trains(decay, num_steps):
    expected = [(step + 1) / (num_steps + 1) for step in range(num_steps)]
    assert factors(num_steps, decay=decay, warmup_ratio=1.0) == expected
    assert factors(1, decay=decay, warmup_ratio=0.0) == [1.0]


@settings(deadline=None, derandomize=True)
@given(
    decay=st.sampled_from(["constant", "linear", "cosine"]),
    num_steps=st.integers(1, 50),
    warmup_ratio=st.floats(0, 1),
    final_factor=st.floats(0, 1),
)
def test_a_schedule_rises_to_the_peak_and_then_only_falls(decay, num_steps, warmup_ratio, final_factor):
    given_ = factors(num_steps, decay=decay, warmup_ratio=warmup_ratio, final_factor=final_factor)
    top = given_.index(max(given_))
    assert given_[: top + 1] == sorted(given_[: top + 1]) and given_[top:] == sorted(given_[top:], reverse=True)
    assert 0 < given_[0] <= 1 and min(given_) >= 0
