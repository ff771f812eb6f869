"""The rules that look while a run goes on, and warn once each."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from torchtitan_rl.health.facts import RunFacts, Series, readings
from torchtitan_rl.health.rules.numerics import bad_steps
from torchtitan_rl.health.rules.table import RULES, look
from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.health.samples import Samples
from torchtitan_rl.record.attempts import begun
from torchtitan_rl.record.recorder import GeneratorStarted, Listener, Metrics, RolloutsEnded
from torchtitan_rl.record.run_dir import RunDir

__all__ = ["HealthWatch"]

logger = logging.getLogger(__name__)

_FIRST, _LAST, _BATCHES, _SAMPLES = 16, 64, 5, 4000
"""Kept of a run: the first and the last batches' lines, the last batches' rollouts, the last samples."""
_OF_ALL_BATCHES = ("reward/mean", "reward/zero_std_frac")
"""Metrics that rules read anywhere in a run: they are kept of every batch, some 100 bytes a number."""
_PACE_S = 2.0


class HealthWatch(Listener):
    """Takes samples of the run's processes, and looks by the rules after batches, evaluations and samples, at most once
    in `pace_s` seconds. What a rule finds is a warning, once in the process's life. Belongs behind a
    `BackgroundListener`: it computes and writes. `GeneratorStarted` brings the client whose replicas are timed.
    """

    EVENTS = GeneratorStarted, RolloutsEnded, Metrics
    """The events that it looks at."""

    def __init__(self, run_dir: RunDir, thresholds: Mapping[str, float], *, pace_s: float = _PACE_S) -> None:
        self._run_dir, self._thresholds, self._pace_s = run_dir, thresholds, pace_s
        self._new, self._looked = set[str](), -math.inf
        """What has come that rules look at (`Rule.live`), and when they looked last."""
        self._settings = Run(run_dir).config()
        self._first: list[dict[str, Any]] = []
        self._last: deque[dict[str, Any]] = deque(maxlen=_LAST)
        self._other_lines: deque[dict[str, Any]] = deque(maxlen=_LAST)
        """Lines of optimizer steps of the other phases that were skipped or had a loss that is not finite."""
        self._evaluations: list[dict[str, Any]] = []
        self._series: dict[str, Series] = {name: [] for name in _OF_ALL_BATCHES}
        self._rollouts: deque[list[dict[str, Any]]] = deque(maxlen=_BATCHES)
        self._taken: deque[dict[str, Any]] = deque(maxlen=_SAMPLES)
        self._samples = Samples(run_dir.logs)
        self._step, self._batches, self._num_lines, self._warned_of = 0, 0, 0, set[str]()
        self._begun: list[int] | None = None
        for line in run_dir.read_metrics():  # of the attempts before
            self._keep(line)

    def generator_started(self, event: GeneratorStarted) -> None:
        self._samples.times = event.client.request_times
        self._samples.look_again()
        self.beat()

    def rollouts(self, event: RolloutsEnded) -> None:
        self._rollouts.append(_light(event.step, event.groups))
        self._batches += 1
        self._new |= {"batches", "answers"} if self._batches % _BATCHES == 0 else {"batches"}
        self.beat()

    def metrics(self, event: Metrics) -> None:
        self._keep(event.line)
        phase = event.line["phase"]  # a batch is looked at when its rollouts have come
        if phase == "evaluation" or (phase != "reinforcement" and bad_steps(event.line)):
            self._new.add("batches")
        self.beat()

    def beat(self) -> None:
        if self._samples.due():
            records = self._samples.take()
            self._run_dir.record("samples", self._step, records)
            self._taken += [{"step": self._step, "attempt": self._run_dir.attempt, **record} for record in records]
            self._new.add("samples")
        if self._new and time.monotonic() - self._looked >= self._pace_s:
            self._look()

    def close(self) -> None:
        self._look()

    def _keep(self, line: dict[str, Any]) -> None:
        if line["phase"] == "reinforcement":
            self._step, self._num_lines = line["step"], self._num_lines + 1
            (self._first if len(self._first) < _FIRST else self._last).append(line)
            for name, series in self._series.items():
                series += readings(name, [line])
        elif line["phase"] == "evaluation":
            self._evaluations.append(line)
        elif bad_steps(line):
            self._other_lines.append(line)

    def _look(self) -> None:
        rules = tuple(rule for rule in RULES if rule.live in self._new and rule.name not in self._warned_of)
        self._new, self._looked = set(), time.monotonic()
        if self._begun is None:
            self._begun = sorted(begun(self._run_dir).values())
        facts = RunFacts(
            lines=[*self._other_lines, *self._evaluations, *self._first, *self._last],
            settings=self._settings,
            rollouts=lambda: [rollout for batch in self._rollouts for rollout in batch],
            samples=lambda: list(self._taken),
            begun=self._begun,
            left_out=self._num_lines - len(self._first) - len(self._last),
            series=self._series,
        )
        for finding in look(facts, self._thresholds, rules):
            self._warned_of.add(finding.rule)
            text = f"{finding.what}; {finding.advice} (rule {finding.rule}, threshold {finding.threshold:g})"
            logger.warning("%s", text, extra={"event": "finding", "who": finding.rule})


def _light(step: int, groups: list[Any]) -> list[dict[str, Any]]:
    """What the rules read of a batch's rollouts; see `health.newest.COLUMNS`."""
    return [
        {
            "step": step,
            "group_id": group.id,
            "task_id": rollout.task.id,
            "text": rollout.text,
            "reward": rollout.reward,
            "reward_parts": rollout.reward_parts,
        }
        for group in groups
        for rollout in group.rollouts
    ]
