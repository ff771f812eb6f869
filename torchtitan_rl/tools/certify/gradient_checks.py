"""Gradients, parameter by parameter: against transformers' autograd, over layouts, and over how documents are
packed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import torch

from torchtitan_rl.algorithm.losses import cross_entropy
from torchtitan_rl.dispatch.mesh_training_client import MeshTrainingClient
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.launch.actors import ActorLauncher
from torchtitan_rl.tools.certify.broken_part import plain_model
from torchtitan_rl.tools.certify.certificate import CertificateLine
from torchtitan_rl.tools.certify.largest_difference import of_states
from torchtitan_rl.tools.certify.subject import CALL_S, Subject
from torchtitan_rl.types import OptimParams

__all__ = ["check_gradients", "check_layouts", "check_packing", "gradients"]

_AUTOGRAD, _LAYOUTS = 1e-4, 1e-5


async def gradients(subject: Subject, trainer: TrainingClient, *, apart: bool = False) -> dict[str, torch.Tensor]:
    """The gradient of minus the weighted sum of the documents' log-probabilities, by the names of the model's state;
    what has accumulated is dropped again. `apart`: every document in a microbatch of its own."""
    data = subject.data(subject.documents)
    for datums in [[datum] for datum in data] if apart else [data]:
        await trainer.forward_backward(datums, cross_entropy)
    by_parameter = await trainer.gradients()
    await trainer.optim_step(OptimParams(lr=0.0))
    await trainer.reset_optimizer()
    return _by_state(subject, by_parameter)


def _by_state(subject: Subject, by_parameter: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Gradients under the names of a state dict, which shows the parts of fused weights. A parameter without a gradient
    has zeros."""
    model, _ = plain_model(subject.shape)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            gradient = by_parameter[name]
            parameter.copy_(torch.zeros(()) if gradient is None else gradient)
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


async def check_gradients(subject: Subject, trainer: TrainingClient) -> CertificateLine:
    _, adapter = plain_model(subject.shape)
    expected = adapter.from_hf(subject.reference.gradients(subject.documents, subject.weights(subject.documents)))
    state = await gradients(subject, trainer)
    for tied in (state.keys() - expected.keys()) & {"lm_head.weight"}:
        del state[tied]
    return of_states("gradients: trainer = transformers", state, expected, _AUTOGRAD, relative=True)


async def check_packing(subject: Subject, trainer: TrainingClient) -> CertificateLine:
    together, apart = await gradients(subject, trainer), await gradients(subject, trainer, apart=True)
    return of_states("gradients: documents packed = one by one", together, apart, _LAYOUTS, relative=True)


async def check_layouts(
    subject: Subject, layouts: Sequence[tuple[int, int]], log_dir: str, expected: dict[str, torch.Tensor]
) -> AsyncIterator[CertificateLine]:
    """Gradients of meshes of (FSDP, TP) ranks, each rank a process, beside those of one rank."""
    for shard, tensor in layouts:
        name = f"gradients: FSDP {shard}, TP {tensor} = one rank"
        uncut = [f"{part}={size}" for part, size in subject.shape.cut_sizes.items() if size % tensor]
        if uncut:
            yield CertificateLine(name=name, difference=None, note=f"TP {tensor} does not divide {', '.join(uncut)}")
            continue
        launcher = ActorLauncher(log_dir=log_dir, start_timeout_s=CALL_S, call_timeout_s=CALL_S)
        try:
            mesh = await launcher.start_trainer(
                subject.trainer(shard=shard, tensor=tensor), subject.model, role="policy", seed=0
            )
            trainer = client(subject, mesh)
            yield of_states(name, await gradients(subject, trainer), expected, _LAYOUTS, relative=True)
        finally:
            await launcher.stop()


def client(subject: Subject, mesh) -> TrainingClient:
    """A client of a mesh that packs all documents into one microbatch."""
    return MeshTrainingClient(
        mesh,
        max_tokens_per_microbatch=10**6,
        max_datum_tokens=subject.shape.max_seq_len,
        temperature=1.0,
        vocab_size=subject.shape.vocab_size,
    )
