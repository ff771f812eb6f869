"""The rules that end a run before its last step: a target, patience, collapse. `config.stopping` has the settings.

What the rules know is in the run's state, so a resumed run ends where an undisturbed run would have ended.
"""

from __future__ import annotations

import math
from typing import Any

from torchtitan_rl.config.run import ControllerConfig
from torchtitan_rl.config.stopping import StopConfig
from torchtitan_rl.record.recorder import Metrics, Recorder
from torchtitan_rl.types.ends import Ended, StopRequest
from torchtitan_rl.types.run_state import RunState

__all__ = ["CollapseRule", "Collapsed", "EarlyEnd", "reason_to_end", "end_early"]


class EarlyEnd(Exception):
    """The reinforcement phase has come to a good end before its last step."""


_ADVICE = {
    "min_entropy": "the policy gives few different answers: lower trainer.optimizer.lr, raise algorithm.entropy_coef",
    "max_no_signal": "nothing is left to learn from: grade the reward, choose harder or easier tasks",
}


class Collapsed(Ended):
    """The policy has collapsed: its entropy is too low, or too few groups give a signal."""


def reason_to_end(config: StopConfig, accuracies: dict[str, dict[str, float]]) -> str:
    """Why the reinforcement phase is to end now, by the accuracies of its evaluations (`RunState.accuracies`); empty if
    it is to go on. The evaluation before the first step counts as a best one, but not as a reached target."""
    measured = sorted((int(step), accuracy) for step, accuracy in accuracies.get(config.evaluation, {}).items())
    if not measured or measured[-1][0] == 0:
        return ""
    step, accuracy = measured[-1]
    if config.target_accuracy and accuracy >= config.target_accuracy:
        return (
            f"controller.stop.target_accuracy={config.target_accuracy:g}: {config.evaluation} accuracy is "
            f"{accuracy:.3f} after step {step}"
        )
    (best_step, best), since = measured[0], 0
    for step, accuracy in measured[1:]:
        better = accuracy > best + config.min_improvement
        best_step, best, since = (step, accuracy, 0) if better else (best_step, best, since + 1)
    if config.patience and since >= config.patience:
        return (
            f"controller.stop.patience={config.patience}: {since} evaluations in a row are no better than the "
            f"{config.evaluation} accuracy of {best:.3f} after step {best_step}"
        )
    return ""


def end_early(config: ControllerConfig, state: RunState, recorder: Recorder) -> None:
    """Raises EarlyEnd where a rule about evaluations says so, and records why. A run that has made all its steps does
    not end early."""
    if state.step < config.num_steps and (reason := reason_to_end(config.stop, state.accuracies)):
        line = {"step": state.step, "phase": "stop", "stop/reason": reason}
        recorder.record(Metrics(line=line, text=f"step {state.step}: stopped early by {reason}"))
        raise EarlyEnd(reason)


class CollapseRule:
    """Counts batches in a row with a sign of collapse, and makes the run fail after enough of them."""

    def __init__(self, config: StopConfig, counted: dict[str, int], stop: StopRequest) -> None:
        """`counted` has the batches so far by rule. Counting goes on in it: a checkpoint holds it."""
        self._config, self._counted, self._stop = config, counted, stop

    def count(self, line: dict[str, Any]) -> None:
        """Counts a batch by its line of metrics."""
        config = self._config
        entropy, no_signal = line.get("policy/entropy", math.inf), line.get("reward/zero_std_frac", 0.0)
        if config.min_entropy and line.get("tokens/trained", 1):  # without a trained token nobody knows the entropy
            self._count("min_entropy", entropy < config.min_entropy, f"entropy {entropy:.3g}")
        if config.max_no_signal:
            share = f"{no_signal:.0%} of groups without signal"
            self._count("max_no_signal", no_signal >= config.max_no_signal, share)

    def _count(self, rule: str, sign: bool, shown: str) -> None:
        self._counted[rule] = self._counted.get(rule, 0) + 1 if sign else 0
        if self._counted[rule] >= self._config.collapse_batches:
            self._stop.failure = Collapsed(
                f"controller.stop.{rule}={getattr(self._config, rule):g}: held for {self._counted[rule]} batches in a "
                f"row, {shown} in the last; {_ADVICE[rule]}, or go on all the same with --resume latest"
            )
            self._counted.clear()  # a run that is resumed all the same begins to count again
