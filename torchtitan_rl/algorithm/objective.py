"""The objective of a policy's step: the loss, and the terms that a config adds.

objective = loss_fn with w x correction  +  kl_coef x sum w (x ratio) x KL  -  entropy_coef x sum w x entropy
            + the divergence from a teacher (algorithm.distill; without loss_fn if the teacher alone trains)

w are the `token_weights`. Every term is linear in them, so the objective is a token sum like any loss.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from torchtitan_rl.algorithm.distill_objective import distilled, zero_loss
from torchtitan_rl.algorithm.terms import corrected, regularized
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.types import LossFunction

__all__ = ["policy_objective"]


def policy_objective(config: AlgorithmConfig, columns: Collection[str] = ()) -> LossFunction:
    """`config.loss_fn` with `loss_config`, and every configured term, as one loss that takes `LossInputs` alone.

    `columns` names the loss inputs of the data: soft targets and teacher log-probabilities add terms without a setting.
    """
    objective: LossFunction = partial(config.loss_fn, **config.loss_config)
    has_terms = config.correction_fn or config.distill or config.kl_coef or config.entropy_coef
    if has_terms or {"soft_weights", "teacher_logprobs"} & set(columns):
        objective = _with_terms(objective, config, columns)
    return objective


def _with_terms(objective: LossFunction, config: AlgorithmConfig, columns: Collection[str]) -> LossFunction:
    if config.correction_fn is not None:
        correction = partial(config.correction_fn, **config.correction_config)
        objective = partial(corrected, loss_fn=objective, correction_fn=correction)
    if config.teacher_replaces_loss_fn:
        objective = zero_loss
    kl_coef = config.kl_coef if config.kl_in == "loss" else 0.0
    if kl_coef or config.entropy_coef:
        terms = partial(regularized, kl_coef=kl_coef, kl_estimator=config.kl_estimator)
        terms = partial(terms, kl_ratio_weighted=config.kl_ratio_weighted, entropy_coef=config.entropy_coef)
        objective = partial(terms, loss_fn=objective)
    if config.distill is not None or {"soft_weights", "teacher_logprobs"} & set(columns):
        objective = partial(distilled, loss_fn=objective, distill=config.distill)
    return objective
