"""What clients without a session meet: one policy, by its name and its published versions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchtitan_rl.rollout.policy import Policy
from torchtitan_rl.serve.errors import Refused

__all__ = ["Served", "unknown_model"]


@dataclass(kw_only=True, slots=True)
class Served:
    """What clients without a session meet: one policy, newest or of a version that is published."""

    name: str
    policy: Policy
    versions: Callable[[], list[int]]
    """The versions that can be asked for as `NAME@VERSION`."""
    tool_parser: str = ""
    ignored: tuple[str, ...] = ()
    """Parameters of requests that are left out."""

    def names(self) -> list[str]:
        return [self.name, *(f"{self.name}@{version}" for version in self.versions())]

    def version(self, model: str | None) -> int | None:
        """The version that a name means; None: the newest. Raises Refused (404) for any other name."""
        name, at, version = (self.name if model is None else model).partition("@")
        if name == self.name and not at:
            return None
        if name == self.name and version.isdecimal() and int(version[:18]) in self.versions():
            return int(version)
        raise unknown_model(model, self.names())


def unknown_model(model: str | None, names: list[str]) -> Refused:
    """The refusal (404) of a name that is none of `names`."""
    return Refused(
        404,
        f"model={str(model)[:80]!r}: is not served here; use {' or '.join(names[:4])}",
        param="model",
        code="model_not_found",
    )
