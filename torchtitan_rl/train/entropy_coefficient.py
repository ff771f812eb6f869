"""The adaptive coefficient of the entropy bonus: its place in the run's state, its metric."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torchtitan_rl.algorithm.entropy_control import adapted_coef, bonus_factor
from torchtitan_rl.config.algorithm import AlgorithmConfig, EntropyControlConfig
from torchtitan_rl.types.run_state import RunState

__all__ = ["AdaptiveEntropy"]


class AdaptiveEntropy:
    """Holds the policy's entropy at the target of `entropy_control`. The coefficient, and the entropy that says whether
    it acts, are in the run's state, so that a resumed run goes on with those of its checkpoint."""

    def __init__(self, control: EntropyControlConfig, first_coef: float, state: RunState) -> None:
        """`first_coef`: the coefficient of a run without a batch."""
        self._control, self._state = control, state
        if state.entropy_coef is None:
            state.entropy_coef = first_coef

    def algorithm(self, algorithm: AlgorithmConfig) -> AlgorithmConfig:
        """`algorithm` with the factor of the entropy bonus of the batch that comes next."""
        coef = self._state.entropy_coef
        assert coef is not None
        return dataclasses.replace(algorithm, entropy_coef=bonus_factor(coef, self._state.batch_entropy, self._control))

    def adapt(self, line: dict[str, Any]) -> dict[str, float]:
        """Changes the coefficient after a batch, by the metrics of its steps. Returns the batch's metric: the factor
        that it trained with. A batch without a trained token, or without a finite entropy, changes nothing."""
        coef, entropy = self._state.entropy_coef, line.get("policy/entropy", math.nan)
        assert coef is not None
        metric = {"policy/entropy_coef": bonus_factor(coef, self._state.batch_entropy, self._control)}
        if line["tokens/trained"] and math.isfinite(entropy):
            self._state.entropy_coef = adapted_coef(coef, entropy, self._control)
            self._state.batch_entropy = entropy
        return metric
