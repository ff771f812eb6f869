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


def _view(args: argparse.Namespace) -> int:
    from torchtitan_rl.view.verb import run

    return run(args)


def _view_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run directory; the run may be going on")
    parser.add_argument("--port", type=int, default=8765, help="the next free one from here on; 0: any")


VERBS: dict[str, Verb] = {"view": Verb("show runs in the browser, while they go on too", _view_arguments, _view)}
