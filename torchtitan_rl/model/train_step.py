"""Forward, backward and optimizer step as functions of a model: what a trainer rank does, without actors."""

from __future__ import annotations

import torch
from torchtitan.models.common.attention import create_varlen_metadata_for_document

from torchtitan_rl import platform
from torchtitan_rl.model.attention import PackedDocuments, PackedSDPA
from torchtitan_rl.types import Accumulated, LossFunction, LossInputs, Microbatch, OptimParams

__all__ = ["forward_logprobs", "accumulate_gradients", "policy_metrics", "clip_and_step"]


def forward_logprobs(model, batch: Microbatch, device: torch.device, *, temperature: float, multiple_of: int = 1):
    """Policy log-probabilities and entropies of a packed microbatch, both (T,).

    `multiple_of`: T is padded to a multiple of it (sequence parallelism needs the TP size) with a document
    of its own, which is cut off again.
    """
    total = len(batch.tokens_T)
    padding = -total % multiple_of
    lengths = [*batch.lengths, padding] if padding else batch.lengths
    pad = torch.nn.functional.pad
    tokens_T = pad(batch.tokens_T, (0, padding)).to(device)
    targets_T = pad(batch.target_tokens_T, (0, padding)).to(device)
    positions_T = torch.cat([torch.arange(length) for length in lengths]).to(device)
    inner = model.config.first_attention.inner_attention
    if isinstance(inner, PackedSDPA.Config):
        masks = PackedDocuments.build(lengths, device)
    else:
        masks = create_varlen_metadata_for_document(positions_T[None])
    model.lm_head.target(targets_T, temperature)
    logprobs, entropy = model(tokens_T[None], positions=positions_T[None], attention_masks=masks)
    return logprobs[0, :total], entropy[0, :total]


def accumulate_gradients(
    model, batches: list[Microbatch], loss_fn: LossFunction | None, device: torch.device, *,
    temperature: float = 1.0, loss_weight: float = 1.0, multiple_of: int = 1,
) -> Accumulated:
    """Adds the gradient of `loss_weight` x the summed loss to the parameters; `loss_fn=None` only scores.

    The loss is a token sum, so the result does not depend on how datums were split into microbatches.
    """
    result = Accumulated(policy_logprobs=[], loss=0.0, sums={})
    for batch in batches:
        with torch.set_grad_enabled(loss_fn is not None):
            logprobs_T, entropy_T = forward_logprobs(
                model, batch, device, temperature=temperature, multiple_of=multiple_of)
            if loss_fn is not None:
                datum_T = torch.repeat_interleave(torch.tensor(batch.lengths)).to(device)
                inputs = LossInputs(
                    policy_logprobs=logprobs_T, entropy=entropy_T, datum=datum_T, num_datums=len(batch.lengths),
                    tensors=platform.to_device(batch.loss_inputs, device))
                loss, metrics = loss_fn(inputs)
                metrics = {**policy_metrics(inputs), **metrics}
                (loss * loss_weight).backward()
                result.loss += loss.item()
                for name, value in metrics.items():
                    value = float(value)
                    old = result.sums.get(name)
                    result.sums[name] = value if old is None else max(old, value) if name.endswith("_max") else old + value
        result.policy_logprobs += list(logprobs_T.detach().float().cpu().split(batch.lengths))
    return result


def policy_metrics(inputs: LossInputs) -> dict[str, torch.Tensor]:
    """Metric sums of any loss on sampled data: entropy, advantages, and how far trainer and generator disagree.

    The KL is k3 of Schulman 2020, "Approximating KL divergence"; data without `sampling_logprobs` give nothing.
    """
    if "sampling_logprobs" not in inputs.tensors:
        return {}
    with torch.no_grad():
        mask_T = inputs.loss_mask > 0
        difference_T = torch.where(mask_T, inputs.policy_logprobs - inputs.sampling_logprobs, 0.0)
        sums = {
            "policy/entropy": inputs.entropy[mask_T].sum(),
            # KL(generator || trainer), sampled from the generator: r - 1 - log r >= 0 with r = trainer / generator.
            "mismatch/kl": (torch.expm1(difference_T.double()) - difference_T.double()).sum(),
            "mismatch/logprob_diff_max": difference_T.abs().max(),
        }
        if "advantages" in inputs.tensors:
            sums["advantage/mean"] = inputs.advantages[mask_T].sum()
            sums["advantage/abs_max"] = torch.where(mask_T, inputs.advantages.abs(), 0.0).max()
        return sums


def clip_and_step(
    parameters: list[torch.nn.Parameter], optimizers, params: OptimParams, *, max_grad_norm: float, grad_scale: float,
    expert_parallel: bool = False,
) -> tuple[float, bool]:
    """Scales and clips what has accumulated, steps unless the gradient is not finite, and zeroes it.

    `expert_parallel`: experts lie on a mesh of their own, so norms are taken per mesh and then put together.

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
