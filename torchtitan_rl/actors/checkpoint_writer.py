"""Writing a rank's part of a checkpoint while the rank goes on training."""

from __future__ import annotations

import errno
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_rl import platform
from torchtitan_rl.actors.host_copy import HostCopy, local_part, tensors
from torchtitan_rl.weights import checkpoint

__all__ = ["CheckpointWriter", "load_random_states"]


class CheckpointWriter:
    """Copies a rank's state to host memory and writes the copy in a thread. At most one copy exists: its memory is used
    again for the next checkpoint."""

    def __init__(self) -> None:
        self._copy = HostCopy()
        self._group: dist.ProcessGroup | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[dict[str, list]] | None = None

    def stage(self, state: dict[str, Any], path: Path) -> None:
        """Copies `state` and begins to write the copy below `path`. A collective call: ranks agree on who writes what.

        Raises RuntimeError while the checkpoint before is still being written.
        """
        if self._writing is not None and not self._writing.done():
            raise RuntimeError("stage_checkpoint: the checkpoint before is still being written; wait for it first")
        if self._group is None and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")  # collectives of training go on in another thread
        staged = self._copy.take(state)
        self._writing = self._thread.submit(self._write, staged, _random_states(), checkpoint.model_dir(path))

    def written(self) -> dict[str, list] | None:
        """Path below the checkpoint of each file that this rank wrote -> [bytes, xxh3]; None while the rank is still
        writing. Raises what writing raised, and RuntimeError when nothing was staged."""
        if self._writing is None:
            raise RuntimeError("checkpoint_written: nothing was staged; call stage_checkpoint first")
        return self._writing.result() if self._writing.done() else None

    def _write(self, staged: Any, random_states: dict[str, torch.Tensor], directory: Path) -> dict[str, list]:
        rank = dist.get_rank()
        file = self._write_random_states(random_states, directory)
        # With several ranks no rank may leave the others waiting: torch gathers what failed.
        alone, free, needed = self._group is None, shutil.disk_usage(directory).free, _nbytes(staged)
        if alone and free < needed:
            problem = os.strerror(errno.ENOSPC)
            raise OSError(f"{directory}: {problem}: needs {needed} bytes, {free} are free on its file system")
        try:
            dcp.save(staged, checkpoint_id=str(directory), process_group=self._group, no_dist=alone)
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            free = shutil.disk_usage(directory).free
            raise OSError(f"{directory}: {cause} ({free} bytes are free on its file system)") from error
        mine = [file, *directory.glob(f"__{rank}_*.distcp"), *(directory.glob(".metadata") if rank == 0 else ())]
        return checkpoint.checksums(directory.parent, mine)

    def _write_random_states(self, states: dict[str, torch.Tensor], directory: Path) -> Path:
        """The file of this rank. Raises OSError on every rank where one of them failed: the others would wait for it in
        the collective that follows."""
        file, problem = _random_file(directory), ""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            torch.save(states, file)
            with open(file, "rb") as f:
                os.fsync(f.fileno())
        except (OSError, RuntimeError) as error:  # torch's writer of zip files raises RuntimeError for a full disk
            problem = f"{file}: {error}"
        problems = [problem]
        if self._group is not None:
            problems = [""] * dist.get_world_size()
            dist.all_gather_object(problems, problem, group=self._group)
        if any(problems):
            raise OSError("; ".join(filter(None, problems)))
        return file


def _nbytes(state: dict[str, Any]) -> int:
    """Bytes that a nested state has on disk, where a tensor of two names is written twice."""
    return sum(local_part(tensor).nbytes for _, tensor in tensors(state))


def _random_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if platform.device_type() == "cuda" else {})


def load_random_states(directory: Path) -> None:
    """Goes back to the random states that this rank had when it wrote the checkpoint. A rank that did not exist then
    keeps its own."""
    file = _random_file(directory)
    if not file.exists():
        return
    states = torch.load(file, weights_only=True)
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and platform.device_type() == "cuda":
        torch.cuda.set_rng_state(states["cuda"])


def _random_file(directory: Path) -> Path:
    return directory / f"random-{dist.get_rank()}.pt"
