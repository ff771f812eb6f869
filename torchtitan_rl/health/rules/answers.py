"""Rules about what the newest rollouts say."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from statistics import fmean
from typing import Any

from torchtitan_rl.health.facts import Reading, RunFacts
from torchtitan_rl.health.rules.rule import Problem, Rule, few, last, middle

__all__ = ["ANSWERS"]

_FEW_TASKS, _FEW_ROLLOUTS, _FEW_NATS = 8, 32, 2.0
_RIGHT = 0.9
"""Share of the best reward from which an answer counts as right."""
_TAIL, _LONGEST_PIECE, _TIMES = 512, 32, 8
_FORM = re.compile(r"format|parse|valid|schema|well_?formed")
_FAULT = re.compile(r"penalt|invalid|error|fail|malformed|unpars")
"""In the name of a reward part that is 0 for an answer of the right form, such as `format_penalty`."""


def duplicates(facts: RunFacts, threshold: float) -> Problem | None:
    """The policy says the same to different tasks, or siblings are copies although the policy is not sure."""
    rollouts = facts.rollouts
    if len(rollouts) < _FEW_ROLLOUTS or len({rollout["task_id"] for rollout in rollouts}) < _FEW_TASKS:
        return None
    return _one_answer(facts, threshold) or _copies(facts, threshold)


def _one_answer(facts: RunFacts, threshold: float) -> Problem | None:
    rollouts = facts.rollouts
    text, number = Counter(rollout["text"] for rollout in rollouts).most_common(1)[0]
    same, share = [rollout for rollout in rollouts if rollout["text"] == text], number / len(rollouts)
    right = fmean(rollout["reward"] or 0.0 for rollout in same) >= _RIGHT * facts.best_reward
    if share < threshold or right or len({rollout["task_id"] for rollout in same}) < _FEW_TASKS:
        return None
    sentence = f"{share:.0%} of {len(rollouts)} answers to different tasks are the same, {_shown(text)}"
    return Problem(sentence, [Reading("share of the commonest answer", rollouts[-1]["step"], share)])


def _copies(facts: RunFacts, threshold: float) -> Problem | None:
    """With n nats of chance in an answer, equal siblings are rare: a few groups in a thousand at n = 2."""
    entropy, length = (last(facts.series(name)) for name in ("policy/entropy", "completion/length_mean"))
    if not entropy or not length or (nats := middle(entropy) * middle(length)) < _FEW_NATS:
        return None
    groups: dict[str, list[str]] = defaultdict(list)
    for rollout in facts.rollouts:
        groups[f"{rollout['step']}/{rollout['group_id']}"].append(rollout["text"])
    alike = [len(set(texts)) == 1 for texts in groups.values() if len(texts) > 2]
    if not alike or fmean(alike) < threshold:
        return None
    sentence = (
        f"in {fmean(alike):.0%} of the groups all rollouts are the same, while an answer has {nats:.1f} nats of chance"
    )
    evidence = [Reading("share of groups of copies", facts.rollouts[-1]["step"], fmean(alike)), *entropy]
    return Problem(f"{sentence}: siblings are not sampled independently", evidence)


def unparsable(facts: RunFacts, threshold: float) -> Problem | None:
    """Many answers cannot be read: empty, undecodable, or one piece over and over."""
    rollouts = facts.rollouts
    if len(rollouts) < _FEW_ROLLOUTS:
        return None
    step = rollouts[-1]["step"]
    whys = [_unreadable(rollout, facts.best_reward) for rollout in rollouts]
    reasons = Counter(why for why in whys if why)
    if not reasons or reasons.total() / len(rollouts) <= threshold:
        return None
    evidence = [Reading(f"share that is {why}", step, number / len(rollouts)) for why, number in reasons.most_common()]
    example = next(rollout["text"] for rollout, why in zip(rollouts, whys, strict=True) if why)
    sentence = f"{reasons.total() / len(rollouts):.0%} of the newest {len(rollouts)} answers cannot be read"
    return Problem(
        f"{sentence}, mostly because they are {reasons.most_common(1)[0][0]}, such as {_shown(example)}", evidence
    )


def _unreadable(rollout: dict[str, Any], best_reward: float) -> str:
    """What is wrong with the form of an answer; empty for nothing."""
    text = rollout["text"] or ""
    if not text.strip():
        return "empty"
    odd = sum(sign == "\ufffd" or (sign < " " and sign not in "\n\t\r") for sign in text)
    if 10 * odd > len(text):
        return "undecodable"
    if _loops(text[-_TAIL:]):
        return "one piece over and over"
    if (rollout["reward"] or 0.0) >= _RIGHT * best_reward:  # the reward could read it
        return ""
    parts = [number for name, number in (rollout["reward_parts"] or {}).items() if _is_of_form(name.lower())]
    return "without the form that the reward asks for" if parts and max(parts) <= 0 else ""


def _is_of_form(part: str) -> bool:
    """Whether a reward part of this name pays for the form of an answer."""
    return _FORM.search(part) is not None and _FAULT.search(part) is None


def _loops(text: str) -> bool:
    """Whether a text ends in a piece of at most 32 letters 8 times or more, and that is most of the text."""
    for period in range(1, min(_LONGEST_PIECE, len(text) - 1) + 1):
        same = 0  # letters at the end that are equal to the letter a period before
        while same + period < len(text) and text[-1 - same] == text[-1 - same - period]:
            same += 1
        if same >= (_TIMES - 1) * period and 2 * (same + period) > len(text):
            return True
    return False


def _shown(text: str | None) -> str:
    return repr((text or "")[:40])


def _lacks_rollouts(facts: RunFacts) -> str:
    return few("the texts", len(facts.rollouts), _FEW_ROLLOUTS, "rollouts")


def _lacks_answers(facts: RunFacts) -> str:
    tasks = {rollout["task_id"] for rollout in facts.rollouts}
    return _lacks_rollouts(facts) or few("the rollouts", len(tasks), _FEW_TASKS, "tasks")


ANSWERS = (
    Rule(
        "duplicates",
        "learning",
        duplicates,
        threshold=0.8,
        means="share of answers to different tasks that are one text that earns little; share of groups of copies",
        reads="texts of the newest rollouts, `policy/entropy`",
        advice="one text: the policy has settled on what is often right; more entropy, other tasks, a finer reward. "
        "Copies: look at the seeds of a workflow of your own",
        lacks=_lacks_answers,
        live="answers",
    ),
    Rule(
        "unparsable",
        "learning",
        unparsable,
        threshold=0.5,
        means="share of answers that are empty, undecodable or a loop, or whose reward part of a form is 0",
        reads="texts and reward parts of the newest rollouts",
        advice="a longer warm start, a lower learning rate; look at the chat template and at what ends a completion",
        lacks=_lacks_rollouts,
        live="answers",
    ),
)
"""The rules, in the order in which they are told."""
