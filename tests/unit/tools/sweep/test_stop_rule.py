"""The rule that stops arms: its interval, its error, and what it saves."""

import numpy as np
import pytest
from scipy.stats import t

from torchtitan_rl.tools.sweep.stop_rule import ERROR, differences, mean_interval, stopped, t_quantile


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30])
@pytest.mark.parametrize("level", [0.9, 0.975, 0.9875, 0.9999])
def test_quantiles_of_students_t(freedom, level):
    assert t_quantile(level, freedom) == pytest.approx(t.ppf(level, freedom), rel=1e-6)


def test_the_interval_of_a_mean():
    low, high = mean_interval([0.5, 0.6, 0.7], 1000)
    assert (low, high) == (pytest.approx(0.6 - 4.3027 * 0.1 / 3**0.5, 1e-4), pytest.approx(0.6 + 0.2484, abs=1e-4))
    assert mean_interval([0.5], 1000) is None
    low, high = mean_interval([0.5, 0.5], 8)  # two equal values: a spread of one task of eight
    assert high - 0.5 == pytest.approx(12.706 * 0.125 / 2**0.5, 1e-4)
    assert differences({0: 0.5, 1: 0.75, 3: 1.0}, {1: 0.5, 0: 0.5, 2: 0.0}) == [0.0, 0.25]


ARMS = {"good": {0: 0.8, 1: 0.7, 2: 0.9}, "near": {0: 0.7, 1: 0.8, 2: 0.8}, "bad": {0: 0.2, 1: 0.1, 2: 0.32}}


def test_an_arm_that_is_worse_with_confidence_is_stopped_and_one_that_may_be_as_good_is_not():
    stops = stopped(ARMS, num_arms=3, num_seeds=5, num_tasks=100)
    assert [*stops] == ["bad"] and stops["bad"].best == "good" and stops["bad"].pairs == 3
    # Differences -0.6, -0.6, -0.58; the level 1 - 0.05 / (2 arms x 2 looks); t with 2 degrees of freedom.
    upper = -0.59333 + t.ppf(0.9875, 2) * 0.011547 / 3**0.5
    assert stops["bad"].upper == pytest.approx(upper, abs=1e-4)
    assert stops["bad"].summary() == f"worse than good by 0.593, at least {-upper:.3f} (3 pairs)"
    # With 8 tasks the spread counts as 1/8, and the bound is -0.593 + 6.2 x 0.125 / 1.73.
    assert stopped(ARMS, num_arms=3, num_seeds=5, num_tasks=8)["bad"].upper == pytest.approx(-0.145, abs=1e-2)


def test_fewer_than_three_pairs_or_no_seeds_to_save_stop_nothing():
    two = {name: {0: of_arm[0], 1: of_arm[1]} for name, of_arm in ARMS.items()}
    assert stopped(two, num_arms=3, num_seeds=5, num_tasks=100) == {}
    assert stopped(ARMS, num_arms=3, num_seeds=3, num_tasks=100) == {}
    assert stopped({"good": ARMS["good"]}, num_arms=3, num_seeds=5, num_tasks=100) == {}
    assert stopped({}, num_arms=3, num_seeds=5, num_tasks=100) == {}


def simulated(rng, means: list[float], num_seeds: int = 6) -> set[str]:
    """The arms that a sweep stops whose accuracies are normal: a part that arms of one seed share, and one of their
    own."""
    shared = rng.normal(0, 0.1, num_seeds)
    values = {f"arm {i}": mean + shared + rng.normal(0, 0.05, num_seeds) for i, mean in enumerate(means)}
    ends: set[str] = set()
    for seeds in range(1, num_seeds):
        going = {name: dict(enumerate(of_arm[:seeds])) for name, of_arm in values.items() if name not in ends}
        ends |= set(stopped(going, num_arms=len(means), num_seeds=num_seeds, num_tasks=1000))
    return ends


def test_the_best_arm_is_stopped_no_more_often_than_the_rule_says_and_bad_ones_are():
    rng = np.random.default_rng(0)
    equal = [simulated(rng, [0.5, 0.5, 0.5, 0.5]) for _ in range(1000)]
    rate = np.mean(["arm 0" in ends for ends in equal])  # each of equal arms is a best one
    assert rate <= ERROR and 0 < np.mean([bool(ends) for ends in equal])
    better = [simulated(rng, [0.9, 0.5, 0.5, 0.5]) for _ in range(200)]
    assert np.mean(["arm 0" in ends for ends in better]) <= ERROR
    assert np.mean(["arm 1" in ends for ends in better]) > 0.8
