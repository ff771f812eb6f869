"""Settings of checkpoints and failures that are refused before a start."""

import pytest

from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.config.run import ControllerConfig, EvalSetConfig
from torchtitan_rl.validation.recovery import check_checkpoints, check_failures


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"keep_last": 0}, "controller.keep_last=0: would delete the checkpoint to resume from"),
        ({"keep_last": -2}, "controller.keep_last=-2: "),
        ({"checkpoint_every": -1}, "controller.checkpoint_every=-1: must not be negative"),
        ({"max_hours": float("inf")}, "controller.max_hours=inf: "),
        ({"keep_every": 10}, "controller.keep_every=10: is no multiple of controller.checkpoint_every=0"),
        ({"keep_every": 10, "checkpoint_every": 4}, "controller.keep_every=10: is no multiple"),
        ({"keep_best": "test", "checkpoint_every": 4}, "controller.keep_best='test': is no evaluation of this run"),
        ({"keep_best": "validation"}, "controller.keep_best='validation': needs evaluations and checkpoints"),
        ({"checkpoint_export": "some"}, "controller.checkpoint_export='some': is not known"),
    ],
)
def test_settings_that_would_not_do_what_they_say_are_refused(settings, complaint):
    with pytest.raises(ValueError) as caught:
        check_checkpoints(ControllerConfig(**settings))
    message = str(caught.value)
    assert message.startswith(complaint) and ("; use " in message or "; set" in message)


def test_settings_that_fit_pass():
    check_checkpoints(ControllerConfig())
    check_checkpoints(
        ControllerConfig(
            checkpoint_every=5, keep_every=20, keep_last=-1, keep_best="hard", eval_sets={"hard": EvalSetConfig()}
        )
    )
    check_failures(AlgorithmConfig())


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"on_rollout_failure": "ignore"}, "algorithm.on_rollout_failure='ignore': is not known"),
        ({"on_rollout_failure": "retry", "rollout_retries": 0}, "algorithm.rollout_retries=0: retries nothing"),
        ({"max_failed_frac": 0.0}, "algorithm.max_failed_frac=0.0: must be above 0"),
    ],
)
def test_failure_policies_that_cannot_be_are_refused(settings, complaint):
    with pytest.raises(ValueError, match="; use ") as caught:
        check_failures(AlgorithmConfig(**settings))
    assert str(caught.value).startswith(complaint)
