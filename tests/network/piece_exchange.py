"""Trainer ranks that publish pieces, and generator ranks that fetch them, as bare processes: for hosts of a test bed.

    piece_exchange.py publish DIRECTORY RANK RANKS MEBIBYTES      writes DIRECTORY/source-RANK, and stays
    piece_exchange.py pull DIRECTORY RANKS RANK SIZE MEBIBYTES    prints JSON: seconds, bytes, growth; or an error

The tensors are those of a Qwen3 of about this size in bf16; every value says where it belongs, and a pull checks all.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from torchtitan_rl.weights import layout, piece_server
from torchtitan_rl.weights.finite import FiniteCheck
from torchtitan_rl.weights.pieces import Box, HeadRows, PieceManifest
from torchtitan_rl.weights.sharded_pull import pull
from torchtitan_rl.weights.sharded_push import Publisher, write_pieces
from torchtitan_rl.weights.staging import Staging, part_box
from torchtitan_rl.weights.trainer_shards import LocalShard, entries_of

_DIM, _KV = 1024, 8
_LAYER = {
    "attention.qkv_linear.wqkv": (2048, _DIM),
    "attention.wo": (_DIM, 1024),
    "feed_forward.w1": (3072, _DIM),
    "feed_forward.w3": (3072, _DIM),
    "feed_forward.w2": (_DIM, 3072),
}
_HEADS = HeadRows(heads_per_kv=2, head_dim=64)


def shapes(mebibytes: int) -> dict[str, tuple[int, ...]]:
    """An embedding of a sixth, and layers."""
    found: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (mebibytes * 2**20 // 6 // 2 // _DIM, _DIM)}
    for index in range(round(mebibytes * 5 / 6 / (2 * 12.6e6 / 2**20))):
        found |= {f"layers.{index}.{name}.weight": shape for name, shape in _LAYER.items()}
    return found | {"norm.weight": (_DIM,)}


def values(name: str, box: Box, whole: tuple[int, ...]) -> torch.Tensor:
    """Of a box: 16-bit integers, read as bf16, that differ between tensors and between places."""
    start = hash_of(name)
    rows = torch.arange(box.offsets[0], box.offsets[0] + box.shape[0], dtype=torch.int64)
    if len(whole) == 1:
        flat = rows
    else:
        columns = torch.arange(box.offsets[1], box.offsets[1] + box.shape[1], dtype=torch.int64)
        flat = rows[:, None] * whole[1] + columns
    return ((flat * 7 + start) % 16000).to(torch.int16).view(torch.bfloat16)


def hash_of(name: str) -> int:
    return sum(ord(letter) * (index + 1) for index, letter in enumerate(name))


def publish(directory: Path, rank: int, ranks: int, mebibytes: int) -> None:
    torch.set_num_threads(1)
    exchange = SimpleNamespace(buffers=layout.SharedBuffers(), pieces=Publisher(), n_kv_heads=_KV)
    held = {}
    for name, shape in shapes(mebibytes).items():
        rows = -(-shape[0] // ranks)
        box = Box((0,) * len(shape), shape).rows(min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0]))
        held[name] = LocalShard(shape, box, values(name, box, shape), _HEADS if "wqkv" in name else None)
    source = write_pieces(exchange, rank, 7, held, dict.fromkeys(held, torch.bfloat16), {}, FiniteCheck())
    (directory / f"writing-{rank}").write_bytes(pickle.dumps(source))
    (directory / f"writing-{rank}").rename(directory / f"source-{rank}")
    signal.pause()


def manifest_of(directory: Path, ranks: int, mebibytes: int) -> PieceManifest:
    sources = [pickle.loads((directory / f"source-{rank}").read_bytes()) for rank in range(ranks)]
    entries = {}
    for name, shape in shapes(mebibytes).items():
        held = LocalShard(shape, Box((), ()), torch.empty(0), _HEADS if "wqkv" in name else None)
        entries |= entries_of(name, held, torch.bfloat16)
    return PieceManifest(version=7, entries=entries, aliases={}, sources=sources)


def fetch(directory: Path, ranks: int, rank: int, size: int, mebibytes: int) -> None:
    """Twice: the memory is touched for the first time in the first pull."""
    torch.set_num_threads(1)
    manifest, staging = manifest_of(directory, ranks, mebibytes), Staging()
    told: dict = {"seconds": []}
    before = resident("VmRSS")
    for _ in range(2):
        payload = None  # the segment is free for the next pull, as it is once an engine has loaded a version
        began = time.monotonic()
        try:
            plan, payload = pull(manifest, rank, size, staging, verify=True)
        except RuntimeError as error:
            told |= {"error": str(error), "at": time.monotonic()}
            break
        told["seconds"].append(time.monotonic() - began)
        told["bytes"] = plan.nbytes
    told["growth"] = resident("VmHWM") - before
    if "error" not in told:
        told["right"] = right(layout.read(payload, plan), rank, size, mebibytes)
    print(json.dumps(told), flush=True)


def right(fetched: dict[str, torch.Tensor], rank: int, size: int, mebibytes: int) -> bool:
    """Whether every value is what the trainer ranks made of its place."""
    whole = {}
    for name, shape in shapes(mebibytes).items():
        made = values(name, Box((0,) * len(shape), shape), shape)
        if "wqkv" in name:
            prefix, heads = name.removesuffix("wqkv.weight"), made.view(_KV, 4, 64, shape[1])
            parts = {"wq": heads[:, :2], "wk": heads[:, 2], "wv": heads[:, 3]}
            whole |= {f"{prefix}{part}.weight": rows.reshape(-1, shape[1]) for part, rows in parts.items()}
        else:
            whole[name] = made
    return whole.keys() == fetched.keys() and all(
        torch.equal(
            fetched[name].as_subclass(torch.Tensor).contiguous().view(torch.int16),
            tensor[part_box(name, tuple(tensor.shape), rank, size).within(Box((0,) * tensor.dim(), tensor.shape))]
            .contiguous()
            .view(torch.int16),
        )
        for name, tensor in whole.items()
    )


def resident(which: str) -> int:
    """`VmRSS`: resident memory now; `VmHWM`: the most there has been. In bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    what, place, *numbers = sys.argv[1:]
    if limit := os.environ.get("SILENT_S"):
        piece_server.SILENT_S = float(limit)
    {"publish": publish, "pull": fetch}[what](Path(place), *map(int, numbers))
