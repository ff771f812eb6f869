#!/usr/bin/env python
"""How quick the web view is on many rollouts, and how much memory it takes.

    .venv/bin/python benchmarks/view_load.py make DIR --rollouts 200000 --tokens 200
    .venv/bin/python benchmarks/view_load.py measure DIR

`make` writes a run's directory of made-up rollouts, of one to three turns with everything per token, in the format of
`record.tables`: sealed parts, and a last part of JSON lines. `measure` starts `torchtitan-rl view` on it, and
prints the seconds of each request and the largest resident memory of the server.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from torchtitan_rl.record import attempts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.schemas import SCHEMAS
from torchtitan_rl.record.tables import ROW_GROUP

GROUP, GROUPS_PER_STEP, STEPS_PER_PART = 8, 16, 20
WORDS = (
    "the sum of two numbers is so we get let me check this again first second then therefore answer number total each "
    "train leaves at hours apples costs dollars twice half remaining equation solve x y minus plus equals wait because"
).split()


def make(path: Path, num_rollouts: int, mean_tokens: int) -> None:
    run_dir, rng = RunDir.create(path), np.random.default_rng(0)
    attempts.begin(run_dir, None)
    run_dir.write_config({"name": "load", "algorithm": {"loss_config": {"clip_low": 0.2, "clip_high": 0.2}}})
    per_step = GROUP * GROUPS_PER_STEP
    steps = -(-num_rollouts // per_step)
    number = 1
    for first in range(0, steps, STEPS_PER_PART):
        last_part = first + STEPS_PER_PART >= steps
        rows = [step for step in range(first, min(steps, first + STEPS_PER_PART)) for _ in range(per_step)]
        table = part(rows[: num_rollouts - first * per_step], rng, mean_tokens)
        if last_part:  # the part that grows
            for record in table.to_pylist(maps_as_pydicts="strict"):
                step = record.pop("step")
                record.pop("attempt")
                run_dir.tables["rollouts"].append([{"step": step, "attempt": 1, **record}])
        else:
            file = path / "rollouts" / f"{number:06d}.parquet"
            file.parent.mkdir(exist_ok=True)
            pq.write_table(table, file, compression="zstd", row_group_size=ROW_GROUP)
        for step in sorted(set(rows)):
            run_dir.log_metrics({"step": step + 1, "phase": "reinforcement", "reward/mean": float(rng.random())})
        number += 1


def part(steps: list[int], rng: np.random.Generator, mean_tokens: int) -> pa.Table:
    """One part: the columns of `rollouts`, made array by array because 40 million tokens are too many for a loop."""
    n = len(steps)
    turns = rng.integers(1, 4, n)
    lengths = np.maximum(1, rng.gamma(4.0, mean_tokens / 4.0 / 2.0, int(turns.sum()))).astype(np.int64)
    per_rollout = np.add.reduceat(lengths, np.r_[0, np.cumsum(turns)[:-1]])
    words = [random.choices(WORDS, k=400) for _ in range(50)]
    texts = [
        " ".join((words[i % 50] * 4)[: max(1, int(k * 0.75))]) + f" {i * 7919 % 99991}"
        for i, k in enumerate(per_rollout)
    ]
    seen = np.add.reduceat(lengths, np.r_[0, np.cumsum(turns)[:-1]])
    schema = SCHEMAS["rollouts"]
    turn, sequence = schema.field("turns").type.value_type, schema.field("sequences").type.value_type
    turn_array = pa.ListArray.from_arrays(_offsets(turns), _turns(lengths, rng, turn))
    sequence_array = pa.ListArray.from_arrays(
        _offsets(np.ones(n, int)), _sequences(seen, lengths, turns, rng, sequence)
    )
    index = np.arange(n)
    slots = np.array(steps) * GROUPS_PER_STEP + (index // GROUP) % GROUPS_PER_STEP
    rewards = (rng.random(n) < 0.4).astype(float)
    columns = {
        "step": pa.array(np.array(steps) + 1, pa.int32()),
        "attempt": pa.array(np.ones(n), pa.int32()),
        "phase": ["reinforcement"] * n,
        "group_id": [f"{slot}/0" for slot in slots],
        "rollout_id": [f"{slot}/0/{i % GROUP}" for slot, i in zip(slots, index)],
        "draw": [f"{slot}/0" for slot in slots],
        "role": ["policy"] * n,
        "task_id": [f"math/train/{slot % 7473}" for slot in slots],
        "prompt": [f"Question {slot % 7473}: {' '.join(words[slot % 50][:40])}?" for slot in slots],
        "answer": [str(slot % 1000) for slot in slots],
        "text": texts,
        "reward": rewards,
        "reward_parts": pa.array(
            [[("correct", r), ("format", 1.0)] for r in rewards], schema.field("reward_parts").type
        ),
        "advantage": rewards - 0.4,
        "left_out": ["zero_variance" if slot % 9 == 0 else "" for slot in slots],
        "num_tokens": pa.ListArray.from_arrays(_offsets(turns), pa.array(lengths, pa.int32())),
        "finish_reason": ["length" if i % 17 == 0 else "stop" for i in index],
        "end_reason": ["done"] * n,
        "policy_version_min": pa.array(np.array(steps), pa.int32()),
        "policy_version_max": pa.array(np.array(steps) + 1, pa.int32()),
        "seconds": pa.array([[("play", 1.5), ("reward", 0.01)]] * n, schema.field("seconds").type),
        "turns": turn_array,
        "sequences": sequence_array,
    }
    empty = pa.nulls(n)
    return pa.table([pa.array(columns.get(f.name, empty)).cast(f.type) if not isinstance(columns.get(f.name), pa.Array)
                     else columns[f.name] for f in schema], schema=schema)  # fmt: skip


def _turns(lengths: np.ndarray, rng: np.random.Generator, kind: pa.StructType) -> pa.StructArray:
    n, total = len(lengths), int(lengths.sum())
    columns = {
        "prompt": pa.array([f"observation {i % 1000}" for i in range(n)]),
        "text": pa.array([" ".join(WORDS[: 1 + i % 40]) * 4 for i in range(n)]),
        "num_prompt_tokens": pa.array(rng.integers(20, 400, n), pa.int32()),
        "finish_reason": pa.array(["stop"] * n),
        "tokens": _lists(lengths, rng.integers(0, 150_000, total), pa.int32()),
        "logprobs": _lists(lengths, -rng.exponential(0.5, total), pa.float64()),
        "policy_versions": _lists(lengths, np.full(total, 7), pa.int32()),
    }
    return _struct(columns, kind, n)


def _sequences(sampled: np.ndarray, lengths, turns, rng: np.random.Generator, kind: pa.StructType) -> pa.StructArray:
    n = len(sampled)
    whole = sampled + 60
    total = int(whole.sum())
    first = np.r_[0, np.cumsum(turns)[:-1]]
    spans = [
        [[t, 59 + int(lengths[f : f + t].sum()), int(lengths[f + t])] for t in range(k)] for f, k in zip(first, turns)
    ]
    columns = {
        "tokens": _lists(whole, rng.integers(0, 150_000, total), pa.int32()),
        "target_tokens": _lists(whole, rng.integers(0, 150_000, total), pa.int32()),
        "loss_mask": _lists(whole, np.ones(total, np.int8), pa.int8()),
        "advantages": _lists(whole, rng.normal(size=total), pa.float64()),
        "token_weights": _lists(whole, np.full(total, 1e-4), pa.float64()),
        "policy_logprobs": _lists(whole, -rng.exponential(0.5, total), pa.float64()),
        "turns": pa.array(spans, kind.field("turns").type),
    }
    return _struct(columns, kind, n)


def _struct(columns: dict[str, pa.Array], kind: pa.StructType, n: int) -> pa.StructArray:
    return pa.StructArray.from_arrays([columns.get(f.name, pa.nulls(n, f.type)) for f in kind], fields=list(kind))


def _lists(lengths: np.ndarray, values: np.ndarray, kind: pa.DataType) -> pa.ListArray:
    return pa.ListArray.from_arrays(_offsets(lengths), pa.array(values, kind))


def _offsets(lengths: np.ndarray) -> pa.Array:
    return pa.array(np.r_[0, np.cumsum(lengths)], pa.int32())


def measure(path: Path) -> None:
    command = [sys.executable, "-m", "torchtitan_rl.cli", "view", str(path), "--port", "8911"]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            first_line = process.stdout.readline()
            url = next(word for word in first_line.split() if word.startswith("http")).rstrip(";")
            print(f"{time.perf_counter() - began:6.2f} s  until it says {first_line.strip()!r}")
            server = psutil.Process(process.pid)
            run = urllib.parse.urlencode({"run": path.resolve().name})
            for page, address in (
                ("list, first time", f"rollouts?{run}"),
                ("list", f"rollouts?{run}"),
                ("sorted by reward", f"rollouts?{run}&sort=reward"),
                ("sorted by length, page 100", f"rollouts?{run}&sort=num_tokens&page=100"),
                ("search, rare", f"rollouts?{run}&q=77777"),
                ("search, frequent", f"rollouts?{run}&q=therefore"),
                ("search, no match", f"rollouts?{run}&q=zzzzzz"),
                ("search, sorted by reward", f"rollouts?{run}&q=apples&sort=reward"),
                ("filter by reward, length, reason", f"rollouts?{run}&reward_min=1&tokens_min=300&reason=length"),
                ("one step's groups", f"groups?{run}&step=700"),
                ("one rollout", f"rollout?{run}&id=11200/0/3"),
                ("its group", f"group?{run}&id=11200/0"),
            ):
                start = time.perf_counter()
                body = urllib.request.urlopen(f"{url}/{address}").read()
                seconds = time.perf_counter() - start
                rss = server.memory_info().rss / 2**20
                print(f"{seconds:6.2f} s  {rss:4.0f} MiB  {len(body) / 1000:6.0f} kB  {page}")
            peak = [line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "VmHWM" in line]
            print(*peak)
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=["make", "measure"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rollouts", type=int, default=200_000)
    parser.add_argument("--tokens", type=int, default=200, help="mean sampled tokens per rollout")
    args = parser.parse_args()
    if args.verb == "make":
        make(args.directory, args.rollouts, args.tokens)
    else:
        measure(args.directory)


if __name__ == "__main__":
    main()
