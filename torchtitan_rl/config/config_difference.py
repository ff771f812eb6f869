"""What has changed between the config of a run's checkpoint and the config that is to resume it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from torchtitan_rl.config.resolve import is_function

__all__ = ["LABELS", "changes_draws", "changes_future_only", "changes_rollouts", "differences", "is_harmless", "leaves"]

LABELS = ("name", "output_dir")
"""Fields that say nothing about what is trained."""
_HARMLESS = (
    *LABELS,
    "controller.",
    "record.",
    "weight_sync.",
    "roles.colocation",
    # Layout and speed: the state of a checkpoint fits every layout.
    *(
        f"{trainer}.{part}"
        for trainer in (
            "trainer",
            *(f"roles.{role}.trainer" for role in ("critic", "reference", "teacher", "reward_model")),
        )
        for part in (
            *("parallelism.", "num_hosts", "num_threads", "nice", "max_tokens_per_microbatch", "logprob_chunk_mib"),
            *("activation_checkpoint", "shared_prefix", "logprob_kernels", "compile.", "comm."),
            *(
                "optimizer.lr",
                "optimizer.betas",
                "optimizer.eps",
                "optimizer.weight_decay",
                "optimizer.implementation",
            ),  # read at every step
            "training.max_norm",
            "training.seq_len",
        )
    ),
    *(
        f"generator.{field}"
        for field in (
            *(
                "num_replicas",
                "max_replicas",
                "tensor_parallel_degree",
                "max_model_len",
                "max_num_seqs",
                "kv_cache_gib",
            ),
            *("max_num_batched_tokens", "num_threads", "enforce_eager", "compile", "model_runner", "verify_loaded"),
            *("on_update", "record_routing", "async_scheduling"),
            *("max_replica_restarts", "num_spares", "restart_window_s", "probe_every_s", "hang_timeout_s"),
        )
    ),
    "algorithm.schedule.",
)
"""Fields that a resumed run may have otherwise. Every other field decides what the checkpoint's state means, or which
data the run sees."""


_FUTURE = (*_HARMLESS, *("algorithm.", "sampling.", "generator.", "model.float32_head", "task.reward", "task.reward."))
"""Fields that decide how a run goes on and neither what it drew before nor what its checkpoints hold."""
_BATCHES = ("algorithm.max_policy_lag", "algorithm.batch_order", "algorithm.tasks_per_step")
"""Fields that say which draws make a batch. A checkpoint's counts are of batches that were made so."""
_DRAWS = ("seed", "task", "task.")
"""Fields that say which tasks a run draws, and with which random numbers."""
_ROLLOUTS = (
    *("task", "task.", "sampling.", "algorithm.workflow", "algorithm.workflow."),
    *("algorithm.group_size", "algorithm.temperature", "algorithm.greedy_baseline"),
)
"""Fields that say how a draw is played and judged."""


def is_harmless(path: str) -> bool:
    """Whether a run may be resumed with another value of a field."""
    return _is_one_of(path, _HARMLESS)


def changes_future_only(path: str) -> bool:
    """Whether a fork may have another value of a field and still share every draw with its parent."""
    return _is_one_of(path, _FUTURE) and not _is_one_of(path, _BATCHES)


def changes_draws(path: str) -> bool:
    """Whether another value of a field means other tasks or other random numbers."""
    return _is_one_of(path, _DRAWS) and not changes_future_only(path)


def changes_rollouts(path: str) -> bool:
    """Whether another value of a field means other rollouts of the same draw, or other rewards for them."""
    return _is_one_of(path, _ROLLOUTS)


def _is_one_of(path: str, entries: tuple[str, ...]) -> bool:
    return any(path == entry or entry.endswith(".") and path.startswith(entry) for entry in entries)


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted path -> (value before, value now) of every field that differs between two `config.resolve.resolved`; None
    stands for a field that one of them lacks. Fields that did not exist yet when `before` was written are left out. A
    key that a dictionary of arguments had not is a difference; a section that was None is one of each of its fields."""
    now = json.loads(json.dumps(now))  # tuples become lists, as in files
    left, right = dict(leaves(before)), dict(leaves(now))
    paths = [*left, *_added(before, now)]
    return {path: (left.get(path), right.get(path)) for path in paths if left.get(path) != right.get(path)}


def _added(before: dict[str, Any], now: dict[str, Any], path: str = "") -> Iterator[str]:
    """The fields of `now` in sections and under keys that `before` lacks. A field that a section of `before` lacks is
    of a newer version, and not among them."""
    has_fixed_fields = "class" in before or is_function(before)
    for name, value in now.items():
        place = f"{path}.{name}" if path else name
        earlier = before.get(name)
        if isinstance(earlier, dict) and isinstance(value, dict):
            yield from _added(earlier, value, place)
        elif name in before or not has_fixed_fields:
            yield from (leaf for leaf, _ in leaves(value, place))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every field of a resolved config."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from leaves(item, f"{path}.{name}" if path else name)
    else:
        yield path, value
