"""The policy as a workflow sees it, text or messages in, tokens out; and the simplest workflow, of one turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl.rollout.chat import Chat
from torchtitan_rl.rollout.sampler import Sampler, WorkflowSampler, refuse_altered
from torchtitan_rl.tasks.family import stream
from torchtitan_rl.types import Completion, Rollout, SamplingParams, Task, Turn

__all__ = ["Policy", "Prompt", "Sampler", "single_turn"]

Prompt = str | list[dict[str, str]] | list[int]
"""Text, chat messages, or tokens."""


@dataclass(kw_only=True)
class Policy:
    """A sampler with its tokenizer and sampling settings."""

    generator: Sampler
    tokenizer: Any
    """A Hugging Face tokenizer."""
    max_tokens: int
    max_prompt_tokens: int
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)
    policy_version: int | None = None
    """The version that samples, or `types.WITHOUT_ADAPTERS`; None: the newest."""
    for_training: bool = False
    """Whether the rollouts will train. False in evaluations and demonstrations, where `self_distill` does nothing."""
    altered: dict[str, float] = field(default_factory=dict)
    """Settings of `types.completions.NEUTRAL` for every completion, such as `{"top_p": 0.9}`; for evaluations only."""
    teacher_version: int | None = None
    """The version of the snapshot that scores rollouts for self-distillation; None: no workflow asked for one."""

    @property
    def sampler(self) -> Sampler:
        """Samples and scores tokens for a workflow that `complete` is not enough for."""
        return WorkflowSampler(self.generator, for_training=self.for_training)

    def prompt_tokens(self, task: Task) -> list[int]:
        """The task's prompt as tokens, see `encode`. Raises ValueError when longer than `max_prompt_tokens`."""
        tokens = self.encode(task.prompt)
        self.check_prompt(task, tokens)
        return tokens

    def encode(self, prompt: Prompt) -> list[int]:
        """A prompt as tokens; messages go through the chat template."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=False)
        if prompt and isinstance(prompt[0], dict):
            return Chat(self.tokenizer).prompt(prompt)
        return list(prompt)  # type: ignore[arg-type]  # neither text nor messages: tokens

    def check_prompt(self, task: Task, tokens: list[int]) -> None:
        """Raises ValueError when a first prompt is longer than `max_prompt_tokens`."""
        if len(tokens) > self.max_prompt_tokens:
            raise ValueError(
                f"task={task.id!r}: its prompt has {len(tokens)} tokens, sampling.max_prompt_tokens="
                f"{self.max_prompt_tokens}; raise it or filter the task out"
            )

    async def complete(
        self,
        tokens: list[int],
        *,
        seed: int,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        **altered: float,
    ) -> Completion:
        """One completion of a prompt; the same seed and version give the same tokens (on a GPU: in the same batch).

        `max_tokens` replaces the policy's limit; `stop`, `stop_token_ids`, `altered` are added to the policy's. Raises
        ValueError for a request that cannot be met or may not (`altered`), SamplingFailed when the generators fail.
        """
        params = SamplingParams(
            max_tokens=self.max_tokens if max_tokens is None else max_tokens,
            temperature=self.temperature,
            seed=seed,
            stop_token_ids=[*stop_token_ids, *self.stop_token_ids],
            stop=[*stop, *self.stop],
            **(self.altered | altered),  # type: ignore[arg-type]  # top_k is a whole number
        )
        if self.for_training:
            refuse_altered(params, self.policy_version)
        return await self.sampler.sample(tokens, params, policy_version=self.policy_version)

    def text(self, completion: Completion) -> str:
        return self.tokenizer.decode(completion.tokens, skip_special_tokens=True)


async def single_turn(task: Task, policy: Policy, *, rollout_id: str, seed: int) -> Rollout:
    """Answers the task's prompt once. The reward is filled in by `run_group`."""
    tokens = policy.prompt_tokens(task)
    completion = await policy.complete(tokens, seed=stream(seed, 0))  # turn 0
    turn = Turn(prompt_tokens=tokens, completion=completion)
    return Rollout(id=rollout_id, task=task, turns=[turn], text=policy.text(completion))
