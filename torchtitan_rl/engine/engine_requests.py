"""Between our requests and vLLM's: sampling parameters one way, completions and scores the other."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import torch
from vllm import SamplingParams as EngineSamplingParams
from vllm.sampling_params import RequestOutputKind

from torchtitan_rl.engine.layer_adapters import EXTRA_ARGUMENT, NO_SLOT
from torchtitan_rl.engine.structures import structured_outputs
from torchtitan_rl.types import MIN_TEMPERATURE, NEUTRAL, Completion, Request, SamplingParams, Scores

__all__ = ["completion", "engine_params", "has_nan", "scores"]

_SHARED_FIELDS = ("max_tokens", "temperature", "seed", "stop_token_ids", "stop", "ignore_eos", *NEUTRAL)
"""The fields that vLLM's sampling parameters have under the same names."""


def engine_params(request: Request, adapter_slot: int = NO_SLOT) -> EngineSamplingParams:
    """vLLM's sampling parameters; a request without parameters scores the prompt. `adapter_slot`: of the adapters that
    answer it. Raises vLLM's error for values that vLLM refuses, and ValueError for a temperature that it alters."""
    params: SamplingParams | None = request.params
    extra = None if adapter_slot == NO_SLOT else {EXTRA_ARGUMENT: adapter_slot}
    if params is None:
        return _scoring_params(request, extra)
    if 0 < params.temperature < MIN_TEMPERATURE:  # vLLM would sample at another one than the caller's
        raise ValueError(
            f"temperature={params.temperature:g}: is below the smallest that the engine samples at; use 0 for greedy, "
            f"or {MIN_TEMPERATURE} or more"
        )
    return EngineSamplingParams(
        **{name: getattr(params, name) for name in _SHARED_FIELDS},
        logprobs=0,
        flat_logprobs=True,  # one list of numbers a request, in place of a dictionary and an object a token
        detokenize=bool(params.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        structured_outputs=structured_outputs(params.structure),
        extra_args=extra,
    )


def _scoring_params(request: Request, extra: dict[str, Any] | None) -> EngineSamplingParams:
    return EngineSamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=request.top_k,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=not request.cached,
        extra_args=extra,
    )


def completion(output: Any, version_starts: list[tuple[int, int]]) -> Completion:
    """The completion of a finished `RequestOutput`. `version_starts`: (number of tokens already sampled, policy version
    from there on), the first at 0."""
    sampled = output.outputs[0]
    tokens = list(sampled.token_ids)
    versions: list[int] = []
    for (_, version), (end, _) in zip(version_starts, [*version_starts[1:], (len(tokens), 0)]):
        versions += [version] * (end - len(versions))
    return Completion(
        tokens=tokens,
        logprobs=list(sampled.logprobs.logprobs),
        policy_versions=versions,
        finish_reason=sampled.finish_reason,
    )


def scores(output: Any, request: Any) -> Scores | tuple[torch.Tensor, torch.Tensor]:
    """Scores from a finished `RequestOutput` of T prompt tokens: the log-probabilities of all tokens but the first,
    T - 1 numbers. With `request.top_k`, the likeliest tokens at the same positions instead, int64 (T - 1, top_k), and
    their log-probabilities, float32 (T - 1, top_k). Tokens whose position the prefix cache covered are NaN.
    `request.version_starts` has the versions while the request was in the engine, see `completion`."""
    cached, top_k = output.num_cached_tokens or 0, request.top_k
    tokens, entries = output.prompt_token_ids[1:], output.prompt_logprobs[1:]
    if not top_k:
        pairs = enumerate(zip(tokens, entries, strict=True))
        token_scores = Scores(entry[token].logprob if i >= cached else math.nan for i, (token, entry) in pairs)
        if len(request.version_starts) == 1:
            token_scores.policy_version = request.version_starts[0][1]
        return token_scores
    rows = [_likeliest(entry, top_k) for entry in entries]
    return (
        torch.tensor([[token for token, _ in row] for row in rows]),
        torch.tensor([[logprob for _, logprob in row] for row in rows]),
    )


def has_nan(output: Any) -> bool:
    """Whether a finished `RequestOutput` has a NaN for a token that it sampled or scored."""
    if output.prompt_logprobs is None:
        return any(map(math.isnan, output.outputs[0].logprobs.logprobs))
    scored = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    cached = output.num_cached_tokens or 0
    return any(math.isnan(entry[token].logprob) for token, entry in islice(scored, cached, None))


def _likeliest(entry: dict, top_k: int) -> list[tuple[int, float]]:
    """The `top_k` likeliest tokens of one position, best first, the lower id first among equals. vLLM's entry also has
    the prompt's own token; the token's rank says whether it is among the likeliest."""
    best = [(token, scored.logprob) for token, scored in entry.items() if scored.rank <= top_k]
    return sorted(best, key=lambda pair: (-pair[1], pair[0]))
