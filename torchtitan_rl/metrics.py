"""The names of metrics, `area/what[_unit]`, and the reductions that make them.

One line of `metrics.jsonl` per step holds `step`, `phase` (`"supervised"`, `"reinforcement"` or `"evaluation"`) and at
least the names of that phase.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

__all__ = ["SUPERVISED", "REINFORCEMENT", "EVALUATION", "all_equal", "mean_std", "mean_interval", "pass_at_k"]

NO_SPREAD = 1e-6
"""Of the largest absolute reward: a spread within it is rounding."""

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
"""Of every batch of the reinforcement phase; `step` is the number of optimizer steps after it.

More where they exist: `policy/reference_kl` (k3 from a reference role, nats per token), `correction/weight_mean` (of an
off-policy correction's factors), `correction/changed_frac` (tokens it truncated or masked), `distill/kl` (nats per
token, see docs/distillation.md: reverse KL to a teacher, k1 of it where only sampled tokens are compared, forward KL on
its likeliest tokens), `distill/target_frac` (tokens with such targets), `critic/loss`, `critic/squared_error`,
`critic/value_mean`, `critic/grad_norm`, `critic/skipped`, `optim/num_steps` and `optim/skipped` of the batch,
`time/score_s` (forward passes that only score), `filter/...` where filters are on (docs/grouping.md). In environments
`rollout/turns_mean` and `rollout/limit_frac` (ended by a limit of turns, tokens or time). With several roles
`reward/ROLE_mean` of each.
"""

EVALUATION = (
    "eval/name",  # of the task family
    "eval/split",
    "eval/accuracy",  # fraction of greedy completions that are correct
)
"""Of every evaluation. `step` counts the reinforcement phase: 0 is before its first step.

More where they exist: `eval/num_tasks`; with n samples of each task `eval/avg_at_N` (fraction that is correct) and
`eval/pass_at_K`. Of each of them and of the accuracy, with two tasks or more, NAME_ci95_low and NAME_ci95_high: see
`mean_interval`.
"""


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether rewards differ by no more than rounding: largest minus smallest at most 1e-6 of the largest absolute one.

    Rewards that are sums, such as .1 + .2 beside .3, differ in their last bits; divided by their own standard deviation
    that noise would be advantages of full size. Equal rewards, and a single one, have no spread at all;
    a reward that is not finite differs from all. Raises ValueError on no rewards.
    """
    if not all(map(math.isfinite, rewards)):
        return False
    return max(rewards) - min(rewards) <= NO_SPREAD * max(map(abs, rewards))


def mean_std(values: Iterable[float]) -> tuple[float, float]:
    """Mean and population standard deviation (divided by n, so one value has 0). Raises ValueError on no values."""
    values = [float(value) for value in values]
    if not values:
        raise ValueError("values=[]: have no mean; give at least one")
    average = math.fsum(values) / len(values)
    return average, math.sqrt(math.fsum((value - average) ** 2 for value in values) / len(values))


def mean_interval(values: Iterable[float], z: float = 1.96) -> tuple[float, float] | None:
    """Normal confidence interval of a mean over tasks, 95% by default: mean -+ z * s / sqrt(n), cut off at 0 and 1.

    s^2 = sum (x_i - mean)^2 / (n - 1), where x_i in [0, 1] is the score of task i, itself a mean over its samples:
    tasks are what is drawn independently, samples of one task are not. Miller 2024, "Adding Error Bars to Evals",
    https://arxiv.org/abs/2411.00640, section 2. Too narrow for few tasks or a mean near 0 or 1; of width 0 where all
    scores are equal, which says that these tasks did not differ, not that others would not. None for one value.
    Raises ValueError on no values.
    """
    values = [float(value) for value in values]
    average, deviation = mean_std(values)
    if len(values) == 1:
        return None
    half = z * deviation / math.sqrt(len(values) - 1)  # mean_std divides by n
    return max(0.0, average - half), min(1.0, average + half)


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
