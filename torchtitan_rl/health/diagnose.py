"""What is wrong with a run: rules about liveness, numerics and learning, and the verb that tells what they find."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_rl.health.facts import Facts
from torchtitan_rl.health.rules.answers import ANSWERS
from torchtitan_rl.health.rules.learning import LEARNING
from torchtitan_rl.health.rules.liveness import LIVENESS
from torchtitan_rl.health.rules.numerics import NUMERICS
from torchtitan_rl.health.rules.rule import Finding, Rule
from torchtitan_rl.health.run_reader import Run

__all__ = ["RULES", "Diagnosis", "Finding", "add_arguments", "check_thresholds", "diagnose", "examine", "look", "run"]

RULES: tuple[Rule, ...] = (*LIVENESS, *NUMERICS, *LEARNING, *ANSWERS)
"""Every rule, in the order in which findings are told: liveness first, then numerics, then learning."""

SOMETHING_WRONG = 3
"""Exit status of `torchtitan-rl diagnose` where a rule has found something."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the rules say of a run."""

    findings: list[Finding]
    missing: list[str]
    """What could not be read of the run's directory, and why, one sentence each."""
    lacks: dict[str, str]
    """Rule -> why it could not look at this run."""

    @property
    def verdict(self) -> str:
        """What follows from the findings, in a sentence. That nothing is wrong follows only where every rule could
        look and all files could be read."""
        every, looked = len(RULES), len(RULES) - len(self.lacks)
        if self.findings:
            return f"{len(self.findings)} of {every} rules have found something"
        if not looked:
            return "nothing is known: there is nothing that a rule could look at"
        if self.lacks or self.missing:
            return f"{looked} of {every} rules could look, and found nothing; what was not looked at may be wrong"
        return "nothing wrong found"

    @property
    def not_looked_at(self) -> list[str]:
        """What could not be read and which rules could not look, one sentence each; rules of one reason together."""
        rules: dict[str, list[str]] = {}
        for rule, why in self.lacks.items():
            rules.setdefault(why, []).append(rule)
        together = [
            f"{'rules' if len(names) > 1 else 'rule'} {', '.join(names)}: {why}" for why, names in rules.items()
        ]
        return [*self.missing, *together]


def diagnose(run: Run, thresholds: Mapping[str, float] = {}) -> list[Finding]:
    """What is wrong with a run, the most urgent first; [] when nothing is. See `examine`."""
    return examine(run, thresholds).findings


def examine(run: Run, thresholds: Mapping[str, float] = {}, now: float | None = None) -> Diagnosis:
    """What the rules say of a run's directory, finished or not, whole or not. A threshold is that of `thresholds`, else
    of `record.thresholds` in the run's config, else the rule's. `now` is in seconds since 1970; None: the present.
    Raises ValueError for a threshold of no rule."""
    check_thresholds(thresholds, "--threshold ")
    facts = Facts.of(run, now)
    recorded = facts.setting("record.thresholds", {})
    findings = look(facts, {**(recorded if isinstance(recorded, dict) else {}), **thresholds})
    lacks = {rule.name: why for rule in RULES if (why := _lacks(rule, facts, findings))}
    return Diagnosis(findings, facts.missing, lacks)


def _lacks(rule: Rule, facts: Facts, findings: list[Finding]) -> str:
    """Why a rule could not look; empty where it could."""
    if rule.name in facts.failed or rule.name in [finding.rule for finding in findings]:
        return facts.failed.get(rule.name, "")
    try:
        return rule.lacks(facts)
    except Exception as error:
        return _unreadable(error)


def _unreadable(error: Exception) -> str:
    return f"cannot read the records ({type(error).__name__}: {error})"


def look(facts: Facts, thresholds: Mapping[str, float], rules: tuple[Rule, ...] = RULES) -> list[Finding]:
    """What the rules find. A rule that fails on records of another form is named in `facts.failed`."""
    found = []
    for rule in rules:
        try:
            finding = rule.on(facts, float(thresholds.get(rule.name, rule.threshold)))
        except Exception as error:
            facts.failed[rule.name] = _unreadable(error)
            continue
        if finding is not None:
            found.append(finding)
    return found


def check_thresholds(thresholds: Mapping[str, float], where: str) -> None:
    """Raises ValueError for a name that is no rule's, and for a threshold that is no number. `where` begins the
    message, such as `record.thresholds.`."""
    names = [rule.name for rule in RULES]
    for name, value in thresholds.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(names)}"
            raise ValueError(f"{where}{name}={value}: there is no such rule; {hint}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            raise ValueError(f"{where}{name}={value}: is no number; give one such as 0.5")


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
    """The verb `diagnose`: prints what is wrong with a run. Returns the exit status."""
    run = Run.open(args.run)
    diagnosis = examine(run, _given(args.threshold))
    status = SOMETHING_WRONG if diagnosis.findings else int(len(diagnosis.lacks) == len(RULES))
    if args.json:
        data = {
            "verdict": diagnosis.verdict,
            "findings": [finding.as_data() for finding in diagnosis.findings],
            "missing": diagnosis.missing,
            "lacks": diagnosis.lacks,
        }
        print(json.dumps(data, indent=1))
        return status
    for finding in diagnosis.findings:
        print(f"{finding.area} / {finding.rule}: {finding.what}")
        print(f"  threshold: {finding.threshold:g}")
        for name, text in _evidence(finding).items():
            print(f"  {name}: {text}")
        print(f"  to do: {finding.advice}\n")
    for sentence in diagnosis.not_looked_at:
        print(f"not looked at: {sentence}")
    print(f"{run.path}: {diagnosis.verdict}")
    return status


def _given(texts: list[str]) -> dict[str, float]:
    given = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            given[name.replace("-", "_")] = float(value)
        except ValueError:
            raise ValueError(f"--threshold {text}: write NAME=VALUE, such as truncation=0.5") from None
    return given


def _evidence(finding: Finding) -> dict[str, str]:
    """Name of what was read -> its values with their steps."""
    texts: dict[str, list[str]] = {}
    for name, step, value in finding.evidence:
        shown = value if isinstance(value, str) else f"{value:.4g}"
        texts.setdefault(name, []).append(shown if step is None else f"{shown} (step {step})")
    return {name: ", ".join(values) for name, values in texts.items()}
