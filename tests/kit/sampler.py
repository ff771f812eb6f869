"""Samplers that say what a test tells them to, with the interface of SamplingClient, and a policy over one."""

from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer

import torchtitan_rl
from torchtitan_rl.rollout.policy import Policy
from torchtitan_rl.types import Completion, SamplingParams

CHARS = AutoTokenizer.from_pretrained(Path(torchtitan_rl.__file__).parent / "assets" / "chars")


class ScriptedSampler:
    """Says the next of its texts (or token lists) whatever it is asked; ends as an engine would."""

    def __init__(self, *said: str | list[int], tokenizer=CHARS):
        self.said, self.tokenizer = list(said), tokenizer
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.versions: list[int | None] = []
        """Of each request, the version that it names."""

    async def sample(self, tokens, params, *, policy_version=None):
        self.asked.append((list(tokens), params))
        self.versions.append(policy_version)
        said = self.said.pop(0)
        said = self.tokenizer.encode(said, add_special_tokens=False) if isinstance(said, str) else said
        reason = "stop" if len(said) <= params.max_tokens else "length"
        said = said[: params.max_tokens]
        return Completion(
            tokens=said, logprobs=[-0.5] * len(said), policy_versions=[3] * len(said), finish_reason=reason
        )


class FunctionSampler:
    """Says `answer(prompt, params)`, a text, after the text of the prompt; every token has probability 1."""

    def __init__(self, answer: Callable[[str, SamplingParams], str], tokenizer=CHARS):
        self.answer, self.tokenizer = answer, tokenizer

    async def sample(self, tokens, params, *, policy_version=None):
        text = self.answer(self.tokenizer.decode(tokens), params)
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        num = len(tokens)
        return Completion(tokens=tokens, logprobs=[0.0] * num, policy_versions=[0] * num, finish_reason="stop")


def policy(*said, tokenizer=CHARS, **settings) -> Policy:
    settings = {"max_tokens": 32, "max_prompt_tokens": 64} | settings
    return Policy(generator=ScriptedSampler(*said, tokenizer=tokenizer), tokenizer=tokenizer, **settings)
