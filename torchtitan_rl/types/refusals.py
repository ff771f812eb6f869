"""What datums, prompts and answers of ranks are refused for, in words."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

__all__ = ["refuse_datum", "refuse_lengths", "refuse_prompt", "refuse_rows", "refuse_token_ids", "refuse_unlike"]


def refuse_datum(datum: Any) -> NoReturn:
    """Raises ValueError for the first fault of a `Datum`."""
    length = len(datum.tokens)
    if length == 0:
        raise ValueError("datum.tokens=[]: a datum needs at least one token; drop it before training")
    for name, tensor in {"target_tokens": datum.target_tokens, **datum.loss_inputs}.items():
        if len(tensor) != length:
            raise ValueError(f"datum.{name}: has {len(tensor)} entries where tokens has {length}; give one per token")
        allowed = ["(T,)"] if name == "loss_mask" else ["(T,)", "(T, n)"]
        if tensor.dim() > len(allowed) or 0 in tensor.shape:
            raise ValueError(f"datum.{name}: has shape {tuple(tensor.shape)}; give {' or '.join(allowed)}")
    weights = datum.loss_inputs.get("token_weights", datum.target_tokens)
    if weights.dim() == 2 and weights.shape != datum.target_tokens.shape:
        raise ValueError(
            f"datum.token_weights: has shape {tuple(weights.shape)} where target_tokens has "
            f"{tuple(datum.target_tokens.shape)}; give one per token, or one per target"
        )
    for name, tensor in datum.loss_inputs.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(
                f"datum.{name}={tensor[~torch.isfinite(tensor)][0].item()}: is not finite; mask such tokens "
                "out and give them a finite value"
            )
    raise ValueError(f"datum.tokens: has shape {tuple(datum.tokens.shape)}; give (T,)")


def refuse_prompt(num_tokens: int, max_tokens: int, max_model_len: int) -> NoReturn:
    """Raises ValueError for a prompt that is empty, or too long for its completion to fit."""
    if num_tokens + max_tokens > max_model_len:
        raise ValueError(
            f"prompt of {num_tokens} tokens + max_tokens={max_tokens}: exceed "
            f"generator.max_model_len={max_model_len}; shorten one or raise the other"
        )
    raise ValueError("prompt=[]: has no tokens; give at least one")


def refuse_lengths(operation: str, lengths: list[int], limit: int) -> NoReturn:
    """Raises ValueError for data of these lengths: for the first datum beyond the trainer's context, or for no data."""
    for index, length in enumerate(lengths):
        if length > limit:
            raise ValueError(
                f"{operation}.data[{index}]: {length} tokens, the trainer's context is "
                f"trainer.training.seq_len={limit}; raise it or shorten the datum"
            )
    raise ValueError(f"{operation}.data=[]: no datums; skip the call when nothing is left to train on")


def refuse_rows(who: str, rank: int, given: int, expected: int) -> NoReturn:
    """Raises RuntimeError for a rank that answers with another number of rows than its shard has."""
    raise RuntimeError(f"{who}: data-parallel rank {rank} answered with {given} rows for {expected}")


def refuse_unlike(where: str, shapes: dict[str, torch.Size], first: dict[str, torch.Size]) -> NoReturn:
    """Raises ValueError for a datum of other loss inputs, or of another shape per token, than the call's `first`."""
    if shapes.keys() != first.keys():
        has, wanted = (sorted(given.keys() - {"target_tokens"}) for given in (shapes, first))
        raise ValueError(
            f"{where}.loss_inputs={has}: data[0] of the call has {wanted}; give every datum of one call the same loss "
            "inputs"
        )
    name = next(name for name in shapes if shapes[name] != first[name])
    raise ValueError(
        f"{where}.{name}: is {_shape(shapes[name])} where that of data[0] is {_shape(first[name])}; "
        "give every datum of one call as many per token"
    )


def refuse_token_ids(name: str) -> NoReturn:
    """Raises ValueError for a loss input of token ids, which stand in int64."""
    raise ValueError(
        f"loss input {name!r}: holds token ids, which no loss reads; make targets of them with "
        "algorithm.soft_targets.appended(data)"
    )


def _shape(row: torch.Size) -> str:
    return f"(T, {row[0]})" if row else "(T,)"
