import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from torchtitan_rl.actors.checkpoint_writer import CheckpointWriter
from torchtitan_rl.weights import checkpoint

_RANKS = 2


def _write(rank: int, directory: Path) -> None:
    """Writes a checkpoint as one of two ranks and notes in a file what came of it."""
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", store, timedelta(seconds=60), world_size=_RANKS, rank=rank)
    writer = CheckpointWriter()
    writer.stage({"weight": torch.full((2,), float(rank))}, directory / "step-1")
    deadline = time.monotonic() + 30
    try:
        while (files := writer.written()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        outcome = "waits" if files is None else " ".join(sorted(files))
    except OSError as error:
        outcome = f"OSError: {error}"
    (directory / f"outcome-{rank}").write_text(outcome)
    dist.destroy_process_group()


def _outcomes(directory: Path) -> list[str]:
    mp.spawn(_write, (directory,), nprocs=_RANKS)
    return [(directory / f"outcome-{rank}").read_text() for rank in range(_RANKS)]


def test_ranks_write_a_checkpoint_together(tmp_path):
    first, second = _outcomes(tmp_path)
    assert "random-0.pt" in first and ".metadata" in first
    assert "random-1.pt" in second


def test_a_rank_that_cannot_write_leaves_no_other_waiting(tmp_path):
    in_the_way = checkpoint.model_dir(tmp_path / "step-1") / "random-1.pt"
    in_the_way.mkdir(parents=True)
    for outcome in _outcomes(tmp_path):
        assert outcome.startswith(f"OSError: {in_the_way}: ")
