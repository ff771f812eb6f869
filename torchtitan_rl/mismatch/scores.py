"""Samples of a run's tokens, and their scores by the generators: of the tokens, or of whole distributions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.mismatch.causes import Position, tempered
from torchtitan_rl.mismatch.gap import Sample, unknown
from torchtitan_rl.record.records import Trained
from torchtitan_rl.types import Datum, Rollout, Scores, Turn

__all__ = ["Rescorer", "VersionGone", "add_trainer", "samples_of", "tokens_of"]

_LARGEST_TOP = 4096
"""Likeliest tokens that a distribution holds at most. A larger vocabulary is cut there."""


def samples_of(rollout: Rollout) -> list[Sample]:
    """One sample per run of turns that extend each other, as training has one datum. Without scores."""
    segments: list[tuple[list[int], list[tuple[int, Turn]]]] = []
    for index, turn in enumerate(rollout.turns):
        if not segments or turn.prompt_tokens[: len(segments[-1][0])] != segments[-1][0]:
            segments.append(([], []))
        segments[-1][0][:] = turn.prompt_tokens + turn.completion.tokens
        segments[-1][1].append((index, turn))
    return [_sample(rollout.id, tokens, turns) for tokens, turns in segments]


def _sample(rollout: str, tokens: list[int], turns: list[tuple[int, Turn]]) -> Sample:
    spans = [range(len(turn.prompt_tokens), len(turn.prompt_tokens + turn.completion.tokens)) for _, turn in turns]
    place_N = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    reported_N = np.concatenate([np.array(turn.completion.logprobs, np.float64) for _, turn in turns])
    return Sample(
        rollout=rollout,
        tokens=tokens,
        place_N=place_N,
        turn_N=np.concatenate([np.full(len(span), index) for (index, _), span in zip(turns, spans)]),
        reported_N=np.where(np.isfinite(reported_N), reported_N, np.nan),
        version_N=np.concatenate([np.array(turn.completion.policy_versions, int) for _, turn in turns]),
        trainer_N=unknown(len(place_N)),
        between_N=unknown(len(place_N)),
        sampled_N=unknown(len(place_N)),
        ended_N=unknown(len(place_N)),
    )


def add_trainer(samples: list[Sample], trained: Sequence[Trained]) -> None:
    """Fills in the trainer's log-probabilities, except where the data have several targets a token. `trained` are the
    sequences of the samples' rollout, of which a `credit_fn` may have left some out."""
    logprobs = {tuple(tokens_of(datum)): logprobs_T for datum, logprobs_T in trained if logprobs_T.dim() == 1}
    for sample in samples:
        if (logprobs_T := logprobs.get(tuple(sample.tokens))) is not None:
            sample.trainer_N = sample.scored(logprobs_T.tolist())


def tokens_of(datum: Datum) -> list[int]:
    """All tokens of a sequence with one target a token, the last target included."""
    return [*datum.tokens.tolist(), int(datum.target_tokens[-1])]


class VersionGone(RuntimeError):
    """New weights came before the version that was asked for had scored everything."""


class Rescorer:
    """Scores of samples by the generators, computed without a cache, at the run's temperature."""

    def __init__(
        self, generator: SamplingClient, temperature: float, vocab_size: int, version: int | None = None
    ) -> None:
        """`version` has to score, see `of_version`; None: whichever is served."""
        self.generator, self.temperature, self.version = generator, temperature, version
        self._vocab_size, self._num_top = vocab_size, min(vocab_size, _LARGEST_TOP)

    def of_version(self, version: int) -> Rescorer:
        """A rescorer bound to `version`: it raises VersionGone where another version answers."""
        return Rescorer(self.generator, self.temperature, self._vocab_size, version)

    async def scores(self, samples: list[Sample], *, without: int = 0, cached: bool = False) -> list[np.ndarray]:
        """Log-probability of each sampled token, one array (N,) per sample. `without`: so many tokens of
        the first prompt are left out of what the generators read, the first ones, or with a negative number the last
        ones. `cached`: the prefix cache is read, at temperature 1, and the tokens that it covers are NaN."""
        if self.temperature != 1.0 and not cached:
            at = await self.positions(samples, without=without)
            return _cut(tempered(at, self.temperature), samples)
        answers = await asyncio.gather(*(self._score(_without(sample, without), cached) for sample in samples))
        return [_after(answer, sample, abs(without)) for answer, sample in zip(answers, samples)]

    async def positions(self, samples: list[Sample], *, without: int = 0) -> Position:
        """The distributions at the sampled tokens of all samples, at temperature 1."""
        own, top = [], []
        for sample in samples:  # one by one: a distribution has many entries
            tokens = _without(sample, without)
            scores, (_, best) = await asyncio.gather(
                self._score(tokens), self.generator.score_top(tokens, self._num_top)
            )
            own.append(_after(scores, sample, abs(without)))
            top.append(best.double().numpy()[sample.place_N - 1 - abs(without)])
        return Position(np.concatenate(own), np.concatenate(top))

    async def served(self, samples: list[Sample]) -> tuple[int, list[np.ndarray]] | None:
        """(version, scores) by the version that the generators hold; None where new weights came meanwhile. The
        requests name no version: no replica goes back for them."""
        if (version := self.generator.loaded_version()) is None:
            return None
        try:
            return version, await self.of_version(version).scores(samples)
        except VersionGone:
            return None

    async def _score(self, tokens: list[int], cached: bool = False) -> Scores:
        scores = await self.generator.score(tokens, cached=cached)
        if self.version not in (None, scores.policy_version):
            raise VersionGone(f"policy_version={self.version}: new weights came while tokens were scored again")
        return scores


def _without(sample: Sample, num: int) -> list[int]:
    first = int(sample.place_N[0])
    return sample.tokens[num:] if num >= 0 else sample.tokens[: first + num] + sample.tokens[first:]


def _after(scores: Scores, sample: Sample, fewer: int) -> np.ndarray:
    """The sampled tokens' scores out of those of all tokens but the first, of which `fewer` were left out before."""
    return np.asarray(scores, np.float64)[sample.place_N - 1 - fewer]


def _cut(values_N: np.ndarray, samples: list[Sample]) -> list[np.ndarray]:
    return np.split(values_N, np.cumsum([len(sample.place_N) for sample in samples])[:-1])
