"""The adaptive coefficient of the KL: by hand, as others have it, and through a checkpoint."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from tests.kit.rollouts import group, rollout, turn
from torchtitan_rl.algorithm.datums import to_datums
from torchtitan_rl.algorithm.inputs import with_inputs
from torchtitan_rl.algorithm.kl_control import adapted_coef, rollout_kls
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.train.kl_coefficient import AdaptiveKL
from torchtitan_rl.types.run_state import RunState

CONFIG = AlgorithmConfig(kl_coef=0.5, kl_estimator="k1", kl_in="return", kl_target=2.0, kl_horizon=10)


def scored(*rollouts, differences):
    """Datums with the reference's log-probabilities that much below the generator's, per datum."""
    data = to_datums([group(*rollouts)], AlgorithmConfig())
    rows = [datum.loss_inputs["sampling_logprobs"] - d for datum, d in zip(data, differences, strict=True)]
    return with_inputs(data, reference_logprobs=rows)


def test_the_kl_of_a_rollout_is_the_sum_over_its_trained_tokens():
    masked = rollout("c", turn([1], [2, 3]), reward=0.0, masked=True)
    data = scored(
        rollout("a", turn([1], [2, 3]), turn([9], [4]), reward=1.0),  # two datums
        rollout("b", turn([1, 1], [2]), reward=0.0),
        masked,
        differences=[0.5, 1.0, -0.25, 7.0],
    )
    assert rollout_kls(data) == [2.0, -0.25] and rollout_kls(data[3:]) == []
    far = scored(rollout("a", turn([1], [2]), reward=1.0), differences=[50.0])
    assert rollout_kls(far) == [20.0]  # as a difference counts in rewards


@pytest.mark.parametrize(
    ("kls", "factor"),
    [
        ([2.0, 2.0], 1.0),
        ([2.2, 2.2], 1 + 0.1 * 2 / 10),  # a tenth above the target, two rollouts of the horizon's ten
        ([1.0, 2.0, 0.6], 1 - 0.2 * 3 / 10),  # 0.4 below, held at 0.2
        ([100.0], 1 + 0.2 / 10),
        ([-5.0], 1 - 0.2 / 10),
        ([], 1.0),
    ],
)
def test_the_coefficient_goes_where_the_kl_is_not(kls, factor):
    assert adapted_coef(0.5, kls, CONFIG) == pytest.approx(0.5 * factor, rel=1e-14)


class AdaptiveKLController:
    """verl/trainer/ppo/core_algos.py and TRL's former PPO, by Ziegler's code: lm_human_preferences/train_policy.py."""

    def __init__(self, init_kl_coef, target_kl, horizon):
        self.value, self.target, self.horizon = init_kl_coef, target_kl, horizon

    def update(self, current_kl, n_steps):
        proportional_error = np.clip(current_kl / self.target - 1, -0.2, 0.2)
        self.value *= 1 + proportional_error * n_steps / self.horizon


def test_it_is_zieglers_controller_over_many_batches():
    rng, coef, theirs = np.random.default_rng(0), 0.2, AdaptiveKLController(0.2, 6.0, 10_000)
    config = dataclasses.replace(CONFIG, kl_target=6.0, kl_horizon=10_000)
    for _ in range(200):
        kls = (rng.normal(size=64) + rng.normal(5, 4)).tolist()
        coef = adapted_coef(coef, kls, config)
        theirs.update(np.mean(kls), len(kls))
    assert coef == pytest.approx(theirs.value, rel=1e-12) and coef != 0.2


def batch(number):
    return scored(rollout("a", turn([1], [2, 3, 4]), reward=1.0), differences=[0.1 * number])


def through(control, numbers):
    return [(control.algorithm(CONFIG).kl_coef, control.adapt(batch(number))) for number in numbers]


def test_a_batch_trains_with_the_coefficient_that_the_batches_before_it_gave():
    state = RunState(seed=0)
    control = AdaptiveKL(CONFIG, state)
    (first, line), (second, other) = through(control, [1, 9])
    assert first == 0.5 == line["policy/kl_coef"] and line["policy/rollout_kl"] == pytest.approx(0.3)
    assert second == other["policy/kl_coef"] == pytest.approx(0.5 * (1 - 0.2 / 10))
    assert state.kl_coef == pytest.approx(second * (1 + 0.2 / 10)) and CONFIG.kl_coef == 0.5
    assert control.algorithm(CONFIG) == dataclasses.replace(CONFIG, kl_coef=state.kl_coef)
    assert torch.isfinite(batch(1)[0].loss_inputs["reference_logprobs"]).all()


def test_a_resumed_run_goes_on_to_the_last_digit():
    numbers = [1, 9, 7, 3, 8, 2, 6]
    whole = through(AdaptiveKL(CONFIG, RunState(seed=0)), numbers)
    for stop in range(len(numbers) + 1):
        state = RunState(seed=0)
        before = through(AdaptiveKL(CONFIG, state), numbers[:stop])
        saved = json.loads(json.dumps(dataclasses.asdict(state)))  # as a checkpoint keeps it
        assert before + through(AdaptiveKL(CONFIG, RunState(**saved)), numbers[stop:]) == whole


def test_a_checkpoint_of_a_run_without_it_starts_at_the_configs():
    saved = dataclasses.asdict(RunState(seed=0))
    del saved["kl_coef"]
    assert AdaptiveKL(CONFIG, RunState(**saved)).algorithm(CONFIG).kl_coef == 0.5
