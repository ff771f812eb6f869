"""The names of metrics, `area/what[_unit]`. docs/metrics.md says of each what it is and when to worry.

A line of `metrics.jsonl` holds `step`, `phase` (one of `PHASES`, or `"evaluation"`) and at least the names of its
phase. Lines of two further phases are events: `"checkpoint"`, and `"stop"` with the `stop/reason` of an early end.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = [
    "PHASES",
    "SUPERVISED",
    "PREFERENCE",
    "REINFORCEMENT",
    "EVALUATION",
    "FEATURES",
    "REPEATED_RULE",
    "A_NAME",
    "entry",
    "is_metric",
    "is_name",
    "is_repeated",
    "repeatable",
    "unit",
]

PHASES = ("supervised", "preference", "reinforcement")
"""The phases that consist of optimizer steps, in the order of a run; a run may lack the first two."""

SUPERVISED = (
    "loss/mean",
    "optim/grad_norm",
    "optim/lr",
    "tokens/trained_per_s",
    "time/step_s",
    "time/forward_backward_s",
    "time/optim_s",
)
"""In the line of every optimizer step of the supervised phase."""

PREFERENCE = (*SUPERVISED, "rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy", "time/score_s")
"""In the line of every optimizer step of the preference phase. `rewards/*` are of the pairs before the step: a policy's
implicit rewards, beta x log-ratio, or the values of a model with a value head."""

REINFORCEMENT = (
    *SUPERVISED,
    "reward/mean",
    "reward/std",
    "reward/zero_std_frac",
    "policy/entropy",
    "policy/clip_frac",
    "advantage/mean",
    "advantage/abs_max",
    "policy/lag_mean",
    "policy/lag_max",
    "mismatch/kl",
    "mismatch/logprob_diff_max",
    "completion/length_mean",
    "completion/truncated_frac",
    "tokens/generated_per_s",
    "time/generate_s",
    "time/reward_s",
    "time/sync_s",
)
"""In the line of every batch of the reinforcement phase; `step` is the number of optimizer steps after the batch."""

EVALUATION = ("eval/name", "eval/split", "eval/accuracy", "eval/reward_mean")
"""In the line of every evaluation. `step` counts steps of the reinforcement phase: 0 is before the first step.

An evaluation of which every attempt failed has no `eval/reward_mean`.
"""

FEATURES = {
    "a trainer on known devices": ("perf/tokens_per_second_per_device", "perf/mfu"),
    "every batch": (
        "optim/num_steps",
        "optim/skipped",
        "tokens/trained",
        "tokens/generated",
        "time/score_s",
        "prompt/repeated_frac",
    ),
    "a shared prefix": ("prompt/shared_frac",),
    "several replicas": ("generator/healthy_replicas",),
    "pairs": ("rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy"),
    "validation pairs": ("rewards/validation_loss", "rewards/validation_accuracy"),
    "a reference": ("policy/reference_kl",),
    "an adaptive KL": ("policy/kl_coef", "policy/rollout_kl"),
    "an adaptive entropy bonus": ("policy/entropy_coef",),
    "a lag": (
        "policy/ratio_lagA_mean",
        "policy/far_lagA_frac",
        "tokens/trained_lagA",
        "batches/ready",
        "trainer/idle_frac",
        "generator/idle_frac",
        "generator/in_flight_mean",
        "generator/stall_s",
        "time/eval_wait_s",
        "completion/long_frac",
        "completion/long_played_frac",
    ),
    "an explanation of the gap": (
        "mismatch/noise_mean",
        "mismatch/noise_max",
        "mismatch/stale_mean",
        "mismatch/stale_max",
        "mismatch/kept_mean",
        "mismatch/kept_max",
        "mismatch/unexplained_mean",
        "mismatch/unexplained_max",
        "mismatch/explained_tokens",
        "time/mismatch_s",
    ),
    "experts of the generator": ("mismatch/expert_agreement_frac", "mismatch/expert_choice_frac"),
    "an off-policy correction": ("correction/weight_mean", "correction/changed_frac"),
    "distillation": ("distill/kl", "distill/target_frac"),
    "a critic": ("critic/loss", "critic/squared_error", "critic/value_mean", "critic/grad_norm", "critic/skipped"),
    "filters": (
        "filter/zero_variance_groups",
        "filter/overlong_groups",
        "filter/overlong_rollouts",
        "filter/overlong_penalty_mean",
        "filter/resampled_tasks",
        "filter/missing_tasks",
        "filter/skipped_rollouts",
        "filter/ungrouped_rollouts",
    ),
    "a curriculum": ("curriculum/pass_rate_mean", "curriculum/in_band_frac", "curriculum/unseen_frac"),
    "failures": (
        "failure/environment",
        "failure/workflow",
        "failure/reward",
        "failure/dropped_groups",
        "failure/attempts",
    ),
    "environments": ("rollout/turns_mean", "rollout/limit_frac", "rollout/NAME_mean"),
    "a reward in parts": ("reward/part_NAME_mean",),
    "a reward model": (
        "reward_model/score_mean",
        "reward_model/score_std",
        "reward_model/task_correlation",
        "time/reward_model_s",
    ),
    "several roles in a workflow": ("reward/ROLE_mean",),
    "evaluations": (
        "eval/num_tasks",
        "eval/avg_at_N",
        "eval/pass_at_K",
        "eval/NAME_ci95_low",
        "eval/NAME_ci95_high",
        "eval/reward_part_NAME_mean",
    ),
    "checkpoints": ("checkpoint/name", "checkpoint/failed", "time/stage_s", "time/write_s"),
    "an early end": ("stop/reason",),
}
"""What else lines hold, by feature. Capitals stand for an age in publications (A), a number of samples (N, K), or a
name (NAME, ROLE)."""

_NAME = "[A-Za-z0-9_.-]+"
A_NAME = "letters and digits of ASCII, '_', '.' and '-'"
"""What a name that stands in the name of a metric is made of, as error messages say it: the name of a part of a reward,
of a count, of a role."""

_STANDS_FOR = {"A": "[0-9]+", "N": "[0-9]+", "K": "[0-9]+", "NAME": _NAME, "ROLE": _NAME}


_UNITS = {
    ".*_per_s": "per second",
    "perf/tokens_per_second_per_device": "tokens per second",
    "perf/mfu": "share of the peak",
    ".*_s": "seconds",
    "rewards/(chosen|rejected|margin)": "reward",
    ".*(_frac|accuracy|pass_at_[0-9]+|avg_at_[0-9]+|_ci95_low|_ci95_high)": "share",
    "completion/length.*|tokens/.*|mismatch/explained_tokens": "tokens",
    "policy/rollout_kl": "nats per rollout",
    "policy/entropy|.*kl|mismatch/.*": "nats per token",
    "rewards/validation_loss|preference/loss/mean": "loss per pair",
    "(.*/)?loss(/mean)?": "loss per token",
    "optim/lr": "learning rate",
    ".*grad_norm": "norm of the gradient",
}
"""Pattern of names -> unit, the first that fits; docs/metrics.md has the unit of every metric."""


_NOT_REPEATED = (
    "(time|perf|generator)/.*|.*_s|trainer/idle_frac|batches/ready|completion/long_played_frac|checkpoint/failed"
)
"""Pattern of the names of metrics that time or the machine decides: the same run may have other values."""

REPEATED_RULE = 2
"""Which metrics `is_repeated` is true of, as a number that changes with them: digests of two rules do not compare."""


def is_metric(name: str) -> bool:
    """Whether a metric may have this name, such as `reward/mean`."""
    return re.fullmatch("[a-z][a-z0-9_]*/[A-Za-z0-9_.@-]+", name) is not None


def is_repeated(name: str) -> bool:
    """Whether a run repeats this metric to the last digit, as it does every metric that neither time nor the machine
    decides; a loss's own metric too, unless its name ends as that of seconds or of a rate does."""
    return re.fullmatch(_NOT_REPEATED, name) is None


def is_name(text: str) -> bool:
    """Whether a part of a reward, a count or a role may have this name, which the name of a metric contains."""
    return re.fullmatch(_NAME, text) is not None


def unit(name: str) -> str:
    """What to write on the axis of a metric or curve: its unit, or what it is a number of.

    Example: `unit("time/step_s")` is `"seconds"`, `unit("reward/mean")` is `"reward"`.
    """
    phase, _, rest = name.partition("/")
    name_in_phase = rest if phase in PHASES else name
    for pattern, text in _UNITS.items():
        if re.fullmatch(pattern, name) or re.fullmatch(pattern, name_in_phase):
            return text
    return name_in_phase.split("/")[0]


def entry(name: str) -> str | None:
    """The name above that a metric of a line has, capitals filled in; None for a metric of a loss of one's own.

    Example: `entry("policy/ratio_lag2_mean")` is `"policy/ratio_lagA_mean"`.
    """
    entries = [*REINFORCEMENT, *EVALUATION, *(metric for metrics in FEATURES.values() for metric in metrics)]
    if name in entries:
        return name
    patterns = {metric: re.sub("[A-Z]+", lambda capitals: _STANDS_FOR[capitals[0]], metric) for metric in entries}
    return next((metric for metric, pattern in patterns.items() if re.fullmatch(pattern, name)), None)


def repeatable(line: dict[str, Any]) -> dict[str, str]:
    """The numbers of a line of metrics that a run repeats, as text with every digit."""
    return {name: repr(value) for name, value in line.items() if is_metric(name) and is_repeated(name)}
