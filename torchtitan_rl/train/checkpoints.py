"""The checkpoints of a run: when one is due, writing it while training goes on, deleting the old ones."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torchtitan_rl.config.resolve import resolved
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.policy_weights import PolicyWeights
from torchtitan_rl.dispatch.role_mesh import WorkerLost
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.model.files import pad_token_id
from torchtitan_rl.record.recorder import Metrics, Recorder
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.tracing import span
from torchtitan_rl.rollout import finished
from torchtitan_rl.train.retention import complete, superfluous
from torchtitan_rl.types.run_state import RunState, random_states
from torchtitan_rl.weights import checkpoint

__all__ = ["Checkpoints", "checkpointed_roles", "checkpoint_name"]

logger = logging.getLogger(__name__)


def checkpoint_name(state: RunState) -> str:
    """The directory's name: `supervised-N` in the supervised phase, `preference-N` in the preference phase, `step-N`
    after them."""
    early = state.phase in ("supervised", "preference")
    return f"{state.phase}-{state.phase_step}" if early else f"step-{state.step}"


def checkpointed_roles(config: RunConfig) -> dict[str, str]:
    """The roles whose weights change during a run -> the part of a checkpoint that holds them. Every other role reads
    its weights where it first found them."""
    parts, roles = {"policy": ""}, config.roles
    if roles.critic is not None:
        parts["critic"] = "critic"
    if roles.reference is not None and (roles.reference.model is None or roles.refresh_reference_every):
        parts["reference"] = "reference"
    return parts


class Checkpoints:
    """Writes a run's checkpoints. The run waits only while the state is copied to host memory; a checkpoint that cannot
    be written is reported, and the run goes on."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        roles: dict[str, TrainingClient],
        weights: PolicyWeights,
        tokenizer,
        batch_state: Callable[[], dict[str, Any]],
        state: RunState,
        recorder: Recorder,
        *,
        num_requests: Callable[[], int],
    ) -> None:
        """`batch_state` gives the state of the draws before the first batch that has not trained; with a lag the groups
        that have been played for later batches too, as `finished`. `num_requests` gives that of the sampling client."""
        self.config, self.run_dir, self.state, self.recorder = config, run_dir, state, recorder
        self._roles, self._weights, self._tokenizer, self._batch_state = roles, weights, tokenizer, batch_state
        self._num_requests = num_requests
        self._writing: asyncio.Task[dict[str, Any]] | None = None
        self._failure = ""

    async def save(self, *, last: bool = False) -> Path:
        """Begins to write a checkpoint, once the one before is written. Returns the path that it will have."""
        await self.finish()
        with span("begin a checkpoint", kind="phase"):
            return await self._begin(last=last)

    async def _begin(self, *, last: bool) -> Path:
        """Copies the run's state and starts the task that writes it. Returns the path of the checkpoint."""
        state, config = self.state, self.config
        path = self.run_dir.checkpoints / checkpoint_name(state)
        began, staged = time.perf_counter(), []
        try:
            written = checkpoint.beside(path)
            checkpoint.begin(written)
            parts = {self._roles[role]: written / part for role, part in checkpointed_roles(config).items()}
            stages = [role.stage_checkpoint(where) for role, where in parts.items()]
            ends = await asyncio.gather(*stages, return_exceptions=True)
            staged = [role for role, end in zip(parts, ends, strict=True) if end is None]
            if errors := [end for end in ends if end is not None]:
                raise errors[0]
            export = config.controller.checkpoint_export
            if export == "all" or (export == "last" and last):
                await self._export(written)
            await self._weights.save_teacher(checkpoint.teacher_file(written))
            state.draws, state.teacher_version = self._batch_state(), self._weights.teacher_version
            state.num_requests, played = self._num_requests(), state.draws.pop("finished", [])
            content = dataclasses.asdict(state)
            content |= {"finished": played, "random": random_states(), "metrics_bytes": self.run_dir.metrics_size()}
        except (OSError, RuntimeError) as error:
            await _wait_for_writers(staged)
            self._record(self._failed(path, state.phase_step, error))
            return path
        stage_s = time.perf_counter() - began
        self._writing = asyncio.ensure_future(self._write(path, content, parts, stage_s))
        return path

    async def finish(self) -> None:
        """Waits until the checkpoint that is being written is on disk. It is written on where the wait is cancelled."""
        if (writing := self._writing) is not None:
            try:
                with span("wait for a checkpoint on disk"):
                    line = await asyncio.shield(writing)
            finally:
                if writing.done():
                    self._writing = None
            self._record(line)  # here and not in `_write`: the place of the line must not depend on the disk

    async def finish_at_end(self) -> None:
        """Waits as `finish` does, for a run that ends: `call_timeout_s` at most. What goes wrong is logged."""
        try:
            async with asyncio.timeout(self.config.controller.call_timeout_s):
                await self.finish()
        except Exception as error:
            logger.warning("checkpoint: the one that was being written as the run ended is not complete: %r", error)
        finally:
            if self._writing is not None:
                self._writing.cancel()
            self._writing = None

    async def require_written(self) -> None:
        """Waits as `finish` does. Raises RuntimeError when the last checkpoint could not be written."""
        await self.finish()
        if self._failure:
            raise RuntimeError(f"the last checkpoint could not be written: {self._failure}")

    async def _export(self, written: Path) -> None:
        policy, tokenizer = self._roles["policy"], self._tokenizer
        await policy.save_hf_model(checkpoint.hf_dir(written), eos=tokenizer.eos_token_id, pad=pad_token_id(tokenizer))
        if self.config.trainer.lora is not None:
            await policy.save_adapter(checkpoint.adapter_dir(written))

    async def _write(
        self, path: Path, content: dict, parts: dict[TrainingClient, Path], stage_s: float
    ) -> dict[str, Any]:
        began, written = time.perf_counter(), checkpoint.beside(path)
        try:
            files: dict[str, list] = {}
            for role, where in parts.items():
                prefix = where.relative_to(written)
                files |= {str(prefix / name): entry for name, entry in (await role.checkpoint_written()).items()}
            checkpoint.write_json(written / checkpoint.RUN_CONFIG, resolved(self.config))
            if played := content.pop("finished"):
                await asyncio.to_thread(finished.write, checkpoint.finished_file(written), played)
            await asyncio.to_thread(checkpoint.commit, written, path, content, files)
            await asyncio.to_thread(checkpoint.point_to, path)
        except WorkerLost as error:  # the run's next call to the role fails for the same reason, and ends the run
            self._failure = str(error)
            return {}
        except (OSError, RuntimeError) as error:
            await _wait_for_writers(parts)
            return self._failed(path, content["phase_step"], error)
        self._failure = ""
        write_s = time.perf_counter() - began
        await self._delete_old()
        await self._seal_records()
        line = _line(path, content["phase_step"], failed=0)
        return line | {"time/stage_s": stage_s, "time/write_s": write_s}

    async def _delete_old(self) -> None:
        config, names = self.config.controller, [path.name for path in complete(self.run_dir.checkpoints)]
        accuracies = self.state.accuracies.get(config.keep_best, {})
        for name in superfluous(names, keep_last=config.keep_last, keep_every=config.keep_every, accuracies=accuracies):
            try:
                await self._roles["policy"].remove_checkpoint(self.run_dir.checkpoints / name)
            except (OSError, RuntimeError) as error:
                logger.warning("checkpoint=%s: could not be deleted: %s", name, error)

    async def _seal_records(self) -> None:
        """Turns the records so far into Parquet, and notes checksums of the run's files."""
        for name, table in self.run_dir.tables.items():
            table.rotate()
            try:
                await asyncio.to_thread(table.seal, self.run_dir.checksums)
            except (OSError, RuntimeError, ValueError) as error:  # no room, or a line that something else has damaged
                logger.warning("table=%s: stays as JSON lines until the next checkpoint: %s", name, error)
        await asyncio.to_thread(self.run_dir.checksums.note, self.run_dir.metrics_file)

    def _failed(self, path: Path, step: int, error: BaseException) -> dict[str, Any]:
        """Reports that a checkpoint could not be written. Returns the line of metrics that says so."""
        self._failure = f"{path.name}: {error}"
        newest = [other.name for other in complete(self.run_dir.checkpoints)][-1:] or ["none"]
        logger.warning(
            "checkpoint=%s: could not be written, the run goes on without it (the newest complete one: %s): %s",
            path, newest[0], error,
            extra={"event": "checkpoint_failed", "who": path.name},
        )  # fmt: skip
        shutil.rmtree(checkpoint.beside(path), ignore_errors=True)
        return _line(path, step, failed=1)

    def _record(self, line: dict[str, Any]) -> None:
        if not line:
            return
        try:
            self.recorder.record(Metrics(line=line))
        except OSError as error:  # the file system that has no room for a checkpoint may have none for a line
            logger.warning("metrics: a line could not be written: %s", error)


async def _wait_for_writers(roles: Iterable[TrainingClient]) -> None:
    """Waits until no thread of these roles writes any more, well or not: files that appear while a directory is deleted
    would stay, and a rank that still writes refuses the next checkpoint."""
    await asyncio.gather(*(role.checkpoint_written() for role in roles), return_exceptions=True)


def _line(path: Path, step: int, *, failed: int) -> dict[str, Any]:
    return {"step": step, "phase": "checkpoint", "checkpoint/name": path.name, "checkpoint/failed": failed}
