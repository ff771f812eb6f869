"""How a run ends before its last step: asked to stop, or for a reason that starting it again cannot mend."""

from __future__ import annotations

import os
import time

__all__ = ["Diverged", "Ended", "PREEMPTED_STATUS", "Preempted", "SAME_REQUEST_S", "StopRequest"]

PREEMPTED_STATUS = 75
"""The exit status of a run that was asked to stop and has written a checkpoint: EX_TEMPFAIL of sysexits.h, "try again
later"."""
SAME_REQUEST_S = 5.0
"""Seconds within which several SIGTERMs are one request: Slurm sends two, and to every process of a run, and a launcher
passes on what it gets."""


class Ended(RuntimeError):
    """The run has ended for a reason that a restart cannot mend. `--resume auto` refuses such a run."""


class Diverged(Ended):
    """Too many optimizer steps in a row were skipped, or had a loss that is not finite, or the weights are not."""


class Preempted(RuntimeError):
    """The run was asked to stop, and has written a checkpoint to go on from."""


class StopRequest:
    """Whether a run is to stop after the present step: a caller asked, or its time is up.

    Time is up once another step as long as the last one would pass the limit: `max_hours` after the start (0: no
    limit), or the end of the Slurm job (the environment variable SLURM_JOB_END_TIME, seconds since 1970).
    """

    def __init__(self, max_hours: float, *, clock=time.monotonic, wall_clock=time.time) -> None:
        """`clock` gives seconds that no change of the machine's time moves, `wall_clock` those since 1970."""
        self.requested_reason = ""
        """The reason that a caller of `ask` gave; empty before."""
        self.failure: Ended | None = None
        """What the run is to fail with after the present step."""
        self._clock = clock
        now = clock()
        self._limits = {f"controller.max_hours={max_hours:g}": now + 3600 * max_hours} if max_hours else {}
        if end := os.environ.get("SLURM_JOB_END_TIME", ""):
            self._limits["the Slurm job's time limit"] = now + float(end) - wall_clock()
        self._last = now
        self.evaluation_s = 0.0
        """Seconds that the last evaluations between steps took; who makes them sets it."""

    def ask(self, reason: str) -> None:
        """Makes the run stop after the present step."""
        self.requested_reason = reason

    def reason(self, *, step_goes_on: bool = False) -> str:
        """Why the run is to stop now; empty if it may go on. Call once after each step: the time since the last call is
        the length of a step. `step_goes_on`: asks within a step, before its evaluations, and ends no step; what comes
        next are evaluations, which may take longer than a step."""
        now = self._clock()
        step_s = now - self._last
        if not step_goes_on:
            self._last = now
        if self.failure or self.requested_reason:
            return str(self.failure or self.requested_reason)
        next_s = max(step_s, self.evaluation_s) if step_goes_on else step_s
        over = (limit for limit, end in self._limits.items() if now + next_s > end)
        return next((f"{limit} leaves no time for another step" for limit in over), "")
