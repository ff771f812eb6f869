"""What an engine's thread executes between two steps. Data only: rank 0 broadcasts each command to the other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchtitan_rl.record.schedule import Companion
from torchtitan_rl.types import Request

__all__ = ["AddRequests", "CancelRequests", "Command", "JoinCompany", "Load", "LoadAdapters", "Sleep", "Wake"]


@dataclass(slots=True)
class Command:
    """An instruction that every rank executes before the next engine step."""

    holds_step: bool = field(default=False, kw_only=True)
    """Whether another command is executed before the engine steps."""


@dataclass(slots=True)
class AddRequests(Command):
    """Admits requests, each with an id. Without requests: the command of a step that has no other."""

    requests: list[tuple[str, Request]] = field(default_factory=list)


@dataclass(slots=True)
class CancelRequests(Command):
    """Takes requests out of the engine."""

    numbers: list[int]
    """`Request.number` of each."""


@dataclass(slots=True)
class Load(Command):
    """Copies a staged version into the model."""

    version: int


@dataclass(slots=True)
class LoadAdapters(Command):
    """Copies the staged adapters of a version into a slot."""

    version: int
    slot: int


@dataclass(slots=True)
class JoinCompany(Command):
    """Adds requests in the place of those that were under way at a recorded load."""

    companions: list[Companion]


@dataclass(slots=True)
class Sleep(Command):
    """Frees weights and KV cache on the device."""


@dataclass(slots=True)
class Wake(Command):
    """Brings `"weights"` or `"kv_cache"` back."""

    part: str
