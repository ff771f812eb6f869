"""The names of metrics, `area/what[_unit]`.

A line of `metrics.jsonl` holds `step`, `phase` (`"supervised"`, `"reinforcement"` or `"evaluation"`) and at least the
names of its phase. Lines of two further phases are events: `"checkpoint"`, and `"stop"` with the `stop/reason` of an
early end.
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
"""In the line of every optimizer step of the supervised phase."""

REINFORCEMENT = (
    *SUPERVISED,
    "reward/mean",  # over rollouts
    "reward/std",
    "reward/zero_std_frac",  # groups whose rewards are all equal: they teach nothing
    "policy/entropy",  # nats per token
    "policy/clip_frac",  # tokens whose ratio was clipped
    "advantage/mean",  # over trained tokens
    "advantage/abs_max",
    "policy/lag_max",  # policy versions between the oldest token and this step; with a lag allowed, publications
    "mismatch/kl",  # trainer against generator on the batch before its first optimizer step, k3, nats per token
    "mismatch/logprob_diff_max",  # largest absolute difference on the same tokens
    "completion/length_mean",  # tokens
    "completion/truncated_frac",  # ended by the token limit
    "tokens/generated_per_s",  # over the time of generation
    "time/generate_s",  # sampling, environments and rewards
    "time/reward_s",  # the longest wait for the rewards of one group, within time/generate_s
    "time/sync_s",  # push and pull of weights
)
"""In the line of every batch of the reinforcement phase; `step` is the number of optimizer steps after the batch.

Every line also has `optim/num_steps` and `optim/skipped` of the batch, and `time/score_s` (forward passes that only
score). By feature:

- A reference: `policy/reference_kl` (k3, nats per token).
- A lag (docs/asynchrony.md): `policy/lag_mean` (publications, over sampled tokens); for tokens of each age A
  `policy/ratio_lagA_mean` (probability ratio of trainer to sampler before the first step), `policy/far_lagA_frac`
  (ratios outside 0.8 to 1.2), `tokens/trained_lagA`; `batches/ready` (played batches that waited as the step began),
  `trainer/idle_frac`, `generator/idle_frac` (of the time since the last line, without a request),
  `generator/in_flight_mean` (requests), `generator/stall_s` (the engine's last load of weights), `time/eval_wait_s`
  (the publication waited for an evaluation; not in `time/sync_s`). With `batch_order="finished"`:
  `completion/long_frac` (rollouts of the batch, before filters, with half of `sampling.max_tokens` tokens or more),
  `completion/long_played_frac` (the same of all rollouts played so far, trained or waiting).
- An explanation of the gap (`record.explain_mismatch_every`, docs/mismatch.md), nats, mean and largest absolute value
  over tokens of a few rollouts: `mismatch/noise_*`, `mismatch/stale_*`, `mismatch/kept_*`, `mismatch/unexplained_*`;
  `mismatch/explained_tokens` (tokens whose parts are all known), `time/mismatch_s` (what the step waited for it).
- An off-policy correction: `correction/weight_mean` (mean factor), `correction/changed_frac` (tokens whose factor was
  truncated or masked).
- Distillation (docs/distillation.md): `distill/kl` (nats per token: reverse KL to the teacher, its k1 estimate where
  only sampled tokens are compared, or forward KL on the teacher's likeliest tokens), `distill/target_frac` (tokens with
  such targets).
- A critic: `critic/loss`, `critic/squared_error`, `critic/value_mean`, `critic/grad_norm`, `critic/skipped`.
- Filters (docs/grouping.md): `filter/...`.
- Environments: `rollout/turns_mean`, `rollout/limit_frac` (ended by a limit of turns, tokens or time).
- A reward in parts (docs/rewards.md): `reward/part_NAME_mean` over the rollouts that have the part.
- Several roles in a workflow: `reward/ROLE_mean` of each role.
"""

EVALUATION = (
    "eval/name",  # of the task family
    "eval/split",
    "eval/accuracy",  # fraction of greedy completions that are correct
    "eval/reward_mean",  # of greedy completions; without those whose attempt failed
)
"""In the line of every evaluation. `step` counts steps of the reinforcement phase: 0 is before the first step.

Every line also has `eval/num_tasks`. With N samples per task: `eval/avg_at_N` (fraction of samples that are correct)
and `eval/pass_at_K`. With two tasks or more: `eval/NAME_ci95_low` and `eval/NAME_ci95_high` of the accuracy, of
avg_at_N and of pass_at_K (`run.intervals.mean_interval`). With a reward in parts: `eval/reward_part_NAME_mean`, of
greedy completions. An evaluation of which every attempt failed has no `eval/reward_mean`.
"""
