"""With a lag: the evaluations after a step are made while later batches are played and train."""

from __future__ import annotations

import asyncio

from torchtitan_rl.config.run import ControllerConfig
from torchtitan_rl.dispatch.versions import PolicyVersions
from torchtitan_rl.record.recorder import Recorder
from torchtitan_rl.train.early_stop import EarlyEnd, end_early
from torchtitan_rl.train.evaluation import Evaluations
from torchtitan_rl.types.run_state import RunState

__all__ = ["OverlappedEvaluations"]

_HOLDER = "evaluation"


class OverlappedEvaluations:
    """The evaluations after a step, in a task of their own. Their requests name the version that is served as they
    begin, and the next publication waits for them: no evaluation mixes versions, and no replica loads a version twice.

    `RunState.evaluations_due` names the evaluations that have no result yet. A checkpoint holds the names, and a
    resumed run begins with these evaluations. A result counts for the rules of `controller.stop` before the next batch.
    """

    def __init__(
        self,
        config: ControllerConfig,
        evaluations: Evaluations,
        versions: PolicyVersions,
        state: RunState,
        recorder: Recorder,
    ) -> None:
        self._config, self._evaluations, self._versions = config, evaluations, versions
        self._state, self._recorder = state, recorder
        self._task: asyncio.Task[None] | None = None
        self.waited_s = 0.0
        """Seconds that the last `finish` waited."""

    async def begin(self) -> None:
        """Begins the evaluations after the present step, once those that have begun are made. Raises EarlyEnd as
        `begin_due` does, and what an evaluation raises."""
        await self.finish()
        self._end_early()
        self._state.evaluations_due = self._config.evaluation_names
        self._start()

    def begin_due(self) -> None:
        """Before a batch: begins the evaluations that a checkpoint says are due. Raises EarlyEnd where the results so
        far say so."""
        self._end_early()
        names = self._config.evaluation_names  # the config may have lost a set since the checkpoint
        self._state.evaluations_due = [name for name in self._state.evaluations_due if name in names]
        if self._state.evaluations_due and self._task is None:
            self._start()

    async def finish(self) -> None:
        """Before a publication: waits for the evaluations that have begun. Raises what an evaluation raises."""
        self.waited_s = 0.0
        if self._task is not None:
            with self._recorder.span("wait for the evaluation") as wait:
                await self._task
            self._task, self.waited_s = None, wait.seconds

    async def cancel(self) -> None:
        """Gives up the evaluations that have begun; they stay due."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _end_early(self) -> None:
        try:
            end_early(self._config, self._state, self._recorder)
        except EarlyEnd:
            self._state.evaluations_due.clear()  # the evaluations at the end of a run take their place
            raise

    def _start(self) -> None:
        version = self._versions.served
        assert version is not None  # batches are admitted after the first publication
        self._versions.pin(version, _HOLDER)
        self._task = asyncio.ensure_future(self._evaluate(version, self._state.step))

    async def _evaluate(self, version: int, step: int) -> None:
        try:
            for name in list(self._state.evaluations_due):
                result = await self._evaluations.evaluate_named(name, step, version=version)
                # No `await` between the line of the result and this: a checkpoint has both or neither.
                self._state.note_evaluation(name, step, result.summary_data())
                self._state.evaluations_due.remove(name)
        finally:
            await self._versions.release(version, _HOLDER)
