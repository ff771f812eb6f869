"""The sampler of a workflow: it tells faults of the generators from the workflow's own, and where the rollouts train it
refuses to sample from another distribution than the policy's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from torchtitan_rl.types import Completion, SamplingParams
from torchtitan_rl.types.completions import alterations

__all__ = ["AlteredForTraining", "Sampler", "SamplingFailed", "WorkflowSampler", "refuse_altered"]


class Sampler(Protocol):
    """Completes and scores tokens, such as `dispatch.SamplingClient`. Only self-distillation calls `score`,
    `score_top`."""

    async def sample(
        self, tokens: list[int], params: SamplingParams, *, policy_version: int | None = None
    ) -> Completion: ...

    async def score(self, tokens: list[int], *, policy_version: int | None = None) -> list[float]: ...

    async def score_top(
        self, tokens: list[int], top_k: int, *, policy_version: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class SamplingFailed(RuntimeError):
    """The generators gave no answer. The rollout that asked is not at fault."""


class AlteredForTraining(ValueError):
    """A workflow asked for a completion that could not train."""


def refuse_altered(params: SamplingParams, policy_version: int | None = None, call: str = "policy.complete") -> None:
    """Raises AlteredForTraining for a setting that alters the policy's distribution, and for the base in the place of a
    policy version. `call` is what asked."""
    for name, value in alterations(params, policy_version).items():
        raise AlteredForTraining(
            f"{call}({name}={value}): this rollout is to train, and its log-probabilities would not be "
            f"those of the policy; leave {name} out where policy.for_training is True"
        )


class WorkflowSampler:
    """The sampler of a policy, for a workflow that asks it without `Policy.complete`: raises the same errors."""

    def __init__(self, sampler: Sampler, *, for_training: bool) -> None:
        self._sampler, self._for_training = sampler, for_training

    async def sample(
        self, tokens: list[int], params: SamplingParams, *, policy_version: int | None = None
    ) -> Completion:
        if self._for_training:
            refuse_altered(params, policy_version, "policy.sampler.sample")
        with _faults_of_generators():
            return await self._sampler.sample(tokens, params, policy_version=policy_version)

    async def score(self, tokens: list[int], *, policy_version: int | None = None) -> list[float]:
        with _faults_of_generators():
            return await self._sampler.score(tokens, policy_version=policy_version)

    async def score_top(
        self, tokens: list[int], top_k: int, *, policy_version: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with _faults_of_generators():
            return await self._sampler.score_top(tokens, top_k, policy_version=policy_version)


@contextmanager
def _faults_of_generators() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise SamplingFailed(str(error)) from error
