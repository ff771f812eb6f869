"""Rules that could never end a run are refused before a start."""

import pytest

from torchtitan_rl.config.run import ControllerConfig, EvalSetConfig
from torchtitan_rl.config.stopping import StopConfig
from torchtitan_rl.validation.stopping import check_stop


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"target_accuracy": 1.5}, "target_accuracy=1.5: must be between 0 and 1"),
        ({"patience": -1}, "patience=-1: must not be negative"),
        ({"patience": 2, "min_improvement": -0.1}, "min_improvement=-0.1: must be at least 0"),
        ({"min_entropy": float("inf")}, "min_entropy=inf: must not be negative"),
        ({"max_no_signal": 50}, "max_no_signal=50: is a share of groups"),
        ({"collapse_batches": 0}, "collapse_batches=0: must be at least 1"),
        ({"evaluation": "test", "patience": 2}, "evaluation='test': is no evaluation of this run; use one of validat"),
        ({"evaluation": "hard"}, "evaluation='hard': no rule looks at it"),
        ({"min_improvement": 0.1}, "min_improvement=0.1: acts only with patience"),
    ],
)
def test_rules_that_do_not_fit_are_refused(settings, complaint):
    with pytest.raises(ValueError) as caught:
        check_stop(ControllerConfig(stop=StopConfig(**settings), eval_sets={"hard": EvalSetConfig()}))
    message = str(caught.value)
    assert message.startswith(f"controller.stop.{complaint}") and ("; use " in message or "; set " in message)


def test_rules_about_evaluations_need_evaluations():
    with pytest.raises(ValueError, match="controller.stop.patience=2: there is no evaluation between steps; set"):
        check_stop(ControllerConfig(eval_every=0, stop=StopConfig(patience=2)))
    check_stop(ControllerConfig(eval_every=0, stop=StopConfig(min_entropy=0.1)))
    check_stop(ControllerConfig(stop=StopConfig(patience=2, min_improvement=0.01, target_accuracy=1.0)))
