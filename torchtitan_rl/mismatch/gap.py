"""The gap between trainer and generator on sampled tokens, in parts that add up: numeric noise, staleness, the rest.

Shape letters: N sampled tokens, K likeliest tokens of a position. Log-probabilities are in nats, float64; NaN says that
nobody scored the token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

__all__ = [
    "RoundingLimits",
    "LIMITS",
    "Sample",
    "GapParts",
    "decomposed",
    "of_turns",
    "part_metrics",
    "parts_over_limit",
    "joined",
    "unknown",
]


@dataclass(frozen=True, slots=True)
class RoundingLimits:
    """How far rounding alone brings two scores of a token apart, in nats."""

    mean: float
    largest: float

    def broken_by(self, difference_N: np.ndarray) -> bool:
        """Whether the differences are more than rounding; NaN does not count."""
        known = np.abs(difference_N[np.isfinite(difference_N)])
        return known.size > 0 and (known.mean() > self.mean or known.max() > self.largest)


LIMITS = {"float32": RoundingLimits(1e-5, 1e-4), "bfloat16": RoundingLimits(2e-2, 0.3)}
"""By `generator.dtype`. The largest differences are those that docs/numerics.md gives for a healthy run."""


def unknown(count: int) -> np.ndarray:
    """NaN for `count` scores that have not been computed."""
    return np.full(count, np.nan)


@dataclass(kw_only=True, slots=True)
class Sample:
    """One token sequence of a rollout, with the log-probabilities of its N sampled tokens by each source."""

    rollout: str
    tokens: list[int]
    """Prompt and completions, all turns that extend each other."""
    place_N: np.ndarray
    """Index in `tokens` of each sampled token."""
    turn_N: np.ndarray
    reported_N: np.ndarray
    """The generator's, when it sampled."""
    version_N: np.ndarray
    """The version that is said to have sampled the token."""
    trainer_N: np.ndarray = field(default_factory=lambda: unknown(0))
    """The trainer's newest weights."""
    between_N: np.ndarray = field(default_factory=lambda: unknown(0))
    """A source with one half in common with either side: see `decomposed`."""
    sampled_N: np.ndarray = field(default_factory=lambda: unknown(0))
    """The generator, without a cache, under the version that sampled the token."""
    ended_N: np.ndarray = field(default_factory=lambda: unknown(0))
    """The generator, without a cache, under `ended_version`, which was served when the rollout had ended."""
    ended_version: int = -1

    @property
    def kept_N(self) -> np.ndarray:
        """Whether the token was sampled after new weights had come under its request: the tokens before it were read
        by older weights, unless the generator has computed their cache again."""
        kept_N = np.zeros(len(self.place_N), bool)
        for turn in np.unique(self.turn_N):
            in_turn = np.flatnonzero(self.turn_N == turn)
            kept_N[in_turn] = self.version_N[in_turn] != self.version_N[in_turn[0]]
        return kept_N

    def scored(self, scores: Iterable[float]) -> np.ndarray:
        """The sampled tokens' part of the scores of all tokens but the first."""
        return np.asarray(list(scores), np.float64)[self.place_N - 1]


@dataclass(frozen=True, slots=True)
class GapParts:
    """gap = noise + stale + rest, token by token, as far as all sources are known."""

    gap_N: np.ndarray
    noise_N: np.ndarray
    stale_N: np.ndarray
    rest_N: np.ndarray
    kept_N: np.ndarray


def decomposed(samples: list[Sample], *, between: str) -> GapParts:
    """The parts of each gap, trainer - reported.

    `between` says what `between_N` holds. `"newest"`, during a run: the generator under the trainer's newest version;
    noise = trainer - between, stale = between - sampled. `"trainer"`, afterwards: the trainer under the version that
    sampled; stale = trainer - between, noise = between - sampled. rest = sampled - reported in either case.
    """
    trainer_N, between_N, sampled_N, reported_N = (
        joined(samples, name) for name in ("trainer_N", "between_N", "sampled_N", "reported_N")
    )
    first_N, second_N = trainer_N - between_N, between_N - sampled_N
    noise_N, stale_N = (first_N, second_N) if between == "newest" else (second_N, first_N)
    return GapParts(trainer_N - reported_N, noise_N, stale_N, sampled_N - reported_N, joined(samples, "kept_N"))


def joined(samples: list[Sample], name: str) -> np.ndarray:
    """One array of all samples end to end."""
    return np.concatenate([getattr(sample, name) for sample in samples])


def of_turns(samples: list[Sample]) -> list[np.ndarray]:
    """The indices of each turn's tokens among the tokens of all samples."""
    indices, start = [], 0
    for sample in samples:
        indices += [start + np.flatnonzero(sample.turn_N == turn) for turn in np.unique(sample.turn_N)]
        start += len(sample.place_N)
    return indices


def part_metrics(parts: GapParts) -> dict[str, float]:
    """Mean and largest absolute value of every part in nats, over the tokens for which the part is known; a part that
    is known of no token is left out. `kept` is the rest of tokens behind a kept attention cache, `unexplained` the rest
    of all others."""
    alone_N, kept_N = parts.rest_N[~parts.kept_N], parts.rest_N[parts.kept_N]
    named = {"noise": parts.noise_N, "stale": parts.stale_N, "kept": kept_N, "unexplained": alone_N}
    line: dict[str, float] = {}
    for name, values in named.items():
        known = np.abs(values[np.isfinite(values)])
        if known.size:
            line[f"mismatch/{name}_mean"], line[f"mismatch/{name}_max"] = float(known.mean()), float(known.max())
    line["mismatch/explained_tokens"] = int(np.isfinite(parts.rest_N + parts.noise_N).sum())
    return line


def parts_over_limit(parts: GapParts, limits: RoundingLimits, *, keeps: bool) -> list[str]:
    """Names of the parts, `noise` or `rest`, that exceed `limits`. `keeps`: generators keep the attention cache over
    new weights, so the rest of tokens behind a kept cache is no fault."""
    rest_N = parts.rest_N[~parts.kept_N] if keeps else parts.rest_N
    return [name for name, values in (("noise", parts.noise_N), ("rest", rest_N)) if limits.broken_by(values)]
