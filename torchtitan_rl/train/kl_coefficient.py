"""The adaptive coefficient of the KL to the reference: its place in the run's state, its metrics."""

from __future__ import annotations

import dataclasses
from statistics import fmean

from torchtitan_rl.algorithm.kl_control import adapted_coef, rollout_kls
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.types import Datum
from torchtitan_rl.types.run_state import RunState

__all__ = ["AdaptiveKL"]


class AdaptiveKL:
    """Holds the KL of a run's rollouts at `kl_target`. The coefficient is in the run's state, so that a resumed run
    goes on with the one of its checkpoint."""

    def __init__(self, config: AlgorithmConfig, state: RunState) -> None:
        self._config, self._state = config, state
        if state.kl_coef is None:
            state.kl_coef = config.kl_coef

    def algorithm(self, algorithm: AlgorithmConfig) -> AlgorithmConfig:
        """`algorithm` with the coefficient of the batch that comes next."""
        return dataclasses.replace(algorithm, kl_coef=self._state.kl_coef)

    def adapt(self, data: list[Datum]) -> dict[str, float]:
        """Changes the coefficient after a batch of training data. Returns the batch's metrics: its own coefficient, and
        its mean KL of a rollout."""
        coef, kls = self._state.kl_coef, rollout_kls(data)
        assert coef is not None
        self._state.kl_coef = adapted_coef(coef, kls, self._config)
        return {"policy/kl_coef": coef, "policy/rollout_kl": fmean(kls) if kls else 0.0}
