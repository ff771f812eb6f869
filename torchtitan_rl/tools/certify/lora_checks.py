"""Low-rank adapters: the trainer computes with them apart, the engine and an export have them merged in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.launch.backend import Stack
from torchtitan_rl.tools.certify.certificate import CertificateLine
from torchtitan_rl.tools.certify.forward_checks import engine_logprobs, named, trainer_logprobs
from torchtitan_rl.tools.certify.largest_difference import LOGPROBS, of_pairs
from torchtitan_rl.tools.certify.reference_model import ReferenceModel
from torchtitan_rl.tools.certify.subject import EOS, PAD, Subject
from torchtitan_rl.tools.certify.sync_checks import take_step

__all__ = ["adapters_of", "check_adapters"]

_MOVED = 1e-2


def adapters_of(shape: DecoderShape) -> LoRAConfig:
    """Adapters on every layer that can have one: experts have none. No targets: the family has no adapters."""
    without = () if shape.experts is None else ("gate_proj", "up_proj", "down_proj")
    targets = [target for target in shape.lora_targets if target not in without]
    return LoRAConfig(rank=4, alpha=8.0, target_modules=targets)


async def check_adapters(subject: Subject, stack: Stack, directory: Path) -> AsyncIterator[CertificateLine]:
    trainer, documents = stack.roles["policy"], subject.documents
    for _ in range(2):  # the first step moves B alone, which begins at zero
        await take_step(subject, stack)
    await stack.generator.push_and_pull()
    rows = await trainer_logprobs(trainer, subject, documents)
    base = of_pairs("", named(subject.reference, documents, rows), LOGPROBS)
    if not (base.difference or 0.0) > _MOVED:
        yield CertificateLine(
            name="LoRA: adapters change the model", difference=1.0, part="adapters", note="training did nothing"
        )
        return
    merged = await engine_logprobs(stack.generator, documents)
    pairs = [(f"{len(d)} tokens", one, other) for d, one, other in zip(documents, merged, rows, strict=True)]
    yield of_pairs("LoRA: engine (merged) = trainer (apart)", pairs, LOGPROBS)
    await trainer.save_hf_model(directory, eos=EOS, pad=PAD)
    exported = ReferenceModel.read(directory)
    yield of_pairs("LoRA: trainer (apart) = export in transformers", named(exported, documents, rows), LOGPROBS)
