"""The parts that each operation of a role needs on the device: one table for clients, placement, meshes and ranks.

A trainer's operation has three places: the client's method (`dispatch.training_client`), the row of `TRAINER_NEEDS`,
and the implementation (a method of `TrainerRank`, `WeightExchange`, `RoleCopies`, `TrainerFiles` or
`AdapterSlots`). Meshes and the
actor forward an operation by name.
"""

from __future__ import annotations

__all__ = ["TRAINER_PARTS", "GENERATOR_PARTS", "TRAINED_ROLES", "TRAINER_NEEDS", "NEEDS", "ENTRIES", "parts_of"]

TRAINER_PARTS = ("model", "gradients", "optimizer")
GENERATOR_PARTS = ("weights", "kv_cache")  # in the order in which parts wake
TRAINED_ROLES = ("policy", "critic")

TRAINER_NEEDS: dict[str, tuple[str, ...]] = {
    "forward": ("model",),
    "forward_backward": ("model", "gradients"),
    "optim_step": ("model", "optimizer", "gradients"),
    "reset_optimizer": ("optimizer", "gradients"),
    "push_weights": ("model",),
    "discard_weights": (),
    "push_copy": ("model",),
    "pull_copy": ("model",),
    "push_head": ("model",),
    "pull_head": ("model",),
    "init_model": ("model", "optimizer"),
    "stage_checkpoint": ("model", "optimizer"),
    "checkpoint_written": (),
    "remove_checkpoint": (),
    "load_checkpoint": ("model", "optimizer", "gradients"),
    "load_weights": ("model",),
    "save_hf_model": ("model",),
    "save_adapter": ("model",),
    "parameters": ("model",),
    "gradients": ("model", "gradients"),
    "begin_model": ("optimizer", "gradients"),
    "add_adapter": TRAINER_PARTS,
    "use_adapter": TRAINER_PARTS,
    "drop_adapter": (),
    "freeze_untrained": ("gradients",),
}
"""Parts by operation, in the order of error messages. An operation that needs gradients needs a role that trains."""
NEEDS = TRAINER_NEEDS | {"pull": ("weights",), "sample": GENERATOR_PARTS}

ENTRIES: dict[str, tuple[str, tuple[str, ...]]] = {name: ("run", (name,)) for name in TRAINER_NEEDS}
"""The actor's endpoint for an operation of a trainer, and the endpoint's first arguments. Any other call has the
endpoint of its own name."""


def parts_of(role: str) -> tuple[str, ...]:
    """The parts that a role holds on the device."""
    if role == "generator":
        return GENERATOR_PARTS
    return TRAINER_PARTS if role in TRAINED_ROLES else ("model",)
