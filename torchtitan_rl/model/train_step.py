"""Forward, backward and optimizer step as functions of a model, without actors."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.distributed.utils import clip_grad_norm_

from torchtitan_rl.algorithm.losses import sampled_metrics
from torchtitan_rl.model import routing_replay
from torchtitan_rl.model.attention import PackedDocuments, PackedSDPA, varlen_metadata
from torchtitan_rl.model.shared_prefix import SharedPrefix
from torchtitan_rl.record.tracing import span
from torchtitan_rl.types import LossFunction, LossInputs, Microbatch, OptimParams, RankOutput, add_sum

__all__ = ["head_outputs", "accumulate_gradients", "add_rows", "clip_and_step"]


def head_outputs(
    model, microbatch: Microbatch, device: torch.device, *, temperature: float, multiple_of: int = 1, **extra
) -> dict[str, torch.Tensor]:
    """The head's outputs for a packed microbatch of T tokens, by name, each (T, ...) in the microbatch's order:
    `policy_logprobs` of the targets and `entropy`, or a critic's `predicted_values`. `extra` are further arguments of
    `LogprobHead.ask`.

    One extra document, which the outputs leave out, pads T to a multiple of `multiple_of` (sequence parallelism). Where
    siblings share their prompt, the prompt is computed once. Raises RuntimeError for siblings where attention is
    torchtitan's kernel of variable lengths, which has no such layout here."""
    lengths, shared = microbatch.lengths, microbatch.shared
    tokens_T, targets = microbatch.tokens_T, microbatch.target_tokens_T
    prefix = None
    if shared is not None:
        prefix = SharedPrefix.build(lengths, shared)
        lengths, tokens_T, targets = prefix.lengths, tokens_T[prefix.computed_U], targets[prefix.computed_U]
        if "teacher_hidden_TD" in extra:
            extra |= {"teacher_hidden_TD": extra["teacher_hidden_TD"][prefix.computed_U.to(device, non_blocking=True)]}
    num_tokens = len(tokens_T)
    padding = -num_tokens % multiple_of
    if padding:
        lengths, shared = [*lengths, padding], None if shared is None else [*shared, 0]
    tokens_T = F.pad(tokens_T, (0, padding)).to(device, non_blocking=True)
    positions_T = _positions(lengths, shared or [0] * len(lengths)).to(device, non_blocking=True)
    masks = _attention_masks(model, lengths, device, shared)
    targets = F.pad(targets, (0, 0) * (targets.dim() - 1) + (0, padding)).to(device, non_blocking=True)
    # torchtitan's forward takes tokens, positions and masks: what the head is to compute is left with the head before.
    (model.lm_head.ask if extra else model.lm_head.target)(targets, temperature, **extra)
    routing_replay.expect(model, microbatch.routing, padding=padding, device=device)
    outputs = model(tokens_T[None], positions=positions_T[None], attention_masks=masks)
    rows = {name: rows_1T[0, :num_tokens] for name, rows_1T in outputs.items()}
    if prefix is None:
        return rows
    row_T = prefix.row_T.to(device, non_blocking=True)
    return {name: computed.index_select(0, row_T) for name, computed in rows.items()}


def _positions(lengths: list[int], firsts: list[int]) -> torch.Tensor:
    """The position of each packed token in its sequence, (T,). A document that shares its first tokens with an earlier
    one begins at `firsts[i]`."""
    return torch.cat([torch.arange(first, first + length) for first, length in zip(firsts, lengths, strict=True)])


def _attention_masks(model, lengths: list[int], device: torch.device, shared: list[int] | None):
    """What the layers take as `attention_masks`. Raises RuntimeError for siblings that share tokens where attention is
    torchtitan's kernel of variable lengths."""
    if isinstance(model.config.first_attention.inner_attention, PackedSDPA.Config):
        return PackedDocuments.build(lengths, device, shared)
    if shared is None:
        return varlen_metadata(lengths, device)
    raise RuntimeError(
        "trainer.shared_prefix='auto': attention of variable lengths computes each document by itself; use 'off', "
        "or trainer.attention='sdpa'"
    )


class _Answer(NamedTuple):
    """What one microbatch gave. Tensors are on the device still."""

    metric_names: list[str]
    scalars: list[torch.Tensor]
    """The loss, then the metrics."""
    outputs: dict[str, torch.Tensor]
    """By name, (T, ...)."""
    lengths: list[int]
    """Tokens of each datum."""


def accumulate_gradients(
    model,
    microbatches: list[Microbatch],
    loss_fn: LossFunction,
    device: torch.device,
    *,
    temperature: float = 1.0,
    loss_weight: float = 1.0,
    multiple_of: int = 1,
) -> RankOutput:
    """Adds the gradient of `loss_weight` x the summed loss to the parameters.

    The loss is a token sum, so the result does not depend on how datums were split into microbatches. Numbers are read
    from the device after the last microbatch: the host launches the next one while the device computes.
    """
    result = RankOutput(rows={}, loss=0.0, sums={}, interval=(time.time(), 0.0))
    answers: list[_Answer] = []
    for microbatch in microbatches:
        tensors = {name: column.to(device, non_blocking=True) for name, column in microbatch.loss_inputs.items()}
        extra = {"teacher_hidden_TD": tensors["teacher_hidden"]} if "teacher_hidden" in tensors else {}
        with span("forward"):
            outputs = head_outputs(model, microbatch, device, temperature=temperature, multiple_of=multiple_of, **extra)
        datum_T = torch.repeat_interleave(torch.tensor(microbatch.lengths)).to(device, non_blocking=True)
        inputs = LossInputs(
            **outputs, datum=datum_T, num_datums=len(microbatch.lengths), tensors=tensors, turns=microbatch.turns
        )
        loss, metrics = loss_fn(inputs)
        metrics = {**sampled_metrics(inputs, _trained(microbatch, device)), **metrics}
        if microbatch.routing is not None:
            metrics |= routing_replay.agreement(model, tensors["loss_mask"])
        with span("backward"):
            (loss * loss_weight).backward()
        row_names = outputs.keys() & {"policy_logprobs", "predicted_values"}
        answers.append(
            _Answer(
                metric_names=list(metrics),
                scalars=[_scalar(value, device) for value in (loss, *metrics.values())],
                outputs={name: outputs[name].detach().float() for name in row_names},
                lengths=microbatch.lengths,
            )
        )
    scalars = [scalar for answer in answers for scalar in answer.scalars]
    numbers = iter(torch.stack(scalars).tolist() if scalars else [])  # one copy from the device
    for answer in answers:
        result.loss += next(numbers)
        for name in answer.metric_names:
            add_sum(result.sums, name, next(numbers))
        for name, rows_T in answer.outputs.items():
            add_rows(result, name, rows_T, answer.lengths)
    result.interval = (result.interval[0], time.time())
    return result


def _trained(microbatch: Microbatch, device: torch.device) -> torch.Tensor | None:
    """Indices of the trained tokens of sampled data, found on the host: a mask that selects on the device would have to
    be read. None for other data."""
    if "sampling_logprobs" not in microbatch.loss_inputs:
        return None
    return (microbatch.loss_inputs["loss_mask"] > 0).nonzero(as_tuple=True)[0].to(device, non_blocking=True)


def _scalar(value: Any, device: torch.device) -> torch.Tensor:
    """A number, or a tensor of one, in float64, which has every number of float32 and every count."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, torch.float64).reshape(())
    return torch.full((), value, dtype=torch.float64, device=device)  # a fill; for a copy the host would wait


def add_rows(result: RankOutput, name: str, rows_T: torch.Tensor, lengths: list[int]) -> None:
    """Appends an output of a microbatch to `result.rows`, a tensor per datum."""
    rows = rows_T.detach().cpu().split(lengths)
    result.rows.setdefault(name, []).extend(row.clone() for row in rows)  # pickling a view sends all rows


def clip_and_step(
    parameters: list[torch.nn.Parameter], optimizers, params: OptimParams, grad_scale: float, *, expert_parallel: bool
) -> tuple[float, bool]:
    """Scales and clips the accumulated gradient, steps unless the gradient is not finite, and zeroes the gradient.
    Returns (gradient L2 norm before clipping, whether a step was taken).

    `params` has a number in every field. `expert_parallel`: experts lie on a separate mesh, with a norm of their own.
    """
    if grad_scale != 1.0:
        gradients = [p.grad for p in parameters if p.grad is not None]
        # This rank's shards, in one operator. Every rank scales its own, so no mesh has to know.
        torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in gradients], grad_scale)
    norm = float(clip_grad_norm_(parameters, params.max_grad_norm, foreach=True, ep_enabled=expert_parallel))
    finite = math.isfinite(norm)
    if finite:
        changes = {"lr": params.lr, "betas": params.betas, "eps": params.eps, "weight_decay": params.weight_decay}
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group.update(changes)
        optimizers.step()
    optimizers.zero_grad()
    return norm, finite
