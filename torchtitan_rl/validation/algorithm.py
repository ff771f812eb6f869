"""Checks of a run's algorithm before a process starts: contradictions, terms without effect, functions that break the
contract of their field."""

from __future__ import annotations

import difflib
import inspect
import math
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from torchtitan_rl.algorithm import advantages, corrections, credit, losses, minibatch_statistics, reductions
from torchtitan_rl.config.algorithm import AlgorithmConfig, ScheduleConfig, unwrapped
from torchtitan_rl.config.resolve import function_name, named
from torchtitan_rl.config.run import RolesConfig, RunConfig
from torchtitan_rl.validation.functions import (
    needs_old_logprobs,
    probe_advantages,
    probe_correction,
    probe_credit,
    probe_loss,
    probe_minibatch,
    probe_reduction,
    reads,
)

__all__ = [
    "check_algorithm",
    "check_arguments",
    "check_entropy_control",
    "check_function",
    "check_minibatches",
    "check_schedule",
    "check_workflow",
    "no_breakpoints",
]


def check_algorithm(config: RunConfig) -> None:
    """Raises ValueError for the first mistake in `config.algorithm` or a schedule; changes nothing."""
    algorithm, roles = config.algorithm, config.roles
    check_schedule("algorithm.schedule", algorithm.schedule)
    check_schedule("supervised.schedule", config.supervised.schedule)
    for role, estimator in advantages.estimators_of(algorithm).items():
        setting = f"algorithm.advantage_fn{role and '.' + role}"
        check_function(setting, estimator, advantages)
        if (estimator.func if isinstance(estimator, partial) else estimator) is advantages.pass_at_k:
            _check_subsets(setting, estimator, algorithm)
    estimators = advantages.estimators_of(algorithm).values()
    if algorithm.greedy_baseline and not any(map(advantages.sees_group, estimators)):
        raise ValueError(
            "algorithm.greedy_baseline=True: plays a rollout of every task for a baseline, and no estimator that sees "
            "groups would read it; use advantage_fn=group_estimators.remax, or False"
        )
    if algorithm.greedy_baseline and not _uses_estimators(algorithm, roles):
        raise ValueError(
            "algorithm.greedy_baseline=True: plays a rollout of every task for an estimator, whose advantages do not "
            "count with a critic, with a teacher that trains alone, in self-distillation, or with "
            "precomputed_advantages='require'; use False"
        )
    functions = {"loss_fn": losses, "critic_loss_fn": losses, "reduction": reductions}
    if algorithm.correction_fn is not None:
        functions["correction_fn"] = corrections
    if algorithm.minibatch_fn is not None:
        functions["minibatch_fn"] = minibatch_statistics
    if algorithm.credit_fn is not None:
        functions["credit_fn"] = credit
    for name, module in functions.items():
        check_function(f"algorithm.{name}", getattr(algorithm, name), module)
    with no_breakpoints():
        _check_terms(algorithm, roles)
        _probe(algorithm, roles)


def check_minibatches(algorithm: AlgorithmConfig, num_steps: int) -> None:
    """Raises ValueError for minibatches larger than a batch, and for a number of steps that ends within a batch."""
    if algorithm.tasks_per_minibatch > algorithm.tasks_per_step:
        raise ValueError(
            f"algorithm.tasks_per_minibatch={algorithm.tasks_per_minibatch}: must be between 0 (the whole batch) "
            f"and algorithm.tasks_per_step={algorithm.tasks_per_step}"
        )
    per_batch = algorithm.steps_per_batch
    if num_steps % per_batch:
        below = num_steps - num_steps % per_batch
        raise ValueError(
            f"controller.num_steps={num_steps}: a batch is {per_batch} optimizer steps (algorithm.num_epochs x its "
            f"minibatches); use a multiple, such as {below or per_batch} or {below + per_batch}"
        )


def check_entropy_control(algorithm: AlgorithmConfig, *, vocab_size: int) -> None:
    """Raises ValueError for a coefficient of the entropy bonus that could not follow the entropy."""
    control, where = algorithm.entropy_control, "algorithm.entropy_control"
    if control is None:
        return
    low, high = control.min_coef, control.max_coef
    if not low < high:
        raise ValueError(
            f"{where}.min_coef={low}: is not below max_coef={high}, so the coefficient could not move; use a smaller "
            f"one, or {where}=None with algorithm.entropy_coef={low}"
        )
    if not low <= algorithm.entropy_coef <= high:
        raise ValueError(
            f"algorithm.entropy_coef={algorithm.entropy_coef}: is the first coefficient, and outside of the bounds "
            f"[{low}, {high}] of {where}; use a number within them, such as {low}"
        )
    if control.step > high - low:
        raise ValueError(
            f"{where}.step={control.step}: is more than the {high - low:g} between min_coef and max_coef, so a batch "
            "would take the coefficient from bound to bound; use a hundredth of that"
        )
    if control.target >= math.log(vocab_size):
        raise ValueError(
            f"{where}.target={control.target}: no distribution over the vocabulary's {vocab_size} tokens has more than "
            f"{math.log(vocab_size):.4g} nats, so the coefficient could only rise; use an entropy that the policy has "
            "early in training"
        )


def check_workflow(workflow: Callable | None) -> None:
    """Raises ValueError for a workflow that cannot be called as workflows are."""
    if workflow is None:
        return
    check_function("algorithm.workflow", workflow)
    try:
        inspect.signature(workflow).bind(None, None, rollout_id="", seed=0)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"algorithm.workflow={named(workflow)}: cannot be called as (task, policy, rollout_id=, seed=) "
            f"({error}); give it that signature"
        ) from error


@contextmanager
def no_breakpoints():
    """Disables `breakpoint()` in a user's function: it is meant for the run, not for the made-up numbers of a check."""
    hook = sys.breakpointhook
    sys.breakpointhook = lambda *args, **keywords: None
    try:
        yield
    finally:
        sys.breakpointhook = hook


def _check_terms(algorithm: AlgorithmConfig, roles: RolesConfig) -> None:
    """Refuses terms that are configured but without effect."""
    if algorithm.kl_coef:
        if roles.reference is None:
            raise ValueError(
                f"algorithm.kl_coef={algorithm.kl_coef}: there is no reference to measure the KL to; set "
                "roles.reference or use 0"
            )
        if algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1" and not algorithm.kl_ratio_weighted:
            raise ValueError(
                "algorithm.kl_estimator='k1': its gradient as a loss has mean 0, so it would not hold the "
                "policy; use 'k2' (the gradient of the KL), 'k3', algorithm.kl_in='reward', or "
                "algorithm.kl_ratio_weighted=True"
            )
        if algorithm.kl_in != "loss" and algorithm.kl_estimator != "k1":
            raise ValueError(
                f"algorithm.kl_estimator={algorithm.kl_estimator!r}: as a reward its policy gradient is not that of "
                "the KL, and near the reference it can point away from it; use 'k1' with "
                f"algorithm.kl_in={algorithm.kl_in!r}, or 'loss'"
            )
    if algorithm.kl_ratio_weighted:
        _check_weighted_kl(algorithm)
    _check_adaptive_kl(algorithm)
    _check_correction(algorithm, _columns(algorithm, roles))
    _check_minibatch_fn(algorithm)
    _check_credit(algorithm, roles)
    if roles.critic is None:
        for name, default in (("critic_loss_config", {}), ("gae_gamma", 1.0), ("gae_lambda", 1.0)):
            if name == "gae_gamma" and algorithm.kl_in_return:
                continue
            if getattr(algorithm, name) != default:
                raise ValueError(
                    f"algorithm.{name}={getattr(algorithm, name)}: is for a critic and this run has none; "
                    f"set roles.critic or use {default}"
                )
    if algorithm.on_rollout_failure == "retry" and not algorithm.rollout_retries:
        raise ValueError(
            "algorithm.rollout_retries=0: retries nothing; use 1 or more, or on_rollout_failure='drop_group'"
        )


def _check_credit(algorithm: AlgorithmConfig, roles: RolesConfig) -> None:
    """Refuses a factor of advantages where advantages are computed after it, from rewards or by a teacher. Which turns
    train still counts there."""
    if algorithm.credit_fn in (None, credit.all_branches, credit.last_branch):
        return
    computed_by = {
        "roles.critic": roles.critic is not None,
        "algorithm.kl_in='return'": algorithm.kl_in_return,
        "algorithm.distill.rewards=False": algorithm.teacher_trains_alone,
        "top_k of self-distillation": any(own.top_k and not _estimates(own) for own in algorithm.own_teachers),
    }
    for setting, is_set in computed_by.items():
        if is_set:
            raise ValueError(
                f"algorithm.credit_fn={function_name(algorithm.credit_fn)}: with {setting} what a token counts is "
                "computed after it, so its factors would not count; use credit.last_branch or credit.all_branches"
            )


def _estimates(teacher: Any) -> bool:
    """Whether a teacher of self-distillation adds advantages of rewards."""
    return getattr(teacher, "advantage_fn", None) is not None


def _check_weighted_kl(algorithm: AlgorithmConfig) -> None:
    setting = "algorithm.kl_ratio_weighted=True"
    if not algorithm.kl_coef:
        raise ValueError(f"{setting}: there is no KL to weigh; set algorithm.kl_coef, or use False")
    if algorithm.kl_in != "loss":
        raise ValueError(
            f"{setting}: a KL in the reward is a part of the advantage, which the loss's own ratio multiplies; use "
            "False, or algorithm.kl_in='loss'"
        )
    if algorithm.kl_estimator == "k2":
        raise ValueError(
            f"{setting}: the mean of algorithm.kl_estimator='k2' is not the KL, so weighed by the ratio its gradient "
            "is not that of the KL; use 'k3' or 'k1', or False"
        )


def _check_adaptive_kl(algorithm: AlgorithmConfig) -> None:
    target, horizon = algorithm.kl_target, algorithm.kl_horizon
    if not target:
        if horizon != AlgorithmConfig().kl_horizon:
            raise ValueError(
                f"algorithm.kl_horizon={horizon}: without a target no coefficient adapts; set algorithm.kl_target or "
                f"use {AlgorithmConfig().kl_horizon}"
            )
        return
    if not algorithm.kl_coef:
        raise ValueError(
            f"algorithm.kl_target={target}: there is no coefficient to adapt, and 0 stays 0; set algorithm.kl_coef to "
            "the first one, with roles.reference, or use 0"
        )
    if algorithm.kl_in == "loss":
        raise ValueError(
            f"algorithm.kl_target={target}: adapts the coefficient of a KL in rewards, and algorithm.kl_in='loss' is a "
            "term of the loss; use 'return' or 'reward', or kl_target=0"
        )
    rollouts = algorithm.tasks_per_step * algorithm.group_size
    if horizon < rollouts:
        raise ValueError(
            f"algorithm.kl_horizon={horizon}: a batch has {rollouts} rollouts, so one batch would change the "
            f"coefficient by more than a fifth; use {rollouts} or more"
        )


def _check_correction(algorithm: AlgorithmConfig, columns: set[str]) -> None:
    if algorithm.correction_fn is None and algorithm.correction_config:
        raise ValueError(
            f"algorithm.correction_config={algorithm.correction_config}: there is no correction for it "
            "to configure; set algorithm.correction_fn or leave it empty"
        )
    if algorithm.correction_denominator == "kept":
        if algorithm.correction_fn is None:
            raise ValueError(
                "algorithm.correction_denominator='kept': there is no correction that rejects tokens; set "
                "algorithm.correction_fn or use 'all'"
            )
        function = unwrapped(algorithm.correction_fn)
        if function in (corrections.truncated_token, corrections.truncated_sequence):
            raise ValueError(
                f"algorithm.correction_denominator='kept': {function_name(function)} rejects no token, "
                "so nothing would leave the denominator; use masked_token or masked_sequence, or 'all'"
            )
        if function is corrections.opsm:
            raise ValueError(
                "algorithm.correction_denominator='kept': opsm compares with the policy of each step, and the "
                "denominator is known before; use 'all', as in DeepSeek-V3.2"
            )
    if algorithm.recompute_logprobs_per_batch and algorithm.recompute_logprobs_per_minibatch:
        raise ValueError(
            "algorithm.recompute_logprobs_per_batch=True: recompute_logprobs_per_minibatch=True takes its "
            "place at every step; keep one of them"
        )
    correction, arguments = algorithm.correction_fn, algorithm.correction_config
    if (
        correction is not None
        and not algorithm.recomputes_logprobs
        and needs_old_logprobs(correction, arguments, columns)
    ):
        raise ValueError(
            f"algorithm.correction_fn={function_name(algorithm.correction_fn)}: the loss's ratios are against the "
            "generator already, nothing is left to correct; set algorithm.recompute_logprobs_per_batch=True"
        )


def _check_minibatch_fn(algorithm: AlgorithmConfig) -> None:
    if algorithm.minibatch_fn is None:
        if algorithm.minibatch_config:
            raise ValueError(
                f"algorithm.minibatch_config={algorithm.minibatch_config}: there is no function for it to configure; "
                "set algorithm.minibatch_fn or leave it empty"
            )
        return
    setting = f"algorithm.minibatch_fn={function_name(algorithm.minibatch_fn)}"
    if not algorithm.recompute_logprobs_per_minibatch:
        raise ValueError(
            f"{setting}: sees the policy's log-probabilities just before each step, and this run does not compute "
            "them; set algorithm.recompute_logprobs_per_minibatch=True"
        )
    if algorithm.minibatch_reads_batch_start and algorithm.steps_per_batch == 1:
        raise ValueError(
            f"{setting}: compares with the policy before the batch, and a batch has one step, before which the two are "
            "the same; set algorithm.tasks_per_minibatch or algorithm.num_epochs, or leave it out"
        )
    if _changes_advantages(algorithm) and algorithm.teacher_replaces_loss_fn:
        raise ValueError(
            f"{setting}: changes advantages, and with algorithm.distill.rewards=False no loss reads them; use "
            "True, or leave minibatch_fn out"
        )


def _changes_advantages(algorithm: AlgorithmConfig) -> bool:
    """Whether `minibatch_fn` is one of this package's, which act through advantages alone."""
    function = unwrapped(algorithm.minibatch_fn)
    return function in (minibatch_statistics.clip_cov, minibatch_statistics.kl_cov, minibatch_statistics.top_entropy)


def _probe(algorithm: AlgorithmConfig, roles: RolesConfig) -> None:
    """Calls the run's functions on made-up numbers."""
    columns = _columns(algorithm, roles)
    divergence = algorithm.distill.divergence if algorithm.distill is not None else ""
    outputs = ["policy_logprobs", *(["teacher_kl"] if divergence == "full" else [])]
    probe_advantages(algorithm)
    if algorithm.credit_fn is not None:
        probe_credit(algorithm)
    probe_reduction(f"algorithm.reduction={named(algorithm.reduction)}", algorithm.reduction)
    check_arguments("algorithm.loss_config", algorithm.loss_fn, algorithm.loss_config)
    probe_loss(
        f"algorithm.loss_fn={named(algorithm.loss_fn)}",
        algorithm.loss_fn,
        algorithm.loss_config,
        outputs=outputs,
        columns=columns,
    )
    loss = partial(algorithm.loss_fn, **algorithm.loss_config)
    if algorithm.kl_coef and algorithm.kl_in != "loss" and not reads("advantages", loss, columns, outputs):
        raise ValueError(
            f"algorithm.kl_in={algorithm.kl_in!r}: {function_name(algorithm.loss_fn)} does not read advantages, so "
            "the KL would not count; use 'loss'"
        )
    needs = {
        "algorithm.distill.divergence='tokens'": divergence == "tokens",
        "algorithm.whiten_advantages=True": algorithm.whiten_advantages,
        "algorithm.distill.rewards=True": bool(divergence) and algorithm.distill.rewards,
        "algorithm.minibatch_fn": _changes_advantages(algorithm),
        "self-distillation": any(
            not teacher.top_k or getattr(teacher, "advantage_fn", None) for teacher in algorithm.own_teachers
        ),
    }
    for setting, needed in needs.items():
        if needed and not reads("advantages", loss, columns, outputs):
            raise ValueError(
                f"algorithm.loss_fn={function_name(algorithm.loss_fn)}: does not read advantages, by which "
                f"{setting} is to train; use importance_sampling or ppo"
            )
    if algorithm.correction_fn is not None:
        check_arguments("algorithm.correction_config", algorithm.correction_fn, algorithm.correction_config)
        probe_correction(
            f"algorithm.correction_fn={named(algorithm.correction_fn)}",
            algorithm.correction_fn,
            algorithm.correction_config,
            columns,
        )
        if algorithm.correction_denominator == "kept":  # computed from the data alone, before they are split
            probe_correction(
                f"algorithm.correction_denominator='kept': {function_name(algorithm.correction_fn)} without the "
                "model's outputs, which depend on the microbatch",
                algorithm.correction_fn,
                algorithm.correction_config,
                columns,
                outputs=[],
            )
    if algorithm.minibatch_fn is not None:
        check_arguments("algorithm.minibatch_config", algorithm.minibatch_fn, algorithm.minibatch_config)
        probe_minibatch(f"algorithm.minibatch_fn={named(algorithm.minibatch_fn)}", algorithm, columns)
    if roles.critic is not None:
        check_arguments("algorithm.critic_loss_config", algorithm.critic_loss_fn, algorithm.critic_loss_config)
        probe_loss(
            f"algorithm.critic_loss_fn={named(algorithm.critic_loss_fn)}",
            algorithm.critic_loss_fn,
            algorithm.critic_loss_config,
            outputs=["predicted_values"],
            columns=columns,
        )


def _columns(algorithm: AlgorithmConfig, roles: RolesConfig) -> set[str]:
    """The names of the loss inputs that the run's data will have."""
    columns = {"token_weights", "loss_mask", "advantages", "sampling_logprobs"}
    if algorithm.recomputes_logprobs:
        columns.add("old_logprobs")
    if algorithm.minibatch_reads_entropy:
        columns.add("old_entropy")
    if algorithm.minibatch_reads_batch_start:
        columns.add("batch_logprobs")
    if roles.reference is not None:
        columns.add("reference_logprobs")
    if roles.teacher is not None:
        columns.add("teacher_logprobs")
    if roles.critic is not None:
        columns |= {"values", "returns"}
    return columns


def check_arguments(setting: str, function: Callable, arguments: dict[str, float]) -> None:
    """Raises ValueError for an argument in `setting`, such as `algorithm.loss_config`, that the function does not
    take."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    known = list(parameters)[1:]
    for argument, value in arguments.items():
        if argument not in known:
            near = difflib.get_close_matches(argument, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known) or 'none'}"
            raise ValueError(f"{setting}.{argument}={value}: {function_name(function)} has no such argument; {hint}")


def _uses_estimators(algorithm: AlgorithmConfig, roles: RolesConfig) -> bool:
    precomputed = algorithm.asks_teacher or algorithm.precomputed_advantages == "require"
    return roles.critic is None and not algorithm.teacher_trains_alone and not precomputed


def _check_subsets(setting: str, estimator: Callable, algorithm: AlgorithmConfig) -> None:
    """Raises ValueError for `pass_at_k` without k, and for subsets of k rollouts that a group of `group_size` has none
    of, or a single one."""
    k = getattr(estimator, "keywords", {}).get("k")
    if k is None:
        raise ValueError(
            f"{setting}=pass_at_k: says not how many rollouts a subset has; write partial(advantages.pass_at_k, k=4)"
        )
    if k >= algorithm.group_size and algorithm.trajectory_grouping_hook is None:
        raise ValueError(
            f"{setting}=pass_at_k(k={k}): compares subsets of {k} rollouts, and algorithm.group_size="
            f"{algorithm.group_size} has at most one; use a smaller k, or larger groups"
        )


def check_schedule(where: str, schedule: ScheduleConfig) -> None:
    """Raises ValueError for a schedule that gives the length of its warm-up twice."""
    if schedule.warmup_steps and schedule.warmup_ratio:
        raise ValueError(
            f"{where}.warmup_ratio={schedule.warmup_ratio}: warmup_steps={schedule.warmup_steps} says how "
            "long the warm-up is already; set one of them to 0"
        )


def check_function(where: str, function: Any, module: ModuleType | None = None) -> None:
    """Raises ValueError for what is no function, with a function of `module` that may be meant."""
    if callable(function):
        return
    if module is None:
        raise ValueError(f"{where}={function!r}: is not a function; give the function itself, not its name")
    near = difflib.get_close_matches(str(function), module.__all__, 1)
    hint = f"did you mean the function {module.__name__}.{near[0]}?" if near else f"see {module.__name__} for some"
    raise ValueError(f"{where}={function!r}: is not a function; give the function itself, not its name; {hint}")
