"""Weights and log-probabilities: transformers' model, the trainer's and the engine's."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator

import torch

from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.tools.certify.broken_part import broken_part, plain_model
from torchtitan_rl.tools.certify.certificate import CertificateLine
from torchtitan_rl.tools.certify.largest_difference import LOGPROBS, of_pairs, of_states
from torchtitan_rl.tools.certify.reference_model import ReferenceModel, tensors_of
from torchtitan_rl.tools.certify.subject import Subject

__all__ = [
    "check_documents_apart",
    "check_engine",
    "check_names",
    "check_trainer",
    "check_weights",
    "engine_logprobs",
    "named",
    "trainer_logprobs",
]

_PACKING = "layers.*.attention.inner_attention (documents packed together see each other)"


def check_names(subject: Subject) -> CertificateLine:
    """The tensors that the family's model has are those that transformers wrote: nothing is left over, nothing is
    missing. Shapes too."""
    name = "weights: names and shapes of transformers' safetensors"
    written, (model, adapter) = tensors_of(subject.directory), plain_model(subject.shape)
    state = adapter.to_hf(model.state_dict())
    shapes = {n: torch.tensor(t.shape) for n, t in state.items()}
    expected = {n: torch.tensor(t.shape) for n, t in written.items()}
    if missing := expected.keys() - shapes.keys():
        words = f"{len(missing)} tensors of the safetensors are read into no parameter"
        return CertificateLine(name=name, difference=math.inf, part=min(missing), note=words)
    if extra := shapes.keys() - expected.keys():
        words = f"{len(extra)} tensors of the model are not in the safetensors"
        return CertificateLine(name=name, difference=math.inf, part=min(extra), note=words)
    return of_states(name, shapes, expected, 0.0)


async def check_weights(subject: Subject, trainer: TrainingClient) -> CertificateLine:
    """What the trainer holds, after it has read transformers' safetensors, is what they hold."""
    _, adapter = plain_model(subject.shape)
    state = adapter.to_hf(await trainer.parameters())
    return of_states("weights: trainer = transformers' safetensors", state, tensors_of(subject.directory), 0.0)


async def check_trainer(subject: Subject, trainer: TrainingClient) -> AsyncIterator[CertificateLine]:
    """Log-probabilities of the trainer, at short and at long positions."""
    for words, documents in _documents(subject).items():
        name = f"{words}: trainer = transformers"
        check = await _trainer_check(name, subject, trainer, documents)
        if check.broken:
            alone = [await _trainer_check(name, subject, trainer, [document]) for document in documents]
            packed = not any(one.broken for one in alone)
            part = _PACKING if packed else broken_part(subject, max(documents, key=len))
            check = dataclasses.replace(check, part=part)
        yield check


async def _trainer_check(
    name: str, subject: Subject, trainer: TrainingClient, documents: list[list[int]]
) -> CertificateLine:
    rows = await trainer_logprobs(trainer, subject, documents)
    return of_pairs(name, named(subject.reference, documents, rows), LOGPROBS)


async def check_engine(subject: Subject, generator: SamplingClient, title: str) -> AsyncIterator[CertificateLine]:
    """Log-probabilities of an engine, at short and at long positions."""
    for words, documents in _documents(subject).items():
        rows = await engine_logprobs(generator, documents)
        yield of_pairs(f"{words}: {title} = transformers", named(subject.reference, documents, rows), LOGPROBS)


async def check_documents_apart(subject: Subject, trainer: TrainingClient) -> CertificateLine:
    """Log-probabilities of documents that are packed together, where another document changes between them."""
    documents = subject.documents
    changed = [[3 + (token + 7) % (subject.shape.vocab_size - 3) for token in document] for document in documents]
    before = await trainer_logprobs(trainer, subject, documents)
    pairs = []
    for index, document in enumerate(documents):
        around = [document if i == index else other for i, other in enumerate(changed)]
        after = await trainer_logprobs(trainer, subject, around)
        pairs.append((f"document {index} of {len(document)} tokens", after[index], before[index]))
    check = of_pairs("packed documents do not see each other: trainer", pairs, 1e-6)
    return dataclasses.replace(check, part=f"{_PACKING}: {check.part}") if check.broken else check


def _documents(subject: Subject) -> dict[str, list[list[int]]]:
    return {
        "log-probabilities": subject.documents,
        f"long positions ({', '.join(str(len(d)) for d in subject.long_documents)})": subject.long_documents,
    }


def named(
    reference: ReferenceModel, documents: list[list[int]], rows: list[torch.Tensor]
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """The documents' log-probabilities beside the reference's."""
    return [(f"{len(d)} tokens", row, reference.logprobs(d)) for d, row in zip(documents, rows, strict=True)]


async def trainer_logprobs(trainer: TrainingClient, subject: Subject, documents: list[list[int]]) -> list[torch.Tensor]:
    return (await trainer.forward(subject.data(documents))).policy_logprobs


async def engine_logprobs(generator: SamplingClient, documents: list[list[int]]) -> list[torch.Tensor]:
    return [torch.tensor(row) for row in await asyncio.gather(*(generator.score(document) for document in documents))]
