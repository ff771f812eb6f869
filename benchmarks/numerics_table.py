"""Measures what layouts of a trainer change in ten optimizer steps, and what they cost: docs/dev/numerics_table.md.

`.venv/bin/python benchmarks/numerics_table.py`, on a machine that does nothing else: some two minutes on two cores.
"""

import asyncio
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from tests.integration.helpers import flat, relative_l2  # noqa: E402
from tests.integration.layouts import client, recorded_batches, replay, trainer_config, trainer_mesh  # noqa: E402
from torchtitan_rl import platform  # noqa: E402
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape  # noqa: E402

DOC = ROOT / "docs" / "dev" / "numerics_table.md"
BEGIN, END = "<!-- written by benchmarks/numerics_table.py: begin -->", "<!-- end -->"
LAYOUTS: dict[str, dict] = {
    "one rank": {},
    "FSDP 2": dict(dp=2),
    "TP 2": dict(tp=2),
    "FSDP 2 x TP 2": dict(dp=2, tp=2),
    "HSDP: 2 replicas of 1": dict(replicate=2),
    "HSDP: 2 replicas of FSDP 2": dict(replicate=2, dp=2),
    "one rank, selective activation checkpointing": dict(activation_checkpoint="selective"),
    "one rank, full activation checkpointing": dict(activation_checkpoint="full"),
    "one rank, bfloat16 mixed precision": dict(training__mixed_precision_param="bfloat16"),
    "FSDP 2 x TP 2, bfloat16 mixed precision": dict(dp=2, tp=2, training__mixed_precision_param="bfloat16"),
}


# The quickstart's.
SHAPE = Qwen3Shape(
    vocab_size=64, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, max_seq_len=64
)


async def measured(layout: dict) -> tuple[torch.Tensor, float]:
    """(update of ten steps, median seconds of a step), after as many steps to warm up."""
    batches = recorded_batches(10, num_datums=48, max_len=40)
    async with trainer_mesh(trainer_config(num_threads=0, **layout), ModelConfig(shape=SHAPE)) as mesh:
        update, _ = await replay(client(mesh), batches)
        _, seconds = await replay(client(mesh), batches)
    return flat(update), statistics.median(seconds)


async def layout_table() -> list[str]:
    lines = ["| layout | ranks | relative L2 difference of ten steps' update | seconds per step |", "|---|---|---|---|"]
    expected = None
    for name, layout in LAYOUTS.items():
        update, seconds = await measured(layout)
        difference = "reference" if expected is None else f"{relative_l2(update, expected):.1e}"
        expected = update if expected is None else expected
        lines.append(f"| {name} | {trainer_config(**layout).num_ranks} | {difference} | {seconds:.3f} |")
        print(lines[-1], flush=True)
    return lines


def state_dict_table() -> list[str]:
    """What reading the sharded weights costs, two ways, on one rank. Separate projections of queries, keys and values:
    `get_model_state_dict` looks for each entry's attribute, and those of a fused projection have none."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torchtitan.distributed import ParallelDims

    from torchtitan_rl.model.spec import build_spec, training_spec

    dist.init_process_group(platform.distributed_backend(), store=dist.HashStore(), rank=0, world_size=1)
    config = trainer_config()
    spec = training_spec(
        build_spec(ModelConfig(flavor="debugmodel_non_fused_qkv")),
        SimpleNamespace(parallelism=config.parallelism),
        attention=platform.attention_backend("float32"),
        chunk_bytes=2**27,
    )
    dims = ParallelDims.from_config(config.parallelism, 1)
    dims.build_mesh()
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=None,
        dump_folder="",
    )
    model.to_empty(device=platform.local_device(0))

    def milliseconds(read) -> float:
        taken = []
        for _ in range(51):
            start = time.perf_counter()
            read()
            taken.append(1000 * (time.perf_counter() - start))
        return statistics.median(taken)

    lines = [
        f"| reading {len(model.state_dict())} weights | milliseconds |",
        "|---|---|",
        f"| `model.state_dict()` | {milliseconds(model.state_dict):.2f} |",
        f"| `get_model_state_dict(model)` | {milliseconds(lambda: get_model_state_dict(model)):.2f} |",
    ]
    dist.destroy_process_group()
    return lines


def main() -> None:
    before, rest = DOC.read_text().split(BEGIN)
    _, after = rest.split(END)
    tables = asyncio.run(layout_table()) + [""] + state_dict_table()
    where = f"{platform.num_cores()} cores, {platform.device_type()}, torch {torch.__version__}"
    DOC.write_text("\n".join([before + BEGIN, f"Measured with {where}:", "", *tables, END + after]))
    print("\n".join(tables))


if __name__ == "__main__":
    main()
