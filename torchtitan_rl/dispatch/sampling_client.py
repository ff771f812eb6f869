"""Sampling and scoring with any policy version, as everything above asks for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from torchtitan_rl.dispatch.recorded_answers import RecordedAnswers
from torchtitan_rl.dispatch.versions import ServedVersions
from torchtitan_rl.types import Completion, Request, SamplingParams, Scores
from torchtitan_rl.types.completions import alterations

__all__ = ["SamplingClient"]


class SamplingClient(ABC):
    """`sample`, `score` and `score_top` by any policy version.

    There are two. `MeshSamplingClient` asks replicas of the generator: meshes of this run's own actors, or an engine in
    this process. `RemoteSamplingClient` asks a service that speaks Tinker's protocol. It raises RuntimeError for a call
    that the protocol does not have.
    """

    def __init__(self, versions: ServedVersions, *, max_model_len: int) -> None:
        self._versions, self._max_model_len = versions, max_model_len
        self._answers: RecordedAnswers | None = None
        self.num_requests = 0
        """The requests so far, as a schedule numbers them; 0 at a service, which records none."""

    def answer_from(self, answers: RecordedAnswers) -> None:
        """Answers by the record what a replay does not sample again."""
        self._answers = answers

    # The state of the replicas.

    @property
    def policy_version(self) -> int | None:
        """The version that serves unpinned requests; None before the first pull."""
        return self._versions.served

    @abstractmethod
    def health(self) -> dict[str, str]:
        """Role of each replica -> `"healthy"`, or why the replica is out of use, known once a call has failed."""

    @abstractmethod
    def in_flight(self) -> list[int]:
        """The unanswered requests of each replica; a lost one has none."""

    @abstractmethod
    def stalls(self) -> list[float]:
        """Per replica, the seconds for which its engine stood still at its last load of weights."""

    @abstractmethod
    def request_times(self) -> dict[str, tuple[float, int]]:
        """Role of each replica, also of those that have left -> `Router.times`; {} where no router chooses between
        several."""

    @abstractmethod
    def loaded_version(self) -> int | None:
        """The version that every healthy replica has loaded, also while a newer one is fetched; None where they
        differ, and where nobody here knows."""

    @abstractmethod
    async def profile(self, role: str, rank: int, file: str) -> None:
        """Begins to profile a rank of the replica `role`; with `file`, ends and writes the trace there."""

    @abstractmethod
    async def weights(self) -> dict[str, torch.Tensor]:
        """The parameters that the first healthy replica holds, by torchtitan's names (rank 0's part of each); for small
        models."""

    # Versions.

    @abstractmethod
    async def pull(self, version: int) -> None:
        """Makes a published version the one that serves unpinned requests: every healthy replica loads it. Raises
        RuntimeError when no replica is left, and when all of them refuse the version: they serve the version before
        then."""

    async def push_and_pull(self) -> int:
        """The trainer pushes what it holds now as a version of its own, and every healthy replica pulls it. Returns the
        version."""
        version = await self._versions.publish()
        await self.pull(version)
        return version

    @abstractmethod
    async def load_hf(self, directory: str, *, version: int = 0) -> None:
        """Every healthy replica loads the weights of a Hugging Face directory and calls them `version`. No trainer is
        needed. Raises RuntimeError when no replica is left."""

    # Requests.

    async def sample(
        self, tokens: list[int], params: SamplingParams, *, policy_version: int | None = None
    ) -> Completion:
        """One completion. Raises ValueError for an empty prompt, and when prompt and completion exceed the context."""
        if len(tokens) + params.max_tokens > self._max_model_len:
            raise ValueError(
                f"prompt of {len(tokens)} tokens + max_tokens={params.max_tokens}: exceed "
                f"generator.max_model_len={self._max_model_len}; shorten one or raise the other"
            )
        if not tokens:
            raise ValueError("prompt=[]: has no tokens; give at least one")
        request = Request(list(tokens), params)
        completion = None if self._answers is None else self._answers.take(request)
        if completion is None:
            completion = await self._submit(request, policy_version)
        completion.seed = params.seed
        altered = alterations(params, policy_version)
        completion.filtered = ", ".join(f"{name}={value}" for name, value in altered.items())
        return completion

    async def score(self, tokens: list[int], *, policy_version: int | None = None, cached: bool = False) -> Scores:
        """Log-probability of every token but the first, at temperature 1. No prefix cache is read unless `cached`; the
        tokens that the cache covers are NaN then. Raises ValueError for fewer than 2 tokens, or for as many as the
        context or more."""
        return await self._score(Request(list(tokens), None, cached=cached), policy_version)

    async def score_top(
        self, tokens: list[int], top_k: int, *, policy_version: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The `top_k` likeliest tokens at the position of each of T tokens but the first, best first: token ids, int64
        (T - 1, top_k), and log-probabilities at temperature 1, float32 (T - 1, top_k). Raises ValueError for a `top_k`
        below 1 or beyond the vocabulary, and as `score` does."""
        if top_k < 1:
            raise ValueError(f"top_k={top_k}: must be at least 1; use score for the tokens that are there")
        return await self._score(Request(list(tokens), None, top_k), policy_version)

    async def _score(self, request: Request, version: int | None) -> Any:
        if not 2 <= len(request.tokens) < self._max_model_len:
            raise ValueError(
                f"tokens of length {len(request.tokens)}: scoring needs at least 2 and fewer than "
                f"generator.max_model_len={self._max_model_len}"
            )
        return await self._submit(request, version)

    @abstractmethod
    async def _submit(self, request: Request, version: int | None) -> Any:
        """The answer to one request. Raises RuntimeError before the first pull and once the client is closed, and
        ValueError for a request that is refused."""

    @abstractmethod
    def close(self) -> None:
        """Cancels every unanswered call. Its caller gets a RuntimeError."""
