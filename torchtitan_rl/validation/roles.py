"""Checks of the roles beside the policy: critic, reference, teacher."""

from __future__ import annotations

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.model.shape import resolve_shape

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
        if role.model is not None and (size := resolve_shape(role.model).vocab_size) != shape.vocab_size:
            raise ValueError(
                f"roles.{name}.model: has a vocabulary of {size} tokens, the policy has {shape.vocab_size}; "
                "use models with the same tokenizer"
            )
    critic = roles.critic
    of_critic = trainers["critic"][0].training.dtype if critic is not None else dtype
    if critic is not None and critic.model is None and of_critic != dtype:
        raise ValueError(
            f"roles.critic.trainer.training.dtype={of_critic!r}: the policy's, whose weights "
            f"it takes over after a warm start, is {dtype!r}; use the same"
        )
    reference, every = roles.reference, roles.refresh_reference_every
    if reference is not None and (every or reference.model is None):  # the policy's weights are copied to it
        if reference.model is not None and resolve_shape(reference.model) != shape:
            raise ValueError(
                f"roles.refresh_reference_every={every}: the reference has another shape than the policy, whose "
                "weights it would take; use 0, or leave roles.reference.model unset"
            )
        if (of_reference := trainers["reference"][0].training.dtype) != dtype:
            raise ValueError(
                f"roles.reference.trainer.training.dtype={of_reference!r}: the policy's, whose "
                f"weights it takes over, is {dtype!r}; use the same"
            )
    if roles.teacher is not None and roles.teacher.model is None:
        raise ValueError("roles.teacher.model=None: a teacher is another model than the policy; name it")
    if roles.refresh_reference_every and roles.reference is None:
        raise ValueError(
            f"roles.refresh_reference_every={roles.refresh_reference_every}: there is no reference to refresh; "
            "set roles.reference or use 0"
        )
    if roles.colocation == "policy_reference" and roles.reference is None:
        raise ValueError(
            "roles.colocation='policy_reference': there is no reference; set roles.reference or use 'none'"
        )
