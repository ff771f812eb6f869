"""What moving weights costs, beside the least that this machine needs for the same bytes: one flat copy."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from scripts.gpu_checks.configs import sized_model
from scripts.gpu_checks.result import Result, run_check
from scripts.gpu_checks.trainer_steps import Row, Trainer, join_process_group, release, trainer_config
from torchtitan_rl import platform
from torchtitan_rl.model.residency import Part, gradient_tensors, model_tensors, optimizer_tensors
from torchtitan_rl.model.row_blocks import copy_all
from torchtitan_rl.weights import layout
from torchtitan_rl.weights.exchange import WeightExchange
from torchtitan_rl.weights.finite import NotFinite
from torchtitan_rl.weights.versioned import MemoryStore

REPEATS = 3
PUBLISHED_SYNC_S = 0.067  # a weight sync of this size between a trainer and a generator on one node


class Copies:
    """Measurements as rows of one table, each written to the result as it is made."""

    def __init__(self, result: Result, device: torch.device) -> None:
        self.result, self.device = result, device
        self.rows: list[dict[str, Any]] = []
        self.gb_per_s: dict[str, float] = {}

    def measure(
        self, name: str, nbytes: int, call: Callable[[], Any], *, floor: str = "", repeats: int = REPEATS, first=False
    ) -> None:
        """A row: the median seconds of some calls after a first, or of the first alone. `floor` names the row of the
        flat copy; beside the row stand the seconds that these bytes take at its rate. A call that raises is noted."""

        def timed() -> float:
            self._wait()
            start = time.perf_counter()
            call()
            self._wait()
            return time.perf_counter() - start

        print(name, flush=True)
        seconds = self.result.attempt(name, timed)
        if seconds is not None and not first:
            seconds = self.result.attempt(name, lambda: statistics.median(timed() for _ in range(repeats)))
        if seconds is None:
            return
        rate = self.gb_per_s[name] = nbytes / seconds / 1e9
        limit = self.gb_per_s.get(floor)
        self.rows.append(
            {
                "copy": name,
                "gb": round(nbytes / 1e9, 3),
                "seconds": float(f"{seconds:.4g}"),
                "gb_per_s": float(f"{rate:.4g}"),
                "floor": floor,
                "floor_s": float(f"{nbytes / 1e9 / limit:.4g}") if limit else "",
            }
        )
        self.result.note(copies=self.rows)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def host_copies(copies: Copies, nbytes: int) -> torch.Tensor:
    """Pins, copies and sums up host memory. Returns a pinned buffer of `nbytes`."""
    buffers = layout.SharedBuffers()
    copies.measure("new shared segment, pinned (map, clear, pin)", nbytes, lambda: buffers.take(0, nbytes), first=True)
    buffers.close()
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)

    def pin_again() -> None:
        platform.unpin(source)
        platform.pin(source)

    copies.measure("unpin, and pin pages that are there", nbytes, pin_again)
    if copies.device.type == "cuda":
        new = "torch's pinned memory, new"
        copies.measure(
            new, nbytes, lambda: torch.empty(nbytes + 1, dtype=torch.uint8, pin_memory=True), repeats=1, first=True
        )
    whole = "host to host, one flat copy, torch's threads"
    copies.measure(whole, nbytes, lambda: target.copy_(source))
    blocks = [(target[i : i + 2**21], source[i : i + 2**21]) for i in range(0, nbytes, 2**21)]
    copies.measure("host to host, in blocks by every core", nbytes, lambda: copy_all(blocks), floor=whole)
    sums = "xxh3, one thread"
    copies.measure(sums, nbytes, lambda: layout.checksum(source), floor=whole)
    copies.measure(
        "xxh3, blocks by every core (as published now)",
        nbytes,
        lambda: platform.in_threads(layout.checksum, [block for _, block in blocks]),
        floor=whole,
    )
    words = source[: nbytes // 8 * 8].view(torch.int64)
    copies.measure("torch.hash_tensor on the host", words.nbytes, lambda: torch.hash_tensor(words).item(), floor=whole)
    return source


def device_copies(copies: Copies, trainer: Trainer, pinned: torch.Tensor) -> None:
    """Between device and host: flat, and tensor by tensor with a cast as weights are published."""
    parameters = [parameter.detach() for parameter in trainer.model.parameters()]
    parameters = [p.to_local() if hasattr(p, "to_local") else p for p in parameters]
    cast = [p.to(torch.bfloat16) for p in parameters]
    nbytes = sum(p.nbytes for p in cast)
    flat = torch.cat([p.reshape(-1) for p in cast]).view(torch.uint8)
    places, end = [], 0
    for p in cast:
        places.append(pinned[end : end + p.nbytes].view(torch.bfloat16).view(p.shape))
        end += p.nbytes
    down, up = "device to host, one flat pinned copy", "host to device, one flat pinned copy"
    copies.measure(down, nbytes, lambda: pinned[:nbytes].copy_(flat, non_blocking=True))
    copies.measure(up, nbytes, lambda: flat.copy_(pinned[:nbytes], non_blocking=True))
    pageable = torch.ones(nbytes, dtype=torch.uint8)
    copies.measure("device to host, flat, not pinned", nbytes, lambda: pageable.copy_(flat), floor=down)
    copies.measure("host to device, flat, not pinned", nbytes, lambda: flat.copy_(pageable), floor=up)

    def cast_down() -> None:
        for place, parameter in zip(places, parameters, strict=True):
            place.copy_(parameter.to(torch.bfloat16), non_blocking=True)
        platform.wait_for_copies()

    def tensors_up() -> None:
        for place, tensor in zip(places, cast, strict=True):
            tensor.copy_(place)

    copies.measure("device to host, tensor by tensor, cast from float32", nbytes, cast_down, floor=down)
    copies.measure("host to device, tensor by tensor (as an engine loads)", nbytes, tensors_up, floor=up)
    copies.measure("device to device, flat", nbytes, lambda: flat.clone())
    words = flat[: nbytes // 8 * 8].view(torch.int64)
    copies.measure("torch.hash_tensor on the device", nbytes, lambda: torch.hash_tensor(words).item(), floor=down)


def publications(copies: Copies, trainer: Trainer) -> None:
    """`WeightExchange.push` as a trainer rank calls it: cast, copy, look for NaN, sum up."""
    exchange = WeightExchange(
        trainer.model,
        n_kv_heads=trainer.shape.n_kv_heads,
        config=trainer.config,
        device=trainer.device,
        store=MemoryStore(),
    )
    nbytes = 2 * trainer.shape.num_parameters
    down = "device to host, one flat pinned copy"

    def push(transport: str, verify: bool) -> None:
        written = asyncio.run(exchange.push("measured", torch.bfloat16, transport, verify))
        if isinstance(written, NotFinite):
            raise RuntimeError(f"{written.tensor}: is not finite")

    try:
        shared = "publish by shared memory"
        copies.measure(f"{shared}, the first", nbytes, lambda: push("shared_memory", True), floor=down, first=True)
        copies.measure(f"{shared}, checksums", nbytes, lambda: push("shared_memory", True), floor=down)
        copies.measure(f"{shared}, no checksums", nbytes, lambda: push("shared_memory", False), floor=down)
        copies.measure("publish in pieces (store)", nbytes, lambda: push("store", True), floor=down)
        copies.result.note(published={"weight sync, seconds": PUBLISHED_SYNC_S})
    finally:
        exchange.close()


def residencies(copies: Copies, trainer: Trainer) -> None:
    """Parameters, gradients and both moments to the host and back. The second time torch has the pinned memory."""
    tensors = {
        "parameters": model_tensors(trainer.model),
        "gradients": gradient_tensors(trainer.model),
        "moments": optimizer_tensors(trainer.optimizers),
    }
    nbytes = sum(tensor.nbytes for part in tensors.values() for tensor in part)
    copies.result.note(
        offloaded_gb={name: round(sum(t.nbytes for t in part) / 1e9, 3) for name, part in tensors.items()}
    )
    parts = {name: Part() for name in tensors}

    def offload() -> None:
        for name, part in parts.items():
            part.offload(tensors[name])

    def onload() -> None:
        for part in parts.values():
            part.onload()

    for time_name in ("first", "second"):
        copies.measure(
            f"offload, the {time_name} time", nbytes, offload, floor="device to host, one flat pinned copy", first=True
        )
        copies.measure(
            f"onload, the {time_name} time", nbytes, onload, floor="host to device, one flat pinned copy", first=True
        )


def check(result: Result, args: argparse.Namespace) -> None:
    """Measures copies of the weights at 0.6B in bfloat16 and of a trainer's state; fails for a copy that raises."""
    device = join_process_group()
    length = 32 if args.tiny else 1024
    row = Row("tiny", 64) if args.tiny else Row("0.6B", 2048)
    trainer = Trainer(trainer_config(row, length), sized_model(args.tiny), device)
    copies = Copies(result, device)
    nbytes = 2 * trainer.shape.num_parameters + 2**20  # room for names of one tensor that are copied twice

    def flat_copies() -> None:
        pinned = host_copies(copies, nbytes)
        device_copies(copies, trainer, pinned)
        platform.unpin(pinned)

    result.attempt("copies", flat_copies)
    release()
    result.attempt("publications", lambda: publications(copies, trainer))
    release()
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer.optimizers.step()  # makes the moments
    result.attempt("residency", lambda: residencies(copies, trainer))


if __name__ == "__main__":
    run_check(check)
