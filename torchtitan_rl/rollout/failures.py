"""Rollouts that fail: try again or drop the group, count by cause, and end the run when too many fail."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.rollout.episode import EnvironmentFailed
from torchtitan_rl.rollout.group import AttemptFailed
from torchtitan_rl.rollout.sampler import AlteredForTraining, SamplingFailed
from torchtitan_rl.tasks.outcomes import is_cancellation
from torchtitan_rl.types.ends import Ended

__all__ = ["Failures", "TooManyFailures"]

logger = logging.getLogger(__name__)

_MIN_CALLS = 32  # calls before the share of failures says anything


class TooManyFailures(Ended):
    """The share of failed calls passed `algorithm.max_failed_frac`."""


class Failures:
    """Retries or drops the rollouts of a workflow, an environment or a reward that raises or is late, as
    `algorithm.on_rollout_failure` says. Faults of the generators are none of these: they end the run."""

    def __init__(self, config: AlgorithmConfig, counted: dict[str, int]) -> None:
        """`counted` has the calls of the run so far, further tries included (`calls`), and the failed calls by cause
        (`environment`, `workflow`, `reward`). Counting goes on in it: a checkpoint holds it."""
        self.retries = config.rollout_retries if config.on_rollout_failure == "retry" else 0
        self.max_failed_frac = config.max_failed_frac
        self.counted = counted
        self._reported = Counter(self.failed)

    @property
    def calls(self) -> int:
        """Calls so far, of all attempts at the run."""
        return self.counted.get("calls", 0)

    @property
    def failed(self) -> Counter[str]:
        """Failed calls so far, by cause."""
        return Counter({cause: number for cause, number in self.counted.items() if cause != "calls"})

    async def retrying(
        self, call: Callable[[int], Awaitable[Any]], stage: str, counts: Counter[str] | None = None
    ) -> Any:
        """The result of `call(retry)`, from retry 0 on. Raises AttemptFailed after the last retry, and TooManyFailures.

        `stage` is `workflow` or `reward`. `counts`, an evaluation's, receives the calls that fail, by cause; the counts
        of `complete` are then without them.
        """
        for retry in range(self.retries + 1):
            self.counted["calls"] = self.calls + 1
            try:
                return await call(retry)
            except (SamplingFailed, AlteredForTraining, Ended):
                raise
            except (Exception, asyncio.CancelledError, SystemExit) as raised:
                if is_cancellation(raised):
                    raise
                error = raised if isinstance(raised, Exception) else RuntimeError(f"{type(raised).__name__}: {raised}")
                cause = "environment" if isinstance(error, EnvironmentFailed) else stage
                if counts is not None:
                    counts[f"failure/{cause}"] += 1
                    self._reported[cause] += 1
                self._count(cause, error)
                last = error
        raise AttemptFailed(f"{last} ({self.retries} retries)") from last

    def without_failed(self, played: list[Any], counts: Counter[str]) -> list[Any]:
        """The groups among groups and AttemptFailed. Adds to `counts` the calls that failed since the last call, by
        cause, and the groups that were dropped. Raises any other exception."""
        for result in played:
            if isinstance(result, BaseException) and not isinstance(result, AttemptFailed):
                raise result
        groups = [result for result in played if not isinstance(result, AttemptFailed)]
        counts.update({f"failure/{cause}": n - self._reported[cause] for cause, n in self.failed.items()})
        counts["failure/dropped_groups"] += len(played) - len(groups)
        self._reported = self.failed
        return groups

    def _count(self, cause: str, error: Exception) -> None:
        self.counted[cause] = self.counted.get(cause, 0) + 1
        logger.warning("a rollout failed (%s): %s", cause, error, extra={"event": "rollout_failed", "who": cause})
        failed = self.failed.total()
        if self.calls >= _MIN_CALLS and failed > self.max_failed_frac * self.calls:
            causes = ", ".join(f"{number} {name}" for name, number in self.failed.most_common())
            raise TooManyFailures(
                f"algorithm.max_failed_frac={self.max_failed_frac:g}: {failed} of {self.calls} calls have failed "
                f"({causes}); the last: {error}"
            )
