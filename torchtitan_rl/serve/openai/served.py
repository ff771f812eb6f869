"""What clients without a session meet: one policy, by its name and its published versions, and its base."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchtitan_rl.rollout.policy import Policy
from torchtitan_rl.serve.errors import Refused
from torchtitan_rl.types import WITHOUT_ADAPTERS

__all__ = ["BASE", "Served", "not_served", "unknown_model"]

BASE = "base"
"""The name of the model without adapters."""


@dataclass(kw_only=True, slots=True)
class Served:
    """What clients without a session meet: one policy, newest or of a version that is published."""

    name: str
    policy: Policy
    versions: Callable[[], list[int]]
    """The versions that can be asked for as `NAME@VERSION`."""
    no_base: str = "the policy has no adapters beside a base; use the policy"
    """Why `base` cannot be asked for, and what to do; empty: it can."""
    tool_parser: str = ""
    ignored: tuple[str, ...] = ()
    """Parameters of requests that are left out."""

    def names(self) -> list[str]:
        base = [] if self.no_base else [BASE]
        return [self.name, *base, *(f"{self.name}@{version}" for version in self.versions())]

    def version(self, model: str | None) -> int | None:
        """The version that a name means, `WITHOUT_ADAPTERS` for the base; None: the newest. Raises Refused (404) for
        any other name."""
        if model == BASE:
            if self.no_base:
                raise not_served(BASE, self.no_base)
            return WITHOUT_ADAPTERS
        name, at, version = (self.name if model is None else model).partition("@")
        if name == self.name and not at:
            return None
        if name == self.name and version.isdecimal() and int(version[:18]) in self.versions():
            return int(version)
        raise unknown_model(model, self.names())


def unknown_model(model: str | None, names: list[str]) -> Refused:
    """The refusal (404) of a name that is none of `names`."""
    return not_served(model, f"is not served here; use {' or '.join(names[:4])}")


def not_served(model: str | None, why: str) -> Refused:
    """The refusal (404) of a name; `why` says what to do, too."""
    return Refused(404, f"model={str(model)[:80]!r}: {why}", param="model", code="model_not_found")
