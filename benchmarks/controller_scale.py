"""What many replicas and many rollouts in flight cost the controller, on the simulator's clock.

    .venv/bin/python -m benchmarks.controller_scale [--replicas 8 32 128 256] [--rollouts 1008 10000 100000] [--modules]

Every run is a process of its own: two batches at lag 1, all of whose rollouts are in flight at once, each of one or
two turns. Engines, trainer and store are pretended, so the processor's time is the controller's, the event loop's and
that of what pretends. Prints a row per run, and by what power each figure grows. `--modules` adds where the time goes,
`--json FILE` writes everything. Memory is what the process has more of while all rollouts are in flight.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
from collections import Counter
from typing import Any

Row = dict[str, Any]
FIGURES = ("us/rollout", "us/token", "us/decision", "ms/publication", "bytes/rollout")
HEAD = f"{'replicas':>8} {'rollouts':>8} " + " ".join(f"{name:>14}" for name in FIGURES) + f" {'fakes':>6} {'loop':>6}"


def row_of(replicas: int, rollouts: int, order: str) -> Row:
    """One run, in this process."""
    from tests.simulation.scale import cost_of, decision_s

    cost = cost_of(replicas, rollouts, order=order)
    shares = Counter({name: number / max(1, cost.shares.total()) for name, number in cost.shares.items()})
    return {
        **{name: getattr(cost, name) for name in ("replicas", "rollouts", "requests", "tokens", "peak", "seconds")},
        "us/rollout": cost.controller_s / rollouts * 1e6,
        "us/token": cost.controller_s / cost.tokens * 1e6,
        "us/decision": decision_s(replicas, rollouts) * 1e6,
        "ms/publication": cost.publication_s * 1e3,
        "bytes/rollout": cost.bytes_in_flight,
        "shares": dict(shares.most_common()),
        "messages": cost.messages,
    }


def power(points: list[tuple[float, float]]) -> float:
    """The exponent e of the line y = c x^e through points with positive numbers, by least squares of the logarithms;
    NaN for fewer than two different x."""
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:
        return math.nan
    x_mean, y_mean = (sum(axis) / len(logs) for axis in zip(*logs, strict=True))
    squares = sum((x - x_mean) ** 2 for x, _ in logs)
    return sum((x - x_mean) * (y - y_mean) for x, y in logs) / squares


def growths(rows: list[Row]) -> list[str]:
    """Lines of text: by what power each figure grows with the rollouts at so many replicas, and the other way round."""
    lines = []
    for grows, fixed in (("rollouts", "replicas"), ("replicas", "rollouts")):
        for number in sorted({row[fixed] for row in rows}):
            rows_of_number = [row for row in rows if row[fixed] == number]
            powers = [(name, power([(row[grows], row[name]) for row in rows_of_number])) for name in FIGURES]
            if not math.isnan(powers[0][1]):
                exponents = ", ".join(f"{name} {exponent:+.2f}" for name, exponent in powers)
                lines.append(f"with {grows}, at {number} {fixed}: {exponents}")
    return lines


def text_of(row: Row) -> str:
    figures = " ".join(f"{row[name]:>14.1f}" for name in FIGURES)
    fakes, loop = row["shares"].get("simulator", 0.0), row["shares"].get("event loop", 0.0)
    return f"{row['replicas']:>8} {row['rollouts']:>8} {figures} {fakes:>6.0%} {loop:>6.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 32, 128, 256])
    parser.add_argument("--rollouts", type=int, nargs="+", default=[1008, 10_000, 100_000])
    parser.add_argument("--order", choices=["slots", "finished"], default="slots", help="of batches; finished: lag 2")
    parser.add_argument("--modules", action="store_true", help="where the controller's time goes")
    parser.add_argument("--json", default="", metavar="FILE")
    parser.add_argument("--here", action="store_true", help="the first run alone, in this process, as a line of JSON")
    args = parser.parse_args()
    if args.here:
        print(json.dumps(row_of(args.replicas[0], args.rollouts[0], args.order)))
        return
    rows = []
    print(HEAD)
    for rollouts, replicas in itertools.product(args.rollouts, args.replicas):
        cell = ["--here", "--replicas", str(replicas), "--rollouts", str(rollouts), "--order", args.order]
        ran = subprocess.run(
            [sys.executable, "-m", "benchmarks.controller_scale", *cell], stdout=subprocess.PIPE, text=True
        )
        if ran.returncode:
            raise SystemExit(f"replicas={replicas}, rollouts={rollouts}: the run failed, see above")
        rows.append(json.loads(ran.stdout.splitlines()[-1]))
        print(text_of(rows[-1]), flush=True)
        if args.modules:
            shares = rows[-1]["shares"].items()
            print(" " * 18 + ", ".join(f"{name} {share:.0%}" for name, share in shares), flush=True)
    print("", *growths(rows), sep="\n")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
