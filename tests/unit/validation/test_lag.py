"""A lag above 0 needs devices of their own for generators, and an objective that knows who sampled."""

from functools import partial
from pathlib import Path

import pytest

from torchtitan_rl.algorithm import corrections, losses, presets
from torchtitan_rl.config.algorithm import DistillConfig
from torchtitan_rl.config.load import apply_overrides, load_config
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RoleConfig, RolesConfig
from torchtitan_rl.validation.lag import check_lag_settings
from torchtitan_rl.validation.run import validate

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.py"


def lagged(algorithm=None, *overrides, lag=1):
    config = load_config(str(QUICKSTART))
    config.algorithm = algorithm or config.algorithm
    config.algorithm.max_policy_lag = lag
    apply_overrides(config, list(overrides))
    return config


def reinforce(inputs):
    return -(inputs.token_weights * inputs.policy_logprobs * inputs.advantages).sum(), {}


@pytest.mark.parametrize(
    "algorithm",
    [
        None,
        presets.asynchronous(),
        presets.gspo(),
        presets.cispo(),
        presets.rloo(),
        presets.sapo(),
        presets.gmpo(),
        presets.vespo(),
        presets.dppo(correction_fn=corrections.opsm, correction_config={"delta": 0.1}),
        presets.asynchronous(correction_fn=corrections.reject_geometric),
        presets.grpo(loss_fn=losses.dro, loss_config={"beta": 0.1}),
        presets.grpo(loss_fn=reinforce, recompute_logprobs_per_batch=True, correction_fn=corrections.truncated_token),
    ],
)
def test_objectives_with_a_ratio_to_the_sampler_are_allowed(algorithm):
    validate(lagged(algorithm, lag=3))


def test_distillation_over_more_than_the_sampled_token_needs_no_ratio():
    config = lagged(presets.distill(distill=DistillConfig(divergence="top_k"), loss_fn=losses.cross_entropy))
    config.roles = RolesConfig(teacher=RoleConfig(model=ModelConfig(shape=config.model.shape)))
    check_lag_settings(config)


@pytest.mark.parametrize(
    ("algorithm", "overrides", "lag", "complaint"),
    [
        (None, ("--roles.colocation", "all"), 1, "roles.colocation='all' gives generators and trainers the devices"),
        (presets.grpo(loss_fn=reinforce), (), 1, "reinforce does not read sampling_logprobs"),
        (presets.grpo(recompute_logprobs_per_batch=True), (), 2, "with recompute_logprobs_per_batch=True a ratio is"),
        (presets.grpo(recompute_logprobs_per_minibatch=True), (), 2, "with recompute_logprobs_per_minibatch=True"),
        (
            presets.grpo(
                recompute_logprobs_per_batch=True, correction_fn=corrections.opsm, correction_config={"delta": 0.1}
            ),
            (),
            2,
            "with recompute_logprobs_per_batch=True a ratio is",
        ),
        (
            presets.grpo(recompute_logprobs_per_batch=True, correction_fn=partial(corrections.opsm, delta=0.1)),
            (),
            2,
            "with recompute_logprobs_per_batch=True a ratio is",
        ),
        (
            presets.grpo(loss_fn=reinforce, correction_fn=corrections.opsm, correction_config={"delta": 0.1}),
            (),
            1,
            "reinforce does not read sampling_logprobs",
        ),
    ],
)
def test_others_are_refused_with_what_would_serve(algorithm, overrides, lag, complaint):
    config = lagged(algorithm, *overrides, lag=lag)
    with pytest.raises(ValueError, match=f"^algorithm.max_policy_lag={lag}: ") as refused:
        check_lag_settings(config)
    assert complaint in str(refused.value) and ("use 0" in str(refused.value) or "a lag of 0" in str(refused.value))
    config.algorithm.max_policy_lag = 0
    check_lag_settings(config)


@pytest.mark.parametrize("lag", [0, 1])
def test_first_finished_needs_something_to_choose_from(lag):
    config = lagged(None, "--algorithm.batch-order", "finished", lag=lag)
    message = rf"^algorithm.batch_order='finished': with algorithm.max_policy_lag={lag} every slot .*is due in"
    with pytest.raises(ValueError, match=message):
        check_lag_settings(config)
    config.algorithm.max_policy_lag = 2
    check_lag_settings(config)
    config.algorithm.trajectory_grouping_hook = lambda rollouts, **named: []
    with pytest.raises(ValueError, match="groups the rollouts of a whole batch; use 'slots'"):
        check_lag_settings(config)
