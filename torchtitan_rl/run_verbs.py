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


def _timeline_arguments(parser: argparse.ArgumentParser) -> None:
    from torchtitan_rl.inspection.timeline.verb import add_arguments

    add_arguments(parser)


def _timeline(args: argparse.Namespace) -> int:
    from torchtitan_rl.inspection.timeline.verb import run

    return run(args)


VERBS: dict[str, Verb] = {"timeline": Verb("where the time of a run's steps went", _timeline_arguments, _timeline)}
