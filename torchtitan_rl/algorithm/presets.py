"""Published algorithms by name: functions that return an `AlgorithmConfig`. "DAPO on my task" is a line::

    algorithm = presets.dapo(group_size=16, loss_config={"clip_high": 0.3}, filters={"overlong_buffer": 512})

Keyword arguments (`changes`) set fields of the config:

- a dictionary for `loss_config`, `critic_loss_config` or `correction_config` adds or replaces arguments;
- a dictionary for a section, such as `filters`, sets fields of the section, and an object replaces the section;
- another `loss_fn`, `critic_loss_fn` or `correction_fn` discards the arguments of the function that it replaces.

A name that `AlgorithmConfig` does not have raises a ValueError that names the nearest one.

A preset sets the objective. Sizes (`tasks_per_step`, `tasks_per_minibatch`, `group_size`), `temperature` and `schedule`
keep the defaults of `AlgorithmConfig` unless the preset's docstring names them. Bounds of a ratio act only where a
batch is several optimizer steps. Presets have no KL term, because `kl_coef` needs a reference that the run brings
(`roles.reference`).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from functools import partial
from typing import Any

from torchtitan_rl.algorithm import advantages, corrections, group_estimators, losses, reductions
from torchtitan_rl.config.algorithm import AlgorithmConfig, DistillConfig, FilterConfig

__all__ = [
    "asynchronous",
    "cispo",
    "dapo",
    "distill",
    "dppo",
    "dr_grpo",
    "gdpo",
    "gmpo",
    "grpo",
    "gspo",
    "opo",
    "pass_at_k",
    "ppo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
    "sapo",
    "self_distill",
    "vespo",
]


def grpo(**changes: Any) -> AlgorithmConfig:
    """GRPO (DeepSeekMath, arXiv:2402.03300): rewards centred and divided by their group's standard deviation, PPO's
    clipped surrogate, a mean over each sequence and then over sequences.

    The paper's KL to the reference, with k3 as here: `kl_coef=0.04`.
    """
    preset = AlgorithmConfig(
        advantage_fn=advantages.grpo,
        loss_fn=losses.ppo,
        loss_config={"clip_low": 0.2, "clip_high": 0.2},
        reduction=reductions.sequence_mean,
        kl_estimator="k3",
    )
    return _changed("grpo", preset, changes)


def dapo(**changes: Any) -> AlgorithmConfig:
    """DAPO (arXiv:2503.14476): GRPO with a higher upper clip, a mean over the batch's tokens, other tasks in place of
    groups whose rewards are all equal, and a penalty for answers near the length limit.

    The penalty grows over the last `filters={"overlong_buffer": N}` tokens before `sampling.max_tokens`. The paper's N
    is 4,096 of 20,480; the preset's is 0, with which only an answer that reaches the limit loses `overlong_penalty`.
    The paper resamples until the batch is full, the preset 10 times at most.
    """
    preset = AlgorithmConfig(
        advantage_fn=advantages.grpo,
        loss_fn=losses.ppo,
        loss_config={"clip_low": 0.2, "clip_high": 0.28},
        reduction=reductions.token_mean,
        filters=FilterConfig(zero_variance=True, max_resamples=10, overlong="penalty", overlong_penalty=1.0),
    )
    return _changed("dapo", preset, changes)


def dr_grpo(*, length: float, **changes: Any) -> AlgorithmConfig:
    """Dr. GRPO (arXiv:2503.20783): rewards centred and not divided, and every token counts 1 / `length` however
    long its sequence, so that neither easy tasks nor short answers count more.

    `length` is a constant of the run, such as `sampling.max_tokens`.
    """
    preset = AlgorithmConfig(
        advantage_fn=advantages.group_centered,
        loss_fn=losses.ppo,
        loss_config={"clip_low": 0.2, "clip_high": 0.2},
        reduction=partial(reductions.constant_length, length=length),
    )
    return _changed("dr_grpo", preset, changes)


def gdpo(**changes: Any) -> AlgorithmConfig:
    """GDPO (arXiv:2601.05242): each reward part normalised in its group by itself, the sum normalised over the batch,
    and the rest of GRPO.

    The reward returns its parts (`rewards.Rewards` does); all parts of a group count alike. For factors, or for some
    of the parts: `advantage_fn=partial(group_estimators.gdpo, weights={"exact": 1.0, "format": 0.5})`.
    """
    preset = AlgorithmConfig(
        advantage_fn=group_estimators.gdpo,
        loss_fn=losses.ppo,
        loss_config={"clip_low": 0.2, "clip_high": 0.2},
        reduction=reductions.sequence_mean,
        kl_estimator="k3",
    )
    return _changed("gdpo", preset, changes)


def gspo(**changes: Any) -> AlgorithmConfig:
    """GSPO (arXiv:2507.18071): GRPO with one ratio per sequence, the geometric mean of its tokens' ratios.

    The clip bounds are the paper's, for answers of thousands of tokens; the ratio of a short answer moves further.
    """
    preset = AlgorithmConfig(
        advantage_fn=advantages.grpo,
        loss_fn=losses.gspo,
        loss_config={"clip_low": 3e-4, "clip_high": 4e-4},
        reduction=reductions.sequence_mean,
    )
    return _changed("gspo", preset, changes)


def gmpo(**changes: Any) -> AlgorithmConfig:
    """GMPO (arXiv:2507.20673): GRPO with the geometric mean of a sequence's clipped ratios in place of their mean.

    The bounds are the paper's, 0.4 nats on either side of a log-ratio of 0.
    """
    preset = AlgorithmConfig(
        advantage_fn=advantages.grpo,
        loss_fn=losses.gmpo,
        loss_config={"log_clip_low": 0.4, "log_clip_high": 0.4},
        reduction=reductions.sequence_mean,
    )
    return _changed("gmpo", preset, changes)


def cispo(**changes: Any) -> AlgorithmConfig:
    """CISPO (MiniMax-M1, arXiv:2506.13585): a clipped ratio as a constant factor, so that clipped tokens still train.

    `clip_low=1` is no lower bound, as in the paper. The paper does not print its upper bound; `clip_high=4` bounds
    ratios at 5, as recipes after ScaleRL (arXiv:2510.13786) do.
    """
    preset = AlgorithmConfig(
        advantage_fn=advantages.grpo,
        loss_fn=losses.cispo,
        loss_config={"clip_low": 1.0, "clip_high": 4.0},
        reduction=reductions.token_mean,
    )
    return _changed("cispo", preset, changes)


def sapo(**changes: Any) -> AlgorithmConfig:
    """SAPO (arXiv:2511.20347): GRPO with a smooth gate on each token's ratio instead of a clip.

    The temperatures are the paper's: the gate closes faster for tokens with a negative advantage.
    """
    preset = AlgorithmConfig(
        advantage_fn=advantages.grpo,
        loss_fn=losses.sapo,
        loss_config={"tau_pos": 1.0, "tau_neg": 1.05},
        reduction=reductions.sequence_mean,
    )
    return _changed("sapo", preset, changes)


def dppo(**changes: Any) -> AlgorithmConfig:
    """DPPO with the binary total variation (arXiv:2602.04879): centred rewards, and a token is dropped where its
    probability moved by more than 0.2 from the one it was sampled with, the way that its advantage pushes it.

    prime-rl's default loss adds a penalty on log-ratios: `loss_config={"tau": 1e-3}`. The binary KL is
    `loss_fn=losses.dppo_kl`. The distance is to the generator as long as log-probabilities are not recomputed.
    """
    preset = AlgorithmConfig(
        advantage_fn=advantages.group_centered,
        loss_fn=losses.dppo_tv,
        loss_config={"delta_low": 0.2, "delta_high": 0.2},
        reduction=reductions.token_mean,
    )
    return _changed("dppo", preset, changes)


def vespo(**changes: Any) -> AlgorithmConfig:
    """VESPO (arXiv:2602.10693): GRPO's advantages, each sequence weighed by a smooth function of its whole ratio.

    The numbers are those of the authors' runs. The ratio is to the generator as long as log-probabilities are not
    recomputed, so nothing else need correct for older policies.
    """
    preset = AlgorithmConfig(
        advantage_fn=advantages.grpo,
        loss_fn=losses.vespo,
        loss_config={"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
        reduction=reductions.token_mean,
    )
    return _changed("vespo", preset, changes)


def rloo(**changes: Any) -> AlgorithmConfig:
    """RLOO (Ahmadian et al., arXiv:2402.14740): REINFORCE with each reward less the mean reward of its siblings, and
    with the log-probability of a sequence, a sum over tokens.

    The ratio of `importance_sampling` is 1 as long as a batch is one optimizer step. With a sum, gradients grow with
    the length of sequences; `reduction=reductions.sequence_mean` averages instead. The paper subtracts the sequence's
    KL to the reference from the reward: `kl_coef=..., kl_estimator="k1", kl_in="return"`, where the baseline is of
    rewards alone.
    """
    preset = AlgorithmConfig(
        advantage_fn=advantages.rloo,
        loss_fn=losses.importance_sampling,
        reduction=partial(reductions.constant_length, length=1.0),
    )
    return _changed("rloo", preset, changes)


def opo(**changes: Any) -> AlgorithmConfig:
    """OPO (arXiv:2505.23585): REINFORCE with each reward less the group's mean weighted by lengths, and a mean over the
    batch's tokens. One optimizer step per batch, without a KL and without an entropy bonus.

    Keep `tasks_per_minibatch=0`, `num_epochs=1` and `max_policy_lag=0`, the defaults: the paper's training is exactly
    on-policy.
    """
    preset = AlgorithmConfig(
        advantage_fn=group_estimators.opo, loss_fn=losses.importance_sampling, reduction=reductions.token_mean
    )
    return _changed("opo", preset, changes)


def pass_at_k(*, k: int, **changes: Any) -> AlgorithmConfig:
    """Pass@k training (arXiv:2508.10751): what a rollout adds to the chance that one of `k` is right, and of DAPO the
    higher upper clip and the mean over the batch's tokens.

    `k` is smaller than `group_size`. A rollout is right with a reward of 1 or more; for another bound give
    `advantage_fn=partial(advantages.pass_at_k, k=..., correct=...)`.
    """
    preset = AlgorithmConfig(
        advantage_fn=partial(advantages.pass_at_k, k=k),
        loss_fn=losses.ppo,
        loss_config={"clip_low": 0.2, "clip_high": 0.28},
        reduction=reductions.token_mean,
    )
    return _changed("pass_at_k", preset, changes)


def ppo(**changes: Any) -> AlgorithmConfig:
    """PPO with a critic (arXiv:1707.06347): advantages per token by GAE (arXiv:1506.02438), a clipped surrogate and a
    clipped value loss.

    The run brings the critic: `roles=RolesConfig(critic=RoleConfig(...))`. Siblings are not compared, so a group is one
    rollout. Advantages are not whitened over the batch, as they are in verl, OpenRLHF and TRL:
    `whiten_advantages=True`. The classic KL to a reference, inside the return: `kl_coef=0.05, kl_estimator="k1",
    kl_in="return"`.
    """
    preset = AlgorithmConfig(
        group_size=1,
        loss_fn=losses.ppo,
        loss_config={"clip_low": 0.2, "clip_high": 0.2},
        reduction=reductions.token_mean,
        gae_gamma=1.0,
        gae_lambda=0.95,
        critic_loss_fn=losses.value_loss,
        critic_loss_config={"clip": 0.2},
    )
    return _changed("ppo", preset, changes)


def reinforce_pp(**changes: Any) -> AlgorithmConfig:
    """REINFORCE++ (arXiv:2501.03262): PPO's token rewards without a critic. A token's return is the rollout's reward
    less the KL of itself and of the tokens after it, whitened over the batch's tokens; PPO's clipped surrogate, a mean
    over the batch's tokens.

    The run brings the KL: `kl_coef=0.01` and `roles.reference`; without, the returns are rewards alone. Siblings are
    not compared, so a group is one rollout; the paper's form for several is `reinforce_pp_baseline`.
    """
    preset = AlgorithmConfig(
        group_size=1,
        advantage_fn=advantages.reinforce,
        loss_fn=losses.ppo,
        loss_config={"clip_low": 0.2, "clip_high": 0.2},
        reduction=reductions.token_mean,
        kl_estimator="k1",
        kl_in="return",
        whiten_advantages=True,
    )
    return _changed("reinforce_pp", preset, changes)


def reinforce_pp_baseline(**changes: Any) -> AlgorithmConfig:
    """REINFORCE++ with baseline (arXiv:2501.03262): rewards centred by group and divided by the batch's standard
    deviation, PPO's clipped surrogate, a mean over the batch's tokens.

    The paper's KL to the reference is a term of the loss, with k2 as here: set `kl_coef`.
    """
    preset = AlgorithmConfig(
        advantage_fn=advantages.reinforce_pp_baseline,
        loss_fn=losses.ppo,
        loss_config={"clip_low": 0.2, "clip_high": 0.2},
        reduction=reductions.token_mean,
        kl_estimator="k2",
    )
    return _changed("reinforce_pp_baseline", preset, changes)


def remax(**changes: Any) -> AlgorithmConfig:
    """ReMax (arXiv:2310.10505): REINFORCE with each reward less that of a greedy rollout of the same task, and with the
    log-probability of a sequence, a sum over tokens.

    Siblings are not compared, so a group is one rollout; with the greedy one every task is played twice. The paper's KL
    to the reference is a reward of each token, inside the return: `kl_coef=..., kl_estimator="k1", kl_in="return"`.
    """
    preset = AlgorithmConfig(
        group_size=1,
        greedy_baseline=True,
        advantage_fn=group_estimators.remax,
        loss_fn=losses.importance_sampling,
        reduction=partial(reductions.constant_length, length=1.0),
    )
    return _changed("remax", preset, changes)


def asynchronous(**changes: Any) -> AlgorithmConfig:
    """GRPO while the generators are `max_policy_lag` publications ahead, here 1, with the decoupled objective
    (arXiv:2110.00641, equation 5; arXiv:2505.24298): the clipped ratio is to the trainer's policy before the batch, and
    each token counts its truncated importance weight, min(that policy / the one that sampled, 2).

    The trainer scores every batch once more before its first step.
    """
    preset = AlgorithmConfig(
        max_policy_lag=1,
        recompute_logprobs_per_batch=True,
        advantage_fn=advantages.grpo,
        loss_fn=losses.ppo,
        loss_config={"clip_low": 0.2, "clip_high": 0.2},
        correction_fn=corrections.truncated_token,
        correction_config={"cap": 2.0},
        reduction=reductions.token_mean,
    )
    return _changed("asynchronous", preset, changes)


def distill(**changes: Any) -> AlgorithmConfig:
    """On-policy distillation (arXiv:2306.13649): the policy samples, and learns from another model's log-probabilities.

    The run brings the teacher: `roles=RolesConfig(teacher=RoleConfig(model=...))`. The preset compares sampled tokens;
    `distill={"divergence": "top_k"}` or `"full"` compares more of the distribution, and then `loss_fn` does not train.
    """
    preset = AlgorithmConfig(
        loss_fn=losses.importance_sampling, reduction=reductions.token_mean, distill=DistillConfig(divergence="tokens")
    )
    return _changed("distill", preset, changes)


def self_distill(*, workflow: Callable, **changes: Any) -> AlgorithmConfig:
    """On-policy self-distillation (arXiv:2601.18734): the policy learns from itself under a prompt that says more.

    `workflow` is one that `rollout.self_distill` decorates: `workflow=self_distill(single_turn, prompt=...)`. Every
    group must carry its advantages (`precomputed_advantages="require"`); no reward is needed.
    """
    preset = AlgorithmConfig(
        loss_fn=losses.importance_sampling,
        reduction=reductions.token_mean,
        workflow=workflow,
        precomputed_advantages="require",
    )
    return _changed("self_distill", preset, changes)


def _changed(preset: str, config: AlgorithmConfig, changes: dict[str, Any]) -> AlgorithmConfig:
    """`config` with `changes`; `preset` names it in messages. Raises ValueError for a field that does not exist."""
    for function in ("loss_fn", "critic_loss_fn", "correction_fn"):
        if function in changes and changes[function] is not getattr(config, function):
            setattr(config, function.replace("_fn", "_config"), {})
    _set_fields(f"presets.{preset}", "", config, changes)
    return config


def _set_fields(where: str, prefix: str, section: Any, changes: dict[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(section)]
    for name, value in changes.items():
        setting = f"{where}({prefix}{name}={value!r})"
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names)}"
            raise ValueError(f"{setting}: {type(section).__name__} has no such field; {hint}")
        current = getattr(section, name)
        if isinstance(value, dict) and dataclasses.is_dataclass(current):
            _set_fields(where, f"{prefix}{name}.", current, value)
        elif isinstance(value, dict) and current is None:
            raise ValueError(f"{setting}: the preset has no {prefix}{name} to change; give an object of its class")
        else:
            setattr(
                section, name, {**current, **value} if isinstance(value, dict) and isinstance(current, dict) else value
            )
