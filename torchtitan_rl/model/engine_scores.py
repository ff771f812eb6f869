"""Scoring a prompt's tokens in vLLM's terms: the request, and log-probabilities or likeliest tokens from the output."""

from __future__ import annotations

import math
from typing import Any

import torch
from vllm import SamplingParams as EngineSamplingParams
from vllm.sampling_params import RequestOutputKind

from torchtitan_rl.types import Request

__all__ = ["scoring_params", "scores"]


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


def scores(output: Any, top_k: int) -> list[float] | tuple[torch.Tensor, torch.Tensor]:
    """Scores from a finished `RequestOutput` of T prompt tokens: the log-probabilities of all tokens but the first,
    T - 1 numbers. With `top_k`, the likeliest tokens at the same positions instead, int64 (T - 1, top_k), and their
    log-probabilities, float32 (T - 1, top_k). Tokens whose position the prefix cache covered are NaN."""
    cached = output.num_cached_tokens or 0
    tokens, entries = output.prompt_token_ids[1:], output.prompt_logprobs[1:]
    if not top_k:
        pairs = enumerate(zip(tokens, entries, strict=True))
        return [entry[token].logprob if index >= cached else math.nan for index, (token, entry) in pairs]
    rows = [_likeliest(entry, top_k) for entry in entries]
    return (
        torch.tensor([[token for token, _ in row] for row in rows]),
        torch.tensor([[logprob for _, logprob in row] for row in rows]),
    )


def _likeliest(entry: dict, top_k: int) -> list[tuple[int, float]]:
    """The `top_k` likeliest tokens of one position, best first, the lower id first among equals. vLLM's entry also has
    the prompt's own token; the token's rank says whether it is among the likeliest."""
    best = [(token, scored.logprob) for token, scored in entry.items() if scored.rank <= top_k]
    return sorted(best, key=lambda pair: (-pair[1], pair[0]))
