"""Statistics of evaluations: confidence intervals over tasks, and pass@k."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import NormalDist, fmean

__all__ = ["score_interval", "chance_of_one"]


def score_interval(
    scores: Iterable[float], *, draws_per_task: int = 1, confidence: float = 0.95
) -> tuple[float, float] | None:
    """Confidence interval of the mean score over tasks. A score lies in [0, 1]: whether a task's greedy completion is
    correct, the share of its samples that are correct, or its pass@k. None for one task, which says nothing about
    others. Raises ValueError on no scores, and for a score outside [0, 1].

    Wilson's score interval (Wilson 1927, J. Am. Stat. Assoc. 22:209-212) with an effective number of tasks:

        (p + z^2/2M -+ z sqrt(p(1-p)/M + z^2/4M^2)) / (1 + z^2/M),   M = N / d,   d = v / (q (1 - q))

    p is the mean of the N scores. Tasks are drawn independently and samples of one task are not, so tasks are clusters,
    and d is the ratio of the variance between tasks to that of scores of 0 and 1 alone: the design effect of Rao and
    Scott 1992 (Biometrics 48:577-585), counted in tasks instead of samples. v and q are the variance (divided by n) and
    the mean of the scores with z^2/2 scores of 0 and z^2/2 scores of 1 added, as Agresti and Coull 1998 (Am. Stat.
    52:119-126) add them to a proportion: few tasks, and scores that happen to be equal, then never look certain.

    Scores of 0 and 1 have d = 1 and M = N, which is Wilson's interval for a proportion. M is at most
    N x `draws_per_task`, the independent draws behind all scores: the samples of a task, over k for pass@k.
    """
    scores = [float(score) for score in scores]
    if not scores:
        raise ValueError("scores=[]: have no mean; give at least one")
    for score in scores:
        if not 0.0 <= score <= 1.0:
            raise ValueError(f"scores={score:g}: lies outside [0, 1]; give the share of right answers")
    num_tasks = len(scores)
    if num_tasks == 1:
        return None
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    effective = min(num_tasks / _design_effect(scores, z * z), float(num_tasks * draws_per_task))
    mean, share = fmean(scores), z * z / effective
    center = (mean + share / 2) / (1 + share)
    half = math.sqrt(share * (mean * (1 - mean) + share / 4)) / (1 + share)
    return max(0.0, center - half), min(1.0, center + half)


def _design_effect(scores: list[float], added: float) -> float:
    """The variance between tasks over that of scores of 0 and 1 with the same mean, both with `added` / 2 scores of 0
    and `added` / 2 scores of 1 beside the given ones: above 0 and at most 1."""
    total = len(scores) + added
    mean = (math.fsum(scores) + added / 2) / total
    # The mean square minus the squared mean, with the difference to mean (1 - mean) summed by itself: it is exactly 0
    # for scores of 0 and 1, so that their effect is exactly 1.
    within = math.fsum(score * (1 - score) for score in scores) / total
    return 1 - within / (mean * (1 - mean))


def chance_of_one(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that one of k samples is correct, estimated without bias from n >= k samples, c of them correct.

    1 - C(n-c, k) / C(n, k): Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k}: must be between 1 and num_samples={num_samples}; draw more samples or lower k")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct={num_correct}: must be between 0 and num_samples={num_samples}; count again")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
