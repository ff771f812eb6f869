"""Greedy tokens: of the engine, and of an export in transformers and in vLLM."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl import adapters, platform
from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.tools.certify.certificate import CertificateLine
from torchtitan_rl.tools.certify.largest_difference import LOGPROBS, of_states
from torchtitan_rl.tools.certify.reference_model import ReferenceModel, tensors_of
from torchtitan_rl.tools.certify.subject import EOS, PAD, Subject
from torchtitan_rl.types import SamplingParams

__all__ = ["GreedyTokens", "check_export", "check_vllm_alone"]

_PROMPTS, _TOKENS = 32, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class GreedyTokens:
    """Prompts, and the tokens that transformers finds likeliest after them."""

    prompts: list[list[int]]
    completions: list[list[int]]
    margins: list[list[float]]
    """By how much the logit of each token is the largest."""

    @classmethod
    def of(cls, subject: Subject) -> GreedyTokens:
        draw = random.Random(1)
        prompts = [
            [draw.randrange(3, subject.shape.vocab_size) for _ in range(draw.randrange(4, 24))] for _ in range(_PROMPTS)
        ]
        completions, margins = subject.reference.greedy(prompts, _TOKENS)
        return cls(prompts=prompts, completions=completions, margins=margins)

    def compared(self, title: str, completions: list[list[int]]) -> CertificateLine:
        """The difference is the number of completions with another token. Two tokens whose logits differ by no more
        than rounding are equally likely: a completion is compared up to there."""
        wrong = []
        for index, (tokens, expected, margins) in enumerate(
            zip(completions, self.completions, self.margins, strict=True)
        ):
            tie = next((place for place, margin in enumerate(margins) if margin <= 2 * LOGPROBS), len(expected))
            if tokens[:tie] != expected[:tie]:
                wrong.append(index)
        note = f"{len(completions) - len(wrong)} of {len(completions)} completions are equal"
        part = f"after prompt {wrong[0]} of {len(self.prompts[wrong[0]])} tokens" if wrong else ""
        return CertificateLine(name=_name(title), difference=float(len(wrong)), part=part, note=note)

    async def of_engine(self, generator: SamplingClient, title: str) -> CertificateLine:
        params = SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)
        completions = await asyncio.gather(*(generator.sample(prompt, params) for prompt in self.prompts))
        return self.compared(title, [completion.tokens for completion in completions])


async def check_export(
    subject: Subject, trainer: TrainingClient, greedy: GreedyTokens, directory: Path
) -> AsyncIterator[CertificateLine]:
    """The trainer's export has the tensors that transformers wrote, and transformers says the same tokens with it."""
    await trainer.save_hf_model(directory, eos=EOS, pad=PAD)
    yield of_states("export = transformers' safetensors", tensors_of(directory), tensors_of(subject.directory), 0.0)
    exported = ReferenceModel.read(directory)
    completions, _ = exported.greedy(greedy.prompts, _TOKENS)
    yield greedy.compared("export in transformers", completions)


def check_vllm_alone(subject: Subject, greedy: GreedyTokens, directory: Path) -> CertificateLine:
    """vLLM's own model loads the export by itself and says the same tokens. Not run where that model has a fault."""
    if fault := subject.shape.own_model_fault(platform.device_type()):
        return CertificateLine(name=_name("export in vLLM"), difference=None, note=fault)
    adapters.prepare_vllm(eager=True)
    from torchtitan_rl.engine.own_model import greedy_tokens

    completions = greedy_tokens(directory, greedy.prompts, _TOKENS, max_model_len=subject.shape.max_seq_len)
    return greedy.compared("export in vLLM", completions)


def _name(title: str) -> str:
    return f"greedy tokens: {title} = transformers"
