"""Tinker's losses, by name, as this package's: which tensors of a datum each reads, and its configuration.

The definitions are those of Tinker's public documentation. Every loss is a sum over tokens; bounds on a ratio are given
as the bounds themselves (0.8 and 1.2), which here are distances from 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from torchtitan_rl.algorithm import losses
from torchtitan_rl.serve.tinker.faults import user
from torchtitan_rl.types import Datum, LossFunction, LossInputs

if TYPE_CHECKING:  # trainers import this module for a loss, and have no use for the SDK
    from torchtitan_rl.serve.tinker.wire import Sequence

__all__ = ["LOSSES", "Loss", "datums", "dro", "loss_of", "narrowed", "value", "widened"]


@dataclass(kw_only=True, slots=True, frozen=True)
class Loss:
    """How a loss of the protocol is computed here."""

    function: LossFunction
    needed: tuple[str, ...] = ("target_tokens", "logprobs", "advantages")
    """Names of the datum's tensors, all (N,)."""
    optional: tuple[str, ...] = ()
    config: dict[str, float] = field(default_factory=dict)
    """Settings of `loss_fn_config` with their defaults."""
    arguments: Callable[[dict[str, float]], dict[str, float]] = dict
    """From the settings to the function's keyword arguments."""


def _bounds(config: dict[str, float]) -> dict[str, float]:
    return {"clip_low": 1 - config["clip_low_threshold"], "clip_high": config["clip_high_threshold"] - 1}


def dro(inputs: LossInputs, *, beta: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`losses.dro` with the penalty of every token, sampled or not, as the protocol's sum has it: where the advantage
    is 0 the penalty is not."""
    every_token = inputs.tensors | {"loss_mask": torch.ones_like(inputs.loss_mask)}
    return losses.dro(replace(inputs, tensors=every_token), beta=beta)


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(function=losses.cross_entropy, needed=("target_tokens",), optional=("weights",)),
    "importance_sampling": Loss(function=losses.importance_sampling),
    "ppo": Loss(function=losses.ppo, config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, arguments=_bounds),
    "cispo": Loss(
        function=losses.cispo, config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}, arguments=_bounds
    ),
    "gspo": Loss(
        function=losses.gspo,
        config={"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
        arguments=_bounds,
    ),
    "dro": Loss(function=dro, config={"beta": 0.05}),
}


def loss_of(name: str, config: dict[str, float | str]) -> tuple[Loss, dict[str, float]]:
    """A loss and its keyword arguments. Raises Fault for a name or a setting that is not known."""
    if (loss := LOSSES.get(name)) is None:
        near = "create_custom_loss runs in the client" if name == "custom" else f"use {', '.join(LOSSES)}"
        raise user(f"loss_fn={name[:80]!r}: is not offered by this server; {near}")
    settings = dict(loss.config)
    for key, number in config.items():
        if key not in settings or isinstance(number, str) or not abs(number) < float("inf"):
            known = ", ".join(settings) or "no settings"
            raise user(f"loss_fn_config[{key[:80]!r}]={str(number)[:40]}: {name} has {known}, all numbers; mend it")
        settings[key] = number
    arguments = loss.arguments(settings)
    try:
        losses.check_clip(arguments.get("clip_low", 0.0), arguments.get("clip_high", 0.0))
    except ValueError:
        raise user(
            f"loss_fn_config={settings}: the bounds must enclose 1, as in clip_low_threshold=0.8, "
            "clip_high_threshold=1.2"
        ) from None
    if not arguments.get("beta", 1.0) > 0:
        raise user(f"loss_fn_config['beta']={arguments['beta']:g}: must be positive; use 0.05")
    return loss, arguments


def datums(data: list[Sequence], name: str, loss: Loss, *, vocab_size: int) -> list[Datum]:
    """Datums for the trainer. Raises Fault for tensors that are missing, unknown, of another length or not finite, and
    for ids outside of the vocabulary."""
    if not data:
        raise user("data=[]: has no datum; send at least one")
    return [_datum(sequence, f"data[{i}]", name, loss, vocab_size) for i, sequence in enumerate(data)]


def _datum(sequence: Sequence, path: str, name: str, loss: Loss, vocab_size: int) -> Datum:
    inputs = sequence.inputs
    if missing := [key for key in loss.needed if key not in inputs]:
        raise user(f"{path}.loss_fn_inputs: lacks {', '.join(missing)}, which {name} reads; add it")
    if unknown := [key for key in inputs if key not in loss.needed + loss.optional]:
        raise user(f"{path}.loss_fn_inputs[{unknown[0][:80]!r}]: is not read by {name}; leave it out")
    tokens, targets = sequence.tokens, inputs["target_tokens"]
    for key, ids in (("model_input", tokens), ("loss_fn_inputs['target_tokens']", targets)):
        if ids.is_floating_point() or (ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size):
            raise user(f"{path}.{key}: has an id that is not in the vocabulary of {vocab_size}; check the tokenizer")
    for key, tensor in inputs.items():
        wide = key == "target_tokens" or key == "weights"
        if len(tensor) != len(tokens) or not len(tokens) or not tensor.numel() or (tensor.dim() > 1 and not wide):
            raise user(
                f"{path}.loss_fn_inputs[{key!r}]: has shape {tuple(tensor.shape)} and the input {len(tokens)} tokens; "
                "give one number for each token"
            )
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise user(f"{path}.loss_fn_inputs[{key!r}]: has a NaN or an infinity; send finite numbers")
    if name != "cross_entropy":
        if targets.dim() > 1:
            raise user(f"{path}.loss_fn_inputs['target_tokens']: {name} takes one target a token; use cross_entropy")
        sampling_T, advantages_T = inputs["logprobs"].float(), inputs["advantages"].float()
        columns = {"token_weights": torch.ones(len(tokens)), "loss_mask": _sampled(sampling_T, advantages_T)}
        columns |= {"sampling_logprobs": sampling_T, "advantages": advantages_T}
        return Datum(tokens=tokens, target_tokens=targets, loss_inputs=columns)
    weights = inputs.get("weights", torch.ones(targets.shape))
    if weights.shape != targets.shape:
        raise user(
            f"{path}.loss_fn_inputs['weights']: has shape {tuple(weights.shape)} and target_tokens "
            f"{tuple(targets.shape)}; give every target a weight"
        )
    return Datum(tokens=tokens, target_tokens=targets, loss_inputs={"token_weights": weights.float()})


def _sampled(logprobs_T: torch.Tensor, advantages_T: torch.Tensor) -> torch.Tensor:
    """1 where a target was sampled, (T,). The protocol has no column for it; clients send zeros for a prompt's tokens.

    A target that was sampled with probability 1 and has advantage 0 looks the same and counts as not sampled. No sum
    of terms with the advantage as a factor changes by that. In the mean of `gspo` such a target mostly has a log-ratio
    near 0, and the mean matters only where other targets of the datum have an advantage.
    """
    return ((logprobs_T != 0) | (advantages_T != 0)).float()


def widened(data: list[Datum]) -> list[Datum]:
    """Datums with as many targets a token as the widest has: the trainer packs datums of one width. Added targets
    weigh nothing. `narrowed` undoes it for outputs."""
    widths = {datum.target_tokens.shape[1:] for datum in data}
    if len(widths) == 1:
        return data
    widest = max(width[0] for width in widths if width)
    return [
        Datum(
            tokens=datum.tokens,
            target_tokens=_wide(datum.target_tokens, widest),
            loss_inputs={"token_weights": _wide(datum.loss_inputs["token_weights"], widest)},
        )
        for datum in data
    ]


def _wide(rows: torch.Tensor, width: int) -> torch.Tensor:
    rows_TK = rows.reshape(len(rows), -1)
    return torch.cat([rows_TK, rows_TK.new_zeros(len(rows), width - rows_TK.shape[1])], dim=1)


def narrowed(rows: list[torch.Tensor], data: list[Datum]) -> list[torch.Tensor]:
    """Outputs of widened datums in the shapes of their own targets."""
    shapes = [datum.target_tokens.shape for datum in data]
    return [
        row if row.shape == shape else row[:, : 1 if len(shape) == 1 else shape[1]].reshape(shape)
        for row, shape in zip(rows, shapes)
    ]


def value(loss: Loss, arguments: dict[str, float], data: list[Datum], logprobs: list[torch.Tensor]) -> float:
    """The loss of log-probabilities that a forward pass gave, one tensor a datum."""
    lengths = torch.tensor([len(datum) for datum in data])
    names = data[0].loss_inputs
    inputs = LossInputs(
        policy_logprobs=torch.cat(logprobs),
        datum=torch.repeat_interleave(lengths),
        num_datums=len(data),
        tensors={name: torch.cat([datum.loss_inputs[name] for datum in data]) for name in names},
    )
    return float(loss.function(inputs, **arguments)[0])
