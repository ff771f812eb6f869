"""The columns of what a run records besides metrics: rollouts, evaluations, draws, policy versions, attempts, events
and samples.
`docs/run_directory.md` describes them.

A record is a dict of plain data with the columns of its schema; a column may be missing. `read_rollouts`,
`read_evaluations`, `read_ledger` and `read_versions` of `record.attempts` read the tables, and leave out what
later attempts took again.
"""

from __future__ import annotations

import pyarrow as pa

__all__ = ["ENDS", "SCHEMAS"]

ENDS = ("trained", "filtered", "failed")
"""The events of `ledger` that are the end of a draw, as `rollout.draws.outcomes` gives them."""

_TEXT, _INT, _FLOAT = pa.string(), pa.int32(), pa.float64()
_BEGIN = {"step": _INT, "attempt": _INT}

TURN = pa.struct(
    {
        "prompt": _TEXT,
        "text": _TEXT,
        "reward": _FLOAT,
        "num_prompt_tokens": _INT,
        "extends": _INT,
        "seed": pa.int64(),
        "finish_reason": _TEXT,
        "tokens": pa.list_(_INT),
        "logprobs": pa.list_(_FLOAT),
        "policy_versions": pa.list_(_INT),
    }
)
SEQUENCE = pa.struct(
    {
        "tokens": pa.list_(_INT),
        "target_tokens": pa.list_(_INT),
        "loss_mask": pa.list_(pa.int8()),
        "advantages": pa.list_(_FLOAT),
        "token_weights": pa.list_(_FLOAT),
        "policy_logprobs": pa.list_(_FLOAT),
        "old_logprobs": pa.list_(_FLOAT),
        "reference_logprobs": pa.list_(_FLOAT),
        "teacher_logprobs": pa.list_(_FLOAT),
        "values": pa.list_(_FLOAT),
        "returns": pa.list_(_FLOAT),
        "turns": pa.list_(pa.list_(_INT)),
    }
)
SCHEMAS = {
    "rollouts": pa.schema(
        _BEGIN
        | {
            "phase": _TEXT,
            "group_id": _TEXT,
            "rollout_id": _TEXT,
            "draw": _TEXT,
            "role": _TEXT,
            "task_id": _TEXT,
            "prompt": _TEXT,
            "answer": _TEXT,
            "text": _TEXT,
            "reward": _FLOAT,
            "reward_parts": pa.map_(_TEXT, _FLOAT),
            "advantage": _FLOAT,
            "left_out": _TEXT,
            "masked": pa.bool_(),
            "num_tokens": pa.list_(_INT),
            "finish_reason": _TEXT,
            "end_reason": _TEXT,
            "policy_version_min": _INT,
            "policy_version_max": _INT,
            "seconds": pa.map_(_TEXT, _FLOAT),
            "turn_seconds": pa.list_(pa.list_(_FLOAT)),
            "turns": pa.list_(TURN),
            "sequences": pa.list_(SEQUENCE),
        }
    ),
    "evaluations": pa.schema(
        _BEGIN
        | {
            "name": _TEXT,
            "split": _TEXT,
            "task_index": _INT,
            "task_id": _TEXT,
            "sample": _INT,
            "prompt": _TEXT,
            "answer": _TEXT,
            "text": _TEXT,
            "reward": _FLOAT,
            "correct": pa.bool_(),
            "failed": _TEXT,
            "num_tokens": pa.list_(_INT),
            "finish_reason": _TEXT,
            "end_reason": _TEXT,
        }
    ),
    "ledger": pa.schema(
        _BEGIN | {"draw": _TEXT, "event": _TEXT, "task_id": _TEXT, "version_min": _INT, "version_max": _INT}
    ),
    "versions": pa.schema(_BEGIN | {"version": _INT, "at": _TEXT, "seconds": _FLOAT}),
    "attempts": pa.schema(
        _BEGIN | {"phase": _TEXT, "resumed_from": _TEXT, "at": _TEXT, "pid": pa.int64(), "host": _TEXT}
    ),
    "samples": pa.schema(
        _BEGIN
        | {
            "at": _TEXT,
            "who": _TEXT,
            "pid": pa.int64(),
            "rss_mib": _FLOAT,
            "in_flight_s": _FLOAT,
            "answered": pa.int64(),
        }
    ),
    "events": pa.schema(_BEGIN | {"at": _TEXT, "level": _TEXT, "kind": _TEXT, "who": _TEXT, "text": _TEXT}),
}
"""Table -> columns. Tables of text, counts and float64, so that a record read back is the record that was written."""
