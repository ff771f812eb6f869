"""Checks of a whole config before a process starts; every message names the field, its value and what to do."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan_rl import platform
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.config.derive import settled
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.resolve import named
from torchtitan_rl.config.run import EvalSetConfig, RunConfig
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.health.rules.table import check_thresholds
from torchtitan_rl.model import files
from torchtitan_rl.model.files import assets_dir
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.validation.algorithm import check_algorithm
from torchtitan_rl.validation.batches import check_batches
from torchtitan_rl.validation.distillation import check_distill
from torchtitan_rl.validation.engine import check_engine
from torchtitan_rl.validation.lag import check_lag_settings
from torchtitan_rl.validation.recording import check_recording
from torchtitan_rl.validation.recovery import check_checkpoints, check_failures
from torchtitan_rl.validation.roles import check_roles
from torchtitan_rl.validation.sampling import check_sampling
from torchtitan_rl.validation.sinks import check_sinks
from torchtitan_rl.validation.stopping import check_stop
from torchtitan_rl.validation.trainer import (
    check_context,
    check_degree,
    check_experts_kernel,
    check_positive,
    check_trainer,
)
from torchtitan_rl.validation.types import check_types

__all__ = ["validate", "check_local", "missing_weights"]


def validate(config: RunConfig) -> None:
    """Raises ValueError for the first mistake that shows before a process starts; changes nothing."""
    check_types(config)
    check_thresholds(config.record.thresholds, "record.thresholds.")
    config = settled(config)
    for part in (config.task, config.supervised.task, config.trainer.lora):
        _check_again(part)
    shape = resolve_shape(config.model)
    _check_tokenizer(config.model, shape)
    longest = config.sampling.max_prompt_tokens + config.sampling.max_tokens
    for role, (trainer, model) in config.trainers().items():
        check_trainer("trainer" if role == "policy" else f"roles.{role}.trainer", trainer, model, longest)
    if shape.experts is not None:
        _check_generator_of_experts(config, shape)
    _check_rollouts(config)
    check_sampling(config)
    check_degree("generator.tensor_parallel_degree", config.generator.tensor_parallel_degree, shape)
    check_context("generator.max_model_len", config.generator.max_model_len, shape, longest)
    check_engine(config.generator, shape)
    check_roles(config, shape)
    _check_numbers(config)
    _check_minibatches(config.algorithm, config.controller.num_steps)
    check_checkpoints(config.controller)
    check_stop(config.controller)
    check_sinks(config.record)
    check_recording(config)
    check_failures(config.algorithm)
    for name, eval_set in config.controller.eval_sets.items():
        _check_eval_set(name, eval_set)
    if config.supervised.task is not None and not config.supervised.num_steps:
        raise ValueError(
            "supervised.task: is not imitated with supervised.num_steps=0; set the steps, or leave it None"
        )
    _check_own_teacher(config, longest)
    check_distill(config.algorithm, config.roles, vocab_size=shape.vocab_size)
    check_algorithm(config)
    check_lag_settings(config)
    check_batches(config)
    _check_workflow(config.algorithm.workflow)
    if not config.algorithm.temperature > 0:
        raise ValueError(f"algorithm.temperature={config.algorithm.temperature}: training samples need a positive one")
    if config.seed < 0:
        raise ValueError(f"seed={config.seed}: must not be negative; use 0 or more")


def check_local(config: RunConfig, *, generators_only: bool = False) -> None:
    """Raises ValueError for a layout that needs more than one process or device; the message has the numbers."""
    for role, (trainer, _) in ({} if generators_only else config.trainers()).items():
        if trainer.num_ranks != 1:
            where, parallel = "trainer" if role == "policy" else f"roles.{role}.trainer", trainer.parallelism
            raise ValueError(
                f"{where}.parallelism: replicate x shard x tensor = {parallel.data_parallel_replicate_degree} x "
                f"{parallel.data_parallel_shard_degree} x {parallel.tensor_parallel_degree} = {trainer.num_ranks} "
                "ranks; backend='local' has one; set every degree to 1 or use backend='actors'"
            )
    for name in ("tensor_parallel_degree", "num_replicas"):
        if (value := getattr(config.generator, name)) != 1:
            raise ValueError(
                f"generator.{name}={value}: backend='local' has one engine on one device; use 1 or backend='actors'"
            )


def missing_weights(config: RunConfig) -> str:
    """Why a run with a valid config cannot start: a model's files of weights are missing; empty when it can."""
    reasons = (
        files.missing_weights(model, "model" if role == "policy" else f"roles.{role}.model")
        for role, (_, model) in config.trainers().items()
    )
    return next(filter(None, reasons), "")


def _check_tokenizer(model: ModelConfig, shape: DecoderShape) -> None:
    tokenizer_vocab = _tokenizer_size(assets_dir(model))
    if tokenizer_vocab > shape.vocab_size:
        raise ValueError(
            f"model.shape.vocab_size={shape.vocab_size}: the tokenizer of model.assets={model.assets!r} has "
            f"{tokenizer_vocab} tokens; use the tokenizer the model was made for"
        )


def _check_generator_of_experts(config: RunConfig, shape: DecoderShape) -> None:
    """Raises ValueError for generators or adapters that do not work with a mixture of experts."""
    if config.generator.model_impl == "vllm":
        raise ValueError("generator.model_impl='vllm': is for dense models only; use 'torchtitan'")
    check_experts_kernel("generator.dtype", config.generator.dtype, config.generator.tensor_parallel_degree, shape)
    if not config.generator.enforce_eager and platform.experts_ask_the_host(config.generator.dtype):
        raise ValueError(
            f"generator.enforce_eager=False: experts in {config.generator.dtype} are multiplied on this GPU with "
            "the host's help, which a CUDA graph cannot capture; use True"
        )
    for target in config.trainer.lora.target_modules if config.trainer.lora is not None else ():
        if target in ("gate_proj", "up_proj", "down_proj"):
            raise ValueError(
                f"trainer.lora.target_modules={target!r}: experts of a mixture have no adapters; use "
                "qkv_proj and o_proj"
            )


def _check_rollouts(config: RunConfig) -> None:
    sampling, limit = config.sampling, config.sampling.max_rollout_tokens
    if limit and limit <= sampling.max_prompt_tokens:
        raise ValueError(
            f"sampling.max_rollout_tokens={limit}: leaves nothing after a prompt of sampling.max_prompt_tokens="
            f"{sampling.max_prompt_tokens}; raise it, or use 0 for max_prompt_tokens + max_tokens"
        )
    contexts = {"generator.max_model_len": config.generator.max_model_len}
    for role, (trainer, _) in config.trainers().items():
        contexts[f"{'trainer' if role == 'policy' else f'roles.{role}.trainer'}.training.seq_len"] = (
            trainer.training.seq_len
        )
    for where, context in contexts.items():
        if limit > context:
            raise ValueError(
                f"sampling.max_rollout_tokens={limit}: exceeds {where}={context}; lower it or raise that one"
            )
    if not 0 < sampling.rollout_timeout_s < float("inf"):
        raise ValueError(f"sampling.rollout_timeout_s={sampling.rollout_timeout_s}: must be positive; use seconds")
    if "" in sampling.stop:
        raise ValueError(f"sampling.stop={sampling.stop}: an empty text ends every completion at once; leave it out")


def _check_numbers(config: RunConfig) -> None:
    """Raises ValueError for counts and sizes that must be positive, and for numbers that must not be negative."""
    for where, value in (
        ("algorithm.group_size", config.algorithm.group_size),
        ("algorithm.tasks_per_step", config.algorithm.tasks_per_step),
        ("sampling.max_tokens", config.sampling.max_tokens),
        ("sampling.max_prompt_tokens", config.sampling.max_prompt_tokens),
        ("sampling.max_turns", config.sampling.max_turns),
        ("algorithm.num_epochs", config.algorithm.num_epochs),
        ("generator.num_replicas", config.generator.num_replicas),
        ("generator.max_num_seqs", config.generator.max_num_seqs),
        ("controller.hang_timeout_s", config.controller.hang_timeout_s),
        ("controller.eval_tasks", config.controller.eval_tasks),
        ("controller.test_tasks", config.controller.test_tasks),
        ("supervised.batch_size", config.supervised.batch_size),
        ("record.explain_mismatch_rollouts", config.record.explain_mismatch_rollouts),
    ):
        check_positive(where, value)
    for where, number in (
        ("controller.num_steps", config.controller.num_steps),
        ("supervised.num_steps", config.supervised.num_steps),
        ("supervised.lr", config.supervised.lr),
        ("generator.num_spares", config.generator.num_spares or 0),
        ("record.explain_mismatch_every", config.record.explain_mismatch_every),
        ("record.eval_completions", config.record.eval_completions),
    ):
        if not 0 <= number < float("inf"):
            raise ValueError(f"{where}={number}: must not be negative; use 0 or more")


def _check_own_teacher(config: RunConfig, longest: int) -> None:
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


def _check_minibatches(algorithm: AlgorithmConfig, num_steps: int) -> None:
    if not 0 <= algorithm.tasks_per_minibatch <= algorithm.tasks_per_step:
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


def _check_again(part: Any) -> None:
    """Runs __post_init__ of a section and of the sections in it: an override sets one field without their checks."""
    if isinstance(part, dict):
        for item in part.values():
            _check_again(item)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            _check_again(getattr(part, field.name, None))
        dataclasses.replace(part)  # type: ignore[type-var]


def _check_eval_set(name: str, eval_set: EvalSetConfig) -> None:
    where = f"controller.eval_sets.{name}"
    if name in ("validation", "test") or not name.isidentifier():
        raise ValueError(
            f"{where}: the run's own evaluations are validation and test, and overrides contain the name; "
            "use another Python identifier"
        )
    _check_again(eval_set.task)
    check_positive(f"{where}.num_tasks", eval_set.num_tasks)
    if eval_set.num_samples < 0:
        raise ValueError(f"{where}.num_samples={eval_set.num_samples}: must not be negative; use 0 or more")
    if not 0 <= eval_set.pass_at_k <= eval_set.num_samples:
        raise ValueError(
            f"{where}.pass_at_k={eval_set.pass_at_k}: must be between 0 and num_samples={eval_set.num_samples}"
        )
    if eval_set.correct_reward is not None and not math.isfinite(eval_set.correct_reward):
        raise ValueError(f"{where}.correct_reward={eval_set.correct_reward}: is not finite; give a number, or None")
    if eval_set.num_samples and not eval_set.temperature > 0:
        raise ValueError(
            f"{where}.temperature={eval_set.temperature}: samples of one task would all be the same; use a positive one"
        )


def _check_workflow(workflow: Callable | None) -> None:
    if workflow is None:
        return
    try:
        inspect.signature(workflow).bind(None, None, rollout_id="", seed=0)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"algorithm.workflow={named(workflow)}: cannot be called as (task, policy, rollout_id=, seed=) "
            f"({error}); give it that signature"
        ) from error


def _tokenizer_size(directory: Path) -> int:
    """One more than the largest token id. Raises ValueError when there is no tokenizer."""
    file = directory / "tokenizer.json"
    if not file.exists():
        raise ValueError(f"model.assets={str(directory)!r}: has no tokenizer.json; give a directory with a tokenizer")
    content = json.loads(file.read_text())
    ids = list(content["model"].get("vocab", {}).values()) if isinstance(content["model"].get("vocab"), dict) else []
    ids += [token["id"] for token in content.get("added_tokens", [])]
    return max(ids, default=-1) + 1
