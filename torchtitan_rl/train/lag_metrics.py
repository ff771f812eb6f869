"""Metrics of a run with batches ahead: how far tokens of each age have drifted, and who waits for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.record.records import Trained
from torchtitan_rl.record.tracing import span
from torchtitan_rl.rollout.lag import ages, mean
from torchtitan_rl.rollout.lagged_batches import LaggedBatches
from torchtitan_rl.types import RolloutGroup

__all__ = ["LagMetrics", "ratios_by_age"]

_EVERY_S = 0.05
FAR = 0.2
"""A probability ratio is far when it lies outside [1 - FAR, 1 + FAR]."""
_NONE = -1
"""The age of a token that does not train."""


class LagMetrics:
    """What lines of metrics say of a run under a lag, see `metrics.py`. Looks at the generators every 50 ms."""

    def __init__(self, batches: LaggedBatches, generator: SamplingClient, publications: list[int]) -> None:
        self._batches, self._generator, self._publications = batches, generator, publications
        self._watch: asyncio.Task | None = None
        self._looks = 0
        """Looks at the generators. The next three are sums over looks."""
        self._seen = 0
        """Replicas."""
        self._idle = 0
        """Replicas without a request."""
        self._in_flight = 0
        """Unanswered requests."""
        self._ready = 0
        self._by_age: dict[str, float] = {}

    def start(self) -> None:
        """Begins to look at the generators."""
        self._watch = asyncio.ensure_future(self._look())

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def begin_step(self) -> None:
        """Notes how many batches are ready before the step takes one."""
        self._ready = self._batches.num_ready()

    def note_trained(self, sequences: Sequence[Trained], groups: list[RolloutGroup]) -> None:
        """Counts the tokens of a batch's `groups` that trained, by age, before the step's weights are published."""
        with span("count metrics"):
            self._by_age = ratios_by_age(sequences, groups, self._publications[:])

    def metrics(self, line: dict[str, Any], *, training_s: float, evaluation_wait_s: float) -> dict[str, Any]:
        """The metrics of a batch whose other metrics are `line`. `training_s` is the time from the batch to its
        publication; of `time/sync_s`, `evaluation_wait_s` was spent waiting for an evaluation."""
        if self._watch is not None and self._watch.done():
            self._watch.result()  # raises why nothing looks at the generators any more
        looks = self._looks
        added: dict[str, Any] = {
            "batches/ready": self._ready,
            "trainer/idle_frac": max(0.0, 1.0 - training_s / line["time/step_s"]),
        }
        if looks:
            added["generator/idle_frac"] = mean(self._idle, self._seen)
            added["generator/in_flight_mean"] = mean(self._in_flight, looks)
        added["time/eval_wait_s"], added["time/sync_s"] = evaluation_wait_s, line["time/sync_s"] - evaluation_wait_s
        added["generator/stall_s"] = max(self._generator.stalls())
        self._looks = self._seen = self._idle = self._in_flight = 0
        return added | self._by_age

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            in_flight = self._generator.in_flight()
            self._looks, self._seen = self._looks + 1, self._seen + len(in_flight)
            self._idle, self._in_flight = self._idle + in_flight.count(0), self._in_flight + sum(in_flight)


def ratios_by_age(trained: Sequence[Trained], groups: list[RolloutGroup], publications: list[int]) -> dict[str, float]:
    """Per age a, in publications, of the tokens that trained: `policy/ratio_lagA_mean`, the mean probability ratio of
    the trainer before its step to the policy that sampled; `policy/far_lagA_frac`, the share of ratios outside
    [0.8, 1.2]; `tokens/trained_lagA`, the number of tokens.

    `trained` has one pair of datum and log-probabilities (T,) per sequence of `groups`; a rollout is found by
    `Datum.rollout`, its turns by `Datum.turns`. Sequences with several targets a token are left out.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    age_of_version = ages(publications)
    counted = [(datum, logprobs_T) for datum, logprobs_T in trained if logprobs_T.dim() == 1]
    if not counted:
        return {}
    age_of_token: list[int] = []
    for datum, _ in counted:
        first = len(age_of_token)
        age_of_token += [_NONE] * len(datum)
        for index, start, length in datum.turns:
            versions = rollouts[datum.rollout].turns[index].completion.policy_versions
            age_of_token[first + start : first + start + length] = [age_of_version[version] for version in versions]
    sampled_N = torch.cat([datum.loss_inputs["sampling_logprobs"] for datum, _ in counted])
    ratio_N = (torch.cat([logprobs_T for _, logprobs_T in counted]) - sampled_N).exp()
    age_N = torch.tensor(age_of_token)
    age_N[torch.cat([datum.loss_inputs["loss_mask"] for datum, _ in counted]) <= 0] = _NONE
    line: dict[str, float] = {}
    for age in sorted(set(age_N.tolist()) - {_NONE}):
        ratios = ratio_N[age_N == age]
        line[f"policy/ratio_lag{age}_mean"] = float(ratios.mean())
        line[f"policy/far_lag{age}_frac"] = float(((ratios - 1).abs() > FAR).float().mean())
        line[f"tokens/trained_lag{age}"] = len(ratios)
    return line
