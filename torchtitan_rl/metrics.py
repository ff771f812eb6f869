"""The names of metrics, `area/what[_unit]`, and the reductions that make them.

One line of `metrics.jsonl` per step holds `step`, `phase` (`"supervised"`, `"reinforcement"` or `"evaluation"`) and at
least the names of that phase.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["SUPERVISED", "REINFORCEMENT", "EVALUATION", "mean_std", "pass_at_k"]

SUPERVISED = (
    "loss/mean",  # loss per trained token
    "optim/grad_norm",  # L2 norm before clipping
    "optim/lr",
    "tokens/trained_per_s",  # targets with a loss, over the whole step's time
    "time/step_s",
    "time/forward_backward_s",
    "time/optim_s",
)
"""Of every optimizer step."""

REINFORCEMENT = (
    *SUPERVISED,
    "reward/mean",  # over rollouts
    "reward/std",
    "reward/zero_std_frac",  # groups whose rewards are all equal: they teach nothing
    "policy/entropy",  # nats per token
    "policy/clip_frac",  # tokens whose ratio was clipped
    "advantage/mean",  # over trained tokens
    "advantage/abs_max",
    "policy/lag_max",  # policy versions between the oldest token and this step
    "mismatch/kl",  # trainer against generator on the batch before its first optimizer step, k3, nats per token
    "mismatch/logprob_diff_max",  # largest absolute difference on the same tokens
    "completion/length_mean",  # tokens
    "completion/truncated_frac",  # ended by the token limit
    "tokens/generated_per_s",  # over the time of generation
    "time/generate_s",
    "time/sync_s",  # push and pull of weights
)
"""Of every step of the reinforcement phase."""

EVALUATION = (
    "eval/name",  # of the task family
    "eval/split",
    "eval/accuracy",  # fraction of greedy completions that are correct
)
"""Of every evaluation; more where they exist. `step` counts the reinforcement phase: 0 is before its first step."""


def mean_std(values: Iterable[float]) -> tuple[float, float]:
    """Mean and population standard deviation (divided by n, so one value has 0). Raises ValueError on no values."""
    values = [float(value) for value in values]
    if not values:
        raise ValueError("values=[]: have no mean; give at least one")
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that one of k samples is correct, estimated without bias from n >= k of which c are.

    1 - C(n-c, k) / C(n, k): Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k}: must be between 1 and num_samples={num_samples}; draw more samples or lower k")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct={num_correct}: must be between 0 and num_samples={num_samples}; count again")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
