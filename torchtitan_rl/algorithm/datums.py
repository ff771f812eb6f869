"""From judged rollouts, or demonstrations, to what the trainer reads."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from torchtitan_rl.algorithm.advantages import batch_advantages
from torchtitan_rl.algorithm.config import AlgorithmConfig
from torchtitan_rl.algorithm.gae import gae
from torchtitan_rl.types import Datum, Rollout, RolloutGroup

__all__ = ["to_datums", "demonstration_datums", "with_inputs", "minibatches", "with_gae"]


def to_datums(groups: list[RolloutGroup], config: AlgorithmConfig) -> list[Datum]:
    """One datum per rollout turn, in order, weighed by `config.reduction`; fills `group.advantages` on the way.

    Raises ValueError when the estimator gives anything but one finite advantage per rollout.
    """
    parts, group_of = [], []
    for index, (group, advantages) in enumerate(zip(groups, batch_advantages(groups, config), strict=True)):
        group.advantages = advantages
        for rollout, advantage in zip(group.rollouts, group.advantages, strict=True):
            for part in _turns(rollout, advantage):
                parts.append(part)
                group_of.append(index)
    weights = config.reduction([part["loss_mask"] for _, _, part in parts], group_of)
    return [
        Datum(tokens=tokens, target_tokens=targets, loss_inputs={**inputs, "weights": weight}, group=group)
        for (tokens, targets, inputs), weight, group in zip(parts, weights, group_of, strict=True)
    ]


def with_inputs(data: list[Datum], **columns: list[torch.Tensor]) -> list[Datum]:
    """New datums with more loss inputs (or others in their place): one (T,) tensor per datum and name."""
    return [
        Datum(tokens=datum.tokens, target_tokens=datum.target_tokens, group=datum.group,
              loss_inputs={**datum.loss_inputs, **{name: rows[i] for name, rows in columns.items()}})
        for i, datum in enumerate(data)
    ]


def minibatches(data: list[Datum], tasks_per_minibatch: int, reduction: Callable) -> list[list[Datum]]:
    """Cuts a batch into minibatches of whole groups, each weighed as the mean it is of its own tokens.

    The last one holds what is left over. `tasks_per_minibatch=0` keeps the batch whole.
    """
    groups = sorted({datum.group for datum in data})
    size = tasks_per_minibatch or len(groups)
    parts = []
    for start in range(0, len(groups), size):
        chosen = set(groups[start:start + size])
        part = [datum for datum in data if datum.group in chosen]
        parts.append(with_inputs(
            part, weights=reduction([d.loss_inputs["loss_mask"] for d in part], [d.group for d in part])))
    return parts


def with_gae(data: list[Datum], rewards: list[float], values: list[torch.Tensor], config: AlgorithmConfig) -> list[Datum]:
    """Advantages, returns and values by GAE, for one reward and a critic's values per datum."""
    pairs = [
        gae(values_T, datum.loss_inputs["loss_mask"], reward, gamma=config.gae_gamma, lam=config.gae_lambda)
        for datum, reward, values_T in zip(data, rewards, values, strict=True)
    ]
    return with_inputs(
        data, values=values, advantages=[advantages for advantages, _ in pairs], returns=[returns for _, returns in pairs])


def _turns(rollout: Rollout, advantage: float):
    """(tokens, targets, loss inputs) of each turn. A token sampled with log-probability -inf does not train.

    Raises RuntimeError for NaN: a generator that computes NaN must not look like one that has nothing to learn from.
    """
    for turn in rollout.turns:
        logprobs = turn.completion.logprobs
        if turn.completion.filtered:
            raise ValueError(f"rollout={rollout.id}: was sampled with top_k or top_p; its log-probabilities are not those "
                             "of the policy, sample training rollouts without")
        if any(map(math.isnan, logprobs)):
            raise RuntimeError(
                f"rollout={rollout.id}: token {[math.isnan(x) for x in logprobs].index(True)} was sampled with "
                "log-probability NaN; the generator's weights or numerics are broken, look at optim/grad_norm before it")
        sequence = torch.tensor(turn.prompt_tokens + turn.completion.tokens)
        before = [0.0] * (len(turn.prompt_tokens) - 1)  # then the completion's first token is the target
        mask_T = torch.tensor(before + [float(math.isfinite(x)) for x in logprobs])
        sampling_T = torch.tensor(before + [x if math.isfinite(x) else 0.0 for x in logprobs])
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
