"""What a field of a config or of a family may hold: constraints beside it, and the words that refuse another value.

A field states its bounds with the classes of `annotated_types`, and what to do about another value with `Hint`:

    num_steps: Annotated[int, Ge(0), Hint("use 0 for no reinforcement")] = 100

`validation.fields` reads them before a run starts. None satisfies every constraint, where the field's type has it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt

__all__ = ["BETAS", "Check", "Hint", "complaint"]


@dataclass(frozen=True, slots=True)
class Hint:
    """What to do about a value out of the field's bounds: the second half of the message."""

    text: str


@dataclass(frozen=True, slots=True)
class Check:
    """A constraint that no bound expresses: a function that is true of a good value, and the message for another."""

    holds: Callable[[Any], Any]
    message: str


BETAS = Check(
    lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
    "must be two numbers from 0 to below 1; AdamW's usual ones are (0.9, 0.999)",
)
"""Of Adam's decay rates: with 1 its means never move, and beyond they grow without bound."""

_HOLDS = {"gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le}
_WORDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def complaint(value: Any, kind: Any) -> str:
    """What is wrong with a value by the constraints of its field, and what to do; empty where nothing is wrong. `kind`
    is the field's type, with constraints where it is `Annotated`. A number within bounds is finite."""
    if value is None:
        return ""
    bounds: dict[str, Any] = {}
    hint = ""
    for part in _single(getattr(kind, "__metadata__", ())):
        if isinstance(part, Check) and not part.holds(value):
            return part.message
        if isinstance(part, Hint):
            hint = part.text
        if isinstance(part, (Gt, Ge, Lt, Le)):
            name = type(part).__name__.lower()
            bounds[name] = getattr(part, name)
    if not bounds or -math.inf < value < math.inf and all(_HOLDS[name](value, bounds[name]) for name in bounds):
        return ""
    hint = hint or ("use 0 or more" if bounds == {"ge": 0} else "")
    return _requirement(bounds, value) + (f"; {hint}" if hint else "")


def _single(constraints: tuple[Any, ...]) -> Iterator[Any]:
    """The constraints one by one: an `Interval` is two of them."""
    for constraint in constraints:
        yield from constraint if isinstance(constraint, GroupedMetadata) else (constraint,)


def _requirement(bounds: dict[str, Any], value: Any) -> str:
    """Bounds in words, for a value out of them. Example: `{"gt": 0, "le": 1}` is "must be above 0 and at most 1"."""
    if bounds.keys() == {"ge", "le"}:
        return f"must be between {bounds['ge']} and {bounds['le']}"
    words = " and ".join(f"{_WORDS[name]} {bound}" for name, bound in bounds.items())
    words = {"at least 0": "not negative", "above 0": "positive"}.get(words, words)
    if len(bounds) == 1 and not -math.inf < value < math.inf:
        return f"must be finite and {words}"
    return "must not be negative" if words == "not negative" else f"must be {words}"
