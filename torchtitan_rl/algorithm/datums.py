"""From judged rollouts to datums, the trainer's input."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from torchtitan_rl.algorithm.advantages import estimate_advantages
from torchtitan_rl.algorithm.precomputed import use_precomputed
from torchtitan_rl.algorithm.soft_targets import with_soft_targets
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.types import Datum, Rollout, RolloutGroup, Turn

__all__ = ["to_datums", "with_inputs", "without_inputs", "minibatches"]


def to_datums(groups: list[RolloutGroup], config: AlgorithmConfig) -> list[Datum]:
    """One datum per run of turns that extend each other, in order, with token weights by `config.reduction`.

    Fills `group.advantages`: with valid precomputed advantages (algorithm/precomputed.py), else with the estimator's.
    Raises ValueError for a reward that is not finite, or when the estimator gives anything but one finite advantage per
    rollout.
    """
    carried: dict[int, list] = {}
    turns = [turn for group in groups for rollout in group.rollouts for turn in rollout.turns]
    if config.precomputed_advantages == "require" or any(turn.advantages is not None for turn in turns):
        carried = use_precomputed(groups, config)
    _check_rewards(groups)
    estimate_advantages([group for group in groups if group.rollouts and not group.precomputed], config)
    sequences: list[_Sequence] = []
    rollouts = [(index, group, i) for index, group in enumerate(groups) for i in range(len(group.rollouts))]
    for number, (index, group, i) in enumerate(rollouts):
        advantages = carried[index][i] if index in carried else group.advantages[i]
        for sequence in _sequences(group.rollouts[i], advantages):
            sequence.name, sequence.group, sequence.rollout = group.rollouts[i].id, index, number
            sequences.append(sequence)
    columns = [sequence.columns() for sequence in sequences]
    weights = config.reduction([inputs["loss_mask"] for inputs in columns], [s.group for s in sequences])
    data = [
        sequence.datum({**inputs, "weights": weight})
        for sequence, inputs, weight in zip(sequences, columns, weights, strict=True)
    ]
    if any(turn.soft_targets is not None for turn in turns):
        data = with_soft_targets(data, [(sequence.name, sequence.turns) for sequence in sequences])
    return data


def with_inputs(data: list[Datum], **columns: list[torch.Tensor]) -> list[Datum]:
    """New datums with loss inputs added or replaced: one (T,) or (T, n) tensor per datum and name."""
    return [
        dataclasses.replace(
            datum, loss_inputs={**datum.loss_inputs, **{name: rows[i] for name, rows in columns.items()}}
        )
        for i, datum in enumerate(data)
    ]


def without_inputs(data: list[Datum], *names: str) -> list[Datum]:
    """New datums without the named loss inputs; a datum may lack a name."""
    return [
        dataclasses.replace(datum, loss_inputs={n: x for n, x in datum.loss_inputs.items() if n not in names})
        for datum in data
    ]


def minibatches(data: list[Datum], tasks_per_minibatch: int, reduction: Callable) -> list[list[Datum]]:
    """Cuts a batch into minibatches of whole groups; `reduction` computes the token weights of each minibatch anew.

    The last minibatch holds the remaining groups. `tasks_per_minibatch=0` keeps the batch and its token weights.
    """
    if not tasks_per_minibatch:
        return [data]
    groups, parts = sorted({datum.group for datum in data}), []
    for start in range(0, len(groups), tasks_per_minibatch):
        chosen = set(groups[start : start + tasks_per_minibatch])
        part = [datum for datum in data if datum.group in chosen]
        weights = reduction([d.loss_inputs["loss_mask"] for d in part], [d.group for d in part])
        parts.append(with_inputs(part, weights=weights))
    return parts


def _check_rewards(groups: list[RolloutGroup]) -> None:
    """Some estimators turn even an infinite reward into a finite advantage."""
    for group in groups:
        for rollout in group.rollouts:
            unneeded = rollout.reward is None and group.precomputed
            if not unneeded and (rollout.reward is None or not math.isfinite(rollout.reward)):
                raise ValueError(
                    f"reward={rollout.reward}: of rollout {rollout.id} is not a finite number; "
                    "judge every rollout, or group them with algorithm.grouping.form_groups"
                )


@dataclass(slots=True)
class _Sequence:
    """Turns of a rollout that extend each other, as one token sequence; lists other than `turns` are per token."""

    name: str = ""
    """The rollout's id."""
    group: int = 0
    rollout: int = 0
    """Indices of the group and of the rollout in the batch."""
    tokens: list[int] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    turns: list[tuple[int, Turn]] = field(default_factory=list)
    """(position of the turn's first sampled token in `tokens`, turn)."""
    first_turn: int = 0
    """Index in the rollout of the first of `turns`."""

    def extend(self, turn: Turn, advantages: list[float], *, masked: bool) -> None:
        """Appends the part of a turn's prompt that the sequence lacks, which does not train, and the completion."""
        unseen, logprobs = turn.prompt_tokens[len(self.tokens) :], turn.completion.logprobs
        before = [0.0] * len(unseen)
        self.tokens += unseen + turn.completion.tokens
        self.turns.append((len(self.tokens) - len(logprobs), turn))
        # A token sampled with log-probability -inf does not train.
        self.mask += before + [float(math.isfinite(x) and not masked) for x in logprobs]
        self.logprobs += before + [x if math.isfinite(x) else 0.0 for x in logprobs]
        self.advantages += before + advantages

    def columns(self) -> dict[str, torch.Tensor]:
        """Loss inputs, each (T,). Position t predicts token t + 1, so the first token has no entry."""
        mask_T = torch.tensor(self.mask[1:])
        return {
            "loss_mask": mask_T,
            "advantages": mask_T * torch.tensor(self.advantages[1:]),
            "sampling_logprobs": torch.tensor(self.logprobs[1:]),
        }

    def datum(self, loss_inputs: dict[str, torch.Tensor]) -> Datum:
        tokens = torch.tensor(self.tokens)
        return Datum(
            tokens=tokens[:-1],
            target_tokens=tokens[1:],
            loss_inputs=loss_inputs,
            group=self.group,
            rollout=self.rollout,
            turns=[(i, at - 1, len(t.completion.tokens)) for i, (at, t) in enumerate(self.turns, self.first_turn)],
        )


def _sequences(rollout: Rollout, advantages: float | list[list[float]]) -> Iterator[_Sequence]:
    """A rollout's sequences; `advantages` is one number, or one number for each turn and token.

    A turn whose prompt begins with all tokens so far continues the sequence; any other turn begins a new sequence. The
    tokens are the sampled tokens, never text encoded again.
    """
    sequence = _Sequence()
    for index, turn in enumerate(rollout.turns):
        _check_turn(rollout, turn)
        if sequence.tokens and turn.prompt_tokens[: len(sequence.tokens)] != sequence.tokens:
            yield sequence
            sequence = _Sequence(first_turn=index)
        of_turn = advantages[index] if isinstance(advantages, list) else [advantages] * len(turn.completion.tokens)
        sequence.extend(turn, of_turn, masked=rollout.masked)
    if sequence.tokens:
        yield sequence


def _check_turn(rollout: Rollout, turn: Turn) -> None:
    """Raises ValueError for a turn whose parts do not fit, and RuntimeError for a log-probability NaN.

    A token of log-probability -inf is masked. Masking NaN too would hide a broken generator.
    """
    logprobs = turn.completion.logprobs
    if len(logprobs) != len(turn.completion.tokens):
        raise ValueError(
            f"completion.logprobs: {len(logprobs)} for {len(turn.completion.tokens)} sampled tokens in a turn of "
            f"rollout {rollout.id}; give one log-probability per token"
        )
    if turn.completion.filtered:
        raise ValueError(
            f"rollout={rollout.id}: was sampled with {turn.completion.filtered}; its log-probabilities are not those "
            "of the policy, sample training rollouts without"
        )
    if any(map(math.isnan, logprobs)):
        raise RuntimeError(
            f"rollout={rollout.id}: token {[math.isnan(x) for x in logprobs].index(True)} was sampled with "
            "log-probability NaN; the generator's weights or numerics are broken, look at optim/grad_norm before it"
        )
