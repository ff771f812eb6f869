"""The table of rules about a run, the one place that judges one, and the function that goes through the table.

The watch of a run that goes on (`health.watch`, whose findings are warnings on the console), the verb `diagnose` and
the page on health ask this table.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from torchtitan_rl.health.facts import RunFacts
from torchtitan_rl.health.rules.answers import ANSWERS
from torchtitan_rl.health.rules.learning import LEARNING
from torchtitan_rl.health.rules.liveness import LIVENESS
from torchtitan_rl.health.rules.numerics import NUMERICS
from torchtitan_rl.health.rules.rule import Finding, Rule

__all__ = ["RULES", "check_thresholds", "look", "unreadable"]

RULES: tuple[Rule, ...] = (*LIVENESS, *NUMERICS, *LEARNING, *ANSWERS)
"""Every rule, in the order in which findings are told: liveness first, then numerics, then learning."""


def look(facts: RunFacts, thresholds: Mapping[str, float], rules: tuple[Rule, ...] = RULES) -> list[Finding]:
    """What the rules find, in their order. A rule that fails on records of another form is named in `facts.failed`."""
    findings = []
    for rule in rules:
        try:
            finding = rule.on(facts, float(thresholds.get(rule.name, rule.threshold)))
        except Exception as error:
            facts.failed[rule.name] = unreadable(error)
            continue
        if finding is not None:
            findings.append(finding)
    return findings


def unreadable(error: Exception) -> str:
    """The sentence on records that a rule's function failed on."""
    return f"cannot read the records ({type(error).__name__}: {error})"


def check_thresholds(thresholds: Mapping[str, float], prefix: str) -> None:
    """Raises ValueError for a name that is no rule's, and for a threshold that is no number. `prefix` begins the
    message, such as `record.thresholds.`."""
    names = [rule.name for rule in RULES]
    for name, value in thresholds.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(names)}"
            raise ValueError(f"{prefix}{name}={value}: there is no such rule; {hint}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            raise ValueError(f"{prefix}{name}={value}: is no number; give one such as 0.5")
