"""The names of metrics, `area/what[_unit]`.

One line of `metrics.jsonl` per step holds `step`, `phase` (`"supervised"`, `"reinforcement"` or `"evaluation"`) and at
least the names of that phase.
"""

from __future__ import annotations

__all__ = ["SUPERVISED", "REINFORCEMENT", "EVALUATION"]

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
`run.intervals.mean_interval`.
"""
