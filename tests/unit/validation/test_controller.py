"""Settings of checkpoints, and rules that could never end a run, are refused before a start."""

import pytest

from torchtitan_rl.config.run import ControllerConfig, EvalSetConfig
from torchtitan_rl.config.stopping import StopConfig
from torchtitan_rl.validation.controller import check_checkpoints, check_evaluations, check_stop
from torchtitan_rl.validation.fields import check_fields


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"keep_last": 0}, "controller.keep_last=0: would delete the checkpoint to resume from"),
        ({"keep_last": -2}, "controller.keep_last=-2: "),
        ({"checkpoint_every": -1}, "controller.checkpoint_every=-1: must not be negative"),
        ({"max_hours": float("inf")}, "controller.max_hours=inf: must be finite and not negative; use 0 for no limit"),
        ({"keep_every": 10}, "controller.keep_every=10: is no multiple of controller.checkpoint_every=0"),
        ({"keep_every": 10, "checkpoint_every": 4}, "controller.keep_every=10: is no multiple"),
        ({"keep_best": "test", "checkpoint_every": 4}, "controller.keep_best='test': is no evaluation of this run"),
        ({"keep_best": "validation"}, "controller.keep_best='validation': needs evaluations and checkpoints"),
        ({"checkpoint_export": "some"}, "controller.checkpoint_export='some': there is no such choice; use one of"),
    ],
)
def test_settings_that_would_not_do_what_they_say_are_refused(settings, complaint):
    with pytest.raises(ValueError) as caught:
        config = ControllerConfig(**settings)
        check_fields(config, "controller.")
        check_checkpoints(config)
    message = str(caught.value)
    assert message.startswith(complaint) and ("; use " in message or "; set" in message)


def test_settings_that_fit_pass():
    check_checkpoints(ControllerConfig())
    check_checkpoints(
        ControllerConfig(
            checkpoint_every=5, keep_every=20, keep_last=-1, keep_best="hard", eval_sets={"hard": EvalSetConfig()}
        )
    )


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"target_accuracy": 1.5}, "target_accuracy=1.5: must be between 0 and 1"),
        ({"patience": -1}, "patience=-1: must not be negative"),
        ({"patience": 2, "min_improvement": -0.1}, "min_improvement=-0.1: must be at least 0"),
        ({"min_entropy": float("inf")}, "min_entropy=inf: must be finite and not negative"),
        ({"max_no_signal": 50}, "max_no_signal=50: must be between 0 and 1; use a share of groups"),
        ({"collapse_batches": 0}, "collapse_batches=0: must be at least 1"),
        ({"evaluation": "test", "patience": 2}, "evaluation='test': is no evaluation of this run; use one of validat"),
        ({"evaluation": "hard"}, "evaluation='hard': no rule looks at it"),
        ({"min_improvement": 0.1}, "min_improvement=0.1: acts only with patience"),
    ],
)
def test_rules_that_do_not_fit_are_refused(settings, complaint):
    with pytest.raises(ValueError) as caught:
        config = ControllerConfig(stop=StopConfig(**settings), eval_sets={"hard": EvalSetConfig()})
        check_fields(config, "controller.")
        check_stop(config)
    message = str(caught.value)
    assert message.startswith(f"controller.stop.{complaint}") and ("; use " in message or "; set " in message)


def test_rules_about_evaluations_need_evaluations():
    with pytest.raises(ValueError, match="controller.stop.patience=2: there is no evaluation between steps; set"):
        check_stop(ControllerConfig(eval_every=0, stop=StopConfig(patience=2)))
    check_stop(ControllerConfig(eval_every=0, stop=StopConfig(min_entropy=0.1)))
    check_stop(ControllerConfig(stop=StopConfig(patience=2, min_improvement=0.01, target_accuracy=1.0)))


def test_samples_of_an_evaluation_have_a_temperature_that_the_engine_samples_at():
    sampled = ControllerConfig(eval_sets={"hard": EvalSetConfig(num_samples=4, temperature=0.01)})
    check_evaluations(sampled)
    sampled.eval_sets["hard"].temperature = float("inf")
    with pytest.raises(ValueError, match="hard.temperature=inf: must be finite"):
        check_evaluations(sampled)
    for temperature in (0.005, 0.0, float("nan")):
        sampled.eval_sets["hard"].temperature = temperature
        with pytest.raises(ValueError, match="hard.temperature=.* would all be the same; use 0.01 or more"):
            check_evaluations(sampled)
