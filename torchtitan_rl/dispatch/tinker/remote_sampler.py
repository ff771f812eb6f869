"""Sampling and scoring with any published version of a remote service."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.dispatch.tinker.session import Samplers, answered, not_offered, sdk
from torchtitan_rl.dispatch.versions import PolicyVersions
from torchtitan_rl.types import Completion, Request, SamplingParams

__all__ = ["RemoteSamplingClient"]

_ROLE = "generator-0"
_OFFERED = ("top_p", "top_k")
"""Of the settings that alter a distribution, those that the protocol has."""


class RemoteSamplingClient(SamplingClient):
    """Each request goes to the SDK's client of its version: a version never changes under a request. How many requests
    the service computes together is its own matter."""

    def __init__(
        self, samplers: Samplers, versions: PolicyVersions, *, max_model_len: int, timeout_s: float, eos: int
    ) -> None:
        """`eos` is the token that ends a completion unless a request says otherwise."""
        super().__init__(versions, max_model_len=max_model_len)
        self._samplers, self._timeout_s, self._eos = samplers, timeout_s, eos
        self._open: set[asyncio.Task] = set()
        self._closed = False

    def health(self) -> dict[str, str]:
        """One replica, which is never lost: the service replaces its own."""
        return {_ROLE: "healthy"}

    def in_flight(self) -> list[int]:
        """The unanswered requests."""
        return [len(self._open)]

    def stalls(self) -> list[float]:
        """No engine stands still for a version: a version has a sampler of its own."""
        return [0.0]

    def request_times(self) -> dict[str, tuple[float, int]]:
        """{}: the service chooses between its replicas."""
        return {}

    def loaded_version(self) -> None:
        """None: what the service has loaded, it does not say."""

    async def profile(self, role: str, rank: int, file: str) -> None:
        not_offered("profile")

    async def weights(self) -> dict[str, torch.Tensor]:
        not_offered("weights")

    async def pull(self, version: int) -> None:
        """Makes a published version the one that serves unpinned requests. Raises ValueError for any other version."""
        previous = self._versions.served
        self._versions.pin(version, _ROLE)
        self._versions.served = version
        if previous is not None:
            await self._versions.end_serving(previous)
            await self._versions.release(previous, _ROLE)

    async def load_hf(self, directory: str, *, version: int = 0) -> None:
        not_offered("load_hf")

    async def _submit(self, request: Request, version: int | None) -> Any:
        if self.policy_version is None:
            raise RuntimeError("policy_version=None: no version is published yet; publish and pull first")
        if self._closed:
            raise RuntimeError("sampling: the client was closed before the service answered")
        version = self.policy_version if version is None else version
        client = self._samplers.client(version)
        task = asyncio.ensure_future(self._answer(client, request, version))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self._closed:
                raise RuntimeError("sampling: the client was closed before the service answered") from None
            raise

    async def _answer(self, client: Any, request: Request, version: int) -> Any:
        tinker, call = sdk(), f"prompt of {len(request.tokens)} tokens"
        prompt = tinker.ModelInput.from_ints(request.tokens)
        if request.params is not None:
            params = tinker.SamplingParams(**self._sampling_params(request.params))
            return _completion(await self._response(client.sample(prompt, 1, params), call), version)
        one = tinker.SamplingParams(max_tokens=1)
        if not request.top_k:
            response = await self._response(client.sample(prompt, 1, one, include_prompt_logprobs=True), call)
            return response.prompt_logprobs[1:]
        response = await self._response(client.sample(prompt, 1, one, topk_prompt_logprobs=request.top_k), call)
        top = response.topk_prompt_logprobs_np
        return torch.from_numpy(top.token_ids[1:]).long(), torch.from_numpy(top.logprobs[1:].copy())

    async def _response(self, future: Any, call: str) -> Any:
        return await answered(future, call, self._timeout_s)

    def _sampling_params(self, params: SamplingParams) -> dict[str, Any]:
        """The protocol's parameters. Raises ValueError for what it has no parameter for."""
        for name, value in params.altered().items():
            if name not in _OFFERED:
                raise ValueError(f"{name}={value}: Tinker's protocol has no such setting; leave it out")
        if params.stop and (params.stop_token_ids or not params.ignore_eos):
            raise ValueError(
                f"stop={params.stop}: in Tinker's protocol texts end a completion instead of tokens, and not besides "
                "the end-of-sequence token; use stop_token_ids, or ignore_eos with texts alone"
            )
        stop: list | None = list(params.stop) or list(params.stop_token_ids)
        if not params.ignore_eos:
            stop = [*params.stop_token_ids, self._eos] if params.stop_token_ids else None
        return {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "seed": params.seed,
            "stop": stop,
        }

    def close(self) -> None:
        self._closed = True
        for task in self._open:
            task.cancel()


def _completion(response: Any, version: int) -> Completion:
    sequence = response.sequences[0]
    reason = str(getattr(sequence.stop_reason, "value", sequence.stop_reason))
    return Completion(
        tokens=list(sequence.tokens),
        logprobs=list(sequence.logprobs or []),
        policy_versions=[version] * len(sequence.tokens),
        finish_reason="length" if reason == "length" else "stop",
    )
