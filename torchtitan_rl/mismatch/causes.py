"""Causes of a gap that another score of the same tokens can prove: a shift, a temperature, a filter, a coarse dtype.

Each function returns what the cause would have given, or the setting that comes nearest and what it leaves. Shape
letters: N sampled tokens, K likeliest tokens of each position, best first. Nothing here asks a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

__all__ = [
    "Cause",
    "Position",
    "best",
    "fitted",
    "fitted_temperature",
    "has_coarse_logits",
    "mean_difference",
    "shifted",
    "tempered",
]


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a part of the gap is there. `left_mean` is the mean absolute difference that the cause leaves, in nats."""

    part: str
    """`label`, `noise` or `rest`."""
    name: str
    """One word for programs, such as `temperature`; `unknown` where nothing that was tried fits."""
    words: str
    left_mean: float


@dataclass(frozen=True, slots=True)
class Position:
    """The generator's distribution at the position of each sampled token, at temperature 1."""

    own_N: np.ndarray
    """Log-probability of the token that was sampled."""
    top_NK: np.ndarray
    """Log-probabilities of the likeliest tokens, best first."""


def mean_difference(predicted_N: np.ndarray, seen_N: np.ndarray) -> float:
    """Mean absolute difference over the tokens that both know; infinite where there is none."""
    known = np.isfinite(predicted_N) & np.isfinite(seen_N)
    return float(np.abs(predicted_N - seen_N)[known].mean()) if known.any() else np.inf


def best(causes: list[Cause], whole: float, limit: float) -> Cause | None:
    """The cause that leaves the least, if that is rounding (`limit`, nats) or at most a twentieth of the `whole`."""
    fitting = [cause for cause in causes if cause.left_mean <= max(limit, whole / 20)]
    return min(fitting, key=lambda cause: cause.left_mean, default=None)


def shifted(scores_N: np.ndarray, turns: list[np.ndarray], by: int) -> np.ndarray:
    """The scores as they would read if every turn's entries were `by` places late (early: negative); NaN where a turn
    has no such entry."""
    moved_N = np.full(len(scores_N), np.nan)
    for turn_places in turns:
        for place, source in zip(turn_places[max(0, by) :], turn_places[max(0, -by) :]):
            moved_N[place] = scores_N[source]
    return moved_N


def tempered(at: Position, temperature: float) -> np.ndarray:
    """Log-probability of each token at a temperature, (N,). Tokens that are not among the K likeliest count nothing in
    the sum: exact where K is the vocabulary."""
    scaled_NK = at.top_NK / temperature
    highest_N = scaled_NK.max(axis=1)
    return at.own_N / temperature - highest_N - np.log(np.exp(scaled_NK - highest_N[:, None]).sum(axis=1))


def _top_k(at: Position, k: float) -> np.ndarray:
    return at.own_N - np.log(np.exp(at.top_NK[:, : int(k)]).sum(axis=1))


def _top_p(at: Position, p: float) -> np.ndarray:
    sums_NK = np.exp(at.top_NK).cumsum(axis=1)
    last_N = np.minimum((sums_NK < p).sum(axis=1), sums_NK.shape[1] - 1)
    return at.own_N - np.log(sums_NK[np.arange(len(last_N)), last_N])


def _min_p(at: Position, p: float) -> np.ndarray:
    kept_NK = at.top_NK >= at.top_NK[:, :1] + np.log(p)
    return at.own_N - np.log((np.exp(at.top_NK) * kept_NK).sum(axis=1))


_FILTERS: dict[str, tuple[Callable[[Position, float], np.ndarray], str]] = {
    "top_k": (_top_k, "the sampler kept the {:.0f} likeliest tokens (top_k), and this was not accounted for"),
    "top_p": (_top_p, "the sampler kept the likeliest tokens up to a mass of {:.3g} (top_p), unaccounted for"),
    "min_p": (_min_p, "the sampler dropped tokens below {:.3g} of the likeliest (min_p), unaccounted for"),
}


def fitted(at: Position, seen_N: np.ndarray, part: str, temperature: float) -> list[Cause]:
    """The temperature, top-k, top-p and min-p that come nearest to the log-probabilities `seen_N`, each with the
    difference that it leaves. `temperature` is the configured one; filters are tried at temperature 1 only. Takes some
    5 s of a core for a hundred tokens with 4,096 likeliest tokens each."""
    candidates = [fitted_temperature(at, seen_N, part, temperature)]
    grids = {
        "top_k": np.arange(1, min(at.top_NK.shape[1], 129)).astype(float),
        "top_p": np.arange(0.02, 1.0, 0.005),
        "min_p": np.geomspace(1e-3, 0.9, 120),
    }
    for name, (predict, words) in _FILTERS.items() if temperature == 1.0 else ():
        setting, least = _nearest(partial(_remains, predict, at, seen_N), grids[name])
        candidates.append(Cause(part, name, words.format(setting), least))
    return candidates


def fitted_temperature(at: Position, seen_N: np.ndarray, part: str, temperature: float) -> Cause:
    """The temperature alone, see `fitted`."""
    remains = partial(_remains, tempered, at, seen_N)
    setting, least = _nearest(remains, np.geomspace(0.1, 10, 201))
    for width in (0.015, 0.001, 6e-5, 4e-6):  # finer, around the best so far
        setting, least = _nearest(remains, setting * np.linspace(1 - width, 1 + width, 61))
    words = f"the tokens were scored at temperature {setting:.3g}, not at {temperature:.3g}"
    return Cause(part, "temperature", words, least)


def _remains(predict: Callable, at: Position, seen_N: np.ndarray, setting: float) -> float:
    return mean_difference(predict(at, setting), seen_N)


def _nearest(remains: Callable[[float], float], grid: np.ndarray) -> tuple[float, float]:
    values = [remains(float(value)) for value in grid]
    index = int(np.argmin(values))
    return float(grid[index]), values[index]


def has_coarse_logits(at: Position, num: int = 8) -> bool:
    """Whether the logits were computed in 16 bits.

    Differences of log-probabilities at one position are differences of logits. Logits of bfloat16, from 1/8 on, are
    multiples of 2^-10, as those of float16 from 1 on, and so are their differences. Of float32 differences 0.6% come so
    near to a multiple (3e-6).
    """
    differences = (at.top_NK[:, :1] - at.top_NK[:, 1:num]).ravel()
    differences = differences[np.isfinite(differences) & (differences < 8)]
    off = np.abs(differences - np.round(differences * 2.0**10) / 2.0**10)
    return differences.size >= 16 and bool((off < 3e-6).mean() > 0.8)
