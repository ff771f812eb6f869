"""Inputs and outputs of a trainer role: packed data and optimizer parameters, outputs and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from torchtitan_rl.types.data import Datum
from torchtitan_rl.types.routing import Routing
from torchtitan_rl.types.turns import Turns

__all__ = [
    "ForwardBackwardOutput",
    "Microbatch",
    "OptimParams",
    "OptimStepOutput",
    "RankOutput",
    "add_sum",
    "mean_metrics",
    "num_trained",
]


@dataclass(kw_only=True, slots=True)
class Microbatch:
    """Datums packed end to end along T. Built by dispatch; `lengths` and the tensors agree."""

    tokens_T: torch.Tensor
    target_tokens_T: torch.Tensor
    """(T,) or (T, K)."""
    lengths: list[int]
    """Tokens of each datum, in packed order."""
    loss_inputs: dict[str, torch.Tensor]
    """Float32, each (T,) or (T, n)."""
    turns: list[Turns | None] = field(default_factory=list)
    """Where the turns of each datum are; see `Datum.turns`."""
    shared: list[int] | None = None
    """Per datum, the number of leading tokens, and targets, that it shares with the nearest earlier datum whose number
    is 0. They are computed there, once. None: nothing is shared."""
    routing: Routing | None = None
    """The generator's experts of each token; see `Datum.routing`."""


@dataclass(kw_only=True, slots=True)
class RankOutput:
    """One rank's share of a `forward_backward` or `forward` call."""

    rows: dict[str, list[torch.Tensor]]
    """By the output's name (`policy_logprobs`, a critic's `predicted_values`, `top_tokens`, ...): one tensor per datum,
    in the order of the microbatches."""
    loss: float
    sums: dict[str, float]
    """Metric sums over tokens; names ending in `_max` are maxima."""
    interval: tuple[float, float] = (0.0, 0.0)
    """Start and end on this rank, in seconds since the epoch."""


def add_sum(sums: dict[str, float], name: str, value: float) -> None:
    """Adds the metric of a further microbatch or rank; of a name that ends in `_max` the larger number stays."""
    sums[name] = max(sums.get(name, value), value) if name.endswith("_max") else sums.get(name, 0.0) + value


def mean_metrics(sums: dict[str, float], num_tokens: int) -> dict[str, float]:
    """The metrics of a call: sums divided by the number of tokens that train; names that end in `_max` as they are."""
    return {name: value if name.endswith("_max") else value / max(1, num_tokens) for name, value in sums.items()}


def num_trained(data: list[Datum]) -> int:
    """Targets with a loss mask above 0; of a datum without a mask, all."""
    masks = [datum.loss_inputs.get("loss_mask") for datum in data]
    return sum(len(datum) if mask is None else int((mask > 0).sum()) for datum, mask in zip(data, masks))


@dataclass(kw_only=True, slots=True)
class OptimParams:
    """Optimizer parameters of one step; None takes the trainer config's value."""

    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    max_grad_norm: float | None = None


@dataclass(kw_only=True, slots=True)
class ForwardBackwardOutput:
    """The result of one `forward_backward` call; lists follow the order of the call's data."""

    policy_logprobs: list[torch.Tensor]
    """Per datum, float32 (T,) or (T, K) in the targets' shape: the role's log-probability of every target; empty for a
    critic."""
    values: list[torch.Tensor]
    """Per datum, float32 of length T: a critic's value of every position; empty for other roles."""
    loss: float
    """The weighted token sum over the whole call."""
    num_tokens: int
    """Targets with a non-zero loss mask."""
    metrics: dict[str, float]
    """Means and maxima over the `num_tokens` targets, under the names of `metrics.py`."""
    interval: tuple[float, float]
    """First rank's start and last rank's end, in seconds since the epoch of the workers' clocks."""
    top_tokens: list[torch.Tensor] = field(default_factory=list)
    """Per datum, int64 (T, top_k): the likeliest tokens at each position, best first; empty without `top_k`."""
    top_logprobs: list[torch.Tensor] = field(default_factory=list)
    """Per datum, float32 (T, top_k): log-probabilities of `top_tokens` over the whole vocabulary; empty without
    `top_k`."""
    hidden: list[torch.Tensor] = field(default_factory=list)
    """Per datum, (T, D) in the role's compute dtype: the head's input, after the last norm; empty unless requested."""
    entropy: list[torch.Tensor] = field(default_factory=list)
    """Per datum, float32 (T,): entropy of the role's distribution at each position, in nats; empty unless requested."""


@dataclass(kw_only=True, slots=True)
class OptimStepOutput:
    """The result of one `optim_step`."""

    grad_norm: float
    """L2 norm of the accumulated gradient before clipping."""
    lr: float
    policy_version: int
    """Version after the step: one more than before unless `skipped`."""
    skipped: bool
    """True when the gradient was not finite: the parameters are unchanged and the gradient is dropped."""
