"""Settings that alter the distribution which tokens are drawn from: for evaluations, never for training."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Interval

from torchtitan_rl.constraints import Hint

__all__ = ["AlteredSampling", "changes"]


@dataclass(kw_only=True, slots=True)
class AlteredSampling:
    """The distribution that tokens are drawn from, where it is not the policy's own. The first three act on samples
    only: a greedy completion has the likeliest token in any case. Example: `AlteredSampling(top_p=0.95, top_k=20)`."""

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


def changes(settings: AlteredSampling) -> dict[str, float]:
    """Name -> value of every setting that differs from its default."""
    fields = dataclasses.fields(AlteredSampling)
    return {f.name: getattr(settings, f.name) for f in fields if getattr(settings, f.name) != f.default}
