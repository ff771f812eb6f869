"""Tests of this repository as a check: how many passed, and the first line of what each failure said."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from scripts.gpu_checks.result import Result, run_check

ROOT = Path(__file__).parents[2]


class _Outcomes:
    """Tells the result of every test as it ends, so that a suite that is cut off has told of those that ran."""

    def __init__(self, result: Result) -> None:
        self.result, self.counts, self.seconds = result, {"passed": 0, "failed": 0, "skipped": 0}, {}

    def pytest_runtest_logreport(self, report) -> None:
        self.seconds[report.nodeid] = round(self.seconds.get(report.nodeid, 0.0) + report.duration, 1)
        if report.failed:
            print(report.longreprtext, flush=True)  # at once: pytest's own comes at the end, which may be cut off
            first_line = str(getattr(report.longrepr, "reprcrash", None) or report.longrepr).splitlines()[0]
            shown = first_line.replace(f"{ROOT}/", "")[:300]  # results are published, and the checkout's place is not
            self.result.require(False, f"{report.nodeid} ({report.when}): {shown}")
        if report.failed or report.skipped or report.when == "call":
            self.counts[report.outcome] += 1
            longest = dict(sorted(self.seconds.items(), key=lambda item: -item[1])[:5])
            self.result.note(tests=dict(self.counts), longest_s=longest)


def check(result: Result, args: argparse.Namespace) -> None:
    """Runs pytest in this process. Fails when a test does, when none passed, or when collecting them does."""
    outcomes = _Outcomes(result)
    left_out = [f"--ignore={path}" for path in args.ignore] + [f"--deselect={test}" for test in args.deselect]
    code = pytest.main([*args.pytest, *left_out, "-p", "no:cacheprovider", "-q", "-m", args.marker], plugins=[outcomes])
    result.require(code in (0, 1), f"pytest={pytest.ExitCode(code).name}: see the log")
    result.require(outcomes.counts["passed"] > 0, f"tests={outcomes.counts}: none has passed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=check.__doc__)
    parser.add_argument("--marker", default="not slow", help="pytest's -m")
    for option in ("--ignore", "--deselect"):
        parser.add_argument(option, action="append", default=[], help=f"pytest's {option}; may be repeated")
    parser.add_argument("pytest", nargs="+", help="files and tests")
    run_check(check, parser)
