"""Scoring a prompt's tokens in vLLM's terms: the request, and log-probabilities or likeliest tokens from the output."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import torch
from vllm import SamplingParams as EngineSamplingParams
from vllm.sampling_params import RequestOutputKind

from torchtitan_rl.types import Request, Scores

__all__ = ["scoring_params", "scores", "has_nan"]


def scoring_params(request: Request) -> EngineSamplingParams:
    """vLLM's parameters for a request without sampling parameters."""
    return EngineSamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=request.top_k,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=not request.cached,
    )


def scores(output: Any, request: Any) -> Scores | tuple[torch.Tensor, torch.Tensor]:
    """Scores from a finished `RequestOutput` of T prompt tokens: the log-probabilities of all tokens but the first,
    T - 1 numbers. With `request.top_k`, the likeliest tokens at the same positions instead, int64 (T - 1, top_k), and
    their log-probabilities, float32 (T - 1, top_k). Tokens whose position the prefix cache covered are NaN.
    `request.version_starts` has the versions while the request was in the engine, see `engine_steps.completion`."""
    cached, top_k = output.num_cached_tokens or 0, request.top_k
    tokens, entries = output.prompt_token_ids[1:], output.prompt_logprobs[1:]
    if not top_k:
        pairs = enumerate(zip(tokens, entries, strict=True))
        of_tokens = Scores(entry[token].logprob if i >= cached else math.nan for i, (token, entry) in pairs)
        if len(request.version_starts) == 1:
            of_tokens.policy_version = request.version_starts[0][1]
        return of_tokens
    rows = [_likeliest(entry, top_k) for entry in entries]
    return (
        torch.tensor([[token for token, _ in row] for row in rows]),
        torch.tensor([[logprob for _, logprob in row] for row in rows]),
    )


def has_nan(output: Any) -> bool:
    """Whether a finished `RequestOutput` has a NaN for a token that it sampled or scored."""
    if output.prompt_logprobs is None:
        sampled = output.outputs[0]
        return any(math.isnan(e[token].logprob) for token, e in zip(sampled.token_ids, sampled.logprobs, strict=True))
    scored = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    cached = output.num_cached_tokens or 0
    return any(math.isnan(entry[token].logprob) for token, entry in islice(scored, cached, None))


def _likeliest(entry: dict, top_k: int) -> list[tuple[int, float]]:
    """The `top_k` likeliest tokens of one position, best first, the lower id first among equals. vLLM's entry also has
    the prompt's own token; the token's rank says whether it is among the likeliest."""
    best = [(token, scored.logprob) for token, scored in entry.items() if scored.rank <= top_k]
    return sorted(best, key=lambda pair: (-pair[1], pair[0]))
