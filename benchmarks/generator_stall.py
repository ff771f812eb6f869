"""How long new weights stop a generator: seconds of a load between two engine steps against a memcpy of its bytes.

    .venv/bin/python -m benchmarks.generator_stall [--flavor 0.6B] [--loads 8] [--dtype bfloat16]

One engine in this process, with 8 requests under way. Every load brings other values than the one before, in one
contiguous buffer, as a replica fetches them. A memcpy is torch's copy of contiguous host memory into host memory that
has been written to before, with the same number of threads; it is timed before each load, without requests, on 512 MiB
and scaled. Prints one line of JSON per load, and the medians.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from statistics import median

import torch

import torchtitan_rl.config as rl
from benchmarks.checkpoint_cost import Memcpy
from torchtitan_rl import adapters, platform
from torchtitan_rl.model.files import assets_dir, write_model_dir
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.types import Request, SamplingParams

_BLOCK = 512 * 2**20  # bytes
_MAX_TOKENS = {"cpu": 40, "cuda": 900}  # requests have to last as long as a load
_REQUEST = Request([5] * 16, SamplingParams(max_tokens=_MAX_TOKENS[platform.device_type()], seed=0, ignore_eos=True))


def measure(flavor: str, loads: int, dtype: str, directory: Path) -> list[dict[str, float]]:
    model = rl.ModelConfig(flavor=flavor, assets="chars")
    write_model_dir(directory, resolve_shape(model), assets_dir(model), eos=1, pad=0)
    adapters.prepare_vllm(eager=True)
    from torchtitan_rl.engine.engine import Engine

    config = rl.GeneratorConfig(dtype=dtype, max_model_len=1024, max_num_seqs=8, kv_cache_gib=1.0)  # type: ignore[arg-type]
    engine = Engine(config, rl.ModelConfig(assets=str(directory)), 0, 0)
    threads = torch.get_num_threads()
    engine.start()
    engine.ready.result(600)
    platform.set_threads(threads)
    sizes = {name: math.prod(shape) for name, (shape, _) in engine.parameter_specs.items()}
    by_place = {id(place): place.nbytes for place in engine.model.places.values()}  # a tied head counts once
    num_bytes = sum(by_place.values())
    rows, memcpy = [], Memcpy(_BLOCK)
    for version in range(loads):
        payload = torch.empty(sum(sizes.values()), dtype=getattr(torch, dtype)).uniform_(-0.02, 0.02)
        parts = payload.split(list(sizes.values()))
        tensors = {n: part.view(engine.parameter_specs[n][0]) for n, part in zip(sizes, parts, strict=True)}
        tensors["lm_head.weight"].copy_(tensors["tok_embeddings.weight"])  # tied
        engine.stage(version, tensors)
        if not version:
            engine.load(version).result(600)  # the first requests need weights
            continue
        memcpy_s = memcpy.seconds(num_bytes)  # before the requests, which would take cores from it
        flying = engine.submit([_REQUEST] * 8)
        stall_s = engine.load(version).result(600)
        assert not any(future.done() for future in flying), "the requests ended before the load"
        row = {"stall_s": stall_s, "memcpy_s": memcpy_s, "bytes": num_bytes}
        print(json.dumps({name: round(value, 4) for name, value in row.items()}), flush=True)
        rows.append(row)
        for future in flying:
            future.result(600)
    engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", default="0.6B")
    parser.add_argument("--loads", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    if args.loads < 2:
        parser.error(f"--loads {args.loads}: the first one does not count; give 2 or more")
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(args.flavor, args.loads, args.dtype, Path(directory))
    middle = {name: round(median(row[name] for row in rows), 4) for name in ("stall_s", "memcpy_s")}
    middle["ratio"] = round(median(row["stall_s"] / row["memcpy_s"] for row in rows), 3)
    print(json.dumps(middle))


if __name__ == "__main__":
    main()
