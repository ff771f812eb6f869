"""Which datums of a call compute a prompt together, by an estimate of what that saves and what it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan_rl import platform
from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.dispatch.microbatches import Plan, plan_microbatches
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.model.flops import multiplied_parameters
from torchtitan_rl.model.shared_prefix import MASKED_QUERIES, MAX_KEYS
from torchtitan_rl.types import Datum

__all__ = ["PrefixCost", "SharedPlan", "plan_siblings", "prefix_cost"]

_MAX_TIME_SHARE = 0.9
"""Siblings compute their prompt together when that is estimated to take at most this share of each alone."""
# On a CPU, by processor time of one thread; docs/performance.md has estimates beside what was measured.
_CALLS_FLOPS = 2.0e7  # operations of matrix products that take as long as one group's own calls in a layer
_ATTENTION = 3.0  # times that attention takes for an operation, in what a matrix product takes


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixCost:
    """What forward and backward of siblings take, in tokens: 1 is what a token's matrix products take."""

    pair: float
    """Cost of one pair of a query and a key in all layers' attention."""
    group: float
    """Cost of the further calls of attention that one group of siblings needs, in all layers."""

    def alone(self, length: int) -> float:
        """Cost of a datum that is computed whole: a query sees half of the datum on average."""
        return length + self.pair * length * length / 2

    def together(self, prompt: int, lengths: Sequence[int]) -> float:
        """Cost of datums with these lengths whose first `prompt` tokens are computed once, in the first datum. Masked
        keys count like others."""
        first, *siblings = lengths
        total = self.alone(first) + self.group
        for length in siblings:
            own = length - prompt
            total += own + self.pair * own * (prompt + (own + min(own, MASKED_QUERIES)) / 2)
        return total


def prefix_cost(config: TrainerConfig, shape: DecoderShape) -> PrefixCost | None:
    """The estimate for a model of these sizes; None where no prompt is shared: by the config, and on CUDA, where no GPU
    has computed shared prompts yet."""
    if config.shared_prefix == "off" or platform.device_type() == "cuda":
        return None
    token, layers = 2 * multiplied_parameters(shape), shape.num_attention_layers
    pair = layers * 4 * shape.n_heads * shape.head_dim
    return PrefixCost(pair=_ATTENTION * pair / token, group=layers * _CALLS_FLOPS / token)


class SharedPlan(NamedTuple):
    """A plan of microbatches in which siblings stand one behind the other."""

    ranks: Plan
    """As `plan_microbatches` returns it."""
    shared: dict[int, int]
    """Datum -> how many of its first tokens are computed in the sibling that stands first. Others are not in it."""
    prompt_tokens: int
    """Of all datums."""

    @property
    def shared_frac(self) -> float:
        """The share of the prompts' tokens that are not computed again."""
        return sum(self.shared.values()) / max(1, self.prompt_tokens)

    def of(self, members: list[int]) -> list[int] | None:
        """`Microbatch.shared` of a microbatch's datums."""
        sizes = [self.shared.get(index, 0) for index in members]
        return sizes if any(sizes) else None


class _Unit(NamedTuple):
    """Datums that go into one microbatch."""

    members: list[int]
    prompt: int
    """Tokens that are computed once; 0 for one datum."""
    size: int
    """What the unit takes of `max_tokens`."""


def plan_siblings(data: list[Datum], num_ranks: int, max_tokens: int, cost: PrefixCost) -> SharedPlan:
    """Plans the microbatches of a call. Siblings are datums with the same prompt, whatever their group.

    Siblings that do not fit into a microbatch, or would leave ranks without work, are cut into several parts with the
    prompt in each. Where the estimate is against it, datums are planned one by one as `plan_microbatches` does; so is
    the whole call when the fullest rank would have no less to do."""
    lengths, prompts = [len(datum) for datum in data], [_prompt_length(datum) for datum in data]
    prompt_tokens = sum(size + 1 for size in prompts)  # and the last one, which every sibling computes
    groups = _siblings(data, prompts)
    num_parts = math.ceil(num_ranks / len(groups)) if groups else 1
    units, alone = [], set(range(len(data)))
    for members in groups:
        for part in _parts(members, prompts[members[0]], lengths, max_tokens, num_parts):
            part_lengths = [lengths[i] for i in part.members]
            if cost.together(part.prompt, part_lengths) <= _MAX_TIME_SHARE * sum(map(cost.alone, part_lengths)):
                units.append(part)
                alone -= set(part.members)
    plain = plan_microbatches(lengths, num_ranks, max_tokens)
    if units:
        units = sorted([*units, *(_Unit([i], 0, lengths[i]) for i in alone)], key=lambda unit: unit.members[0])
        sizes = [unit.size for unit in units]
        ranks = plan_microbatches(sizes, num_ranks, max_tokens)
        if _fullest(ranks, sizes) < _fullest(plain, lengths):
            shared = {i: unit.prompt for unit in units for i in unit.members[1:]}
            datum_plan = [
                [[i for u in members for i in units[u].members] for members in microbatches] for microbatches in ranks
            ]
            return SharedPlan(datum_plan, shared, prompt_tokens)
    return SharedPlan(plain, {}, prompt_tokens)


def _prompt_length(datum: Datum) -> int:
    """Positions before the first whose target the policy sampled, at most all but one; 0 where the data do not say."""
    first = 0
    if datum.turns:
        first = datum.turns[0][1]
    elif "loss_mask" in datum.loss_inputs:
        trained = datum.loss_inputs["loss_mask"].nonzero()
        first = int(trained[0]) if len(trained) else 0
    return min(first, len(datum) - 1)


def _siblings(data: list[Datum], prompts: list[int]) -> list[list[int]]:
    """Datums, by index, with the same tokens and targets at the positions of their prompts, two or more each.

    A teacher's hidden states are as good as targets: with other states siblings are none."""
    groups: dict[tuple, list[int]] = {}
    for index, (datum, size) in enumerate(zip(data, prompts, strict=True)):
        if size:
            columns = [datum.tokens, datum.target_tokens]
            if "teacher_hidden" in datum.loss_inputs:
                columns.append(datum.loss_inputs["teacher_hidden"].float())
            key = tuple(column[:size].contiguous().numpy().tobytes() for column in columns)
            groups.setdefault(key, []).append(index)
    return [members for members in groups.values() if len(members) > 1]


def _parts(members: list[int], prompt: int, lengths: list[int], max_tokens: int, num_parts: int) -> list[_Unit]:
    """Siblings in parts of about equal number, at least `num_parts` where there are as many, none larger than
    `max_tokens`; a part of one datum has no prompt to share."""
    most = math.ceil(len(members) / num_parts)
    parts: list[_Unit] = []
    for index in members:
        if parts and len(parts[-1].members) < most:
            joined = _unit([*parts[-1].members, index], prompt, lengths)
            if joined.size <= max_tokens:
                parts[-1] = joined
                continue
        parts.append(_unit([index], prompt, lengths))
    return [part for part in parts if len(part.members) > 1]


def _unit(members: list[int], prompt: int, lengths: list[int]) -> _Unit:
    keys = sum(lengths[index] for index in members)
    computed = keys - prompt * (len(members) - 1)
    return _Unit(members, prompt, max(computed, math.ceil(keys / MAX_KEYS)))


def _fullest(ranks: Plan, sizes: list[int]) -> int:
    return max(sum(sizes[index] for members in microbatches for index in members) for microbatches in ranks)
