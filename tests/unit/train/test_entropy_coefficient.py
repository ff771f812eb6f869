"""The adaptive coefficient of the entropy bonus: by hand, as other projects have it, and through a checkpoint."""

import dataclasses
import json
import math

import numpy as np
import pytest

from tests.unit.algorithm.test_objective import loss_and_gradient, mismatched
from torchtitan_rl.algorithm.entropy_control import adapted_coef, bonus_factor
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.config.algorithm import AlgorithmConfig, EntropyControlConfig
from torchtitan_rl.train.entropy_coefficient import AdaptiveEntropy
from torchtitan_rl.types.run_state import RunState

CONTROL = EntropyControlConfig(target=0.5, step=0.25, min_coef=0.125, max_coef=1.0)
CONFIG = AlgorithmConfig(entropy_coef=0.5, entropy_control=CONTROL)


@pytest.mark.parametrize(
    ("coef", "entropy", "expected"),
    [
        (0.5, 0.1, 0.75),
        (0.5, 0.5, 0.75),  # at the target it still rises
        (0.5, 0.6, 0.25),
        (0.875, 0.1, 1.0),
        (1.0, 0.0, 1.0),
        (0.25, 9.0, 0.125),
        (0.125, 9.0, 0.125),
    ],
)
def test_the_coefficient_goes_up_below_the_target_and_down_above(coef, entropy, expected):
    assert adapted_coef(coef, entropy, CONTROL) == expected


def test_the_bonus_acts_after_a_batch_that_was_not_above_the_target():
    assert [bonus_factor(0.5, entropy, CONTROL) for entropy in (None, 0.1, 0.5, 0.6)] == [0.5, 0.5, 0.5, 0.0]


def line(entropy, trained=10):
    return {"policy/entropy": entropy, "tokens/trained": trained}


def control(state=None, config=CONFIG):
    return AdaptiveEntropy(config.entropy_control, config.entropy_coef, state or RunState(seed=0))


def through(control, entropies):
    """(factor of each batch, its metric)."""
    return [(control.algorithm(CONFIG).entropy_coef, control.adapt(line(entropy))) for entropy in entropies]


def test_a_batch_trains_with_what_the_batches_before_it_gave():
    state = RunState(seed=0)
    factors = through(control(state), [0.4, 0.7, 0.3, 0.2])
    assert [factor for factor, _ in factors] == [0.5, 0.75, 0.0, 0.75]
    assert [metric for _, metric in factors] == [{"policy/entropy_coef": factor} for factor, _ in factors]
    assert (state.entropy_coef, state.batch_entropy) == (1.0, 0.2)
    assert control(state).algorithm(CONFIG) == dataclasses.replace(CONFIG, entropy_coef=1.0)


@pytest.mark.parametrize("bad", [line(math.nan), line(math.inf), line(0.0, trained=0), {"tokens/trained": 5}])
def test_a_batch_that_says_nothing_of_the_entropy_changes_nothing(bad):
    state = RunState(seed=0)
    adaptive = control(state)
    adaptive.adapt(line(0.7))
    assert adaptive.adapt(bad) == {"policy/entropy_coef": 0.0}
    assert (state.entropy_coef, state.batch_entropy) == (0.25, 0.7)


class TRL:
    """trl/trainer/grpo_trainer.py, `use_adaptive_entropy`, one optimizer step a batch."""

    def __init__(self, coef, target, delta, low, high):
        self.coef, self.target, self.delta, self.low, self.high = coef, target, delta, low, high
        self.last = None

    def factor(self):
        return self.coef if self.last is None or self.last <= self.target else 0.0

    def update(self, entropy):
        if entropy <= self.target:
            self.coef = min(self.coef + self.delta, self.high)
        else:
            self.coef = max(self.coef - self.delta, self.low)
        self.last = entropy


class EntController:
    """Skywork-OR1, verl/trainer/ppo/core_algos.py: the coefficient is `value` x `enabled`."""

    def __init__(self, coef, target, delta, low, high):
        self.value, self.target, self.delta, self.low, self.high = coef, target, delta, low, high
        self.enabled = 1

    def factor(self):
        return self.value * self.enabled

    def update(self, entropy):
        self.value += self.delta if entropy < self.target else -self.delta
        self.value = float(np.clip(self.value, self.low, self.high))
        self.enabled = int(entropy < self.target)


@pytest.mark.parametrize("project", [TRL, EntController])
def test_it_is_the_rule_of_trl_and_of_skywork_over_many_batches(project):
    config = AlgorithmConfig(entropy_coef=0.0, entropy_control=EntropyControlConfig(target=0.2))
    settings = config.entropy_control
    theirs = project(0.0, settings.target, settings.step, settings.min_coef, settings.max_coef)
    mine, seen = control(config=config), []
    for entropy in 0.2 + 0.15 * np.sin(np.arange(400) / 20) + np.random.default_rng(0).normal(0, 0.02, 400):
        factor = mine.algorithm(config).entropy_coef
        assert factor == pytest.approx(theirs.factor(), abs=1e-12)
        seen.append(factor)
        mine.adapt(line(float(entropy)))
        theirs.update(float(entropy))
    assert max(seen) == settings.max_coef and 0.0 in seen and len(set(seen)) > 40


def test_the_factor_is_that_of_the_objective_of_the_batch():
    data = mismatched(0)
    state = RunState(seed=0)
    adaptive = control(state)
    config = dataclasses.replace(CONFIG, loss_fn=importance_sampling)
    for entropy, factor in ((0.1, 0.5), (0.9, 0.75), (0.1, 0.0)):
        fixed = AlgorithmConfig(loss_fn=importance_sampling, entropy_coef=factor)
        assert loss_and_gradient(data, adaptive.algorithm(config)) == loss_and_gradient(data, fixed)
        adaptive.adapt(line(entropy))


def test_a_resumed_run_goes_on_to_the_last_digit():
    entropies = [0.4, 0.7, 0.3, 0.2, 0.9, 0.8, 0.1, 0.45]
    whole = through(control(), entropies)
    assert len({factor for factor, _ in whole}) > 3
    for stop in range(len(entropies) + 1):
        state = RunState(seed=0)
        before = through(control(state), entropies[:stop])
        saved = json.loads(json.dumps(dataclasses.asdict(state)))  # as a checkpoint keeps it
        assert before + through(control(RunState(**saved)), entropies[stop:]) == whole


def test_a_checkpoint_of_a_run_without_it_starts_at_the_configs():
    saved = dataclasses.asdict(RunState(seed=0))
    del saved["entropy_coef"], saved["batch_entropy"]
    assert control(RunState(**saved)).algorithm(CONFIG).entropy_coef == 0.5
