"""Sampling sessions: each names the weights that its requests are answered with."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.serve.limits import Places
from torchtitan_rl.serve.tinker import wire
from torchtitan_rl.serve.tinker.bodies import SampleBody, SamplingBody
from torchtitan_rl.serve.tinker.bounds import MAX_TOP_LOGPROBS
from torchtitan_rl.serve.tinker.faults import Fault, user
from torchtitan_rl.serve.tinker.futures import Futures, ReadyBody
from torchtitan_rl.serve.tinker.samplers import Turns, Versions
from torchtitan_rl.serve.tinker.saved_states import SavedStates
from torchtitan_rl.tasks.family import stream
from torchtitan_rl.types import WITHOUT_ADAPTERS, Completion, SamplingParams

__all__ = ["BASE_VERSION", "Generators", "SessionWeights", "Sampling"]

BASE_VERSION = 0
_MAX_SAMPLES = 1024
_MAX_STOPS = 64


@dataclass(kw_only=True, slots=True)
class SessionWeights:
    """Weights to sample from, under the id of a sampling session."""

    sampler_id: str
    session_id: str
    version: int
    model_path: str | None = None
    """The checkpoint; None: the base model, or weights that have no name."""


class Generators:
    """What the requests of all owners compete for: the generators, whose turn it is, and places for completions."""

    def __init__(
        self, client: SamplingClient, versions: Versions, *, max_parallel: int, side_by_side: bool = False
    ) -> None:
        """`side_by_side`: the generators hold the adapters of several versions at once, and no version has turns."""
        self.client, self.versions = client, versions
        self.turns, self.places = None if side_by_side else Turns(), Places(max_parallel)
        self.loaded: dict[tuple[str, str], int] = {}
        """The version that a checkpoint on disk was given, by path and by when it was saved: one that was deleted and
        saved again has other weights. Ids of models differ between owners."""


class Sampling:
    """Answers one owner's requests for samples and log-probabilities."""

    def __init__(
        self,
        generators: Generators,
        checkpoints: SavedStates,
        futures: Futures,
        *,
        base_model: str,
        context_tokens: int,
        vocab_size: int,
    ) -> None:
        self.generator, self._versions = generators.client, generators.versions
        self.turns, self._places, self._loaded = generators.turns, generators.places, generators.loaded
        self._checkpoints, self._futures = checkpoints, futures
        self._base_model, self._context_tokens, self._vocab_size = base_model, context_tokens, vocab_size
        self.samplers: dict[str, SessionWeights] = {}

    def open(
        self, sampler_id: str, session_id: str, *, base_model: str | None, model_path: str | None, version: int | None
    ) -> SessionWeights:
        """A sampling session, of a checkpoint, of the base model, or of a version. Raises Fault for another base model
        and for a checkpoint that is not there."""
        if sampler_id in self.samplers:
            return self.samplers[sampler_id]
        if version is None:
            version = self._version(base_model, model_path)
        sampler = SessionWeights(sampler_id=sampler_id, session_id=session_id, version=version, model_path=model_path)
        self.samplers[sampler_id] = sampler
        self._versions.add_sampler(version)
        return sampler

    def _version(self, base_model: str | None, model_path: str | None) -> int:
        if model_path is None:
            if (
                base_model is not None
                and base_model != self._base_model
                and base_model != self._base_model.split("/")[-1]
            ):
                raise user(f"base_model={base_model[:120]!r}: is not served here; use {self._base_model!r}")
            return BASE_VERSION
        checkpoint, directory = self._checkpoints.find(model_path, "sampler_weights")
        key = model_path, checkpoint.time
        if key not in self._loaded:
            # Versions of models are positive; those of checkpoints are counted down.
            self._loaded[key] = WITHOUT_ADAPTERS - 1 - len(self._loaded)
            self._versions.register(self._loaded[key], directory / "weights.safetensors")
        return self._loaded[key]

    async def end(self, session_id: str) -> None:
        """Ends the sampling sessions of a session, and drops weights that have no name."""
        ended = [sampler for sampler in self.samplers.values() if sampler.session_id == session_id]
        for sampler in ended:
            del self.samplers[sampler.sampler_id]
            self._versions.remove_sampler(sampler.version)
        for version in {sampler.version for sampler in ended if sampler.version > BASE_VERSION}:
            await self._versions.forget(version)

    def submit(self, body: SampleBody) -> tuple[str, list[str]]:
        """Starts a request. Returns the ids of its future and of its sequences. Raises Refused (429) when as many are
        awaited as may be, and Fault for too many samples at once."""
        if body.num_samples > _MAX_SAMPLES:
            raise user(f"num_samples={body.num_samples}: is more than {_MAX_SAMPLES}; ask several times")
        try:
            version, tokens = self._asked_version(body), wire.tokens_of(body.prompt)
            self._check(body, tokens)
            params = [self._params(body.sampling_params, len(tokens), i) for i in range(body.num_samples)]
        except Fault as fault:
            request_id = self._futures.refuse(fault)
            return request_id, [f"{request_id}:{i}" for i in range(body.num_samples)]
        # The content is part of the id: a number that another client used before does not answer this request.
        content = hashlib.blake2b(body.model_dump_json().encode(), digest_size=8).hexdigest()
        number = secrets.token_hex(8) if body.seq_id is None else body.seq_id
        request_id = f"sample/{body.sampling_session_id or 'once'}/{number}/{content}"
        if request_id not in self._futures:
            self._places.take(body.num_samples)
            self._futures.start(request_id, self._answered(body, version, tokens, params))
        return request_id, [f"{request_id}:{i}" for i in range(body.num_samples)]

    async def _answered(
        self, body: SampleBody, version: int, tokens: list[int], params: list[SamplingParams]
    ) -> ReadyBody:
        try:
            turn = nullcontext() if self.turns is None else self.turns.of(version)
            async with self._versions.published(version), turn:
                return await self._answer(body, version, tokens, params)
        finally:
            self._places.give(body.num_samples)

    async def _answer(
        self, body: SampleBody, version: int, tokens: list[int], params: list[SamplingParams]
    ) -> ReadyBody:
        samples = [self.generator.sample(tokens, sample_params, policy_version=version) for sample_params in params]
        scoring = len(tokens) > 1
        scores = self.generator.score(tokens, policy_version=version) if body.prompt_logprobs and scoring else _none()
        k = body.topk_prompt_logprobs
        tops = self.generator.score_top(tokens, k, policy_version=version) if k and scoring else _none()
        calls: list[asyncio.Future[Any]] = [asyncio.ensure_future(call) for call in (*samples, scores, tops)]
        try:
            *completions, scored, top_prompt = await asyncio.gather(*calls)
        finally:
            for call in calls:  # those beside one that has failed: the request holds its places until they have ended
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        if k and not scoring:
            top_prompt = torch.zeros(0, k), torch.zeros(0, k)  # one token: no position has one before it
        top_sampled = None
        if body.topk_sample_logprobs:
            top_sampled = await asyncio.gather(
                *(self._tops(tokens, completion, body.topk_sample_logprobs, version) for completion in completions)
            )
        if wrong := {v for completion in completions for v in completion.policy_versions} - {version}:
            raise RuntimeError(f"policy_version={version}: tokens of {sorted(wrong)} came; the server is at fault")
        prompt_logprobs = None
        if body.prompt_logprobs:
            prompt_logprobs = [None, *(scored or [])]
            if (last := body.prompt_logprobs_last_n) is not None:
                prompt_logprobs = [None] * (len(tokens) - last) + prompt_logprobs[len(tokens) - last :]
        return ReadyBody(
            content=wire.sample_message(
                completions, prompt_logprobs=prompt_logprobs, top_prompt=top_prompt, top_sampled=top_sampled
            ),
            kind="sample",
        )

    async def _tops(self, prompt: list[int], completion: Completion, k: int, version: int):
        """The likeliest tokens at each sampled position, (N, k) each, at temperature 1."""
        _check_tops("topk_sample", k, len(prompt) + len(completion.tokens))
        if len(prompt) + len(completion.tokens) >= self._context_tokens:  # scoring needs one token's room
            sequence, missing = [*prompt, *completion.tokens][: self._context_tokens - 1], 1
        else:
            sequence, missing = [*prompt, *completion.tokens], 0
        tokens, logprobs = await self.generator.score_top(sequence, k, policy_version=version)
        tokens, logprobs = tokens[len(prompt) - 1 :], logprobs[len(prompt) - 1 :]
        if missing:
            tokens = torch.cat([tokens, torch.zeros(missing, k, dtype=tokens.dtype)])
            logprobs = torch.cat([logprobs, torch.full((missing, k), wire.NO_LOGPROB)])
        return tokens, logprobs

    def _asked_version(self, body: SampleBody) -> int:
        if body.sampling_session_id is None:
            return self._version(body.base_model, body.model_path)
        if (sampler := self.samplers.get(body.sampling_session_id)) is None:
            raise user(
                f"sampling_session_id={body.sampling_session_id[:120]!r}: is not open: its session has ended, or the "
                "server was started again; create a sampling client again, from a saved path"
            )
        return sampler.version

    def _check(self, body: SampleBody, tokens: list[int]) -> None:
        for name, value in (
            ("target_prompt_logprobs", body.target_prompt_logprobs is not None),
            ("prompt_alt_tokens_k", body.prompt_alt_tokens_k != 0),
        ):
            if value:
                raise user(f"{name}: is not offered by this server; leave it out")
        if not tokens or max(tokens) >= self._vocab_size:
            raise user(
                f"prompt: is empty, or has an id beyond the vocabulary of {self._vocab_size}; check the tokenizer"
            )
        if len(tokens) >= self._context_tokens:
            raise user(f"prompt of {len(tokens)} tokens: the context has {self._context_tokens}; shorten it")
        last = body.prompt_logprobs_last_n
        if last is not None and (not body.prompt_logprobs or last > len(tokens) - 1):
            raise user(f"prompt_logprobs_last_n={last}: needs prompt_logprobs, and at most {len(tokens) - 1} here")
        for name, number in (("topk_prompt", body.topk_prompt_logprobs), ("topk_sample", body.topk_sample_logprobs)):
            if number > self._vocab_size:
                raise user(f"{name}_logprobs={number}: the vocabulary has {self._vocab_size} tokens; ask for fewer")
            _check_tops(name, number, len(tokens))

    def _params(self, body: SamplingBody, prompt_tokens: int, index: int) -> SamplingParams:
        """How sample `index` of a request is drawn: samples of a request have streams of their own."""
        room = self._context_tokens - prompt_tokens
        seed = secrets.randbits(62) if body.seed is None else stream(body.seed, index)
        stops = [body.stop] if isinstance(body.stop, str) else list(body.stop or [])
        if len(stops) > _MAX_STOPS or "" in stops:
            raise user(f"stop: has an empty text, or more than {_MAX_STOPS}; give what ends a completion")
        return SamplingParams(
            max_tokens=min(body.max_tokens or room, room),
            temperature=body.temperature,
            top_p=body.top_p if body.temperature else 1.0,
            top_k=max(body.top_k, 0) if body.temperature else 0,
            seed=seed,
            stop_token_ids=[stop for stop in stops if isinstance(stop, int)],
            stop=[stop for stop in stops if isinstance(stop, str)],
            ignore_eos=body.stop is not None,
        )


def _check_tops(name: str, number: int, positions: int) -> None:
    """Raises Fault for more likeliest tokens than a generator makes of one sequence."""
    if number * positions > MAX_TOP_LOGPROBS:
        raise user(
            f"{name}_logprobs={number}: of {positions} tokens that is {number * positions} log-probabilities; a "
            f"prompt, or a sample with its prompt, may have {MAX_TOP_LOGPROBS}; ask for fewer"
        )


async def _none() -> None:
    return None
