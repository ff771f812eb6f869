"""What a run has to remember beside the weights: the state of a controller, as a checkpoint holds it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

__all__ = ["RunState", "random_states", "set_random_states"]


@dataclass(kw_only=True, slots=True)
class RunState:
    """The state of a controller in a checkpoint; the trainer roles save weights and optimizer state themselves."""

    seed: int
    step: int = 0
    """Optimizer steps of the reinforcement phase."""
    phase: str = "start-up"
    phase_step: int = 0
    """Optimizer steps of the current phase."""
    skipped_in_a_row: dict[str, int] = field(default_factory=lambda: {"policy": 0, "critic": 0})
    """Per role, the bad optimizer steps since the last good one: skipped, or with a loss that is not finite."""
    policy_version: int = 0
    """Optimizer steps that the policy has taken in all phases; skipped steps do not count."""
    teacher_version: int | None = None
    """The version of the snapshot that scores for self-distillation; None without a snapshot."""
    draws: dict = field(default_factory=dict)
    """`BatchSource.state_dict()`: the next slot, and the state of the source of tasks; with a lag the last
    publications."""
    supervised_source: dict = field(default_factory=dict)
    """The state of the supervised phase's source of tasks; empty before the first supervised step."""
    preference_source: dict = field(default_factory=dict)
    """The state of the preference phase's source of tasks; empty before its first step."""
    before_preference: dict | None = None
    """The evaluation before the preference phase; None before it was made, and in a run without that phase."""
    calls: dict[str, int] = field(default_factory=dict)
    """Calls of workflows and rewards, and failed calls by cause; see `rollout.failures`."""
    accuracies: dict[str, dict[str, float]] = field(default_factory=dict)
    """Name of an evaluation -> step of the reinforcement phase -> accuracy."""
    newest_evaluations: dict[str, dict] = field(default_factory=dict)
    """Name of an evaluation -> `step`, and `result`: the newest one of that name, see `Evaluation.summary_data`."""
    evaluations_due: list[str] = field(default_factory=list)
    """The evaluations after step `step` that are not made yet, such as `validation`: with a lag, or where the run was
    asked to stop before them."""
    num_requests: int = 0
    """The requests that this attempt's sampling client had sent when the checkpoint was written: the place of the
    checkpoint in the attempt's schedule."""
    collapse: dict[str, int] = field(default_factory=dict)
    """Batches in a row with a sign of collapse, by rule; see `train.early_stop`."""
    kl_coef: float | None = None
    """The coefficient of the KL that the next batch trains with, where it adapts (`algorithm.kl_target`)."""
    entropy_coef: float | None = None
    """The coefficient of the entropy bonus after the last batch, where it adapts (`algorithm.entropy_control`)."""
    batch_entropy: float | None = None
    """The mean entropy of the last batch's trained tokens, where the coefficient of the bonus follows it; None before
    the first batch."""
    warm_start: dict | None = None
    """The evaluation before reinforcement; None before it was made."""

    def note_evaluation(self, name: str, step: int, result: dict) -> None:
        """Adds an evaluation after `step` to `accuracies`, and makes it the newest one of its name."""
        self.accuracies.setdefault(name, {})[str(step)] = result["accuracy"]
        self.newest_evaluations[name] = {"step": step, "result": result}

    def make_due(self, names: list[str]) -> None:
        """Makes the evaluations of these names after the present step due again, where they were made or are due."""
        evaluated = [name for name in names if self.evaluation_now(name) is not None]
        for name in evaluated:
            del self.newest_evaluations[name], self.accuracies[name][str(self.step)]
        self.evaluations_due = [name for name in names if name in evaluated or name in self.evaluations_due]

    def evaluation_now(self, name: str) -> dict | None:
        """The evaluation of a name after the present step, as plain data; None: it has not been made."""
        newest = self.newest_evaluations.get(name)
        return newest["result"] if newest is not None and newest["step"] == self.step else None


def random_states() -> dict[str, Any]:
    """The random states of this process as plain data: Python's, numpy's and torch's generators of the CPU."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, [int(key) for key in keys], position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Goes back to the states that `random_states` returned."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(states["torch"]), dtype=torch.uint8))
