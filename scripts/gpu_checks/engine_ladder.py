"""Decoding, rung by rung from our engine without graphs to plain vLLM: tokens per second, and how far each is from the
trainer's own log-probabilities of the same tokens."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from scripts.gpu_checks.configs import sized_model
from scripts.gpu_checks.engines import random_weights, runner_of, started, untrained_dir
from scripts.gpu_checks.result import Result, run_check
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.environment import end_with_parent
from torchtitan_rl.types import Completion, Datum, Request, SamplingParams

LIMIT_S, TINY_LIMIT_S = 180, 240  # plain vLLM compiled took 110 s on an H100
ROUNDS = 2  # the first compiles, allocates and fills tables
NUM_SCORED = 16  # completions that the trainer scores, at the lengths of the first shape one microbatch
MAX_KL = 1e-3


@dataclass(frozen=True)
class Shape:
    """Requests of one round, all of the same lengths."""

    num_requests: int
    prompt: int
    output: int

    @property
    def name(self) -> str:
        return f"{self.num_requests} x ({self.prompt} in, {self.output} out)"


SHAPES = [Shape(64, 512, 128), Shape(256, 16, 256)]
PUBLISHED = {f"tokens_per_s, {SHAPES[0].name}": 12_100}
"""Of Qwen3-0.6B decoding on one H100."""
TINY_SHAPES = [Shape(4, 16, 4), Shape(8, 4, 8)]


@dataclass(frozen=True)
class Rung:
    """An engine to measure."""

    name: str
    model_runner: Any = "auto"
    eager: bool = False
    model_impl: Any = "torchtitan"
    plain: bool = False
    """vLLM's own `LLM` with its defaults, in place of our engine."""
    sleeps: bool = False
    ahead: bool = False
    """With asynchronous scheduling."""
    compiled: bool = False
    """With the decoder compiled."""
    tiny: bool = False
    """Runs on a CPU too."""


# The most instructive first, in case the time does not suffice for all.
RUNGS = [
    Rung("v2-graphs-ahead", "v2", ahead=True),
    Rung("v2-graphs", "v2"),
    Rung("plain-vllm", plain=True, tiny=True),
    Rung("v2-eager", "v2", eager=True),
    Rung("vllm-model-v2-graphs", "v2", model_impl="vllm"),
    Rung("v2-compiled-ahead", "v2", ahead=True, compiled=True),
    Rung("v1-graphs", "v1"),
    Rung("v1-eager", "v1", eager=True, tiny=True),
    Rung("sleeping-v2-graphs", "v2", sleeps=True),
    Rung("sleeping-v1-eager", "v1", eager=True, sleeps=True, tiny=True),
]
COLUMNS = (
    "rung",
    "runner",
    "start_s",
    "load_s",
    *(f"tokens_per_s, {shape.name}" for shape in SHAPES),
    "mismatch_kl",
    "logprob_difference_max",
    "sleep_s",
    "wake_s",
    "later_sleep_s",
    "later_wake_s",
)


def generator(rung: Rung, tiny: bool) -> GeneratorConfig:
    """One engine; 256 sequences of 272 tokens at 112 KiB a token are 7.4 GiB."""
    return GeneratorConfig(
        dtype="bfloat16",
        max_model_len=1024,
        kv_cache_gib=0.25 if tiny else 8.0,
        enforce_eager=rung.eager,
        model_impl=rung.model_impl,
        model_runner=rung.model_runner,
        async_scheduling=rung.ahead,
        compile=rung.compiled,
    )


def requests_of(shape: Shape, round_number: int, vocab_size: int) -> list[Request]:
    """Random prompts. Those of each round differ, so that no prefix cache knows them."""
    draw = torch.Generator().manual_seed(1000 * round_number + shape.prompt)
    return [
        Request(
            torch.randint(vocab_size, (shape.prompt,), generator=draw).tolist(),
            SamplingParams(max_tokens=shape.output, seed=1000 * round_number + i, ignore_eos=True),
        )
        for i in range(shape.num_requests)
    ]


Sample = Callable[[list[Request]], list[Completion]]


@contextmanager
def our_engine(rung: Rung, model_dir: Path, result: Result, tiny: bool) -> Iterator[Sample]:
    """Our engine, with the weights of `model_dir`. When the block has ended, sleeps and wakes where the rung asks."""
    from safetensors.torch import load_file

    config, start = generator(rung, tiny), time.perf_counter()
    with started(config, model_dir, sleeps=rung.sleeps) as engine:
        result.note(start_s=round(time.perf_counter() - start, 1), runner=runner_of(engine))
        engine.stage(0, engine.from_hf(load_file(model_dir / "model.safetensors")))
        result.note(load_s=round(engine.load(0).result(), 3))

        def sample(requests: list[Request]) -> list[Completion]:
            return [future.result() for future in engine.submit(requests)]

        yield sample
        if rung.sleeps:
            # The first sleep pins the host memory that keeps the weights. torch keeps that memory for later ones.
            for sleep, wake in (("sleep_s", "wake_s"), ("later_sleep_s", "later_wake_s")):
                start = time.perf_counter()
                engine.sleep().result()
                result.note(**{sleep: round(time.perf_counter() - start, 3)})
                start = time.perf_counter()
                engine.wake("weights").result()
                engine.wake("kv_cache").result()
                result.note(**{wake: round(time.perf_counter() - start, 3)})
                sample([Request([20, 31, 27], SamplingParams(max_tokens=4, seed=0))])


@contextmanager
def plain_engine(rung: Rung, model_dir: Path, result: Result, tiny: bool) -> Iterator[Sample]:
    """vLLM's `LLM` with vLLM's Qwen3 and vLLM's defaults: compiled, graphs, scheduling ahead, a process of its own."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if tiny else "1"
    start = time.perf_counter()
    from vllm import LLM
    from vllm.inputs import TokensPrompt

    from torchtitan_rl.engine.engine_requests import completion, engine_params

    llm = LLM(
        model=str(model_dir),
        dtype="bfloat16",
        seed=0,
        max_model_len=1024,
        max_num_seqs=256,
        kv_cache_memory_bytes=int((0.25 if tiny else 8.0) * 2**30),
        gpu_memory_utilization=0.3,  # bounds only the memory free at the start
        enforce_eager=tiny,
    )
    result.note(start_s=round(time.perf_counter() - start, 1), runner="vllm's default")

    def sample(requests: list[Request]) -> list[Completion]:
        prompts = [TokensPrompt(prompt_token_ids=request.tokens) for request in requests]
        outputs = llm.generate(prompts, [engine_params(request) for request in requests], use_tqdm=False)
        return [completion(output, [(0, 0)]) for output in outputs]

    try:
        yield sample
    finally:
        llm.llm_engine.engine_core.shutdown()


def climb(rung: Rung, model_dir: Path, result: Result, tiny: bool) -> None:
    """Measures one rung in this process: every shape, some rounds, of which the last counts. Completions of the first
    shape's last round go to `completions`, for the trainer to score."""
    model = sized_model(tiny)
    from torchtitan_rl.model.shape import resolve_shape

    vocab_size, shapes = resolve_shape(model).vocab_size, TINY_SHAPES if tiny else SHAPES
    engine = plain_engine if rung.plain else our_engine
    with engine(rung, model_dir, result, tiny) as sample:
        for shape, column in zip(shapes, SHAPES, strict=True):
            requests, completions, seconds = [], [], 0.0
            for round_number in range(ROUNDS):
                requests = requests_of(shape, round_number, vocab_size)
                start = time.perf_counter()
                completions = sample(requests)
                seconds = time.perf_counter() - start
                print(f"{shape.name}: round {round_number}, {seconds:.2f} s", flush=True)
            num_tokens = sum(len(one.tokens) for one in completions)
            result.note(**{f"tokens_per_s, {column.name}": round(num_tokens / seconds, 1)})
            if shape is shapes[0]:
                result.note(
                    completions=[
                        (request.tokens, one.tokens, one.logprobs)
                        for request, one in list(zip(requests, completions, strict=True))[:NUM_SCORED]
                    ]
                )


class Scorer:
    """The trainer's own forward in bfloat16, on the weights of a directory."""

    def __init__(self, model_dir: Path) -> None:
        from torchtitan.distributed import ParallelDims

        from scripts.gpu_checks.trainer_steps import Row, join_process_group, trainer_config
        from torchtitan_rl.actors.build import build_model

        self.device = join_process_group()
        config = trainer_config(Row("", 16384, "none"), 1024)
        dims = ParallelDims.from_config(config.parallelism, 1)
        dims.build_mesh()
        with tempfile.TemporaryDirectory(prefix="torchtitan-rl-") as directory:
            self.model = build_model(
                config,
                ModelConfig(assets=str(model_dir)),
                role="policy",
                seed=0,
                parallel_dims=dims,
                device=self.device,
                dump_dir=directory,
            ).model

    def mismatch(self, completions: list) -> dict[str, float]:
        """Mean k3 estimate of KL(generator || trainer) by token, and the largest difference of log-probabilities, of
        completions as (prompt, tokens, log-probabilities)."""
        from torchtitan_rl.algorithm.kl import k3
        from torchtitan_rl.dispatch.microbatches import pack
        from torchtitan_rl.model.scoring import score

        data = []
        for prompt, tokens, _ in completions:
            whole = torch.tensor([*prompt, *tokens])
            weights = torch.zeros(len(whole) - 1)
            weights[len(prompt) - 1 :] = 1
            inputs = {"loss_mask": weights, "token_weights": weights}
            data.append(Datum(tokens=whole[:-1], target_tokens=whole[1:], loss_inputs=inputs))
        rows = score(self.model, [pack(data)], self.device).rows["policy_logprobs"]
        trained = torch.cat([row[len(one[0]) - 1 :] for row, one in zip(rows, completions, strict=True)])
        difference = torch.cat([torch.tensor(one[2]) for one in completions]) - trained
        return {
            "mismatch_kl": float(f"{k3(difference).mean():.3g}"),
            "logprob_difference_max": float(f"{difference.abs().max():.3g}"),
        }


def in_process(rung: Rung, model_dir: Path, file: Path, limit_s: float, tiny: bool) -> dict[str, Any]:
    """The result of a rung in a process of its own, which ends, with what it has started, by the limit."""
    command = [sys.executable, "-m", "scripts.gpu_checks.engine_ladder", "--rung", rung.name]
    command += ["--model-dir", str(model_dir), "--result", str(file), *["--tiny"] * tiny]
    file.unlink(missing_ok=True)
    start = time.monotonic()
    code = wait_for(subprocess.Popen(command), limit_s)
    written: dict[str, Any] = {"status": "crashed", "values": {}, "problems": []}
    if file.exists():
        written = json.loads(file.read_text())
    if code is None:
        written["problems"].append(f"had not ended after {limit_s:g} s")
    elif written["status"] in ("running", "crashed"):
        written["problems"].append(f"exit status {code} without an end; see the log")
    print(f"{rung.name}: {time.monotonic() - start:.1f} s", flush=True)
    return written


def wait_for(process: subprocess.Popen, limit_s: float) -> int | None:
    """The exit status of a process, None after the limit. Then kills it and all that it has started: an engine's core
    that its parent left behind would keep the device's memory."""
    start, code = time.monotonic(), None
    descendants: set[psutil.Process] = set()  # known by their start too, so that no other process of that id is killed
    while code is None and time.monotonic() - start < limit_s:
        with suppress(psutil.NoSuchProcess):
            descendants |= set(psutil.Process(process.pid).children(recursive=True))
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(0.5)
    process.kill()
    for descendant in descendants:
        with suppress(psutil.NoSuchProcess):
            descendant.kill()
    process.wait()
    psutil.wait_procs(descendants, timeout=10)
    return code


def check(result: Result, args: argparse.Namespace) -> None:
    """Measures the rungs until the budget is spent, or one of them here where it is named. A rung that fails does not
    stop the next; nor does the trainer's forward."""
    if args.rung:
        end_with_parent(signal.SIGKILL)
        climb(next(rung for rung in RUNGS if rung.name == args.rung), args.model_dir, result, args.tiny)
        return
    start, rows = time.monotonic(), []
    rungs = [rung for rung in RUNGS if rung.tiny or not args.tiny]
    result.note(rungs=rows, not_measured=[rung.name for rung in rungs], published=PUBLISHED)
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-") as directory:
        model_dir, scorer = weights_dir(Path(directory) / "model", args.tiny), None
        for number, rung in enumerate(rungs, start=1):
            left = args.budget_s - (time.monotonic() - start)
            if left <= 0:
                break
            limit_s = TINY_LIMIT_S if args.tiny else LIMIT_S
            written = in_process(rung, model_dir, result.part(rung.name), limit_s, args.tiny)
            for problem in written["problems"]:
                result.require(False, f"{rung.name}: {problem}")
            values = {"rung": rung.name, **written["values"]}
            row = {column: values.get(column, "") for column in COLUMNS}
            rows.append(row)
            result.note(rungs=rows, not_measured=[rung.name for rung in rungs[number:]])
            if "completions" in values:
                scorer = scorer or result.attempt("the trainer", partial(Scorer, model_dir))
            if "completions" in values and scorer is not None:
                name = f"{rung.name}, the trainer's forward"
                row |= result.attempt(name, partial(scorer.mismatch, values["completions"])) or {}
                result.note(rungs=rows)
                kl = row["mismatch_kl"] or 0.0
                result.require(kl <= MAX_KL, f"{rung.name}: mismatch_kl={kl}: is more than {MAX_KL:g}")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    measured = [row for row in rows if row[COLUMNS[4]] != ""]
    result.require(bool(measured), "rungs: none was measured")


def weights_dir(directory: Path, tiny: bool) -> Path:
    """A Hugging Face directory with random weights in bfloat16, for every rung and for the trainer."""
    from torchtitan_rl.model.files import assets_dir
    from torchtitan_rl.model.spec import build_spec
    from torchtitan_rl.weights.hf import write_hf_dir

    model = sized_model(tiny)
    directory.mkdir()
    untrained_dir(directory, model)
    spec = build_spec(model)
    adapter = spec.state_dict_adapter(spec.model, str(assets_dir(model)))
    write_hf_dir(random_weights(model, "bfloat16"), adapter, directory)
    return directory


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=check.__doc__)
    parser.add_argument("--rung", choices=[rung.name for rung in RUNGS], help="this one, in this process")
    parser.add_argument("--model-dir", type=Path, help="with --rung: a Hugging Face directory")
    parser.add_argument("--budget-s", type=float, default=420.0, help="seconds after which no further rung begins")
    run_check(check, parser)
