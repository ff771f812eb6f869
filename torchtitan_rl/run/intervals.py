"""Statistics of evaluations: confidence intervals over tasks, and pass@k."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torchtitan_rl.run.lines import mean_std

__all__ = ["mean_interval", "pass_at_k"]


def mean_interval(values: Iterable[float], z: float = 1.96) -> tuple[float, float] | None:
    """Normal confidence interval of a mean over tasks, 95% by default: mean -+ z * s / sqrt(n), cut off at 0 and 1.

    s^2 = sum (x_i - mean)^2 / (n - 1), where x_i in [0, 1] is the score of task i, the mean over its samples. Tasks
    are drawn independently; samples of one task are not. Miller 2024, "Adding Error Bars to Evals",
    https://arxiv.org/abs/2411.00640, section 2. The interval is too narrow for few tasks and for a mean near 0 or 1.
    Equal scores give a width of 0, which says nothing about other tasks. None for one value. Raises ValueError on no
    values.
    """
    values = [float(value) for value in values]
    average, deviation = mean_std(values)
    if len(values) == 1:
        return None
    half = z * deviation / math.sqrt(len(values) - 1)  # mean_std divides by n
    return max(0.0, average - half), min(1.0, average + half)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that one of k samples is correct, estimated without bias from n >= k samples, c of them correct.

    1 - C(n-c, k) / C(n, k): Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k}: must be between 1 and num_samples={num_samples}; draw more samples or lower k")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct={num_correct}: must be between 0 and num_samples={num_samples}; count again")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
