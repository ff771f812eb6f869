"""What a checkpoint costs a step: seconds of staging against a memcpy of the same bytes, in one process.

    .venv/bin/python benchmarks/checkpoint_cost.py [--flavor 0.6B] [--checkpoints 6] [--directory DIR]

A trainer alone, on this machine's device, takes a step before every checkpoint. The first checkpoint allocates the
copy; the figure that counts is that of the later ones. A memcpy is torch's copy of contiguous host memory into host
memory that has been written to before, with the trainer's number of threads. It is timed twice: of all staged bytes at
once before the trainer starts, and before each checkpoint of 512 MiB, scaled to the staged bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import torchtitan_rl.config as rl
from torchtitan_rl import platform
from torchtitan_rl.algorithm.losses import cross_entropy
from torchtitan_rl.dispatch.mesh_training_client import MeshTrainingClient
from torchtitan_rl.launch.local import LocalLauncher
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.types import Datum, OptimParams

_BLOCK = 512 * 2**20  # bytes
_NUMBERS_PER_PARAMETER = 3  # AdamW's state: the parameter and two moments, in float32


class Memcpy:
    """Two blocks of host memory that have been written to, of so many bytes each."""

    def __init__(self, num_bytes: int):
        self._source = torch.ones(num_bytes, dtype=torch.uint8)
        self._target = torch.ones(num_bytes, dtype=torch.uint8)

    def seconds(self, num_bytes: int) -> float:
        """The median time of five copies, scaled to `num_bytes`."""
        times = []
        for _ in range(5):
            start = time.perf_counter()
            self._target.copy_(self._source)
            times.append(time.perf_counter() - start)
        return median(times) * num_bytes / self._source.nbytes


async def measure(model: rl.ModelConfig, checkpoints: int, directory: Path) -> list[dict[str, float]]:
    launcher = LocalLauncher(log_dir=str(directory / "logs"), start_timeout_s=600, call_timeout_s=3600)
    vocab_size = resolve_shape(model).vocab_size
    mesh: Any = await launcher.start_trainer(rl.TrainerConfig(), model, role="policy", seed=0)
    client = MeshTrainingClient(
        mesh, max_tokens_per_microbatch=64, max_datum_tokens=64, temperature=1.0, vocab_size=vocab_size
    )  # fmt: skip
    ones = torch.ones(15)
    tokens = torch.arange(16) % vocab_size
    datum = Datum(
        tokens=tokens[:-1], target_tokens=tokens[1:], loss_inputs={"token_weights": ones / 15, "loss_mask": ones}
    )
    await client.forward_backward([datum], cross_entropy)
    await client.optim_step(OptimParams(lr=1e-5))  # makes the optimizer's state
    [sizes] = await client.residency()
    num_bytes, block, rows = sizes["model"] + sizes["optimizer"], Memcpy(_BLOCK), []
    for number in range(checkpoints):
        await client.forward_backward([datum], cross_entropy)
        await client.optim_step(OptimParams(lr=1e-5))
        path = directory / f"step-{number}"
        memcpy_s = block.seconds(num_bytes)
        start = time.perf_counter()
        await client.stage_checkpoint(path)
        staged = time.perf_counter()
        await client.checkpoint_written()
        rows.append({
            "stage_s": staged - start,
            "write_s": time.perf_counter() - staged,
            "memcpy_s": memcpy_s,
            "bytes": num_bytes,
        })  # fmt: skip
        shutil.rmtree(path)
    await launcher.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", default="0.6B")
    parser.add_argument("--checkpoints", type=int, default=6)
    parser.add_argument("--directory", default="")
    args = parser.parse_args()
    if args.checkpoints < 2:
        parser.error(f"--checkpoints {args.checkpoints}: the first one does not count; give 2 or more")
    model = rl.ModelConfig(flavor=args.flavor)
    platform.set_threads(rl.TrainerConfig().num_threads)
    num_bytes = _NUMBERS_PER_PARAMETER * 4 * resolve_shape(model).num_parameters
    at_once = Memcpy(num_bytes).seconds(num_bytes)
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-", dir=args.directory or None) as directory:
        rows = asyncio.run(measure(model, args.checkpoints, Path(directory)))
    for row in rows:
        print(json.dumps({name: round(value, 4) for name, value in row.items()}))
    later = rows[1:]
    summary = {name: median(row[name] for row in later) for name in ("stage_s", "memcpy_s")}
    summary |= {"ratio": median(row["stage_s"] / row["memcpy_s"] for row in later), "memcpy_at_once_s": at_once}
    print(json.dumps({name: round(value, 3) for name, value in summary.items()}))


if __name__ == "__main__":
    main()
