"""From judged rollouts, or demonstrations, to what the trainer reads."""

from __future__ import annotations

import math

import torch

from torchtitan_rl.algorithm.config import AlgorithmConfig
from torchtitan_rl.types import Datum, Rollout, RolloutGroup

__all__ = ["to_datums", "demonstration_datums"]


def to_datums(groups: list[RolloutGroup], config: AlgorithmConfig) -> list[Datum]:
    """One datum per rollout turn, weighed by `config.reduction`; fills `group.advantages` on the way.

    Raises ValueError when the estimator gives anything but one finite advantage per rollout.
    """
    parts, group_of = [], []
    for index, group in enumerate(groups):
        group.advantages = _advantages(group, config)
        for rollout, advantage in zip(group.rollouts, group.advantages, strict=True):
            for part in _turns(rollout, advantage):
                parts.append(part)
                group_of.append(index)
    weights = config.reduction([part["loss_mask"] for _, _, part in parts], group_of)
    return [
        Datum(tokens=tokens, target_tokens=targets, loss_inputs={**inputs, "weights": weight})
        for (tokens, targets, inputs), weight in zip(parts, weights, strict=True)
    ]


def _advantages(group: RolloutGroup, config: AlgorithmConfig) -> list[float]:
    advantages = config.advantage_fn(torch.tensor(group.rewards, dtype=torch.float64)).tolist()
    if len(advantages) != len(group.rollouts) or not all(map(math.isfinite, advantages)):
        raise ValueError(
            f"algorithm.advantage_fn={config.advantage_fn.__name__}: gave {advantages} for rewards {group.rewards} "
            f"of group {group.id}; return one finite number per rollout")
    return advantages


def _turns(rollout: Rollout, advantage: float):
    """(tokens, targets, loss inputs) of each turn. A token whose log-probability is not finite does not train."""
    for turn in rollout.turns:
        completion = turn.completion
        sequence = torch.tensor(turn.prompt_tokens + completion.tokens)
        start = len(turn.prompt_tokens) - 1  # the completion's first token is the target here
        logprobs = torch.tensor(completion.logprobs, dtype=torch.float32)
        finite = torch.isfinite(logprobs)
        mask_T, sampling_T = torch.zeros(len(sequence) - 1), torch.zeros(len(sequence) - 1)
        mask_T[start:] = finite.float()
        sampling_T[start:] = torch.where(finite, logprobs, 0.0)
        yield sequence[:-1], sequence[1:], {
            "loss_mask": mask_T, "advantages": mask_T * advantage, "sampling_logprobs": sampling_T}


def demonstration_datums(pairs: list[tuple[list[int], list[int]]], config: AlgorithmConfig) -> list[Datum]:
    """Supervised data from (prompt tokens, completion tokens): only the completion is learned."""
    sequences, masks = [], []
    for prompt, completion in pairs:
        sequences.append(torch.tensor(prompt + completion))
        mask_T = torch.zeros(len(prompt) + len(completion) - 1)
        mask_T[len(prompt) - 1:] = 1.0
        masks.append(mask_T)
    weights = config.reduction(masks, list(range(len(masks))))
    return [
        Datum(tokens=sequence[:-1], target_tokens=sequence[1:], loss_inputs={"loss_mask": mask, "weights": weight})
        for sequence, mask, weight in zip(sequences, masks, weights, strict=True)
    ]
