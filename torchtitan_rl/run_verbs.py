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


def _plot_arguments(parser: argparse.ArgumentParser) -> None:
    from torchtitan_rl.inspection.plots import add_arguments

    add_arguments(parser)


def _plot(args: argparse.Namespace) -> int:
    from torchtitan_rl.inspection.plots import run

    return run(args)


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    from torchtitan_rl.inspection.comparison import add_arguments

    add_arguments(parser)


def _compare(args: argparse.Namespace) -> int:
    from torchtitan_rl.inspection.comparison import run

    return run(args)


VERBS: dict[str, Verb] = {
    "plot": Verb("draw curves of several runs in one picture", _plot_arguments, _plot),
    "compare": Verb("what differs between runs, beside the spread over seeds", _compare_arguments, _compare),
}
