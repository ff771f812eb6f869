"""Checks of a whole config before a process starts; every message names the field, its value and what to do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torchtitan_rl import platform
from torchtitan_rl.config.derive import settled
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.health.rules.table import check_thresholds
from torchtitan_rl.health.siblings import compares_siblings
from torchtitan_rl.model import files
from torchtitan_rl.model.files import assets_dir
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.validation.algorithm import (
    check_algorithm,
    check_entropy_control,
    check_minibatches,
    check_workflow,
    no_breakpoints,
)
from torchtitan_rl.validation.batches import check_batches
from torchtitan_rl.validation.controller import check_checkpoints, check_evaluations, check_stop
from torchtitan_rl.validation.distillation import check_distill, check_snapshot
from torchtitan_rl.validation.fields import check_fields
from torchtitan_rl.validation.generator import (
    check_adapters,
    check_engine,
    check_generator_of_experts,
    check_own_model,
    check_replicas,
)
from torchtitan_rl.validation.lag import check_lag_settings
from torchtitan_rl.validation.preference import check_preference
from torchtitan_rl.validation.record import check_profile, check_sinks
from torchtitan_rl.validation.roles import check_roles
from torchtitan_rl.validation.routing import check_expert_routing
from torchtitan_rl.validation.sampling import check_limits, check_sampling, check_stop_tokens
from torchtitan_rl.validation.trainer import check_context, check_degree, check_trainer

__all__ = ["advice", "check_local", "missing_weights", "validate"]

_LR = {"full": (1e-8, 1e-2), "lora": (1e-7, 1e-1)}
"""Learning rates of AdamW between which language models are trained, with a margin of ten on either side."""


def validate(config: RunConfig) -> None:
    """Raises ValueError for the first mistake that shows before a process starts; changes nothing. Fields by themselves
    come first, in the order of the config; after them what two or more fields say together."""
    check_fields(config)
    check_thresholds(config.record.thresholds, "record.thresholds.")
    config = settled(config)
    eval_sets = config.controller.eval_sets.values()
    preferred = None if config.preference is None else config.preference.task
    for task in (config.task, config.supervised.task, preferred, *(eval_set.task for eval_set in eval_sets)):
        _check_again(task)
    shape = resolve_shape(config.model)
    check_fields(shape, "model.shape.")  # what the config.json of a directory says; another role's below
    _check_tokenizer(config.model, shape)
    longest = config.sampling.max_prompt_tokens + config.sampling.max_tokens
    for role, (trainer, model) in config.trainers().items():
        prefix = "" if role == "policy" else f"roles.{role}."
        role_shape = resolve_shape(model)
        check_fields(role_shape, f"{prefix}model.shape.")
        try:
            _check_again(role_shape)
        except ValueError as error:
            raise ValueError(f"{prefix}{error}") from None
        check_trainer(f"{prefix}trainer", trainer, model, longest)
    check_own_model(config.generator, shape)
    if shape.experts is not None:
        check_generator_of_experts(config, shape)
    check_expert_routing(config, shape)
    check_limits(config)
    check_sampling(config)
    check_stop_tokens(config.sampling.stop_token_ids, shape.vocab_size)
    check_degree("generator.tensor_parallel_degree", config.generator.tensor_parallel_degree, shape)
    check_context("generator.max_model_len", config.generator.max_model_len, shape, longest)
    check_engine(config.generator, shape)
    check_replicas(config)
    check_adapters(config)
    check_roles(config, shape)
    check_minibatches(config.algorithm, config.controller.num_steps)
    check_checkpoints(config.controller)
    check_stop(config.controller)
    check_evaluations(config.controller)
    check_sinks(config.record)
    check_profile(config)
    if config.supervised.task is not None and not config.supervised.num_steps:
        raise ValueError(
            "supervised.task: is not imitated with supervised.num_steps=0; set the steps, or leave it None"
        )
    check_preference(config)
    check_snapshot(config, longest)
    check_distill(config.algorithm, config.roles, vocab_size=shape.vocab_size)
    check_algorithm(config)
    check_entropy_control(config.algorithm, vocab_size=shape.vocab_size)
    with no_breakpoints():
        check_lag_settings(config)
        check_batches(config)
    check_workflow(config.algorithm.workflow)


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
    if (most := config.generator.max_replicas) is not None:
        raise ValueError(
            f"generator.max_replicas={most}: backend='local' has one engine; leave it out or use backend='actors'"
        )


def advice(config: RunConfig) -> list[str]:
    """Warnings about settings that are allowed and seldom meant: for each the field, its value, what happens, what to
    do."""
    lines = []
    low, high = _LR["full" if config.trainer.lora is None else "lora"]
    phases = (
        ("trainer.optimizer.lr", config.trainer.optimizer.lr, config.controller.num_steps),
        ("supervised.lr", config.supervised.lr, config.supervised.num_steps),
        *(() if config.preference is None else [("preference.lr", config.preference.lr, config.preference.num_steps)]),
    )
    for where, lr, num_steps in phases:
        if num_steps and lr > high:
            lines.append(f"{where}={lr:g}: AdamW at this rate destroys a model in a few steps; 1e-6 to 1e-3 is usual")
        elif num_steps and lr < low:
            lines.append(f"{where}={lr:g}: the weights will hardly move; 1e-6 to 1e-3 is usual")
    if platform.device_type() == "cuda":
        for role, (trainer, _) in config.trainers().items():
            if trainer.shared_prefix != "off":
                where = "trainer" if role == "policy" else f"roles.{role}.trainer"
                lines.append(
                    f"{where}.shared_prefix={trainer.shared_prefix!r}: prompts are shared on a CPU only; every datum "
                    "is computed whole"
                )
    size, compared = config.algorithm.group_size, compares_siblings(config)
    if size in (2, 3) and compared:
        lines.append(f"algorithm.group_size={size}: few groups will hold unequal rewards; 8 to 64 is usual")
    if size > 256:
        lines.append(f"algorithm.group_size={size}: far beyond what is usual, 8 to 64; raise tasks_per_step instead")
    return lines


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


def _check_again(part: Any) -> None:
    """Runs __post_init__ of a task's config or of a shape, and of what is in it: an override sets one field without
    their checks."""
    if isinstance(part, dict):
        for item in part.values():
            _check_again(item)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            _check_again(getattr(part, field.name, None))
        dataclasses.replace(part)  # type: ignore[type-var]


def _tokenizer_size(directory: Path) -> int:
    """One more than the largest token id. Raises ValueError when there is no tokenizer."""
    where = f"model.assets={str(directory)!r}"
    ids = files.token_ids(directory, where)
    if ids is None:
        raise ValueError(f"{where}: has no tokenizer.json; give a directory with a tokenizer")
    return max(ids.values(), default=-1) + 1
