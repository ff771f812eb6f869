"""The noise that draws a token: a function of the request's stream and of the token's number in it alone.

A stream is named by the request's seed. Token t of a request, counted from 0, has a key: output t of SplitMix64 seeded
with that seed. The key gives every token of the vocabulary a Gumbel noise, and the largest sum of logit and noise is
drawn. The keys of a batch are computed at once. vLLM's V1 model runner asks a random generator per request instead, one
by one. vLLM's V2 model runner draws by seed and position itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from torchtitan_rl.engine.gumbel import gumbel_argmax

__all__ = ["install", "move_rows", "splitmix64"]


def install(runner: Any, seed: int) -> None:
    """Makes a V1 model runner draw by stream and number. `seed`: of the requests that name no stream."""
    streams = _Streams(runner.input_batch, seed)
    runner.input_batch.logitsprocs.argmax_invariant.append(streams)
    runner.sampler.topk_topp_sampler.forward = streams.draw


class _Streams(LogitsProcessor):
    """The seed of the request in each row of a V1 batch. vLLM tells processors of logits which rows change; this
    processor leaves logits alone."""

    def __init__(self, batch: Any, seed: int) -> None:
        self._batch, self._unnamed = batch, np.random.default_rng(seed)
        self._seeds_R = np.zeros(batch.max_num_reqs, dtype=np.uint64)
        kernel = "fused_gumbel_argmax"  # of vLLM for a CPU, in one pass
        self._argmax = getattr(torch.ops._C, kernel) if hasattr(torch.ops._C, kernel) else gumbel_argmax

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """A request without a seed gets one whenever it enters the batch."""
        if batch_update is None:
            return
        for row, params, _, _ in batch_update.added:
            seed = self._unnamed.integers(2**63) if params.seed is None else params.seed
            self._seeds_R[row] = int(seed) % 2**64
        move_rows(self._seeds_R, batch_update)

    def draw(self, logits_RV: torch.Tensor, _: Any, top_k: Any, top_p: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens (rows,), and log-probabilities (rows, vocabulary) of the distribution that they are drawn from."""
        logits_RV, rows = apply_top_k_top_p(logits_RV, top_k, top_p), slice(len(logits_RV))
        num_sampled_R = self._batch.num_tokens_no_spec[rows] - self._batch.num_prompt_tokens[rows]
        keys_R = torch.from_numpy(splitmix64(self._seeds_R[rows], num_sampled_R)).to(logits_RV.device)
        return self._argmax(logits_RV, keys_R), logits_RV.log_softmax(-1, dtype=torch.float32)


def move_rows(values_R: np.ndarray, batch_update: BatchUpdate) -> None:
    """Moves what is known of each row of a V1 batch with the rows that vLLM has moved or exchanged, in place."""
    for row, other, direction in batch_update.moved:
        swap = direction == MoveDirectionality.SWAP
        values_R[[other, row]] = values_R[[row, other if swap else row]]


def splitmix64(seeds: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Output number `outputs`, from 0, of SplitMix64 seeded with `seeds` (uint64), as int64 of the same bits.

    Steele, Lea, Flood 2014, https://doi.org/10.1145/2660193.2660195; https://prng.di.unimi.it/splitmix64.c."""
    z: np.ndarray = seeds + (outputs.astype(np.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)).view(np.int64)
