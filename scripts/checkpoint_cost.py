"""What a checkpoint costs a step: seconds of staging against a memcpy of the same bytes, in one process.

    .venv/bin/python scripts/checkpoint_cost.py [--flavor 0.6B] [--checkpoints 4] [--directory DIR]

A trainer alone, on this machine's device, takes a step before every checkpoint. The first checkpoint allocates the
copy; the figure that counts is that of the later ones.
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
from torchtitan_rl.algorithm.losses import cross_entropy
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.launch.local import LocalLauncher
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.types import Datum, OptimParams


def memcpy_s(num_bytes: int) -> float:
    """Seconds to copy so many bytes within host memory, by the time of one GiB that has been written to before."""
    source, target = torch.ones(2**30, dtype=torch.uint8), torch.ones(2**30, dtype=torch.uint8)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return median(times) * num_bytes / 2**30


async def measure(model: rl.ModelConfig, checkpoints: int, directory: Path) -> list[dict[str, float]]:
    launcher = LocalLauncher(log_dir=str(directory / "logs"), start_timeout_s=600, call_timeout_s=3600)
    vocab_size = resolve_shape(model).vocab_size
    mesh: Any = await launcher.start_trainer(rl.TrainerConfig(), model, role="policy", seed=0)
    client = TrainingClient(
        mesh, max_tokens_per_microbatch=64, max_datum_tokens=64, temperature=1.0, vocab_size=vocab_size
    )  # fmt: skip
    ones = torch.ones(15)
    tokens = torch.arange(16) % vocab_size
    datum = Datum(
        tokens=tokens[:-1], target_tokens=tokens[1:], loss_inputs={"token_weights": ones / 15, "loss_mask": ones}
    )
    rows = []
    for number in range(checkpoints):
        await client.forward_backward([datum], cross_entropy)
        await client.optim_step(OptimParams(lr=1e-5))
        path = directory / f"step-{number}"
        start = time.perf_counter()
        await client.stage_checkpoint(path)
        staged = time.perf_counter()
        files = await client.checkpoint_written()
        rows.append({
            "stage_s": staged - start,
            "write_s": time.perf_counter() - staged,
            "bytes": sum(size for size, _ in files.values()),
        })  # fmt: skip
        shutil.rmtree(path)
    await launcher.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", default="0.6B")
    parser.add_argument("--checkpoints", type=int, default=4)
    parser.add_argument("--directory", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-", dir=args.directory or None) as directory:
        rows = asyncio.run(measure(rl.ModelConfig(flavor=args.flavor), args.checkpoints, Path(directory)))
    for row in rows:
        print(json.dumps({name: round(value, 4) for name, value in row.items()}))
    later, floor = median(row["stage_s"] for row in rows[1:]), memcpy_s(int(rows[0]["bytes"]))
    print(json.dumps({"stage_s": round(later, 3), "memcpy_s": round(floor, 3), "ratio": round(later / floor, 2)}))


if __name__ == "__main__":
    main()
