"""vLLM's two model runners on the same weights and prompts: tokens per second, and whether they say the same."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.gpu_checks.configs import sized_model
from scripts.gpu_checks.engines import random_weights, runner_of, started, untrained_dir
from scripts.gpu_checks.result import Result, largest_of, run_check
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.types import Request, SamplingParams

RUNNERS = ("v1", "v2")
NUM_REQUESTS, MAX_TOKENS = 64, 256
MAX_DIFFERENCE = 0.3  # of a bfloat16 log-probability: the upper end of what docs/numerics.md calls as it should be
LIMIT_S = 270


def generator(model_runner: Any, tiny: bool = False) -> GeneratorConfig:
    """One engine at the Qwen3-0.6B shape, without CUDA graphs."""
    kv_cache_gib = 0.25 if tiny else 8.0
    return GeneratorConfig(
        max_model_len=512,
        kv_cache_gib=kv_cache_gib,
        enforce_eager=True,
        async_scheduling=False,  # V1 has none by default, and it alone makes decoding up to 1.8 times as fast
        model_runner=model_runner,
    )


def sample(config: GeneratorConfig, tiny: bool) -> dict:
    """Completions of seeded requests by one engine, and tokens per second of their second round."""
    model, max_tokens = sized_model(tiny), 8 if tiny else MAX_TOKENS
    requests = [
        Request([20 + i % 32, 31, 27, 14], SamplingParams(max_tokens=max_tokens, seed=i, ignore_eos=True))
        for i in range(8 if tiny else NUM_REQUESTS)
    ]
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-") as directory:
        with started(config, untrained_dir(Path(directory), model)) as engine:
            engine.stage(0, random_weights(model, config.dtype))
            engine.load(0).result()
            for _ in range(2):  # the first round compiles
                start = time.perf_counter()
                completions = [future.result() for future in engine.submit(requests)]
                seconds = time.perf_counter() - start
            return {
                "runner": runner_of(engine),
                "tokens_per_s": round(sum(len(c.tokens) for c in completions) / seconds, 1),
                "tokens": [c.tokens for c in completions],
                "logprobs": [c.logprobs for c in completions],
            }


def difference(one: dict, other: dict) -> tuple[float, float]:
    """(share of completions with the same tokens, largest difference of log-probabilities before the first token that
    differs). The difference is NaN where one of them is."""
    same, largest = 0, 0.0
    for mine, theirs, logprobs, their_logprobs in zip(
        one["tokens"], other["tokens"], one["logprobs"], other["logprobs"], strict=True
    ):
        equal = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), len(mine))
        same += equal == len(mine) == len(theirs)
        largest = largest_of([largest, *(abs(a - b) for a, b in zip(logprobs[:equal], their_logprobs[:equal]))])
    return same / len(one["tokens"]), largest


def check(result: Result, args: argparse.Namespace) -> None:
    """Runs one runner where it is named, else each in a process of its own, and compares them."""
    if args.model_runner:
        result.note(**sample(generator(args.model_runner, args.tiny), args.tiny))
        return
    measured: dict[str, dict] = {}
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-") as directory:
        for name in RUNNERS:
            file = Path(directory) / f"{name}.json"
            command = [
                sys.executable,
                "-m",
                "scripts.gpu_checks.runners",
                "--model-runner",
                name,
                "--result",
                str(file),
            ]
            code = None
            try:
                code = subprocess.run(command + ["--tiny"] * args.tiny, timeout=LIMIT_S).returncode
            except subprocess.TimeoutExpired:
                result.require(False, f"{name}: had not ended after {LIMIT_S} s")
            written: dict[str, Any] = {"status": "crashed", "problems": []}
            if file.exists():
                written = json.loads(file.read_text())
            if code is not None and written["status"] not in ("passed", "failed"):
                result.require(False, f"{name}: exit status {code} without an end; see the log")
            for problem in written["problems"]:
                result.require(False, f"{name}: {problem}")
            if written["status"] == "passed":
                measured[name] = written["values"]
                result.note(**{name: {key: measured[name][key] for key in ("runner", "tokens_per_s")}})
    if len(measured) == len(RUNNERS):
        same, largest = difference(*measured.values())
        result.note(same_completions=same, logprob_difference_max=float(f"{largest:.2e}"))
        result.require(measured["v1"]["runner"] != measured["v2"]["runner"], "v1 and v2: the same runner ran for both")
        result.require(largest <= MAX_DIFFERENCE, f"log-probabilities: differ by {largest:.2g} on the same tokens")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=check.__doc__)
    parser.add_argument("--model-runner", choices=RUNNERS)
    run_check(check, parser)
