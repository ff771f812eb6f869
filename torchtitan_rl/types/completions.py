"""How one completion is drawn, and which settings draw from another distribution than the policy's."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated

from annotated_types import Ge, Gt, Interval

from torchtitan_rl.constraints import Hint

__all__ = [
    "DistributionSettings",
    "Request",
    "SamplingParams",
    "Scores",
    "MIN_TEMPERATURE",
    "NEUTRAL",
    "WITHOUT_ADAPTERS",
    "alterations",
    "changes",
]

MIN_TEMPERATURE = 0.01
"""The smallest temperature besides 0: vLLM samples at 0.01 where it is asked for less."""

WITHOUT_ADAPTERS = -1
"""In the place of a policy version: the base, in an engine that holds adapters beside it."""

NEUTRAL: dict[str, tuple[float, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
}
"""Settings that alter the distribution which tokens are drawn from -> the values that leave the distribution as the
policy gives it. The log-probability of a token under an altered distribution is not the policy's, so no completion that
was drawn with such a setting trains."""


@dataclass(kw_only=True, slots=True)
class DistributionSettings:
    """Settings by which tokens are drawn from another distribution than the policy's own, as fields of a request and of
    configs. The first three act on samples only: a greedy completion has the likeliest token in any case. The bounds of
    the fields are checked in configs."""

    top_p: Annotated[float, Interval(gt=0, le=1), Hint("use 1 to keep every token")] = 1.0
    """Draw from the likeliest tokens whose probabilities sum to `top_p`; 1: from every token."""
    top_k: Annotated[int, Ge(0), Hint("use 0 to keep every token")] = 0
    """Draw from the `top_k` likeliest tokens; 0: from every token."""
    min_p: Annotated[float, Interval(ge=0, le=1), Hint("use 0 to keep every token")] = 0.0
    """Draw from the tokens that are at least `min_p` times as likely as the likeliest; 0: from every token."""
    repetition_penalty: Annotated[float, Gt(0), Hint("use 1 for no penalty")] = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens in the prompt or the completion so far; 1: no
    penalty."""
    presence_penalty: Annotated[float, Interval(ge=-2, le=2), Hint("use 0 for no penalty")] = 0.0
    """Subtracted from the logit of every token that the completion has already; 0: no penalty."""
    frequency_penalty: Annotated[float, Interval(ge=-2, le=2), Hint("use 0 for no penalty")] = 0.0
    """Subtracted from the logit of a token as often as the completion has the token already; 0: no penalty."""


@dataclass(kw_only=True, slots=True)
class SamplingParams(DistributionSettings):
    """How one completion is drawn. Example: `SamplingParams(max_tokens=16, temperature=1.0, seed=3)`."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy; a sample's is at least `MIN_TEMPERATURE`."""
    seed: int | None = None
    """The stream of random numbers: token t takes number t, so equal seed, prompt and weights give equal tokens. On a
    GPU rounding depends on the batch, and a token may differ: docs/numerics.md says how rarely."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end generation, besides the end-of-sequence token; the completion keeps the stop token."""
    stop: list[str] = field(default_factory=list)
    """Strings that end generation once the decoded text holds one."""
    ignore_eos: bool = False
    structure: str = ""
    """What the completion's text must be: a structural tag of xgrammar as JSON
    (https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html). A token that would leave it is never drawn, and
    log-probabilities are among the tokens that could be drawn: no completion with a structure trains. Empty: any
    text."""

    def altered(self) -> dict[str, float | str]:
        """The settings by name that draw from another distribution than the policy's."""
        filters = {name: getattr(self, name) for name, off in NEUTRAL.items() if getattr(self, name) not in off}
        return filters | ({"structure": self.structure} if self.structure else {})


def alterations(params: SamplingParams, policy_version: int | None) -> dict[str, float | str]:
    """`params.altered()`, and the base in the place of a policy version."""
    base = {"policy_version": WITHOUT_ADAPTERS} if policy_version == WITHOUT_ADAPTERS else {}
    return params.altered() | base


def changes(settings: DistributionSettings) -> dict[str, float]:
    """Name -> value of every setting that differs from its default."""
    settings_of = {field.name: (getattr(settings, field.name), field.default) for field in fields(DistributionSettings)}
    return {name: value for name, (value, default) in settings_of.items() if value != default}


@dataclass(slots=True)
class Request:
    """One prompt to complete, or to score when `params` is None."""

    tokens: list[int]
    params: SamplingParams | None
    top_k: int = 0
    """For scoring: the number of likeliest tokens to score at each position; 0 scores the prompt's tokens."""
    cached: bool = False
    """For scoring: read the prefix cache. The tokens that it covers get no score."""
    number: int = 0
    """The request's place among those of its sampling client, from 1; 0: it has none. No answer depends on it."""
    adapter: int | None = None
    """The policy version whose adapters answer it, in an engine that holds several, or `WITHOUT_ADAPTERS`. None: the
    engine's weights do, in an engine without slots."""


class Scores(list):
    """The log-probability of every token of a prompt but the first."""

    policy_version: int | None = None
    """The version that computed them; None where new weights came while they waited, and where nobody knows."""
