"""What is wrong with a run's directory, by the table of rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_rl.health.facts import RunFacts
from torchtitan_rl.health.rules.rule import Finding, Rule
from torchtitan_rl.health.rules.table import RULES, check_thresholds, look, unreadable
from torchtitan_rl.health.run_reader import Run

__all__ = ["Diagnosis", "diagnose", "examine"]


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
    facts = RunFacts.of(run, now)
    recorded = facts.setting("record.thresholds", {})
    findings = look(facts, {**(recorded if isinstance(recorded, dict) else {}), **thresholds})
    lacks = {rule.name: why for rule in RULES if (why := _lacks(rule, facts, findings))}
    return Diagnosis(findings, facts.missing, lacks)


def _lacks(rule: Rule, facts: RunFacts, findings: list[Finding]) -> str:
    """Why a rule could not look; empty where it could."""
    if rule.name in facts.failed or rule.name in [finding.rule for finding in findings]:
        return facts.failed.get(rule.name, "")
    try:
        return rule.lacks(facts)
    except Exception as error:
        return unreadable(error)
