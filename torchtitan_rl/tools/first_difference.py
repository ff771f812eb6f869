"""Where two runs part: the first batch whose numbers or tokens differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.metrics import PHASES, repeatable
from torchtitan_rl.record.attempts import read_rollouts

__all__ = ["BatchDifference", "first_difference"]

_FIRST = ("optim/grad_norm", "loss/mean", "reward/mean")
"""Numbers that a summary shows before others."""
_ORDER = (*PHASES, "evaluation")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchDifference:
    """The first batch in which two runs differ."""

    phase: str
    step: int
    numbers: dict[str, tuple[Any, Any]]
    """Metric -> its values in both runs, for metrics that differ."""
    rollout: str = ""
    """The first rollout of the batch with other tokens; empty where all tokens are the same, or none are recorded."""
    token: int = 0
    """The place of the first sampled token that differs in `rollout`, over its turns."""

    def summary(self) -> str:
        """Example: `step 21: token 5 of rollout 672/0/3, optim/grad_norm 1.2 and 1.3, 7 more numbers`."""
        names = sorted(self.numbers, key=lambda name: (name not in _FIRST, name))
        parts = [f"token {self.token} of rollout {self.rollout}"] if self.rollout else []
        parts += [f"{name} {_number(self.numbers[name][0])} and {_number(self.numbers[name][1])}" for name in names[:3]]
        more = len(names) - 3
        parts += [f"{more} more numbers"] if more > 0 else []
        phase = "" if self.phase == "reinforcement" else f"{self.phase} "
        return f"{phase}step {self.step}: {', '.join(parts)}"


def first_difference(first: Run, second: Run) -> BatchDifference | None:
    """The first step at which numbers or sampled tokens of two runs differ; None: as far as both have come, nothing
    does. Evaluations come after the training of their step, steps of the phases in their order."""
    numbers = _first_other_numbers(first, second)
    tokens = _first_other_tokens(first, second)
    if tokens is None or numbers is not None and _place(numbers) < ("reinforcement", tokens[0]):
        return numbers
    step, rollout, token = tokens
    same_step = numbers is not None and (numbers.phase, numbers.step) == ("reinforcement", step)
    differing = numbers.numbers if numbers is not None and same_step else {}
    return BatchDifference(phase="reinforcement", step=step, numbers=differing, rollout=rollout, token=token)


def _place(difference: BatchDifference) -> tuple[str, int]:
    """Sorts before ("reinforcement", step) what comes earlier in a run."""
    if difference.phase == "evaluation":
        return "reinforcement", difference.step
    return ("" if difference.phase != "reinforcement" else "reinforcement"), difference.step


def _first_other_numbers(first: Run, second: Run) -> BatchDifference | None:
    lines, other_lines = _by_place(first), _by_place(second)
    for key, line in lines.items():
        if (other := other_lines.get(key)) is None:
            continue
        numbers, other_numbers = repeatable(line), repeatable(other)
        if numbers != other_numbers:
            all_names = numbers.keys() | other_numbers.keys()
            names = [name for name in all_names if numbers.get(name) != other_numbers.get(name)]
            differing = {name: (line.get(name), other.get(name)) for name in names}
            return BatchDifference(phase=key[0], step=key[1], numbers=differing)
    return None


def _by_place(run: Run) -> dict[tuple, dict[str, Any]]:
    """The lines of steps and evaluations by their place in the run, in order; the last line of a place counts."""
    lines = (line for line in run.lines() if line["phase"] in _ORDER)
    return {(line["phase"], line["step"], line.get("eval/name"), line.get("eval/split")): line for line in lines}


def _first_other_tokens(first: Run, second: Run) -> tuple[int, str, int] | None:
    """(step, rollout, token) of the first sampled token that differs."""
    steps, other_steps = _tokens_by_step(first), _tokens_by_step(second)
    for (step, rollouts), (other_step, other_rollouts) in zip(steps, other_steps):
        if step != other_step:
            return None  # the runs record other steps
        for name in [*rollouts, *(name for name in other_rollouts if name not in rollouts)]:
            sampled, other = rollouts.get(name, _NOTHING), other_rollouts.get(name, _NOTHING)
            tokens, other_tokens = sampled.tokens, other.tokens
            if tokens is None or other_tokens is None:
                tokens, other_tokens = list(sampled.text), list(other.text)
            if tokens != other_tokens:
                pairs = zip(tokens, other_tokens)
                place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(other_tokens)))
                return step, name, place
    return None


@dataclass(frozen=True, slots=True)
class _Sampled:
    """What a rollout sampled."""

    tokens: list | None
    """None where the run does not record tokens: then the characters of its text are compared."""
    text: str


_NOTHING = _Sampled([], "")


def _tokens_by_step(run: Run) -> Iterator[tuple[int, dict[str, _Sampled]]]:
    """(step, rollout -> what it sampled), in order."""
    columns = ("step", "attempt", "rollout_id", "text", "turns")
    records = read_rollouts(run.directory, columns)
    for step, step_records in groupby(records, key=lambda record: record["step"]):
        yield (
            step,
            {
                record["rollout_id"]: _Sampled(
                    [token for turn in record["turns"] for token in turn["tokens"] or ()] if record["turns"] else None,
                    record["text"] or "",
                )
                for record in step_records
            },
        )


def _number(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.6g}"
    return "none" if value is None else str(value)
