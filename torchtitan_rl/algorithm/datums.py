"""From judged rollouts, or demonstrations, to what the trainer reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any

import torch

from torchtitan_rl.algorithm.advantages import batch_advantages
from torchtitan_rl.algorithm.gae import gae
from torchtitan_rl.algorithm.precomputed import computed_for, precomputed_advantages
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.types import Datum, Rollout, RolloutGroup, Turn

__all__ = ["to_datums", "demonstration_datums", "with_inputs", "minibatches", "with_gae"]


def to_datums(groups: list[RolloutGroup], config: AlgorithmConfig, *, oldest_version: int = 0) -> list[Datum]:
    """One datum per run of turns that extend each other, in order, weighed by `config.reduction`.

    Fills `group.advantages` on the way: with those the turns carry, unless they were computed for a policy version
    before `oldest_version` or do not hold up (algorithm/precomputed.py), else with the estimator's.
    Raises ValueError for a reward that is not finite, or when the estimator gives anything but one finite advantage per
    rollout.
    """
    parts, origins, num_rollouts = [], [], 0
    for index, (group, given) in enumerate(zip(groups, _weigh(groups, config, oldest_version), strict=True)):
        for rollout, advantages in zip(group.rollouts, given, strict=True):
            for part in _sequences(rollout, advantages, oldest_version):
                parts.append(part)
                origins.append((index, num_rollouts))
            num_rollouts += 1
    weights = config.reduction([inputs["loss_mask"] for _, _, inputs, _ in parts], [group for group, _ in origins])
    return [
        Datum(
            tokens=tokens,
            target_tokens=targets,
            loss_inputs={**inputs, "weights": weight},
            group=group,
            rollout=rollout,
            soft_targets=soft,
        )
        for (tokens, targets, inputs, soft), weight, (group, rollout) in zip(parts, weights, origins, strict=True)
    ]


def with_inputs(data: list[Datum], **columns: list[torch.Tensor]) -> list[Datum]:
    """New datums with more loss inputs (or others in their place): one (T,) or (T, n) tensor per datum and name."""
    return [
        dataclasses.replace(
            datum, loss_inputs={**datum.loss_inputs, **{name: rows[i] for name, rows in columns.items()}}
        )
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
        chosen = set(groups[start : start + size])
        part = [datum for datum in data if datum.group in chosen]
        parts.append(
            with_inputs(part, weights=reduction([d.loss_inputs["loss_mask"] for d in part], [d.group for d in part]))
        )
    return parts


def with_gae(
    data: list[Datum],
    rewards: list[float],
    values: list[torch.Tensor],
    config: AlgorithmConfig,
    *,
    keep_groups: Collection[int] = (),
) -> list[Datum]:
    """Advantages, returns and values by GAE, for a critic's values per datum and, per datum, its rollout's reward.

    The datums of a rollout are one episode, in order: the reward falls once, on the last trained token of the last of
    them, and the value after a datum's last trained token is that of the next datum's first.
    The datums of `keep_groups` keep their advantages, which were precomputed; the critic learns from them all.
    """
    episodes: dict[int, list[int]] = {}
    for index, datum in enumerate(data):
        episodes.setdefault(datum.rollout, []).append(index)
    pairs: list[Any] = [None] * len(data)
    for members in episodes.values():
        of_episode = gae(
            torch.cat([values[i] for i in members]),
            torch.cat([data[i].loss_inputs["loss_mask"] for i in members]),
            rewards[members[-1]],
            gamma=config.gae_gamma,
            lam=config.gae_lambda,
        )
        split = zip(*(column.split([len(data[i]) for i in members]) for column in of_episode), strict=True)
        for index, pair in zip(members, split, strict=True):
            pairs[index] = pair
    advantages = [
        datum.loss_inputs["advantages"] if datum.group in keep_groups else advantages_T
        for datum, (advantages_T, _) in zip(data, pairs, strict=True)
    ]
    return with_inputs(data, values=values, advantages=advantages, returns=[returns for _, returns in pairs])


def _weigh(groups: list[RolloutGroup], config: AlgorithmConfig, oldest_version: int) -> list[list[list[list[float]]]]:
    """One advantage per sampled token, `[group][rollout][turn][token]`; fills `advantages` and `precomputed`."""
    given = [precomputed_advantages(group, config, oldest_version=oldest_version) for group in groups]
    for group, own in zip(groups, given, strict=True):
        group.precomputed, group.advantages = own is not None, []
        _check_rewards(group)
    # An estimator has no word on groups that bring their own, nor on empty ones.
    estimated = [group for group in groups if group.rollouts and not group.precomputed]
    for group, advantages in zip(estimated, batch_advantages(estimated, config), strict=True):
        group.advantages = advantages
    for index, group in enumerate(groups):
        if group.precomputed:
            group.advantages = [_mean([number for turn in turns for number in turn]) for turns in given[index]]
        else:
            given[index] = [
                [[advantage] * len(turn.completion.tokens) for turn in rollout.turns]
                for rollout, advantage in zip(group.rollouts, group.advantages, strict=True)
            ]
    return given


def _check_rewards(group: RolloutGroup) -> None:
    """Some estimators turn even an infinite reward into a finite advantage."""
    for rollout in group.rollouts:
        unneeded = rollout.reward is None and group.precomputed
        if not unneeded and (rollout.reward is None or not math.isfinite(rollout.reward)):
            raise ValueError(
                f"reward={rollout.reward}: of rollout {rollout.id} is not a finite number; "
                "judge every rollout, or group them with algorithm.grouping.form_groups"
            )


def _mean(numbers: list[float]) -> float:
    return math.fsum(numbers) / max(1, len(numbers))


def _sequences(rollout: Rollout, advantages: list[list[float]], oldest_version: int):
    """(tokens, targets, loss inputs, soft targets) of each run of turns that extend each other; `advantages` are per
    turn and token.

    A turn whose prompt begins with all tokens so far continues the sequence: what lies between, an observation, is read
    but not trained on. Any other turn begins a new one. Tokens are those that were sampled, never text encoded again.
    """
    tokens, mask, sampling, weighed, soft = [], [], [], [], []
    for turn, advantages_of_turn in zip(rollout.turns, advantages, strict=True):
        _check_turn(rollout, turn)
        if tokens and turn.prompt_tokens[: len(tokens)] != tokens:
            yield _part(tokens, mask, sampling, weighed, soft)
            tokens, mask, sampling, weighed, soft = [], [], [], [], []
        unseen, logprobs = turn.prompt_tokens[len(tokens) :], turn.completion.logprobs
        before = [0.0] * len(unseen)
        tokens += unseen + turn.completion.tokens
        # A token sampled with log-probability -inf does not train.
        mask += before + [float(math.isfinite(x) and not rollout.masked) for x in logprobs]
        sampling += before + [x if math.isfinite(x) else 0.0 for x in logprobs]
        weighed += before + advantages_of_turn
        if turn.soft_targets is not None and computed_for(turn) >= oldest_version:
            soft.append((len(tokens) - len(logprobs), *turn.soft_targets))
    if tokens:
        yield _part(tokens, mask, sampling, weighed, soft)


def _part(
    tokens: list[int],
    mask: list[float],
    sampling: list[float],
    weighed: list[float],
    soft: list[tuple[int, torch.Tensor, torch.Tensor]],
):
    """The token before is what predicts a token, so what is said of the first is left out."""
    sequence, mask_T = torch.tensor(tokens), torch.tensor(mask[1:])
    return (
        sequence[:-1],
        sequence[1:],
        {
            "loss_mask": mask_T,
            "advantages": mask_T * torch.tensor(weighed[1:]),
            "sampling_logprobs": torch.tensor(sampling[1:]),
        },
        _soft_targets(soft, len(tokens)),
    )


def _soft_targets(
    soft: list[tuple[int, torch.Tensor, torch.Tensor]], length: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Tokens and weights (T, K) of (first position, tokens, weights) of turns; weight 0 where there are none, or
    fewer."""
    if not soft:
        return None
    width = max(tokens.shape[1] for _, tokens, _ in soft)
    tokens_TK, weights_TK = torch.zeros(length, width, dtype=torch.long), torch.zeros(length, width)
    for start, tokens, weights in soft:
        place = slice(start, start + len(tokens)), slice(0, tokens.shape[1])
        tokens_TK[place], weights_TK[place] = tokens, weights
    return tokens_TK[1:], weights_TK[1:]


def _check_turn(rollout: Rollout, turn: Turn) -> None:
    """Raises ValueError for a turn that does not fit together, and RuntimeError for NaN: a generator that computes it
    must not look like one with nothing to learn from."""
    logprobs = turn.completion.logprobs
    if len(logprobs) != len(turn.completion.tokens):
        raise ValueError(
            f"completion.logprobs: {len(logprobs)} for {len(turn.completion.tokens)} sampled tokens in a turn of "
            f"rollout {rollout.id}; give one log-probability per token"
        )
    for part in turn.soft_targets or ():
        if part.shape != turn.soft_targets[0].shape or len(part) != len(logprobs):
            raise ValueError(
                f"turn.soft_targets: of shapes {[tuple(p.shape) for p in turn.soft_targets]}, rollout "
                f"{rollout.id} sampled {len(logprobs)} tokens; give tokens (n, K) and weights (n, K)"
            )
        if not torch.isfinite(part).all():
            raise ValueError(
                f"turn.soft_targets: of rollout {rollout.id} are not all finite; the teacher's weights or "
                "numerics are broken"
            )
    if turn.completion.filtered:
        raise ValueError(
            f"rollout={rollout.id}: was sampled with top_k or top_p; its log-probabilities are not those "
            "of the policy, sample training rollouts without"
        )
    if any(map(math.isnan, logprobs)):
        raise RuntimeError(
            f"rollout={rollout.id}: token {[math.isnan(x) for x in logprobs].index(True)} was sampled with "
            "log-probability NaN; the generator's weights or numerics are broken, look at optim/grad_norm before it"
        )


def demonstration_datums(pairs: list[tuple[list[int], list[int]]], config: AlgorithmConfig) -> list[Datum]:
    """Supervised data from (prompt tokens, completion tokens): only the completion is learned."""
    sequences, masks = [], []
    for prompt, completion in pairs:
        sequences.append(torch.tensor(prompt + completion))
        mask_T = torch.zeros(len(prompt) + len(completion) - 1)
        mask_T[len(prompt) - 1 :] = 1.0
        masks.append(mask_T)
    weights = config.reduction(masks, list(range(len(masks))))
    return [
        Datum(tokens=sequence[:-1], target_tokens=sequence[1:], loss_inputs={"loss_mask": mask, "weights": weight})
        for sequence, mask, weight in zip(sequences, masks, weights, strict=True)
    ]
