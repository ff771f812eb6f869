"""Corrections and regularisers: terms of an objective beside its loss, and what they change in the data."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch

from torchtitan_rl.algorithm.inputs import with_inputs
from torchtitan_rl.algorithm.kl import KL_ESTIMATORS, penalized
from torchtitan_rl.algorithm.losses import masked_difference, masked_sum
from torchtitan_rl.algorithm.surrogate import ratio
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.types import Datum, LossInputs

__all__ = ["corrected", "regularized", "same_sequences", "with_kept_weights", "with_kl_reward"]
__all__ += ["with_minibatch_fn"]


def corrected(inputs: LossInputs, *, loss_fn, correction_fn) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`loss_fn` with the weights of trained tokens multiplied by the correction's factors."""
    factor_T, correction_metrics = correction_fn(inputs)
    weights_T = torch.where(inputs.loss_mask > 0, inputs.token_weights * factor_T.detach(), 0.0)
    loss, metrics = loss_fn(dataclasses.replace(inputs, tensors={**inputs.tensors, "token_weights": weights_T}))
    return loss, {**correction_metrics, **metrics}


def regularized(
    inputs: LossInputs, *, loss_fn, kl_coef: float, kl_estimator: str, kl_ratio_weighted: bool, entropy_coef: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`loss_fn` plus the KL to the reference, less the entropy, each times its coefficient and the token weights.

    With `kl_ratio_weighted` a token's KL is multiplied by its ratio, which has a gradient (DeepSeek-V3.2,
    arXiv:2512.02556, "unbiased KL estimate").
    """
    loss, metrics = loss_fn(inputs)
    if kl_coef:
        difference_T = masked_difference(inputs, inputs.policy_logprobs, inputs.reference_logprobs)
        kl_T = KL_ESTIMATORS[kl_estimator](difference_T)
        if kl_ratio_weighted:
            kl_T = ratio(inputs) * kl_T
        loss = loss + kl_coef * masked_sum(inputs, inputs.token_weights * kl_T)
    if entropy_coef:
        entropy_T = torch.where(inputs.loss_mask > 0, inputs.entropy, 0.0)
        loss = loss - entropy_coef * masked_sum(inputs, inputs.token_weights * entropy_T)
    return loss, metrics


def with_kl_reward(data: list[Datum], config: AlgorithmConfig) -> list[Datum]:
    """Datums whose advantages include the KL to the reference if `kl_in="reward"`; else `data` itself.

    The policy's log-probabilities in this KL are the generator's, because the trainer has not scored the batch yet.
    """
    if not config.kl_coef or config.kl_in != "reward":
        return data
    columns = ("advantages", "loss_mask", "sampling_logprobs", "reference_logprobs")
    advantages = [penalized(*(datum.loss_inputs[name] for name in columns), coef=config.kl_coef) for datum in data]
    return with_inputs(data, advantages=advantages)


def with_kept_weights(data: list[Datum], config: AlgorithmConfig) -> list[Datum]:
    """Datums of one optimizer step whose weights are a mean over the tokens that `config.correction_fn` keeps.

    The correction rejects a token by a factor of 0. The reduction receives masks without rejected tokens, so a rejected
    token has weight 0 in every term of the objective and is not in the mean's denominator. A sequence that loses all
    its trained tokens is not shown to the reduction, so it is not in a mean over sequences or groups either. The
    denominator spans all datums of the step, so the factors are computed here, before a split into microbatches; the
    data must hold `old_logprobs`.
    """
    correction = partial(config.correction_fn, **config.correction_config)
    masks: list[torch.Tensor] = []
    for datum in data:
        datum_index_T = torch.zeros(len(datum), dtype=torch.long)  # it stands alone
        tensors = dict(datum.loss_inputs)  # a correction that reads `position` adds a tensor
        factor_T, _ = correction(LossInputs(datum=datum_index_T, num_datums=1, tensors=tensors, turns=[datum.turns]))
        masks.append(torch.where(factor_T > 0, datum.loss_inputs["loss_mask"], 0.0))
    weights = [torch.zeros_like(mask) for mask in masks]
    # A sequence that had no trained token before the correction counts as it does without one.
    counted = [i for i, mask in enumerate(masks) if mask.any() or not data[i].loss_inputs["loss_mask"].any()]
    if counted:
        reduced = config.reduction([masks[i] for i in counted], [data[i].group for i in counted])
        for i, weights_T in zip(counted, reduced, strict=True):
            weights[i] = weights_T
    return with_inputs(data, token_weights=weights)


def with_minibatch_fn(data: list[Datum], config: AlgorithmConfig) -> list[Datum]:
    """Datums of one optimizer step as `config.minibatch_fn` returns them.

    Its statistics span all datums of the step, so it is called here, before a split into microbatches; the data must
    hold `old_logprobs`. It sees the weights that a correction's kept tokens have, if the config says so. Raises
    ValueError as `same_sequences` does.
    """
    return same_sequences(data, config.minibatch_fn(data, **config.minibatch_config))


def same_sequences(data: list[Datum], changed: list[Datum]) -> list[Datum]:
    """`changed`, the answer of a `minibatch_fn` to `data`. Raises ValueError unless it has the same sequences in the
    same order, with the same masks and with every column."""
    setting = "algorithm.minibatch_fn"
    if not isinstance(changed, list) or not all(isinstance(datum, Datum) for datum in changed):
        raise ValueError(
            f"{setting}: returned a {type(changed).__name__} that is no list of datums; return list[Datum]"
        )
    if len(changed) != len(data):
        raise ValueError(
            f"{setting}: returned {len(changed)} datums of {len(data)}; return all in their order, and give tokens "
            "that are not to train token_weights of 0"
        )
    for index, (before, after) in enumerate(zip(data, changed, strict=True)):
        if not torch.equal(before.tokens, after.tokens):
            raise ValueError(f"{setting}: changed the tokens of datum {index}; return the datums in their order")
        if missing := sorted(before.loss_inputs.keys() - after.loss_inputs.keys()):
            raise ValueError(f"{setting}: took {', '.join(missing)} off datum {index}; return every column")
        if not torch.equal(before.loss_inputs["loss_mask"], after.loss_inputs["loss_mask"]):
            raise ValueError(
                f"{setting}: changed loss_mask of datum {index}, over which metrics are means; change token_weights"
            )
    return changed
