"""The parts that each operation of a role needs on the device: one table for clients, placement, meshes and ranks.

A trainer's operation has three places: the client's method (`dispatch.training_client`), the row of `TRAINER_NEEDS`,
and the implementation (a method of `TrainerRank`, `WeightExchange` or `TrainerFiles`). Meshes and the actor forward an
operation by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "TRAINER_PARTS",
    "GENERATOR_PARTS",
    "TRAINED_ROLES",
    "TRAINER_NEEDS",
    "NEEDS",
    "parts_of",
    "require",
    "entry",
]

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
}
"""Parts by operation, in the order of error messages. An operation that needs gradients needs a role that trains."""
NEEDS = TRAINER_NEEDS | {"pull": ("weights",), "sample": GENERATOR_PARTS}


def parts_of(role: str) -> tuple[str, ...]:
    """The parts that a role holds on the device."""
    if role == "generator":
        return GENERATOR_PARTS
    return TRAINER_PARTS if role in TRAINED_ROLES else ("model",)


def require(operation: str, role: str, parts: Mapping[str, Any]) -> None:
    """Raises RuntimeError unless the device holds the operation's parts (`parts`: a `residency.Part` by name), and
    ValueError for an operation on gradients of a role that does not train."""
    needed = TRAINER_NEEDS[operation]
    if "gradients" in needed and role not in TRAINED_ROLES:
        raise ValueError(f"role={role!r}: is only scored; {operation} needs one of {', '.join(TRAINED_ROLES)}")
    missing = [name for name in needed if not parts[name].on_device]
    if missing:
        raise RuntimeError(
            f"{role}.{operation}: {' and '.join(missing)} offloaded; call it through a TrainingClient, "
            "which brings back what an operation needs"
        )


def entry(name: str) -> tuple[str, tuple[str, ...]]:
    """The actor's endpoint for an operation, and the endpoint's first arguments: a trainer's operations go through the
    endpoint `run`, other calls through the endpoint `name`."""
    return ("run", (name,)) if name in TRAINER_NEEDS else (name, ())
