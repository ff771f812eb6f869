"""The verbs of `torchtitan-rl` that look at runs. Nothing here starts a mesh."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["VERBS", "Verb"]


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb: its help, what adds its arguments to a parser, and what runs it and returns the exit status."""

    text: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


VERBS: dict[str, Verb] = {}
