"""When the rules end a run, worked out by hand."""

import dataclasses
import json

import pytest

from tests.kit.listener import EventLog
from torchtitan_rl.config.run import ControllerConfig
from torchtitan_rl.config.stopping import StopConfig
from torchtitan_rl.record.recorder import Metrics, Recorder
from torchtitan_rl.train.early_stop import CollapseRule, EarlyEnd, end_early, reason_to_end
from torchtitan_rl.types.ends import StopRequest
from torchtitan_rl.types.run_state import RunState


def measured(*accuracies, every=20):
    """The accuracies of evaluations on validation tasks, the first before reinforcement, as a checkpoint has them."""
    return {"validation": {str(every * i): accuracy for i, accuracy in enumerate(accuracies)}}


def test_without_rules_nothing_ends():
    assert reason_to_end(StopConfig(), measured(0.5, 1.0, 0.0, 0.0, 0.0)) == ""


def test_a_target_is_reached_between_steps_and_not_before_the_first():
    stop = StopConfig(target_accuracy=0.9)
    assert (
        reason_to_end(stop, {})
        == reason_to_end(stop, measured(0.95))
        == reason_to_end(stop, measured(0.95, 0.89))
        == ""
    )
    assert reason_to_end(stop, measured(0.2, 0.9)) == (
        "controller.stop.target_accuracy=0.9: validation accuracy is 0.900 after step 20"
    )


@pytest.mark.parametrize(
    ("accuracies", "ends"),
    [
        ([0.5, 0.5], False),
        ([0.5, 0.5, 0.4], True),  # two in a row that are no better than 0.5
        ([0.5, 0.6, 0.6], False),
        ([0.5, 0.6, 0.6, 0.55], True),
        ([0.5, 0.4, 0.6, 0.5], False),
        ([0.1, 0.2, 0.3, 0.4], False),
    ],
)
def test_patience_counts_evaluations_that_are_no_better(accuracies, ends):
    assert bool(reason_to_end(StopConfig(patience=2), measured(*accuracies))) is ends


def test_an_improvement_may_have_to_be_a_large_one():
    rising = measured(0.5, 0.55, 0.6, 0.65)
    assert reason_to_end(StopConfig(patience=2), rising) == ""
    # 0.55 and 0.6 are not above 0.5 + 0.12; 0.65 is, and begins to count anew.
    assert reason_to_end(StopConfig(patience=2, min_improvement=0.12), rising) == ""
    assert reason_to_end(StopConfig(patience=2, min_improvement=0.12), measured(0.5, 0.55, 0.6)) == (
        "controller.stop.patience=2: 2 evaluations in a row are no better than the validation accuracy of 0.500 after "
        "step 0"
    )


def test_steps_are_compared_as_numbers_and_another_evaluation_may_be_looked_at():
    stop = StopConfig(evaluation="hard", target_accuracy=0.5)
    accuracies = {"hard": {"100": 0.6, "20": 0.1, "0": 0.0}, "validation": {"120": 0.1}}
    assert (
        reason_to_end(stop, accuracies) == "controller.stop.target_accuracy=0.5: hard accuracy is 0.600 after step 100"
    )


def test_an_early_end_is_recorded_with_its_reason():
    state, log = RunState(seed=0, step=40, accuracies=measured(0.1, 0.2, 0.7)), EventLog()
    config = ControllerConfig(num_steps=100, stop=StopConfig(target_accuracy=0.5))
    with pytest.raises(EarlyEnd) as caught:
        end_early(config, state, Recorder([log]))
    reason = str(caught.value)
    assert reason == "controller.stop.target_accuracy=0.5: validation accuracy is 0.700 after step 40"
    line = {"step": 40, "phase": "stop", "stop/reason": reason}
    assert log.events == [("metrics", Metrics(line=line, text=f"step 40: stopped early by {reason}"))]
    config.num_steps, log = 40, EventLog()
    end_early(config, state, Recorder([log]))  # the last step is no early end
    assert log.events == []


def batches(stop, state, *lines, **rules):
    """Tells the rules of batches: (entropy, share of groups without signal)."""
    rule = CollapseRule(StopConfig(**rules), state.collapse, stop)
    for entropy, no_signal in lines:
        line = {"step": 1, "phase": "reinforcement", "policy/entropy": entropy, "reward/zero_std_frac": no_signal}
        rule.count(line)


def test_rules_that_are_off_count_nothing():
    state, stop = RunState(seed=0), StopRequest(0.0)
    batches(stop, state, (0.0, 1.0))
    assert state.collapse == {} and stop.failure is None


def test_a_collapse_is_signs_in_a_row():
    stop, state = StopRequest(0.0), RunState(seed=0)
    batches(stop, state, (0.04, 0), (0.06, 0), (0.04, 0), (0.03, 0), min_entropy=0.05, collapse_batches=3)
    assert stop.failure is None and stop.reason() == "" and state.collapse["min_entropy"] == 2
    state = RunState(**json.loads(json.dumps(dataclasses.asdict(state))))  # as a checkpoint keeps it
    batches(stop, state, (0.02, 0), min_entropy=0.05, collapse_batches=3)
    assert stop.reason() == str(stop.failure)
    assert stop.reason().startswith(
        "controller.stop.min_entropy=0.05: held for 3 batches in a row, entropy 0.02 in the last; the policy "
        "gives few different answers: lower trainer.optimizer.lr"
    )
    assert state.collapse.get("min_entropy", 0) == 0  # a run that goes on all the same begins to count again


def test_groups_without_signal_are_a_sign_from_the_share_that_is_set():
    stop, state = StopRequest(0.0), RunState(seed=0)
    batches(stop, state, (1.0, 0.74), (1.0, 0.75), max_no_signal=0.75, collapse_batches=2)
    assert stop.failure is None
    batches(stop, state, (1.0, 1.0), max_no_signal=0.75, collapse_batches=2)
    assert "max_no_signal=0.75: held for 2 batches in a row, 100% of groups without signal" in str(stop.failure)
