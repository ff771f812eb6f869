"""Rules about numbers that should agree, or be finite."""

from __future__ import annotations

import math
from typing import Any

from torchtitan_rl.health.facts import Reading, RunFacts, Series
from torchtitan_rl.health.rules.rule import RECENT, Problem, Rule, batches, few, first, middle, worst

__all__ = ["NUMERICS", "bad_steps"]

_USUAL_FLOAT32, _USUAL_BFLOAT16, _USUAL_LAG = 1e-6, 1e-4, 1e-2
"""Nats per token; see docs/numerics.md."""
_CLEARLY = 3.0
"""Times what is usual, from where on a rise counts."""


def mismatch(facts: RunFacts, threshold: float) -> Problem | None:
    """Trainer and generator disagree about sampled tokens more than their dtypes and the lag explain."""
    series = facts.series("mismatch/kl")
    early, high = first(series), worst(series)
    if not high:
        return None
    usual, dtypes = _usual(facts)
    level, before = middle(high), middle(early)
    rises = level > threshold * before and level > _CLEARLY * usual
    if level <= threshold * usual and not rises:
        return None
    shape = f"it rose from {before:.1e} at the run's first steps" if rises else "it has been so from the first steps on"
    sentence = (
        f"trainer and generator disagree by {level:.1e} nats per token at steps {high[0].step} to {high[-1].step}"
    )
    return Problem(f"{sentence}, {usual:.0e} is usual for {dtypes}; {shape}", [*early, *high] if rises else high)


def _usual(facts: RunFacts) -> tuple[float, str]:
    """The largest mismatch that is as it should be, and for what."""
    if lag := facts.setting("algorithm.max_policy_lag", 0):
        return _USUAL_LAG, f"a lag of {lag}"
    dtypes = {facts.setting("generator.dtype"), facts.setting("trainer.training.mixed_precision_param")}
    return (_USUAL_FLOAT32, "float32") if dtypes == {"float32"} else (_USUAL_BFLOAT16, "bfloat16")


def lag(facts: RunFacts, threshold: float) -> Problem | None:
    """Tokens were sampled by weights that are too old."""
    if not facts.setting("algorithm.max_policy_lag", 0):
        late = [reading for reading in facts.series("policy/lag_max") if float(reading.value) > 0]
        if not late:
            return None
        oldest = max(reading.value for reading in late)
        sentence = f"{len(late)} batches hold tokens of older weights, up to {oldest:g} publications"
        return Problem(f"{sentence}, in a run without a lag: new weights did not reach a generator in time", late[:10])
    far = worst(_far(facts))
    if not far or middle(far) <= threshold:
        return None
    ages = facts.series("policy/lag_max")[-1:]
    sentence = f"{middle(far):.0%} of the tokens that are older than one publication have a ratio outside 0.8 to 1.2"
    return Problem(
        f"{sentence} at steps {far[0].step} to {far[-1].step}: the policy moves too far within the lag", [*far, *ages]
    )


def _far(facts: RunFacts) -> Series:
    """Per batch the share of tokens of an age above 0 whose ratio is far from 1."""
    shares = []
    for line in facts.steps:
        ages = [
            int(name.removeprefix("policy/far_lag").removesuffix("_frac"))
            for name in line
            if name.startswith("policy/far_lag")
        ]
        tokens = {age: line.get(f"tokens/trained_lag{age}", 0) for age in ages if age > 0}
        if total := sum(tokens.values()):
            share = sum(line[f"policy/far_lag{age}_frac"] * number for age, number in tokens.items()) / total
            shares.append(Reading("far tokens", line["step"], share))
    return shares


def clip_share(facts: RunFacts, threshold: float) -> Problem | None:
    """The loss clips a large share of the tokens."""
    high = worst(facts.series("policy/clip_frac"))
    if not high or middle(high) <= threshold:
        return None
    sentence = f"{middle(high):.0%} of the tokens were clipped at steps {high[0].step} to {high[-1].step}"
    return Problem(f"{sentence}: the policy moves farther in a batch than the loss lets it", high)


def steps_skipped(facts: RunFacts, threshold: float) -> Problem | None:
    """Optimizer steps were skipped, or had a loss that is not finite."""
    bad = [reading for line in facts.lines for reading in bad_steps(line)]
    number = sum(1 if reading.name == "loss/mean" else int(reading.value) for reading in bad)
    if not number or number < threshold:
        return None
    sentence = f"{number} optimizer steps had a gradient or a loss that is not finite, the first at step {bad[0].step}"
    return Problem(f"{sentence}; skipped steps change nothing", bad[:10])


def bad_steps(line: dict[str, Any]) -> Series:
    """The numbers of a line, of any phase, that tell of optimizer steps that were skipped or had a loss that is not
    finite."""
    bad = [Reading(name, line["step"], line[name]) for name in ("optim/skipped", "critic/skipped") if line.get(name)]
    if not math.isfinite(line.get("loss/mean", 0.0)) and not line.get("optim/skipped"):
        bad.append(Reading("loss/mean", line["step"], line["loss/mean"]))
    return bad


def _lacks_ages(facts: RunFacts) -> str:
    if not facts.setting("algorithm.max_policy_lag", 0):
        return few("`policy/lag_max`", len(facts.series("policy/lag_max")), 1)
    return few("`policy/far_lagA_frac`", len(_far(facts)), RECENT)


def _lacks_steps(facts: RunFacts) -> str:
    losses = [line for line in facts.lines if "loss/mean" in line or "optim/skipped" in line]
    return few("`loss/mean`", len(losses), 1, "steps")


NUMERICS = (
    Rule(
        "mismatch",
        "numerics",
        mismatch,
        threshold=10,
        means="times what is usual (float32 1e-6, bfloat16 1e-4, with a lag 1e-2 nats per token), or times the run's "
        "first steps where that is above what is usual",
        reads="`mismatch/kl`, the median of 5 batches",
        advice="`torchtitan-rl explain-mismatch RUN` says why; from the first step on: temperature, dtype, templates, "
        "top-k; a jump: weights that did not arrive; slowly: lower the learning rate (docs/numerics.md)",
        lacks=batches("mismatch/kl"),
    ),
    Rule(
        "lag",
        "numerics",
        lag,
        threshold=0.5,
        means="share of older tokens whose ratio lies outside 0.8 to 1.2; without `algorithm.max_policy_lag` any older "
        "token",
        reads="`policy/lag_max`, `policy/far_lagA_frac`, `tokens/trained_lagA`",
        advice="lower `algorithm.max_policy_lag` or the learning rate, or take `presets.asynchronous()`; without a "
        "lag: look at the logs of the generators, and at a workflow that keeps rollouts back",
        lacks=_lacks_ages,
    ),
    Rule(
        "clip_share",
        "numerics",
        clip_share,
        threshold=0.4,
        means="share of trained tokens that the loss clips",
        reads="`policy/clip_frac`, the median of 5 batches",
        advice="lower the learning rate, `algorithm.num_epochs` or the lag, take fewer minibatches, or widen the clip "
        "in `algorithm.loss_config`",
        lacks=batches("policy/clip_frac"),
    ),
    Rule(
        "steps_skipped",
        "numerics",
        steps_skipped,
        threshold=1,
        means="optimizer steps with a gradient or loss that is not finite",
        reads="`optim/skipped`, `critic/skipped`, `loss/mean`",
        advice="look at the batch in bad_steps/; lower the learning rate, set `trainer.training.max_norm`, compute in "
        "float32, and look for rewards that are huge",
        lacks=_lacks_steps,
    ),
)
"""The rules, in the order in which they are told."""
