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


def _diagnose_arguments(parser: argparse.ArgumentParser) -> None:
    from torchtitan_rl.inspection.diagnose import add_arguments

    add_arguments(parser)


def _diagnose(args: argparse.Namespace) -> int:
    from torchtitan_rl.inspection.diagnose import tell

    return tell(args)


VERBS: dict[str, Verb] = {
    "diagnose": Verb("what is wrong with a run, finished or going on, and what to do", _diagnose_arguments, _diagnose)
}
