"""The verb `diagnose`: prints what is wrong with a run, finished or going on, and what to do."""

from __future__ import annotations

import argparse
import json

from torchtitan_rl.health.diagnosis import examine
from torchtitan_rl.health.rules.rule import Finding
from torchtitan_rl.health.rules.table import RULES
from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.record.json_lines import encode

__all__ = ["add_arguments", "run"]

SOMETHING_WRONG = 3
"""Exit status of `torchtitan-rl diagnose` where a rule has found something."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run directory")
    parser.add_argument(
        "--threshold", action="append", default=[], metavar="NAME=VALUE", help="a rule's threshold; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="findings as JSON")
    parser.epilog = (
        f"Exit status: {SOMETHING_WRONG} when a rule has found something, 0 when none has, 1 for a mistake, and where\n"
        "there is nothing that a rule could look at."
    )


def run(args: argparse.Namespace) -> int:
    """Prints what is wrong with a run. Returns the exit status."""
    directory = Run.open(args.run)
    diagnosis = examine(directory, _thresholds(args.threshold))
    status = SOMETHING_WRONG if diagnosis.findings else int(len(diagnosis.lacks) == len(RULES))
    if args.json:
        data = {
            "verdict": diagnosis.verdict,
            "findings": [finding.as_data() for finding in diagnosis.findings],
            "missing": diagnosis.missing,
            "lacks": diagnosis.lacks,
        }
        print(json.dumps(encode(data), indent=1, allow_nan=False))
        return status
    for finding in diagnosis.findings:
        print(f"{finding.area} / {finding.rule}: {finding.what}")
        print(f"  threshold: {finding.threshold:g}")
        for name, text in _evidence(finding).items():
            print(f"  {name}: {text}")
        print(f"  to do: {finding.advice}\n")
    for sentence in diagnosis.not_looked_at:
        print(f"not looked at: {sentence}")
    print(f"{directory.path}: {diagnosis.verdict}")
    return status


def _thresholds(texts: list[str]) -> dict[str, float]:
    """Rule -> threshold, of texts NAME=VALUE."""
    thresholds = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            thresholds[name.replace("-", "_")] = float(value)
        except ValueError:
            raise ValueError(f"--threshold {text}: write NAME=VALUE, such as truncation=0.5") from None
    return thresholds


def _evidence(finding: Finding) -> dict[str, str]:
    """Name of what was read -> its values with their steps."""
    texts: dict[str, list[str]] = {}
    for name, step, value in finding.evidence:
        shown = str(value) if isinstance(value, (str, int)) else f"{value:.4g}"
        texts.setdefault(name, []).append(shown if step is None else f"{shown} (step {step})")
    return {name: ", ".join(values) for name, values in texts.items()}
