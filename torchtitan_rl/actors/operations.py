"""What each operation of a role needs on the device: one table, read by clients, placement, meshes and ranks.

An operation of a trainer is written in three places: in the client that offers it (`dispatch.training_client`), in
`TRAINER_NEEDS`, and where it is done (`actors.trainer_rank` and what a rank is composed of). Meshes and the actor pass
it on by its name.
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
GENERATOR_PARTS = ("weights", "kv_cache")  # in the order they wake
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
    "save_checkpoint": ("model", "optimizer"),
    "load_checkpoint": ("model", "optimizer", "gradients"),
    "load_weights": ("model",),
    "save_hf_model": ("model",),
    "save_adapter": ("model",),
    "parameters": ("model",),
    "gradients": ("model", "gradients"),
}
"""Parts by operation, in the order in which an error names them. What needs gradients needs a role that trains."""
NEEDS = TRAINER_NEEDS | {"pull": ("weights",), "sample": GENERATOR_PARTS}


def parts_of(role: str) -> tuple[str, ...]:
    """What a role holds on its device."""
    if role == "generator":
        return GENERATOR_PARTS
    return TRAINER_PARTS if role in TRAINED_ROLES else ("model",)


def require(operation: str, role: str, parts: Mapping[str, Any]) -> None:
    """Raises RuntimeError unless a trainer's parts are on the device (`residency.Part`, by name), ValueError if the
    role does not train and the operation does."""
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
    """How a worker is called: a trainer's operations through its one endpoint `run`, anything else by its own name.
    Returns the endpoint and the arguments that come first."""
    return ("run", (name,)) if name in TRAINER_NEEDS else (name, ())
