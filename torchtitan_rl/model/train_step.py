"""Forward, backward and optimizer step as functions of a model, without actors."""

from __future__ import annotations

import dataclasses
import time

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torchtitan.models.common.attention import create_varlen_metadata_for_document

from torchtitan_rl import platform
from torchtitan_rl.algorithm.mismatch import mismatch
from torchtitan_rl.model.attention import PackedDocuments, PackedSDPA
from torchtitan_rl.model.value_head import ValueHead
from torchtitan_rl.types import Accumulated, LossFunction, LossInputs, Microbatch, OptimParams

__all__ = ["forward_logprobs", "forward_values", "accumulate_gradients", "sampled_metrics", "clip_and_step"]

_ROWS = {
    "policy_logprobs": torch.float32,
    "predicted_values": torch.float32,
    "top_tokens": torch.int64,
    "top_logprobs": torch.float32,
    "hidden": None,
}
"""Model outputs that `Accumulated.rows` returns, and the dtype of each; None keeps the output's dtype."""


def forward_logprobs(
    model,
    batch: Microbatch,
    device: torch.device,
    *,
    temperature: float,
    multiple_of: int = 1,
    top_k: int = 0,
    hidden: bool = False,
    teacher_kl: bool = False,
) -> dict[str, torch.Tensor]:
    """The head's outputs for a packed microbatch, by name, each (T, ...): `policy_logprobs` of the targets, `entropy`,
    and with `top_k`, `hidden` or `teacher_kl` the outputs of `DistillationHead`. `teacher_kl` reads the loss input
    `teacher_hidden`.

    One extra document pads T to a multiple of `multiple_of` (sequence parallelism needs the TP size). The outputs
    leave the padding out.
    """
    padding = -len(batch.tokens_T) % multiple_of
    targets = _pad(batch.target_tokens_T, padding).to(device)
    if top_k or hidden or teacher_kl:  # only a distillation asks for these
        teacher_hidden_TD = _pad(batch.loss_inputs["teacher_hidden"].to(device), padding) if teacher_kl else None
        model.lm_head.ask(targets, temperature, top_k=top_k, hidden=hidden, teacher_hidden_TD=teacher_hidden_TD)
    else:
        model.lm_head.target(targets, temperature)
    said = _forward(model, batch, device, padding)
    return {name: rows_1T[0, : len(batch.tokens_T)] for name, rows_1T in said.items()}


def forward_values(model, batch: Microbatch, device: torch.device, *, multiple_of: int = 1) -> torch.Tensor:
    """A critic's values of a packed microbatch, (T,)."""
    return _forward(model, batch, device, -len(batch.tokens_T) % multiple_of)[0, : len(batch.tokens_T)]


def _pad(rows_T: torch.Tensor, padding: int) -> torch.Tensor:
    """A tensor (T,) or (T, n) with `padding` rows of zeros appended."""
    return F.pad(rows_T, (0, 0) * (rows_T.dim() - 1) + (0, padding))


def _forward(model, batch: Microbatch, device: torch.device, padding: int):
    lengths = [*batch.lengths, padding] if padding else batch.lengths
    tokens_T = F.pad(batch.tokens_T, (0, padding)).to(device)
    positions_T = torch.cat([torch.arange(length) for length in lengths]).to(device)
    inner = model.config.first_attention.inner_attention
    if isinstance(inner, PackedSDPA.Config):
        masks = PackedDocuments.build(lengths, device)
    else:
        masks = create_varlen_metadata_for_document(positions_T[None])
    return model(tokens_T[None], positions=positions_T[None], attention_masks=masks)


def accumulate_gradients(
    model,
    batches: list[Microbatch],
    loss_fn: LossFunction | None,
    device: torch.device,
    *,
    temperature: float = 1.0,
    loss_weight: float = 1.0,
    multiple_of: int = 1,
    top_k: int = 0,
    hidden: bool = False,
) -> Accumulated:
    """Adds the gradient of `loss_weight` x the summed loss to the parameters.

    `loss_fn=None` scores without a gradient. Scoring a language model can also return the `top_k` likeliest tokens and
    the `hidden` states that enter the head. The loss is a token sum, so the result does not depend on how datums were
    split into microbatches.
    """
    began = time.time()
    result = Accumulated(rows={}, loss=0.0, sums={})
    for batch in batches:
        batch = dataclasses.replace(batch, loss_inputs=platform.to_device(batch.loss_inputs, device))
        with torch.set_grad_enabled(loss_fn is not None):
            if isinstance(model.lm_head, ValueHead):
                outputs = {"predicted_values": forward_values(model, batch, device, multiple_of=multiple_of)}
            else:
                outputs = forward_logprobs(
                    model,
                    batch,
                    device,
                    temperature=temperature,
                    multiple_of=multiple_of,
                    top_k=top_k,
                    hidden=hidden,
                    teacher_kl=loss_fn is not None and "teacher_hidden" in batch.loss_inputs,
                )
            if loss_fn is not None:
                datum_T = torch.repeat_interleave(torch.tensor(batch.lengths)).to(device)
                inputs = LossInputs(**outputs, datum=datum_T, num_datums=len(batch.lengths), tensors=batch.loss_inputs)
                loss, metrics = loss_fn(inputs)
                metrics = {**sampled_metrics(inputs), **metrics}
                (loss * loss_weight).backward()
                result.loss += loss.item()
                for name, value in metrics.items():
                    new, old = float(value), result.sums.get(name)
                    result.sums[name] = new if old is None else max(old, new) if name.endswith("_max") else old + new
        for name, rows_T in outputs.items():
            if name in _ROWS:
                rows = rows_T.detach().to(_ROWS[name] or rows_T.dtype).cpu().split(batch.lengths)
                result.rows.setdefault(name, []).extend(row.clone() for row in rows)  # pickling a view sends all rows
    if loss_fn is None:
        # Without a backward FSDP leaves the last group gathered: `model.parameters()` would not be the optimizer's.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    result.interval = (began, time.time())
    return result


def sampled_metrics(inputs: LossInputs) -> dict[str, torch.Tensor]:
    """Metric sums of any loss on sampled data: entropy, and how far trainer and generator disagree.

    Empty for a critic and for data without `sampling_logprobs`. With several targets per position only the entropy:
    the targets are then not the sampled tokens.
    """
    if inputs.policy_logprobs is None or "sampling_logprobs" not in inputs.tensors:
        return {}
    with torch.no_grad():
        sums = {"policy/entropy": inputs.entropy[inputs.loss_mask > 0].sum()}
        return sums | (mismatch(inputs.policy_logprobs, inputs) if inputs.policy_logprobs.dim() == 1 else {})


def clip_and_step(
    parameters: list[torch.nn.Parameter],
    optimizers,
    params: OptimParams,
    *,
    max_grad_norm: float,
    grad_scale: float,
    expert_parallel: bool = False,
) -> tuple[float, bool]:
    """Scales and clips the accumulated gradient, steps unless the gradient is not finite, and zeroes the gradient.

    `expert_parallel`: experts lie on a separate mesh, so norms are taken per mesh and then combined.

    Returns (gradient L2 norm before clipping, whether a step was taken).
    """
    from torchtitan.distributed.utils import clip_grad_norm_

    gradients = [p.grad for p in parameters if p.grad is not None]
    if grad_scale != 1.0:
        for gradient in gradients:
            gradient.mul_(grad_scale)
    norm = clip_grad_norm_(parameters, max_grad_norm, foreach=True, ep_enabled=expert_parallel)
    norm = float(norm)
    finite = norm == norm and norm != float("inf")
    if finite:
        changes = {"lr": params.lr, "betas": params.betas, "eps": params.eps, "weight_decay": params.weight_decay}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group.update({name: value for name, value in changes.items() if value is not None})
        optimizers.step()
    optimizers.zero_grad()
    return norm, finite
