"""Checks of the roles beside the policy: critic, reference, teacher."""

from __future__ import annotations

from pathlib import Path

from torchtitan_rl.config.run import RewardModelConfig, RunConfig
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.model.files import assets_dir, has_weights, token_ids
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.tasks.curriculum import Curriculum

__all__ = ["check_roles"]


def check_roles(config: RunConfig, shape: DecoderShape) -> None:
    """Raises ValueError for a role that does not fit the policy, whose model has `shape`."""
    roles, dtype, trainers = config.roles, config.trainer.training.dtype, config.trainers()
    for name, role in roles.configured().items():
        if (lora := trainers[name][0].lora) is not None:
            raise ValueError(
                f"roles.{name}.trainer.lora.rank={lora.rank}: adapters are the policy's (a critic's "
                "head must train, a reference or teacher does not train); use None"
            )
        if (
            name != "reward_model"
            and role.model is not None
            and (size := resolve_shape(role.model).vocab_size) != shape.vocab_size
        ):
            raise ValueError(
                f"roles.{name}.model: has a vocabulary of {size} tokens, the policy has {shape.vocab_size}; "
                "use models with the same tokenizer"
            )
    if roles.reward_model is not None:
        _check_reward_model(roles.reward_model, config, shape)
    critic = roles.critic
    critic_dtype = trainers["critic"][0].training.dtype if critic is not None else dtype
    if critic is not None and critic.model is None and critic_dtype != dtype:
        raise ValueError(
            f"roles.critic.trainer.training.dtype={critic_dtype!r}: the policy's, whose weights "
            f"it takes over after a warm start, is {dtype!r}; use the same"
        )
    reference, every = roles.reference, roles.refresh_reference_every
    if reference is not None and (every or reference.model is None):  # the policy's weights are copied to it
        if reference.model is not None and resolve_shape(reference.model) != shape:
            raise ValueError(
                f"roles.refresh_reference_every={every}: the reference has another shape than the policy, whose "
                "weights it would take; use 0, or leave roles.reference.model unset"
            )
        if (reference_dtype := trainers["reference"][0].training.dtype) != dtype:
            raise ValueError(
                f"roles.reference.trainer.training.dtype={reference_dtype!r}: the policy's, whose "
                f"weights it takes over, is {dtype!r}; use the same"
            )
    if roles.teacher is not None and roles.teacher.model is None:
        raise ValueError("roles.teacher.model=None: a teacher is another model than the policy; name it")
    if roles.refresh_reference_every and roles.reference is None:
        raise ValueError(
            f"roles.refresh_reference_every={roles.refresh_reference_every}: there is no reference to refresh; "
            "set roles.reference or use 0"
        )
    if roles.refresh_reference_every > config.controller.num_steps:
        raise ValueError(
            f"roles.refresh_reference_every={roles.refresh_reference_every}: never falls due within "
            f"controller.num_steps={config.controller.num_steps}; lower it, or use 0 for a frozen reference"
        )
    if roles.colocation == "policy_reference" and roles.reference is None:
        raise ValueError(
            "roles.colocation='policy_reference': there is no reference; set roles.reference or use 'none'"
        )


def _check_reward_model(role: RewardModelConfig, config: RunConfig, shape: DecoderShape) -> None:
    """Raises ValueError for a classifier that is not there, or that reads other tokens than the policy's."""
    where = "roles.reward_model"
    if not role.weight and not role.task_weight:
        raise ValueError(
            f"{where}.weight=0, {where}.task_weight=0: every reward would be 0; raise one, or leave {where} out"
        )
    if isinstance(config.task, Curriculum.Config) and (role.weight or role.task_weight != 1):
        raise ValueError(
            f"{where}.weight={role.weight:g}, {where}.task_weight={role.task_weight:g}: change rewards, by which "
            "task=Curriculum counts who passes; use weight=0 and task_weight=1, or leave the curriculum out"
        )
    if role.checkpoint:
        _check_checkpoint(Path(role.checkpoint), f"{where}.checkpoint={role.checkpoint!r}")
    elif role.model is None:
        raise ValueError(
            f"{where}.model=None: names no classifier; give a directory with score.weight, "
            f"model=ModelConfig(assets=DIRECTORY), or {where}.checkpoint"
        )
    elif not (role.model.pretrained or has_weights(role.model)):
        raise ValueError(
            f"{where}.model.assets={role.model.assets!r}: has no safetensors, and a reward model does not start from "
            "random weights; give the directory of a classifier"
        )
    if role.model is None:
        return
    size = resolve_shape(role.model).vocab_size
    ours = token_ids(assets_dir(config.model), f"model.assets={config.model.assets!r}")
    theirs = token_ids(assets_dir(role.model), f"{where}.model.assets={role.model.assets!r}")
    if theirs is None and size != shape.vocab_size or theirs is not None and theirs != ours:
        difference = f"a vocabulary of {size} tokens, the policy has {shape.vocab_size}"
        if theirs is not None and ours is not None:
            other = next(text for text in ours | theirs if theirs.get(text) != ours.get(text))
            difference = f"another tokenizer than the policy: {other!r} is {theirs.get(other)}, not {ours.get(other)}"
        raise ValueError(
            f"{where}.model: has {difference}; it reads the policy's tokens, so use a classifier with the policy's "
            "tokenizer, or ask another model by its text (docs/rewards.md)"
        )
    if theirs is not None and max(theirs.values(), default=0) >= size:
        raise ValueError(
            f"{where}.model: has a vocabulary of {size} tokens, and its tokenizer {max(theirs.values()) + 1}; use the "
            "tokenizer that the model was made for"
        )


def _check_checkpoint(checkpoint: Path, where: str) -> None:
    """Raises ValueError unless a directory is a role's part of a complete checkpoint, without adapters."""
    if not (checkpoint / "model" / ".metadata").is_file():
        raise ValueError(
            f"{where}: is no checkpoint of a role; give a critic's part, such as runs/x/checkpoints/step-100/critic"
        )
    if not any((directory / "COMPLETE").is_file() for directory in (checkpoint, checkpoint.parent)):
        raise ValueError(
            f"{where}: is incomplete (no COMPLETE marker: it was cut off while being written); use another"
        )
    if (checkpoint / "lora.json").is_file():
        raise ValueError(f"{where}: holds LoRA adapters only; export the model and give roles.reward_model.model")
