"""Whether every token is labelled with the version that sampled it, while versions are loaded under way."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from scripts.gpu_checks.configs import sized_model
from scripts.gpu_checks.engines import random_weights, runner_of, started, untrained_dir
from scripts.gpu_checks.result import Result, largest_of, run_check
from torchtitan_rl import platform
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.types import Request, SamplingParams

NUM_REQUESTS, MAX_TOKENS, NUM_LOADS = 32, 256, 4
MAX_DIFFERENCE = 0.3  # of a bfloat16 log-probability, as in runners.py; a wrong version is off by several


def opposite_versions(weights: dict) -> list[dict]:
    """Two versions that differ in the last norm alone, whose sign turns every logit's: what the attention cache holds
    is the same for both, and the log-probability of a token tells which of them has sampled it."""
    return [weights | {"norm.weight": scale * weights["norm.weight"]} for scale in (4, -4)]


def judge(result: Result, differences: list[float]) -> None:
    """Fails the check unless every token has nearly the log-probability that the version of its label gives it."""
    result.note(difference_max=round(largest_of(differences), 4))
    wrong = sum(not difference <= MAX_DIFFERENCE for difference in differences)  # NaN is wrong too
    result.require(wrong == 0, f"{wrong} of {len(differences)} tokens: are not of the version of their label")


def check(result: Result, args: argparse.Namespace) -> None:
    """Loads two versions in turn while requests run, then scores every token by the version of its label."""
    on_gpu = platform.device_type() == "cuda"
    model, max_tokens = sized_model(args.tiny), 64 if args.tiny else MAX_TOKENS
    config = GeneratorConfig(
        max_model_len=512, kv_cache_gib=0.25 if args.tiny else 8.0, enforce_eager=not on_gpu, async_scheduling=on_gpu
    )
    requests = [
        Request([20 + i % 32, 31, 27, 14], SamplingParams(max_tokens=max_tokens, seed=i, ignore_eos=True))
        for i in range(NUM_REQUESTS)
    ]
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-") as directory:
        with started(config, untrained_dir(Path(directory), model)) as engine:
            weights = opposite_versions(random_weights(model, config.dtype))
            engine.stage(0, dict(weights[0]))
            engine.load(0).result()
            futures, stalls = engine.submit(requests), []
            for version in range(1, NUM_LOADS + 1):
                time.sleep(0.05 if args.tiny else 0.3)
                engine.stage(version, dict(weights[version % 2]))
                stalls.append(round(engine.load(version).result(), 4))
            completions = [future.result() for future in futures]
            result.note(runner=runner_of(engine), load_s=stalls)
            seen = sorted({version for completion in completions for version in completion.policy_versions})
            result.note(versions=seen, tokens=sum(len(completion.tokens) for completion in completions))
            result.require(len(seen) > 1, f"versions={seen}: no load came while requests ran")
            scored = []
            for parity in range(2):
                engine.stage(NUM_LOADS + 1 + parity, dict(weights[parity]))
                engine.load(NUM_LOADS + 1 + parity).result()
                whole = [Request(r.tokens + c.tokens, None) for r, c in zip(requests, completions, strict=True)]
                scored.append([future.result() for future in engine.submit(whole)])
    differences, apart = [], []
    for i, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        first = len(request.tokens) - 1
        for t, (logprob, version) in enumerate(zip(completion.logprobs, completion.policy_versions, strict=True)):
            differences.append(abs(logprob - float(scored[version % 2][i][first + t])))
            apart.append(abs(logprob - float(scored[1 - version % 2][i][first + t])))
    result.note(difference_to_the_other_mean=round(sum(apart) / len(apart), 3))
    judge(result, differences)


if __name__ == "__main__":
    run_check(check)
