"""Search for the cause of a gap that rounding and staleness do not explain, by further scores of the generators.

Everything here happens at most once in a run, and only when a part of the gap is more than it may be.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import torch

from torchtitan_rl.mismatch import causes
from torchtitan_rl.mismatch.causes import Cause
from torchtitan_rl.mismatch.gap import RoundingLimits, Sample, joined, of_turns
from torchtitan_rl.mismatch.scores import Rescorer

__all__ = ["CauseSearch", "Predictions", "EarlierScores", "wrong_labels"]

Predictions = dict[tuple[str, str], np.ndarray]
"""(name, words) of a cause -> log-probabilities (N,)."""

_MISSING_TOKENS = (1, 2, 3, -1)
"""Tokens that a prompt may have lost: the first ones, or the last one."""


@dataclass(frozen=True, slots=True)
class EarlierScores:
    """The trainer's scores of a few tokens under an earlier version."""

    version: int
    samples: list[Sample]
    """With `trainer_N`."""


@dataclass(kw_only=True, slots=True)
class CauseSearch:
    """Finds causes by requests to the generators, which serve the version that scored `sampled_N` or `between_N`."""

    rescorer: Rescorer
    limits: RoundingLimits
    dtype: str
    """`generator.dtype`."""
    adapted: bool
    """Whether adapters train."""
    tensors: Callable[[], Awaitable[tuple[dict, dict, dict]]] | None = None
    """(published weights, the weights that a generator holds, the trainer's parameters); None where there are too many
    to look at."""

    async def of_rest(self, samples: list[Sample], predictions: Predictions | None = None) -> Cause:
        """Why the generators reported other log-probabilities than they compute now for the same tokens and version.
        `predictions`: the log-probabilities that further causes would have given."""
        sampled_N = joined(samples, "sampled_N")
        reported_N = np.where(np.isfinite(sampled_N), joined(samples, "reported_N"), np.nan)
        temperature, turns = self.rescorer.temperature, of_turns(samples)
        whole = causes.mean_difference(sampled_N, reported_N)

        def cause(name: str, words: str, predicted_N: np.ndarray) -> Cause:
            return Cause("rest", name, words, causes.mean_difference(predicted_N, reported_N))

        candidates = [
            cause("shift", f"log-probabilities are reported one place {'late' if by > 0 else 'early'}", moved)
            for by in (1, -1)
            if np.isfinite(moved := causes.shifted(sampled_N, turns, by)).any()
        ]
        candidates += [cause(name, words, values_N) for (name, words), values_N in (predictions or {}).items()]
        shortest = min(int(sample.place_N[0]) for sample in samples)
        for num in (num for num in _MISSING_TOKENS if shortest > abs(num)):
            lost = f"the {'first' if num > 0 else 'last'} {_tokens(abs(num))} of the prompt did not reach the generator"
            candidates.append(cause("prompt", lost, np.concatenate(await self.rescorer.scores(samples, without=num))))
        if temperature == 1.0:
            cached = np.concatenate(await self.rescorer.scores(samples, cached=True))
            words = "the prefix cache holds what other weights computed: reading it gives what was reported"
            if np.isfinite(cached).any() and causes.mean_difference(cached, sampled_N) > self.limits.mean:
                candidates.append(cause("stale_cache", words, cached))
        at = await self.rescorer.positions(samples)
        # In a thread: it takes seconds to minutes, while the run goes on.
        candidates += await asyncio.to_thread(causes.fitted, at, reported_N, "rest", temperature)
        unnamed = (
            "the generator reported what it does not compute for these tokens under the version that they name; "
            "none of these fits: a shift, a temperature, top-k, top-p, min-p, a shortened prompt, the prefix cache"
        )
        return causes.best(candidates, whole, self.limits.mean) or Cause("rest", "unknown", unnamed, whole)

    async def of_noise(self, samples: list[Sample], memory: list[EarlierScores]) -> Cause:
        """Why generators and trainer score the same tokens differently under the same version number."""
        trainer_N, between_N = joined(samples, "trainer_N"), joined(samples, "between_N")
        whole = causes.mean_difference(trainer_N, between_N)
        at = await self.rescorer.positions(samples)
        if self.dtype == "float32" and causes.has_coarse_logits(at):
            words = "the generator computes in 16 bits, not in float32: its logits are multiples of a coarse spacing"
            return Cause("noise", "dtype", words, math.nan)
        candidates = [await self._of_version(then) for then in memory]
        temperature = self.rescorer.temperature
        scaled = await asyncio.to_thread(causes.fitted_temperature, at, trainer_N, "noise", temperature)
        words = scaled.words.replace("the tokens were scored", "the trainer scores")
        candidates.append(Cause("noise", "temperature", words, scaled.left_mean))
        named = causes.best(candidates, whole, self.limits.mean)
        compared = None
        if self.tensors is not None and (named is None or self.adapted):
            compared = self._of_tensors(*await self.tensors())
        if named and not (compared and compared.name == "adapter"):
            return named
        unnamed = "generators and trainer compute with different weights; they are no earlier version that was tried"
        return compared or Cause("noise", "unknown", unnamed, whole)

    async def _of_version(self, then: EarlierScores) -> Cause:
        scores_N = np.concatenate(await self.rescorer.scores(then.samples))
        name, words = "older_version", f"the generators hold the weights of version {then.version} under a newer number"
        return Cause("noise", name, words, causes.mean_difference(scores_N, joined(then.samples, "trainer_N")))

    def _of_tensors(self, published: dict, loaded_tensors: dict, parameters: dict) -> Cause | None:
        """The cause that a comparison of the published, loaded and trained tensors shows; None where it shows none."""
        names = [
            name for name in published if name in loaded_tensors and loaded_tensors[name].shape == published[name].shape
        ]
        differing = [name for name in names if not torch.equal(loaded_tensors[name].cpu(), published[name].cpu())]
        if differing:
            shown = ", ".join(differing[:3]) + (", ..." if len(differing) > 3 else "")
            words = f"{len(differing)} of {len(names)} tensors in the generator are not what was published: {shown}"
            return Cause("noise", "weights", words, math.nan)
        adapted = [name for name in names if name in self._adapted_names(parameters)]
        if adapted and all(_alike(published[name], parameters[name]) for name in adapted):
            words = "the adapters did not reach the generators: what was published is the base model alone"
            return Cause("noise", "adapter", words, math.nan)
        return None if self.adapted else _outlying_tensor({n: (published[n], parameters[n]) for n in names})

    def _adapted_names(self, parameters: dict) -> set[str]:
        if not self.adapted:
            return set()
        layers = {name.removesuffix(".lora_a.weight") for name in parameters if name.endswith(".lora_a.weight")}
        split = {layer.removesuffix("wqkv") + part for layer in layers for part in ("wq", "wk", "wv")}
        return {f"{layer}.weight" for layer in layers | split}


def wrong_labels(samples: list[Sample], limits: RoundingLimits, *, moved: float) -> Cause | None:
    """Tokens that name another version than the one that reproduces them, `ended_version`. `moved`: the mean absolute
    difference that new weights make. None where there are fewer than 8 such tokens, where they are not reproduced, and
    where weights move too little to tell versions apart."""
    reported_N, ended_N, version_N = (joined(samples, name) for name in ("reported_N", "ended_N", "version_N"))
    ended_version_N = np.concatenate([np.full(len(sample.place_N), sample.ended_version) for sample in samples])
    other_N = (version_N != ended_version_N) & np.isfinite(ended_N)
    remains = causes.mean_difference(np.where(other_N, ended_N, np.nan), reported_N)
    if other_N.sum() < 8 or remains > limits.mean or moved < 20 * limits.mean:
        return None
    pairs = sorted(set(zip(version_N[other_N].tolist(), ended_version_N[other_N].tolist())))
    named = " and ".join(
        f"version {label} where version {sampled_version} sampled them" for label, sampled_version in pairs[:2]
    )
    return Cause("label", "label", f"{int(other_N.sum())} of {len(other_N)} tokens name {named}", remains)


def _alike(published: torch.Tensor, parameter: torch.Tensor) -> bool:
    return torch.equal(published.cpu(), parameter.cpu().to(published.dtype))


def _outlying_tensor(pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> Cause | None:
    """The tensor that was published far from the trainer's, which has taken a step since: ten times as far as the
    tensor in the middle of all."""
    far = {
        name: float(
            (published.cpu().float() - parameter.cpu().float()).norm() / parameter.cpu().float().norm().clamp_min(1e-12)
        )
        for name, (published, parameter) in pairs.items()
    }
    if not far:  # no whole tensor has the published shape
        return None
    worst = max(far, key=lambda name: far[name])
    if far[worst] <= 10 * statistics.median(far.values()):
        return None
    words = f"{worst} was not published as the trainer holds it: it is off by {far[worst]:.1%} of its norm"
    return Cause("noise", "weights", words, math.nan)


def _tokens(num: int) -> str:
    return "token" if num == 1 else f"{num} tokens"
