"""The verbs of `torchtitan-rl` that look at runs."""

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


def _explain_mismatch_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("run", help="a run directory with checkpoints")
    sub.add_argument("--step", type=int, help="the batch of this step; default: the newest that can be explained")
    sub.add_argument("--rollouts", type=int, default=8, metavar="N", help="rollouts that are scored again")


def _explain_mismatch(args: argparse.Namespace) -> int:
    """Prints the parts of the gap and the cause. Returns 1 where a cause was looked for."""
    import asyncio
    from pathlib import Path

    from torchtitan_rl.run.explain_run import explain, text

    if args.rollouts < 1:
        raise ValueError(f"--rollouts={args.rollouts}: must be at least 1")
    explanation = asyncio.run(explain(Path(args.run), step=args.step, num_rollouts=args.rollouts))
    print(text(explanation))
    return 1 if explanation.causes else 0


VERBS: dict[str, Verb] = {
    "explain-mismatch": Verb(
        "say why trainer and generator disagreed about sampled tokens", _explain_mismatch_arguments, _explain_mismatch
    )
}
