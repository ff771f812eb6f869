"""The objective of a policy's step: the loss, and the terms that a config adds.

objective = loss_fn with weights x correction  +  kl_coef x sum weights x KL  -  entropy_coef x sum weights x entropy
            + the divergence from a teacher (algorithm.distill; without loss_fn if the teacher alone trains)

Every term is linear in `weights`, so the objective is a token sum like any loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from functools import partial

import torch

from torchtitan_rl.algorithm.datums import with_inputs
from torchtitan_rl.algorithm.distill_objective import distilled, nothing, sampled_logprobs
from torchtitan_rl.algorithm.kl import KL_ESTIMATORS, penalized
from torchtitan_rl.algorithm.losses import masked_difference, masked_sum
from torchtitan_rl.algorithm.mismatch import kl_sum
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.types import Datum, LossFunction, LossInputs

__all__ = ["policy_objective", "with_kept_weights", "with_kl_reward"]


def policy_objective(config: AlgorithmConfig, columns: Collection[str] = ()) -> LossFunction:
    """`config.loss_fn` with `loss_config`, and every configured term, as one loss that takes `LossInputs` alone.

    `columns` names the loss inputs of the data: soft targets and teacher log-probabilities add terms without a setting.
    """
    objective: LossFunction = partial(config.loss_fn, **config.loss_config)
    if config.correction_fn is not None:
        correction = partial(config.correction_fn, **config.correction_config)
        objective = partial(_corrected, loss_fn=objective, correction_fn=correction)
    distill = config.distill
    if distill is not None and distill.divergence != "tokens" and not distill.rewards:
        objective = nothing
    kl_coef = config.kl_coef if config.kl_in == "loss" else 0.0
    if kl_coef or config.entropy_coef:
        objective = partial(
            _regularized,
            loss_fn=objective,
            kl_coef=kl_coef,
            kl_estimator=config.kl_estimator,
            entropy_coef=config.entropy_coef,
        )
    if distill is not None or {"soft_weights", "teacher_logprobs"} & set(columns):
        objective = partial(distilled, loss_fn=objective, distill=distill)
    return partial(_measured, loss_fn=objective)


def with_kl_reward(data: list[Datum], config: AlgorithmConfig) -> list[Datum]:
    """Datums whose advantages include the KL to the reference if `kl_in="reward"`; else `data` itself.

    The policy's log-probabilities in this KL are the generator's, because the trainer has not scored the batch yet.
    """
    if not config.kl_coef or config.kl_in != "reward":
        return data
    return [
        dataclasses.replace(
            datum,
            loss_inputs={
                **datum.loss_inputs,
                "advantages": penalized(
                    datum.loss_inputs["advantages"],
                    datum.loss_inputs["loss_mask"],
                    datum.loss_inputs["sampling_logprobs"],
                    datum.loss_inputs["reference_logprobs"],
                    coef=config.kl_coef,
                ),
            },
        )
        for datum in data
    ]


def with_kept_weights(data: list[Datum], config: AlgorithmConfig) -> list[Datum]:
    """Datums of one optimizer step whose weights are a mean over the tokens that `config.correction_fn` keeps.

    The correction rejects a token by a factor of 0. The reduction receives masks without rejected tokens, so a rejected
    token has weight 0 in every term of the objective and is not in the mean's denominator. The denominator spans all
    datums of the step, so the factors are computed here, before a split into microbatches; the data must hold
    `old_logprobs`.
    """
    correction = partial(config.correction_fn, **config.correction_config)
    kept = []
    for datum in data:
        alone = torch.zeros(len(datum), dtype=torch.long)
        factor_T, _ = correction(LossInputs(datum=alone, num_datums=1, tensors=datum.loss_inputs))
        kept.append(torch.where(factor_T > 0, datum.loss_inputs["loss_mask"], 0.0))
    return with_inputs(data, weights=config.reduction(kept, [datum.group for datum in data]))


def _corrected(inputs: LossInputs, *, loss_fn, correction_fn) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    factor_T, correction_metrics = correction_fn(inputs)
    weights_T = torch.where(inputs.loss_mask > 0, inputs.weights * factor_T.detach(), 0.0)
    loss, metrics = loss_fn(dataclasses.replace(inputs, tensors={**inputs.tensors, "weights": weights_T}))
    return loss, {**correction_metrics, **metrics}


def _regularized(
    inputs: LossInputs, *, loss_fn, kl_coef: float, kl_estimator: str, entropy_coef: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss, metrics = loss_fn(inputs)
    if kl_coef:
        difference_T = masked_difference(inputs, inputs.policy_logprobs, inputs.reference_logprobs)
        loss = loss + kl_coef * masked_sum(inputs, inputs.weights * KL_ESTIMATORS[kl_estimator](difference_T))
    if entropy_coef:
        entropy_T = torch.where(inputs.loss_mask > 0, inputs.entropy, 0.0)
        loss = loss - entropy_coef * masked_sum(inputs, inputs.weights * entropy_T)
    return loss, metrics


def _measured(inputs: LossInputs, *, loss_fn: LossFunction) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, with metric sums of the advantages and of the KL to the reference."""
    loss, metrics = loss_fn(inputs)
    with torch.no_grad():
        mask_T, sums = inputs.loss_mask > 0, {}
        if "advantages" in inputs.tensors:
            sums["advantage/mean"] = inputs.advantages[mask_T].sum()
            sums["advantage/abs_max"] = torch.where(mask_T, inputs.advantages.abs(), 0.0).max()
        if "reference_logprobs" in inputs.tensors:  # on tokens that the policy, or nearly the policy, sampled
            sums["policy/reference_kl"] = kl_sum(sampled_logprobs(inputs), inputs.reference_logprobs, mask_T)
    return loss, {**sums, **metrics}
