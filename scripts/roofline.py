"""What bytes and operations of a step allow on a GPU, beside what was measured: the tables of docs/gpu/roofline.md.

    .venv/bin/python -m scripts.roofline              both tables
    .venv/bin/python -m scripts.roofline decoding     one of them

A step takes at least the seconds of its operations at the device's peak, and at least those of its bytes at the
device's bandwidth. While decoding the two overlap, and the larger bounds the step. In training matrix products and the
operators between them run one after the other, and the seconds add up.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_rl import platform
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.families import DecoderShape, Qwen3Shape
from torchtitan_rl.model.flops import forward_flops, training_flops
from torchtitan_rl.model.memory import generator_parts
from torchtitan_rl.model.shape import kv_bytes_per_token

__all__ = ["Device", "DEVICES", "decode_bytes", "decode_seconds", "training_seconds"]

MEASURED = Path(__file__).parents[1] / "docs" / "gpu"
"""What the battery measured on each device, such as h100.json."""
FLAVORS = ("0.6B", "4B", "30B-A3B")
GENERATOR = GeneratorConfig(dtype="bfloat16", kv_cache_gib=1.0)
TOKENS, LENGTH = 16384, 1024
"""Of a training microbatch, and of its documents."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU by its data sheet: dense bfloat16 FLOP/s, and bytes and bytes per second of its memory."""

    name: str
    flops: float
    memory: float
    bandwidth: float


DEVICES = (Device("H100", 989e12, 80e9, 3.35e12), Device("H200", 989e12, 141e9, 4.8e12))


@dataclass(frozen=True, slots=True)
class Requests:
    """What the battery's engine ladder samples."""

    number: int
    prompt: int
    output: int

    @property
    def context(self) -> int:
        """Mean tokens that a decoded token looks back to."""
        return self.prompt + self.output // 2

    @property
    def column(self) -> str:
        return f"tokens_per_s, {self.number} x ({self.prompt} in, {self.output} out)"


REQUESTS = (Requests(64, 512, 128), Requests(256, 16, 256))


# Decoding.


def read_weights(shape: DecoderShape, num_tokens: int) -> int:
    """Bytes of the weights that a step of so many tokens reads in bfloat16. Of a mixture those of the experts that
    some token is sent to, when each expert is as likely as another: 1 - (1 - K / E)^tokens of them."""
    weights = generator_parts(GENERATOR, shape)["weights"]
    if not shape.tie_embeddings:
        weights -= 2 * shape.vocab_size * shape.dim  # the embedding gives one row a token
    if shape.experts is not None:
        experts = 2 * shape.num_mixture_layers * shape.experts.num_experts * 3 * shape.dim * shape.hidden_dim
        weights -= int(experts * (1 - shape.experts.top_k / shape.experts.num_experts) ** num_tokens)
    return weights


def decode_bytes(shape: DecoderShape, num_sequences: int, context: int) -> dict[str, int]:
    """Bytes of one decode step by part: the weights once, keys and values of all contexts, logits in bfloat16 written
    once and read once. What is between the products is small and left out."""
    return {
        "weights": read_weights(shape, num_sequences),
        "cache": num_sequences * (context + 1) * kv_bytes_per_token(GENERATOR, shape),
        "logits": 2 * 2 * num_sequences * shape.vocab_size,
    }


def decode_seconds(shape: DecoderShape, num_sequences: int, context: int, device: Device) -> float:
    """The least that one decode step takes."""
    moved = sum(decode_bytes(shape, num_sequences, context).values()) / device.bandwidth
    # Attention is causal: a token of a sequence of twice the context looks back to the context on average.
    return max(moved, num_sequences * forward_flops(shape, 2 * context) / device.flops)


def sampling_seconds(shape: DecoderShape, requests: Requests, device: Device) -> float:
    """The least that prompts and all decode steps take."""
    prompts = requests.number * requests.prompt * forward_flops(shape, requests.prompt) / device.flops
    return prompts + requests.output * decode_seconds(shape, requests.number, requests.context, device)


# Training.


@dataclass(frozen=True, slots=True)
class TrainingSeconds:
    """The least that the parts of a training step take, one after the other."""

    products: float
    """Matrix products and attention, as MFU counts them."""
    again: float
    """Products that are computed again: the head's in its backward, but for one chunk, and those that checkpointing
    does not keep."""
    logits: float
    """Three passes of the head's kernels over logits in bfloat16: one reads, one reads and writes."""
    between: float | None
    """Operators between products, as eager mode calls them; None where they are not counted."""
    optimizer: float | None
    """Copies of parameters and gradients in other dtypes, the norm, AdamW; None where one device cannot hold them."""

    def ceiling(self, *parts: str) -> float:
        """MFU if only products and these parts took time."""
        return self.products / (self.products + sum(getattr(self, part) or 0.0 for part in parts))


OPTIMIZER_BYTES = 2 * 6 + 6 + 2 * 8 + 4 + 4 * 7
"""For each parameter in float32: two casts to bfloat16 (forward, backward) and one of its gradient back; the gradient
scaled, read for the norm, and clipped; AdamW reads parameter, gradient and two moments, and writes all but the
gradient."""


def products_again(shape: DecoderShape, checkpoint: str) -> int:
    """Operations of a microbatch's products that a backward computes again: the head's of all chunks but one, and with
    `"selective"` those whose output `memory.layer_activations` does not count as kept: attention's last, and up or, of
    a mixture, all."""
    kept = platform.logprob_chunk_bytes(0, "cuda") // (4 * shape.vocab_size)
    head = 2 * shape.dim * shape.vocab_size * max(0, TOKENS - kept)
    if checkpoint == "none":
        return head
    matrices = 1 if shape.experts is None else 3 * shape.experts.top_k
    layer = shape.n_heads * shape.head_dim * shape.dim + matrices * shape.dim * shape.hidden_dim
    return head + 2 * shape.n_layers * layer * TOKENS


def training_seconds(shape: DecoderShape, checkpoint: str, traffic: int | None, device: Device) -> TrainingSeconds:
    """Of one microbatch and one optimizer step on one device. `traffic`: bytes between products, counted by
    `operator_counts.training_traffic`."""
    fits = 16 * shape.num_parameters <= device.memory  # parameters, gradients and moments in float32
    return TrainingSeconds(
        products=training_flops(shape, [LENGTH] * (TOKENS // LENGTH)) / device.flops,
        again=products_again(shape, checkpoint) / device.flops,
        logits=3 * 2 * TOKENS * shape.vocab_size / device.bandwidth,
        between=None if traffic is None else traffic / device.bandwidth,
        optimizer=OPTIMIZER_BYTES * shape.num_parameters / device.bandwidth if fits else None,
    )


def counted_traffic(flavor: str, checkpoint: Any) -> int | None:
    """None for a mixture: torchtitan's router cannot run without numbers."""
    from scripts.gpu_checks.logprob_chunk import microbatch
    from scripts.operator_counts import training_traffic
    from torchtitan_rl.config.model import ModelConfig

    if Qwen3Shape.of_flavor(flavor).experts is not None:
        return None
    batch = microbatch(TOKENS // LENGTH, LENGTH, 1000)
    return training_traffic(ModelConfig(assets="chars", flavor=flavor), batch, checkpoint)


# Tables.


def rungs(device: Device) -> dict[str, dict[str, Any]]:
    """Rungs of the engine ladder as a device last ran them, by name; of several runs the median. A column is None where
    every run of the rung ended before it."""
    file = MEASURED / f"{device.name.lower()}.json"
    by_name: dict[str, list[dict[str, Any]]] = {}
    for rung in json.loads(file.read_text())["engine-ladder"]["values"]["rungs"]:
        if rung.get("layers", "now") == "now":  # not those of an earlier state beside it
            by_name.setdefault(rung["rung"], []).append(rung)
    columns = [requests.column for requests in REQUESTS]
    return {
        name: {column: _median([rung[column] for rung in runs if rung[column] != ""]) for column in columns}
        for name, runs in by_name.items()
        if any(rung[columns[0]] != "" for rung in runs)
    }


def _median(figures: list[float]) -> float | None:
    return statistics.median(figures) if figures else None


def decoding() -> list[list[str]]:
    """Bounds of decoding, and rungs of the engine ladder."""
    rungs_by_device = {device: rungs(device) for device in DEVICES}
    columns = [
        "model",
        "requests",
        "device",
        "GB a step: weights, cache, logits",
        "GFLOP a step",
        "ms a step, at least",
    ]
    columns += ["tokens/s, at most", "measured: eager", "graphs", "graphs, ahead", "of the bound"]
    table = [columns]
    for flavor in FLAVORS:
        shape = Qwen3Shape.of_flavor(flavor)
        for requests in REQUESTS:
            for device in DEVICES:
                moved = decode_bytes(shape, requests.number, requests.context)
                bound = requests.number * requests.output / sampling_seconds(shape, requests, device)
                measured: list[Any] = ["", "", "", ""]
                if flavor == "0.6B":
                    names = ("v2-eager", "v2-graphs", "v2-graphs-ahead")
                    figures = [rungs_by_device[device].get(name, {}).get(requests.column) for name in names]
                    measured = ["" if figure is None else _thousands(figure) for figure in figures]
                    measured.append("" if figures[-1] is None else f"{figures[-1] / bound:.0%}")
                flops = requests.number * forward_flops(shape, 2 * requests.context)
                table.append(
                    [
                        flavor,
                        f"{requests.number} x ({requests.prompt} in, {requests.output} out)",
                        device.name,
                        ", ".join(f"{size / 1e9:.2f}" for size in moved.values()),
                        f"{flops / 1e9:,.0f}",
                        f"{1e3 * decode_seconds(shape, requests.number, requests.context, device):.2f}",
                        _thousands(bound),
                        *measured,
                    ]
                )
    return table


def training() -> list[list[str]]:
    """Seconds of the parts of a training step, MFU that they allow, and rows of the battery."""
    steps = json.loads((MEASURED / "h100.json").read_text())["trainer-steps"]
    rows = {row["layout"]: row for row in steps["values"]["rows"]}
    columns = ["model", "checkpoint", "device", "products, ms", "again", "logits", "between", "optimizer"]
    columns += ["MFU at most: products and logits", "and between", "and optimizer", "measured: eager", "compiled"]
    table = [columns]
    for flavor in FLAVORS:
        shape = Qwen3Shape.of_flavor(flavor)
        for checkpoint in ("none", "selective"):
            traffic = counted_traffic(flavor, checkpoint)
            for device in DEVICES:
                seconds = training_seconds(shape, checkpoint, traffic, device)
                layout = f"{flavor}, 1 x {TOKENS} tokens, {checkpoint}, bfloat16, full parameters"
                battery_rows = [
                    rows.get(name, {}) if device.name == "H100" else {} for name in (layout, layout + ", compiled")
                ]
                parts = (seconds.products, seconds.again, seconds.logits, seconds.between, seconds.optimizer)
                ceilings = [seconds.ceiling("again", "logits")]
                if seconds.between is not None:
                    ceilings.append(seconds.ceiling("again", "logits", "between"))
                    if seconds.optimizer is not None:
                        ceilings.append(seconds.ceiling("again", "logits", "between", "optimizer"))
                table.append(
                    [
                        flavor,
                        checkpoint,
                        device.name,
                        *("" if part is None else f"{1e3 * part:.1f}" for part in parts),
                        *(f"{ceiling:.2f}" for ceiling in ceilings),
                        *[""] * (3 - len(ceilings)),
                        *(f"{row['mfu']:.2f}" if row else "" for row in battery_rows),
                    ]
                )
    return table


def markdown(table: list[list[str]]) -> str:
    head, *rows = (f"| {' | '.join(cells)} |" for cells in table)
    return "\n".join([head, "|---" * len(table[0]) + "|", *rows])


def _thousands(number: float) -> str:
    return f"{number:,.0f}"


TABLES: dict[str, Callable[[], list[list[str]]]] = {"decoding": decoding, "training": training}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=TABLES, help="both by default")
    table = parser.parse_args().table
    print("\n\n".join(markdown(TABLES[name]()) for name in ([table] if table else TABLES)))
