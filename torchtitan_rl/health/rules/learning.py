"""Rules about whether the policy learns what it should."""

from __future__ import annotations

from torchtitan_rl.health.facts import Reading, RunFacts, Series
from torchtitan_rl.health.rules.rule import RECENT, Problem, Rule, batches, few, first, last, middle

__all__ = ["LEARNING"]

_IN_A_ROW = 10
"""Batches in a row with (almost) no signal before that is more than bad luck."""
_ALMOST_ALL = 0.9
_LONG_ENOUGH = 4.0
"""Tokens by which a length must change."""


def entropy_collapse(facts: RunFacts, threshold: float) -> Problem | None:
    """The policy has become sure of answers that earn little."""
    series = facts.series("policy/entropy")
    early, late = first(series), last(series)
    if len(series) < 2 * len(early) or not late or middle(late) >= threshold * middle(early):
        return None
    rewards = facts.series("reward/mean")
    before, now, best = middle(first(rewards)), middle(last(rewards)), facts.best_reward
    if now >= before + 0.5 * (best - before):  # sure and mostly right: it has learned
        return None
    sentence = f"the policy's entropy fell from {middle(early):.3g} to {middle(late):.2g} nats per token"
    return Problem(f"{sentence} while the reward went from {before:.3f} to {now:.3f}", [*early, *late, *last(rewards)])


def no_signal(facts: RunFacts, threshold: float) -> Problem | None:
    """The rewards of siblings have been equal for many batches, and are not the best."""
    late = _without_signal(facts, threshold)
    if not late or (rewards := last(facts.series("reward/mean"), _IN_A_ROW)) == []:
        return None
    if middle(rewards) >= 0.95 * facts.best_reward:
        return None
    spread = "the same for every rollout" if _constant(facts) else "equal within the groups"
    sentence = f"for {len(late)} batches the rewards of at least {threshold:.0%} of the groups have been equal"
    return Problem(f"{sentence}, from which nothing is learned; rewards are {spread}", [*late[-5:], *rewards[-5:]])


def saturation(facts: RunFacts, threshold: float) -> Problem | None:
    """Almost every answer has earned the best reward for a good part of the run."""
    late, best = _without_signal(facts, _ALMOST_ALL), facts.best_reward
    rewards = {reading.step: reading for reading in facts.series("reward/mean")}
    full: Series = []
    for reading in reversed(late):
        if float(rewards[reading.step].value) < threshold * best:
            break
        full.append(rewards[reading.step])
    full.reverse()
    if len(full) < max(_IN_A_ROW, facts.num_batches // 4):
        return None
    since = "since the first step" if len(full) == facts.num_batches else f"since step {full[0].step}"
    sentence = f"the reward has been at least {threshold:.0%} of the best, {best:g}, in {len(full)} batches {since}"
    return Problem(f"{sentence}: almost no group has a signal, further steps teach nothing", [*full[-5:], *late[-5:]])


def _without_signal(facts: RunFacts, threshold: float) -> Series:
    """The newest batches in a row of which almost all groups were without signal; [] for fewer than 10, and where
    siblings are not compared."""
    streak: Series = []
    for reading in reversed(facts.series("reward/zero_std_frac") if facts.compares_siblings else []):
        if float(reading.value) < threshold:
            break
        streak.append(reading)
    return streak[::-1] if len(streak) >= _IN_A_ROW else []


def _constant(facts: RunFacts) -> bool:
    return all(float(reading.value) < 1e-9 for reading in last(facts.series("reward/std"), _IN_A_ROW))


def truncation(facts: RunFacts, threshold: float) -> Problem | None:
    """Many completions end at the token limit."""
    late = last(facts.series("completion/truncated_frac"))
    if not late or middle(late) <= threshold:
        return None
    limit = facts.setting("sampling.max_tokens", "?")
    sentence = f"{middle(late):.0%} of the completions are cut off at sampling.max_tokens={limit}"
    return Problem(
        f"{sentence}: what they would have said earns nothing", [*late, *last(facts.series("completion/length_mean"))]
    )


def length_drift(facts: RunFacts, threshold: float) -> Problem | None:
    """Completions become much longer or shorter, and answers no better."""
    series = facts.series("completion/length_mean")
    early, late = first(series), last(series)
    if len(series) < 2 * len(early) or not late:
        return None
    before, now = middle(early), middle(late)
    if abs(now - before) < _LONG_ENOUGH or max(now, before) <= threshold * min(now, before) or _better(facts):
        return None
    accuracy = [Reading("eval/accuracy", line["step"], line["eval/accuracy"]) for line in facts.evaluations]
    answers = "accuracy is no better" if len(accuracy) > 1 else "the reward has not risen as much"
    sentence = f"completions went from {before:.1f} to {now:.1f} tokens, and {answers}"
    return Problem(f"{sentence}: something else than right answers decides the length", [*early, *late, *accuracy[-3:]])


def _better(facts: RunFacts) -> bool:
    """Whether answers have become better: by accuracy where it was measured twice, else by the reward."""
    accuracies = [float(line["eval/accuracy"]) for line in facts.evaluations]
    if len(accuracies) > 1:
        return accuracies[-1] > accuracies[0] + min(0.05, 0.25 * (1 - accuracies[0]))
    rewards = facts.series("reward/mean")
    before, now = middle(first(rewards)), middle(last(rewards))
    return now >= before + 0.25 * (facts.best_reward - before)


def eval_falls(facts: RunFacts, threshold: float) -> Problem | None:
    """Accuracy on validation tasks falls while the reward rises."""
    lines = facts.evaluations
    if len(lines) < 2:
        return None
    best, now = max(lines[:-1], key=lambda line: line["eval/accuracy"]), lines[-1]
    fall = best["eval/accuracy"] - now["eval/accuracy"]
    low, high = best.get("eval/accuracy_ci95_low"), now.get("eval/accuracy_ci95_high")
    if fall <= threshold or low is None or high is None or low <= high:  # within what the number of tasks allows
        return None
    then, late = _reward_at(facts, best["step"]), last(facts.series("reward/mean"))
    if not then or not late or middle(late) <= middle(then):
        return None
    evidence = [Reading("eval/accuracy", line["step"], line["eval/accuracy"]) for line in (best, now)]
    before, after = best["eval/accuracy"], now["eval/accuracy"]
    sentence = f"validation accuracy fell from {before:.3f} (step {best['step']}) to {after:.3f} (step {now['step']})"
    rise = f"while the reward rose from {middle(then):.3f} to {middle(late):.3f}"
    return Problem(f"{sentence}, {rise}: the reward pays for something else", [*evidence, *then, *late])


def _reward_at(facts: RunFacts, step: int) -> Series:
    """The rewards of 5 batches around a step."""
    series = facts.series("reward/mean")
    at = next((i for i, reading in enumerate(series) if (reading.step or 0) >= step), len(series) - 1)
    begin = max(0, min(at - 2, len(series) - 5))
    return series[begin : begin + 5]


def _lacks_groups(facts: RunFacts) -> str:
    if not facts.compares_siblings:
        return ""
    return batches("reward/zero_std_frac", "reward/mean", number=_IN_A_ROW)(facts)


def _lacks_evaluations(facts: RunFacts) -> str:
    return few("`eval/accuracy`", len(facts.evaluations), 2, "evaluations on validation tasks")


LEARNING = (
    Rule(
        "entropy_collapse",
        "learning",
        entropy_collapse,
        threshold=0.1,
        means="share of the entropy of the first 5 batches that is left, the reward being less than half of the way to "
        "`controller.correct_reward`",
        reads="`policy/entropy`, `reward/mean`",
        advice="lower the learning rate, add `algorithm.entropy_coef` or a KL to a reference, raise the clip's upper "
        "bound; `controller.stop.min_entropy` ends such a run",
        lacks=batches("policy/entropy", "reward/mean", number=2 * RECENT),
    ),
    Rule(
        "no_signal",
        "learning",
        no_signal,
        threshold=0.9,
        means="share of groups whose rewards are all equal, in each of 10 batches in a row",
        reads="`reward/zero_std_frac`, `reward/mean`",
        advice="grade the reward, choose easier or harder tasks, or raise algorithm.group_size; a constant reward is a "
        "mistake in the reward",
        lacks=_lacks_groups,
    ),
    Rule(
        "saturation",
        "learning",
        saturation,
        threshold=0.95,
        means="share of `controller.correct_reward` that the mean reward has reached, in at least 10 batches and a "
        "quarter of the run, while 9 groups in 10 are without signal",
        reads="`reward/mean`, `reward/zero_std_frac`",
        advice="end the run, or choose harder tasks; where accuracy is low the reward is too easy to earn",
        lacks=_lacks_groups,
    ),
    Rule(
        "truncation",
        "learning",
        truncation,
        threshold=0.3,
        means="share of completions that end at the token limit",
        reads="`completion/truncated_frac`, the median of the last 5 batches",
        advice="raise sampling.max_tokens, or pay less for length (`algorithm.filters.overlong`); after a warm start: "
        "let its demonstrations end",
        lacks=batches("completion/truncated_frac"),
    ),
    Rule(
        "length_drift",
        "learning",
        length_drift,
        threshold=2.0,
        means="times the length of the first 5 batches, or one such part of it, and at least 4 tokens",
        reads="`completion/length_mean`, `eval/accuracy`, `reward/mean`",
        advice="read the longest answers that earned most: the reward may pay for words; average by "
        "`reductions.constant_length`, penalise length",
        lacks=batches("completion/length_mean", number=2 * RECENT),
    ),
    Rule(
        "eval_falls",
        "learning",
        eval_falls,
        threshold=0.1,
        means="fall of accuracy below the best evaluation before, outside both 95% intervals, while the reward rises",
        reads="`eval/accuracy` on validation tasks, `reward/mean`",
        advice="read what earns most: the reward can be earned without the task; judge by what the evaluation judges, "
        "keep closer to a reference, stop at the best checkpoint (`controller.keep_best`)",
        lacks=_lacks_evaluations,
    ),
)
"""The rules, in the order in which they are told."""
