"""`torchtitan-rl explain-mismatch`: why trainer and generators disagreed, from a run's records and checkpoints."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from torchtitan_rl.tools.explain_mismatch import explain, text

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run directory with checkpoints")
    parser.add_argument("--step", type=int, help="the batch of this step; default: the newest that can be explained")
    parser.add_argument("--rollouts", type=int, default=8, metavar="N", help="rollouts that are scored again")
    parser.add_argument(
        "--trust-code", action="store_true", help="import classes of the run's own that its config names"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the parts of the gap and the cause. Returns 1 where a cause was looked for."""
    if args.rollouts < 1:
        raise ValueError(f"--rollouts={args.rollouts}: must be at least 1")
    explaining = explain(Path(args.run), step=args.step, num_rollouts=args.rollouts, trusted=args.trust_code)
    explanation = asyncio.run(explaining)
    print(text(explanation))
    return 1 if explanation.causes else 0
