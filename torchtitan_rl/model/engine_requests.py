"""Requests as vLLM's sampling parameters, and vLLM's outputs as completions and scores."""

from __future__ import annotations

from typing import Any

import torch
from vllm import SamplingParams as EngineSamplingParams
from vllm.sampling_params import RequestOutputKind

from torchtitan_rl.types import Completion, Request, SamplingParams

__all__ = ["engine_params", "completion", "scores"]


def engine_params(request: Request) -> EngineSamplingParams:
    """vLLM's sampling parameters; a request without parameters scores the prompt. Raises vLLM's error for values that
    vLLM refuses."""
    params: SamplingParams | None = request.params
    if params is None:
        return _scoring_params(request)
    return EngineSamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed,
        stop_token_ids=params.stop_token_ids,
        stop=params.stop,
        ignore_eos=params.ignore_eos,
        logprobs=0,
        detokenize=bool(params.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _scoring_params(request: Request) -> EngineSamplingParams:
    return EngineSamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=request.top_k,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion(output: Any, version_starts: list[tuple[int, int]]) -> Completion:
    """The completion of a finished `RequestOutput`. `version_starts`: (number of tokens already sampled, policy version
    from there on), the first at 0."""
    sampled = output.outputs[0]
    tokens = list(sampled.token_ids)
    logprobs = [entry[token].logprob for token, entry in zip(tokens, sampled.logprobs, strict=True)]
    versions: list[int] = []
    for (_, version), (end, _) in zip(version_starts, [*version_starts[1:], (len(tokens), 0)]):
        versions += [version] * (end - len(versions))
    return Completion(tokens=tokens, logprobs=logprobs, policy_versions=versions, finish_reason=sampled.finish_reason)


def scores(output: Any, top_k: int) -> list[float] | tuple[torch.Tensor, torch.Tensor]:
    """Scores from a finished `RequestOutput` of T prompt tokens: the log-probabilities of all tokens but the first,
    T - 1 numbers. With `top_k`, the likeliest tokens at the same positions instead, int64 (T - 1, top_k), and their
    log-probabilities, float32 (T - 1, top_k)."""
    tokens, entries = output.prompt_token_ids[1:], output.prompt_logprobs[1:]
    if not top_k:
        return [entry[token].logprob for token, entry in zip(tokens, entries, strict=True)]
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
