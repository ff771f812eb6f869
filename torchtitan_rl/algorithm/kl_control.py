"""A coefficient of the KL that goes up and down to hold the KL at a target."""

from __future__ import annotations

from statistics import fmean

import torch

from torchtitan_rl.algorithm.kl import k1
from torchtitan_rl.algorithm.returns import episodes_of
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.types import Datum

__all__ = ["MAX_ERROR", "adapted_coef", "rollout_kls"]

MAX_ERROR = 0.2
"""The largest relative error that one batch counts with."""


def rollout_kls(data: list[Datum]) -> list[float]:
    """The KL to the reference of each rollout that trains: the sum of k1 over its trained tokens, in nats. The policy's
    log-probabilities are the generator's."""
    kls = []
    for members in episodes_of(data):
        inputs = [data[i].loss_inputs for i in members]
        masks = [columns["loss_mask"] > 0 for columns in inputs]
        differences = [
            (columns["sampling_logprobs"].double() - columns["reference_logprobs"].double())[mask]
            for columns, mask in zip(inputs, masks, strict=True)
        ]
        if any(map(len, differences)):
            kls.append(float(k1(torch.cat(differences)).sum()))
    return kls


def adapted_coef(coef: float, kls: list[float], config: AlgorithmConfig) -> float:
    """The coefficient of the next batch (Ziegler et al., arXiv:1909.08593, section 2.2): coef x (1 + e n / horizon), n
    the number of rollouts and e = mean KL / target - 1, held within +-0.2. `kls` is `rollout_kls` of this batch, which
    trained with `coef`; without a rollout the coefficient stays."""
    if not kls:
        return coef
    error = max(-MAX_ERROR, min(MAX_ERROR, fmean(kls) / config.kl_target - 1))
    return coef * (1 + error * len(kls) / config.kl_horizon)
