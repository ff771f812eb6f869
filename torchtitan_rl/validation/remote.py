"""Checks for settings that a remote service cannot serve through Tinker's protocol."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.types.completions import changes

__all__ = ["adapted_parts", "check_remote", "without_export"]

_PARTS = {"attention": {"qkv_proj", "o_proj"}, "mlp": {"gate_proj", "up_proj", "down_proj"}}
_NO_SETTING = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def check_remote(config: RunConfig, *, generators_only: bool = False) -> None:
    """Raises ValueError for the first setting that a remote service cannot serve."""
    for reason in _refusals(config, generators_only):
        raise ValueError(f"{reason}, or use backend='actors'")
    if config.trainer.lora is not None:
        adapted_parts(config.trainer.lora)


def _refusals(config: RunConfig, generators_only: bool) -> Iterator[str]:
    algorithm, trainer = config.algorithm, config.trainer
    if generators_only:
        yield "backend='tinker': a remote service loads no directory of weights; serve them there"
    for name in config.roles.configured():
        yield f"roles.{name}: backend='tinker' trains the policy alone; leave roles.{name} out"
    if config.roles.colocation != "none":
        yield f"roles.colocation={config.roles.colocation!r}: backend='tinker' has no devices; use 'none'"
    if algorithm.temperature != 1.0:
        yield (
            f"algorithm.temperature={algorithm.temperature}: backend='tinker' computes log-probabilities at "
            "temperature 1 for training; use 1"
        )
    if algorithm.entropy_coef:
        yield f"algorithm.entropy_coef={algorithm.entropy_coef}: backend='tinker' answers no entropy; use 0"
    if algorithm.entropy_control is not None:
        yield "algorithm.entropy_control: backend='tinker' answers no entropy to follow; leave it out"
    if algorithm.minibatch_reads_entropy:
        yield "algorithm.minibatch_fn: backend='tinker' answers no entropy, which it reads; use another"
    if algorithm.expert_routing != "own":
        yield (
            f"algorithm.expert_routing={algorithm.expert_routing!r}: Tinker's protocol carries no experts of tokens, "
            "and backend='tinker' trains through it; use 'own'"
        )
    if algorithm.distill is not None:
        yield "algorithm.distill: backend='tinker' has no teacher; leave it out"
    if algorithm.asks_teacher:
        yield "algorithm.workflow: self-distillation keeps a snapshot, which backend='tinker' cannot save; use another"
    if config.sampling.stop:
        yield (
            f"sampling.stop={config.sampling.stop}: in Tinker's protocol texts do not end a completion besides "
            "tokens; use sampling.stop_token_ids"
        )
    altered = {"controller.eval_sampling": config.controller.eval_sampling}
    altered |= {f"controller.eval_sets.{name}.sampling": s.sampling for name, s in config.controller.eval_sets.items()}
    for where, settings in altered.items():
        for name, value in changes(settings).items() if settings is not None else ():
            if name in _NO_SETTING:
                yield f"{where}.{name}={value}: backend='tinker' has no such setting; leave it out"
    if slots := config.generator.max_adapters:
        yield f"generator.max_adapters={slots}: backend='tinker' has no engines here; use 0"
    for name in ("converters", "post_optimizer_build_fn"):
        if getattr(trainer, name):
            yield f"trainer.{name}: backend='tinker' builds no model here; leave it out"
    if config.model.float32_head:
        yield "model.float32_head=True: backend='tinker' computes logits as its service does; use False"
    if trainer.shared_prefix != "off":
        yield (
            f"trainer.shared_prefix={trainer.shared_prefix!r}: backend='tinker' packs no microbatches here; use 'off'"
        )
    if config.record.explain_mismatch_every:
        yield (
            f"record.explain_mismatch_every={config.record.explain_mismatch_every}: backend='tinker' has no generators "
            "to look into; use 0"
        )
    if config.controller.checkpoint_export == "all":
        yield "controller.checkpoint_export='all': backend='tinker' keeps weights to itself; use 'none'"


def adapted_parts(lora: LoRAConfig) -> tuple[str, ...]:
    """Which of "attention" and "mlp" have adapters. Raises ValueError for a part of either."""
    targets = set(lora.target_modules)
    parts = tuple(part for part, modules in _PARTS.items() if modules & targets)
    for part in parts:
        if missing := sorted(_PARTS[part] - targets):
            raise ValueError(
                f"trainer.lora.target_modules={lora.target_modules}: backend='tinker' adapts {part} as a whole; add "
                f"{', '.join(missing)}, or leave out {', '.join(sorted(_PARTS[part] & targets))}"
            )
    return parts


def without_export(config: RunConfig) -> RunConfig:
    """The config with `controller.checkpoint_export="none"`: "last", the default, is no wish."""
    controller = dataclasses.replace(config.controller, checkpoint_export="none")
    return dataclasses.replace(config, controller=controller)
