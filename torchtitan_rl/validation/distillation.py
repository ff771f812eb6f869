"""Checks of distillation before a process starts."""

from __future__ import annotations

import dataclasses
import inspect

from torchtitan_rl.config.algorithm import AlgorithmConfig, DistillConfig
from torchtitan_rl.config.resolve import function_name
from torchtitan_rl.config.run import RolesConfig, RunConfig

__all__ = ["check_distill", "check_snapshot"]


def check_distill(algorithm: AlgorithmConfig, roles: RolesConfig, *, vocab_size: int) -> None:
    """Raises ValueError for the first mistake in distillation's settings; changes nothing."""
    if algorithm.distill is not None:
        _check_teacher_role(algorithm, algorithm.distill, roles, vocab_size)
    _check_own_teacher(algorithm, roles, vocab_size)
    hook = algorithm.after_rewards
    if hook is not None:
        where = f"algorithm.after_rewards={function_name(hook) if callable(hook) else repr(hook)}"
        if not callable(hook) or not (
            inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(type(hook).__call__)
        ):
            raise ValueError(f"{where}: is not an async function; give `async (group, policy) -> None`")
        try:
            inspect.signature(hook).bind(None, None)
        except TypeError as error:
            raise ValueError(
                f"{where}: cannot be called as (group, policy) ({error}); give it that signature"
            ) from error


def _check_teacher_role(
    algorithm: AlgorithmConfig, distill: DistillConfig, roles: RolesConfig, vocab_size: int
) -> None:
    where = "algorithm.distill"
    if roles.teacher is None:
        raise ValueError(f"{where}: there is no teacher to learn from; set roles.teacher, or leave it None")
    if algorithm.asks_teacher:
        raise ValueError(
            f"{where}: the workflow has the policy teach itself, and a run learns from one teacher; leave "
            "one of them out"
        )
    if distill.discount and distill.divergence != "tokens":
        raise ValueError(
            f"{where}.discount={distill.discount}: has no effect with divergence={distill.divergence!r}, "
            "which is of one position; use 0 or divergence='tokens'"
        )
    if distill.divergence != "top_k" and distill.top_k != DistillConfig().top_k:
        raise ValueError(
            f"{where}.top_k={distill.top_k}: has no effect with divergence={distill.divergence!r}; use "
            f"divergence='top_k', or leave it {DistillConfig().top_k}"
        )
    if distill.divergence == "top_k" and distill.top_k > vocab_size:
        raise ValueError(f"{where}.top_k={distill.top_k}: must be from 1 to the vocabulary's {vocab_size} tokens")
    if algorithm.kl_in_return:
        raise ValueError(
            "algorithm.kl_in='return': sums up what a rollout's tokens earn, and a teacher's advantages are no rewards "
            "of theirs; use 'reward' or 'loss'"
        )
    if algorithm.whiten_advantages:
        raise ValueError(
            "algorithm.whiten_advantages=True: would hide how far the teacher is, which algorithm.distill learns from; "
            "use False"
        )
    if distill.rewards:
        return
    alone = f"{where}.rewards=False: the teacher alone trains, so"
    if roles.critic is not None:
        raise ValueError(f"{alone} roles.critic would have nothing to say; leave it out, or use rewards=True")
    if algorithm.precomputed_advantages == "require":
        raise ValueError(
            f"{alone} algorithm.precomputed_advantages='require' asks for advantages that would not count; "
            "use 'auto', or rewards=True"
        )
    _check_penalty(algorithm, alone)
    if algorithm.filters.zero_variance:
        raise ValueError(
            f"{alone} groups of equal rewards teach as well, and algorithm.filters.zero_variance=True would "
            "leave them out; use False, or rewards=True"
        )
    if distill.divergence == "tokens":
        return
    if algorithm.loss_config:
        raise ValueError(
            f"{alone} algorithm.loss_config={algorithm.loss_config} has no loss_fn to configure; leave it "
            "empty, or use rewards=True"
        )
    reads_ratio = algorithm.minibatch_fn is not None or (algorithm.kl_coef and algorithm.kl_ratio_weighted)
    for name in ("recompute_logprobs_per_batch", "recompute_logprobs_per_minibatch"):
        if getattr(algorithm, name) and algorithm.correction_fn is None and not reads_ratio:
            raise ValueError(f"{alone} algorithm.{name}=True has no ratio to serve; use False, or rewards=True")
    if algorithm.correction_fn is not None:
        raise ValueError(f"{alone} algorithm.correction_fn has no loss_fn to correct; use None, or rewards=True")
    if algorithm.kl_coef and algorithm.kl_in == "reward":
        raise ValueError(f"{alone} algorithm.kl_in='reward' changes advantages that nothing reads; use 'loss'")


def _check_penalty(algorithm: AlgorithmConfig, why: str) -> None:
    if algorithm.filters.overlong == "penalty":
        raise ValueError(
            f"{why} algorithm.filters.overlong='penalty' would lower rewards that do not count; use another"
        )


def check_snapshot(config: RunConfig, longest: int) -> None:
    """Raises ValueError for settings under which a snapshot cannot score in self-distillation."""
    every, num_steps = config.algorithm.refresh_teacher_every, config.controller.num_steps
    if every > num_steps:
        raise ValueError(
            f"algorithm.refresh_teacher_every={every}: never falls due within "
            f"controller.num_steps={num_steps}; lower it, or use 0 for a frozen teacher"
        )
    max_model_len = config.generator.max_model_len
    if config.algorithm.asks_teacher and max_model_len <= longest:
        raise ValueError(
            f"generator.max_model_len={max_model_len}: sampling.max_prompt_tokens + max_tokens = {longest} "
            "leave no room for the longer prompt of a self-distillation's teacher; raise it"
        )


def _check_own_teacher(algorithm: AlgorithmConfig, roles: RolesConfig, vocab_size: int) -> None:
    every = algorithm.refresh_teacher_every
    if not algorithm.asks_teacher:
        if every:
            raise ValueError(
                f"algorithm.refresh_teacher_every={every}: no workflow asks an earlier version of the policy "
                "to teach, so it has no effect; use rollout.self_distill, or 0"
            )
        return
    if algorithm.temperature != 1.0:
        raise ValueError(
            f"algorithm.temperature={algorithm.temperature}: self-distillation compares log-probabilities "
            "with scores, which are made at temperature 1; use 1"
        )
    if algorithm.precomputed_advantages == "ignore":
        raise ValueError(
            "algorithm.precomputed_advantages='ignore': self-distillation gives its turns advantages, which "
            "would not count; use 'auto' or 'require'"
        )
    if len(algorithm.own_teachers) > 1:
        raise ValueError(
            "algorithm.after_rewards: has the policy teach itself, as algorithm.workflow does already; keep one of them"
        )
    alone = "self-distillation gives every turn its advantages, so"
    if roles.critic is not None:
        raise ValueError(f"{alone} roles.critic would have nothing to say; leave it out")
    if algorithm.filters.zero_variance:
        raise ValueError(f"{alone} algorithm.filters.zero_variance=True leaves nothing out; use False")
    _check_penalty(algorithm, alone)
    for teacher in algorithm.own_teachers:
        dataclasses.replace(teacher)  # runs __post_init__: an override sets one field without its checks
        if teacher.top_k > vocab_size:
            raise ValueError(
                f"top_k={teacher.top_k}: of self-distillation, exceeds the vocabulary's {vocab_size} tokens"
            )
