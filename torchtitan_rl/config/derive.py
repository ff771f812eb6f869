"""Fields that a config leaves open: lengths from the sampling limits, the trainer of a role from the policy's."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.families import shape_of_directory

__all__ = ["longest_rollout", "open_fields", "settled"]

_FREE_PROMPTS = 2048
"""Fewest tokens that are derived for a workflow of the user's own, whose later prompts no sampling limit bounds; fewer
where a model has fewer positions."""


def longest_rollout(config: RunConfig) -> tuple[int, str]:
    """(the most tokens that a rollout may have, where the number comes from)."""
    sampling = config.sampling
    lengths = [
        (sampling.max_prompt_tokens + sampling.max_tokens, "sampling.max_prompt_tokens + max_tokens"),
        (sampling.max_rollout_tokens, "sampling.max_rollout_tokens"),
    ]
    if config.algorithm.workflow is not None and not config.algorithm.asks_teacher:
        lengths.append((_FREE_PROMPTS, "a workflow's own prompts"))
        positions = min(_num_positions(model) or _FREE_PROMPTS for _, model in config.trainers().values())
        if positions < _FREE_PROMPTS:
            lengths[-1] = (positions, "the model's positions, for a workflow's own prompts")
    return max(lengths, key=lambda length: length[0])


def _context(config: RunConfig) -> tuple[int, str]:
    """(tokens that a generator has room for where the config leaves it open, where the number comes from).

    A snapshot that scores in self-distillation reads a longer prompt than the policy: room for two rollouts then, as
    far as the model has positions."""
    longest, source = longest_rollout(config)
    if not config.algorithm.asks_teacher:
        return longest, source
    positions = _num_positions(config.model)
    if positions is None or 2 * longest <= positions:
        return 2 * longest, f"twice {source}"
    return max(longest, positions), f"the model's positions, fewer than twice {source}"


def _num_positions(model: ModelConfig) -> int | None:
    """Positions of a model, as its shape or its directory says; None: neither does. Torchtitan's flavours have 4,096 or
    more, and a mistake is for validation to report."""
    if model.shape is not None:
        return model.shape.max_seq_len
    directory = Path(model.assets).expanduser()
    if model.flavor is None and (directory / "config.json").is_file():
        with contextlib.suppress(ValueError):
            return shape_of_directory(directory, model.family).max_seq_len
    return None


def open_fields(config: RunConfig) -> dict[str, str]:
    """Dotted path -> where its value comes from, for every field that the config leaves open."""
    _, source = longest_rollout(config)
    sources = {}
    if not config.trainer.training.seq_len:
        sources["trainer.training.seq_len"] = f"from {source}"
    for name, role in config.roles.configured().items():
        if role.trainer is None:
            sources[f"roles.{name}.trainer"] = "from trainer"
        elif not role.trainer.training.seq_len:
            sources[f"roles.{name}.trainer.training.seq_len"] = f"from {source}"
    if not config.generator.max_model_len:
        sources["generator.max_model_len"] = f"from {_context(config)[1]}"
    if config.generator.num_spares is None:
        sources["generator.num_spares"] = "from generator.num_replicas"
    if config.generator.record_routing is None:
        sources["generator.record_routing"] = "from algorithm.expert_routing"
    if config.generator.max_adapters and config.generator.adapters is None and config.trainer.lora is not None:
        sources["generator.adapters"] = "from trainer.lora"
    return sources


def settled(config: RunConfig) -> RunConfig:
    """The config with every open field filled in: a copy that shares the sections without one with `config`, or
    `config` itself where no field is open."""
    if not open_fields(config):
        return config
    longest, _ = longest_rollout(config)
    trainers = {name: _with_length(trainer, longest) for name, (trainer, _) in config.trainers().items()}
    roles: dict[str, Any] = {
        name: dataclasses.replace(role, trainer=trainers[name]) for name, role in config.roles.configured().items()
    }
    context = config.generator.max_model_len or _context(config)[0]
    spares = config.generator.num_spares
    if spares is None:
        spares = int(config.generator.num_replicas > 1 and config.generator.max_replica_restarts > 0)
    records = config.generator.record_routing
    if records is None:
        records = config.algorithm.expert_routing != "own"
    adapters = config.generator.adapters
    if adapters is None and config.generator.max_adapters:
        adapters = config.trainer.lora
    return dataclasses.replace(
        config,
        trainer=trainers["policy"],
        roles=dataclasses.replace(config.roles, **roles),
        generator=dataclasses.replace(
            config.generator, max_model_len=context, num_spares=spares, record_routing=records, adapters=adapters
        ),
    )


def _with_length(trainer: TrainerConfig, longest: int) -> TrainerConfig:
    if trainer.training.seq_len:
        return trainer
    return dataclasses.replace(trainer, training=dataclasses.replace(trainer.training, seq_len=longest))
