"""From judged rollouts, and from demonstrations, to datums, the trainer's input."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from torchtitan_rl.algorithm.advantages import estimate_advantages
from torchtitan_rl.algorithm.credit import credits_of
from torchtitan_rl.algorithm.precomputed import use_precomputed
from torchtitan_rl.algorithm.routed_data import with_routing
from torchtitan_rl.algorithm.soft_targets import with_soft_targets
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.types import Datum, Rollout, RolloutGroup, Turn

__all__ = ["demonstration_datums", "to_datums"]


def to_datums(groups: list[RolloutGroup], config: AlgorithmConfig) -> list[Datum]:
    """One datum per run of turns that extend each other, in order, with token weights by `config.reduction`. A run in
    which no turn has credit (algorithm/credit.py) has no datum, unless the whole rollout has none: then it is masked.

    Sets `group.precomputed`, and fills `group.advantages`: with valid precomputed advantages
    (algorithm/precomputed.py), else with the estimator's. Raises ValueError for a reward that is not finite, or when
    the estimator gives anything but one finite advantage per rollout, or when `config.credit_fn` gives anything but one
    finite number per turn.
    """
    turns = [turn for group in groups for rollout in group.rollouts for turn in rollout.turns]
    carries = config.precomputed_advantages == "require" or any(turn.advantages is not None for turn in turns)
    carried = use_precomputed(groups, config) if carries else {}
    for index, group in enumerate(groups):
        group.precomputed = index in carried
    for rollout, unneeded in ((rollout, group.precomputed) for group in groups for rollout in group.rollouts):
        # Some estimators turn even an infinite reward into a finite advantage. Precomputed advantages need no reward.
        if not (unneeded if rollout.reward is None else math.isfinite(rollout.reward)):
            raise ValueError(
                f"reward={rollout.reward}: of rollout {rollout.id} is not a finite number; "
                "judge every rollout, or group them with algorithm.grouping.form_groups"
            )
    estimate_advantages([group for group in groups if group.rollouts and not group.precomputed], config)
    sequences: list[_Sequence] = []
    batch_index = 0  # of a rollout among all of the batch
    for group_index, group in enumerate(groups):
        group_advantages = carried[group_index] if group_index in carried else group.advantages
        for position, rollout in enumerate(group.rollouts):
            credits = credits_of(rollout, config)
            parts = list(_sequences(rollout, group_advantages[position], credits, group_index, batch_index))
            sequences += [sequence for sequence in parts if sequence.has_credit] or parts
            batch_index += 1
    masks = [torch.tensor(sequence.mask[1:]) for sequence in sequences]
    weights = config.reduction(masks, [sequence.group for sequence in sequences])
    data = [s.datum(mask_T, weight_T) for s, mask_T, weight_T in zip(sequences, masks, weights, strict=True)]
    turns_of_data = [(sequence.name, sequence.turns) for sequence in sequences]
    if any(turn.soft_targets is not None for turn in turns):
        data = with_soft_targets(data, turns_of_data)
    if config.expert_routing != "own":
        data = with_routing(data, turns_of_data, replayed=config.expert_routing == "replay")
    return data


@dataclass(slots=True)
class _Sequence:
    """Turns of a rollout that extend each other, as one token sequence; lists other than `turns` are per token."""

    name: str
    """The rollout's id."""
    group: int
    rollout: int
    """Indices of the group and of the rollout in the batch."""
    first_turn: int = 0
    """Index in the rollout of the first of `turns`."""
    tokens: list[int] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    turns: list[tuple[int, Turn]] = field(default_factory=list)
    """(position of the turn's first sampled token in `tokens`, turn)."""
    has_credit: bool = False
    """Whether a turn has a credit other than 0."""

    def extend(self, turn: Turn, advantages: list[float], credit: float, *, masked: bool) -> None:
        """Appends the part of a turn's prompt that the sequence lacks, which does not train, and the completion."""
        unseen, logprobs = turn.prompt_tokens[len(self.tokens) :], turn.completion.logprobs
        before = [0.0] * len(unseen)
        self.tokens += unseen + turn.completion.tokens
        self.turns.append((len(self.tokens) - len(logprobs), turn))
        self.has_credit |= credit != 0
        # A token sampled with log-probability -inf does not train.
        self.mask += before + [float(math.isfinite(x) and credit != 0 and not masked) for x in logprobs]
        self.logprobs += before + [x if math.isfinite(x) else 0.0 for x in logprobs]
        self.advantages += before + [credit * advantage for advantage in advantages]

    def datum(self, mask_T: torch.Tensor, weight_T: torch.Tensor) -> Datum:
        """The sequence with its loss mask and token weights. Position t predicts token t + 1, so `mask_T` and all other
        loss inputs begin with the second token."""
        tokens = torch.tensor(self.tokens)
        firsts = [position - 1 for position, _ in self.turns]  # targets begin with the second token
        turns = [turn for _, turn in self.turns]
        return Datum(
            tokens=tokens[:-1],
            target_tokens=tokens[1:],
            loss_inputs={
                "loss_mask": mask_T,
                "advantages": mask_T * torch.tensor(self.advantages[1:]),
                "sampling_logprobs": torch.tensor(self.logprobs[1:]),
                "token_weights": weight_T,
            },
            group=self.group,
            rollout=self.rollout,
            turns=[
                (index, first, len(turn.completion.tokens))
                for index, (first, turn) in enumerate(zip(firsts, turns, strict=True), self.first_turn)
            ],
        )


def _check_completion(rollout: Rollout, turn: Turn) -> None:
    """Raises ValueError for a turn whose parts do not fit, and RuntimeError for a log-probability NaN.

    A token of log-probability -inf is masked. Masking NaN too would hide a broken generator.
    """
    sampled = turn.completion
    if len(sampled.logprobs) != len(sampled.tokens):
        raise ValueError(
            f"completion.logprobs: {len(sampled.logprobs)} for {len(sampled.tokens)} sampled tokens in a turn of "
            f"rollout {rollout.id}; give one log-probability per token"
        )
    if sampled.filtered:
        raise ValueError(
            f"rollout={rollout.id}: was sampled with {sampled.filtered}; its log-probabilities are not those "
            "of the policy, sample training rollouts without"
        )
    for index, logprob in enumerate(sampled.logprobs):
        if math.isnan(logprob):
            raise RuntimeError(
                f"rollout={rollout.id}: token {index} was sampled with "
                "log-probability NaN; the generator's weights or numerics are broken, look at optim/grad_norm before it"
            )


def _sequences(
    rollout: Rollout, advantages: float | list[list[float]], credits: list[float], group: int, number: int
) -> Iterator[_Sequence]:
    """A rollout's sequences; `advantages` is one number, or one number for each turn and token; `credits` are one
    number per turn.

    A turn whose prompt begins with all tokens so far continues the sequence; any other turn begins a new sequence. The
    tokens are the sampled tokens, never text encoded again.
    """
    sequence = _Sequence(rollout.id, group, number)
    for index, turn in enumerate(rollout.turns):
        _check_completion(rollout, turn)
        if sequence.tokens and turn.prompt_tokens[: len(sequence.tokens)] != sequence.tokens:
            yield _predicting(sequence)
            sequence = _Sequence(rollout.id, group, number, first_turn=index)
        turn_advantages = (
            advantages[index] if isinstance(advantages, list) else [advantages] * len(turn.completion.tokens)
        )
        sequence.extend(turn, turn_advantages, credits[index], masked=rollout.masked)
    if sequence.tokens:
        yield _predicting(sequence)


def _predicting(sequence: _Sequence) -> _Sequence:
    """The sequence. Raises ValueError for a single token, after which nothing is predicted."""
    if len(sequence.tokens) == 1:
        raise ValueError(
            f"rollout={sequence.name}: turn {sequence.first_turn} is one token, prompt and completion together, so "
            "nothing is predicted; let the workflow leave such a turn out"
        )
    return sequence


def demonstration_datums(pairs: list[tuple[list[int], list[int]]], config: AlgorithmConfig) -> list[Datum]:
    """Datums from (prompt tokens, completion tokens), for `cross_entropy`: only completion tokens train."""
    sequences, masks = [], []
    for prompt, completion in pairs:
        sequences.append(torch.tensor(prompt + completion))
        mask_T = torch.zeros(len(prompt) + len(completion) - 1)
        mask_T[max(0, len(prompt) - 1) :] = 1.0  # without a prompt the first token is not predicted
        masks.append(mask_T)
    weights = config.reduction(masks, list(range(len(masks))))
    return [
        Datum(
            tokens=sequence[:-1], target_tokens=sequence[1:], loss_inputs={"loss_mask": mask, "token_weights": weight}
        )
        for sequence, mask, weight in zip(sequences, masks, weights, strict=True)
    ]
