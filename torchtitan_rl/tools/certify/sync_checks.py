"""Weights after a step: what the engine holds, and that it forgets what it computed with older ones."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

import torch

from torchtitan_rl.algorithm.losses import cross_entropy
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.launch.backend import Stack
from torchtitan_rl.model.spec import build_spec
from torchtitan_rl.tools.certify.certificate import CertificateLine
from torchtitan_rl.tools.certify.forward_checks import engine_logprobs, trainer_logprobs
from torchtitan_rl.tools.certify.largest_difference import LOGPROBS, of_pairs, of_states
from torchtitan_rl.tools.certify.subject import Subject
from torchtitan_rl.types import OptimParams

__all__ = ["check_cache", "check_logprobs_after_step", "check_sync", "take_step"]

_LR = 1e-2


async def take_step(subject: Subject, stack: Stack) -> None:
    """One optimizer step on the documents, which the engine does not know of yet."""
    await stack.roles["policy"].forward_backward(subject.data(subject.documents), cross_entropy)
    await stack.roles["policy"].optim_step(OptimParams(lr=_LR))


async def check_sync(subject: Subject, stack: Stack) -> AsyncIterator[CertificateLine]:
    """A step, a publication, a pull: every parameter of the engine is the trainer's, bit for bit, and none is the old
    one."""
    before = await stack.generator.weights()
    await take_step(subject, stack)
    await stack.generator.push_and_pull()
    after, published = await stack.generator.weights(), await stack.roles["policy"].parameters()
    name = "weight sync: engine = trainer, bit for bit"
    numbers = of_states(name, after, published, 0.0)
    yield numbers if numbers.broken else of_states(name, _bits(after), _bits(published), 0.0)
    with torch.device("meta"):
        buffers = {name for name, _ in build_spec(ModelConfig(shape=subject.shape)).model.build().named_buffers()}
    for name, tensor in after.items():
        if name not in buffers and torch.equal(tensor, before[name]):
            yield CertificateLine(name="weight sync: every parameter has moved", difference=math.inf, part=name)
            return
    yield CertificateLine(name="weight sync: every parameter has moved", difference=0.0)


async def check_logprobs_after_step(subject: Subject, stack: Stack, title: str) -> CertificateLine:
    """Log-probabilities after a pull."""
    documents = subject.documents
    expected = await trainer_logprobs(stack.roles["policy"], subject, documents)
    rows = await engine_logprobs(stack.generator, documents)
    pairs = [(f"{len(d)} tokens", row, other) for d, row, other in zip(documents, rows, expected, strict=True)]
    return of_pairs(f"weight sync: {title} = trainer, log-probabilities after a step", pairs, LOGPROBS)


async def check_cache(subject: Subject, stack: Stack, title: str) -> CertificateLine:
    """A prefix that the engine computed with the old weights is not read after a pull; before it, the cache is read.
    The difference is a number of tokens."""
    if subject.shape.state_sizes:
        return CertificateLine(
            name=title, difference=None, note="the engine of a model with states has no prefix cache"
        )
    document = subject.long_documents[-1]
    for _ in range(2):
        before = await stack.generator.score(document, cached=True)
    if not _num_cached(before):
        return CertificateLine(
            name=title, difference=math.inf, note="the engine never reads its prefix cache: nothing is checked"
        )
    await take_step(subject, stack)
    await stack.generator.push_and_pull()
    after = await stack.generator.score(document, cached=True)
    if stale := _num_cached(after):
        return CertificateLine(name=title, difference=float(stale), part="prefix cache", note="tokens of older weights")
    (expected,) = await trainer_logprobs(stack.roles["policy"], subject, [document])
    return of_pairs(title, [("log-probabilities", torch.tensor(after), expected)], LOGPROBS)


def _num_cached(scores: list[float]) -> int:
    """The tokens that a cache covered, which have no score."""
    return sum(map(math.isnan, scores))


def _bits(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors whose difference is 0 only where their bits are equal."""
    return {n: t.contiguous().view(torch.int32) if t.dtype == torch.float32 else t for n, t in state.items()}
