"""Faults put into a run of the real stack, and what is said to be the cause of the gap between trainer and generator.

    python -m benchmarks.mismatch_faults faults              # every fault, each in a short run of its own
    python -m benchmarks.mismatch_faults clean               # runs without a fault: nothing may be said
    python -m benchmarks.mismatch_faults faults --only shift,dtype
    python -m benchmarks.mismatch_faults cost                # seconds of steps with and without an explanation

Runs are local (one process); `clean` says the largest unexplained part. Exit status 1 where a
cause is missed or made up.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch

from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.mismatch.explainer import MismatchExplainer
from torchtitan_rl.record.recorder import Listener, Span
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.train.controller import Controller


class Instructed(LetterSort):
    """The same text before every prompt, long enough to fill blocks of the prefix cache."""

    @dataclass(kw_only=True, slots=True)
    class Config(LetterSort.Config):
        def build(self):
            return Instructed(self)

    def task(self, split, index):
        task = super().task(split, index)
        return dataclasses.replace(task, prompt=f"thequickbrownfoxjumpsoverthelazydog={task.prompt}")


CONFIGS = Path(__file__).parents[1] / "configs"
Patches = Iterator[Any]


def config_of(directory: str, name: str = "quickstart", **settings: Any) -> RunConfig:
    """A config's model and task in a run of few small steps, all explained. `settings`: `section__field=value`."""
    config = load_config(str(CONFIGS / f"{name}.py"))
    config.output_dir, config.generator.max_num_seqs = directory, 64
    config.supervised.num_steps, config.supervised.batch_size = 30, 16
    config.algorithm.tasks_per_step, config.algorithm.group_size = 8, 4
    config.algorithm.schedule.warmup_steps, config.algorithm.schedule.decay = 0, "constant"
    config.controller.num_steps, config.controller.eval_every = 5, 0
    config.controller.eval_tasks = config.controller.test_tasks = config.controller.pass_at_k = 4
    config.record.explain_mismatch_every = 1
    for path, value in settings.items():
        *parents, last = path.split("__")
        target: Any = config
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, last, value)
    return config


# The faults: each patches what a run calls, before the run starts.


def adapter() -> Patches:
    """What is published is the base: adapters are not merged in."""
    yield patch("torchtitan_rl.model.lora.merge", lambda name, weight, adapters: weight)


def stale_cache() -> Patches:
    """The prefix cache outlives a pull: one salt for all, and no reset. Blocks are short, so that prompts fill some."""
    from vllm import LLMEngine

    from torchtitan_rl.engine import engine

    built = engine.engine_args
    yield patch.object(engine, "tokens_input", _salted(engine.tokens_input))
    yield patch.object(LLMEngine, "reset_prefix_cache", lambda self, **_: True)
    yield patch.object(engine, "engine_args", lambda *a, **k: dataclasses.replace(built(*a, **k), block_size=32))


def _salted(tokens_input: Callable) -> Callable:
    return lambda tokens, cache_salt: tokens_input(tokens, cache_salt="one")


def shift() -> Patches:
    """Each token is reported with the log-probability of the token before it."""
    yield _completions(lambda done: done.logprobs.insert(0, done.logprobs.pop()))


def temperature() -> Patches:
    """The generator samples at 0.8 times the temperature it is asked for."""
    yield _sampling(lambda params: setattr(params, "temperature", 0.8 * params.temperature))


def top_k() -> Patches:
    yield _sampling(lambda params: setattr(params, "top_k", 3))


def top_p() -> Patches:
    yield _sampling(lambda params: setattr(params, "top_p", 0.7))


def dtype() -> Patches:
    """The generator's engine computes in bfloat16 though the config says float32."""
    from torchtitan_rl.dispatch.versions import PolicyVersions
    from torchtitan_rl.launch.local import LocalLauncher

    start, init = LocalLauncher.start_generator, PolicyVersions.__init__

    def start_generator(self, config, model, **named):
        return start(self, dataclasses.replace(config, dtype="bfloat16"), model, **named)

    def in_bfloat16(self, trainer, store, config, dtype, **named):
        init(self, trainer, store, config, torch.bfloat16, **named)

    yield patch.object(LocalLauncher, "start_generator", start_generator)
    yield patch.object(PolicyVersions, "__init__", in_bfloat16)


def older_version() -> Patches:
    """Every pull loads the version before the one that it names."""
    from torchtitan_rl.engine.engine import Engine

    stage, before = Engine.stage, []

    def stage_older(self, version, tensors):
        before.append({name: tensor.clone() for name, tensor in tensors.items()})
        stage(self, version, before[-2] if len(before) > 1 else before[-1])

    yield patch.object(Engine, "stage", stage_older)


def stale_tensor() -> Patches:
    """One tensor is published as it was at the start."""
    from torchtitan_rl.weights.payload import PayloadWriter

    add, first = PayloadWriter.add, {}

    def add_one_stale(self, name, tensor):
        if name == "layers.2.feed_forward.w2.weight":
            tensor = first.setdefault(name, tensor.clone())
        add(self, name, tensor)

    yield patch.object(PayloadWriter, "add", add_one_stale)


def layer_scaled() -> Patches:
    """After each load one tensor of the engine's model is off by a tenth."""
    from torchtitan_rl.engine.engine import Engine

    load = Engine._load_staged

    def load_and_scale(self, version, futures):
        load(self, version, futures)
        with torch.inference_mode():
            # A norm's: of a matrix the engine computes with a packed copy, which a change of the weight does not reach.
            self.model.decoder.layers["1"].attention_norm.weight.mul_(1.1)

    yield patch.object(Engine, "_load_staged", load_and_scale)


def label() -> Patches:
    """Tokens are labelled with the version before the one that sampled them."""

    def earlier(done):
        done.policy_versions[:] = [version - 1 for version in done.policy_versions]

    yield _completions(earlier)


def prompt() -> Patches:
    """The first token of a prompt does not reach the engine."""
    from torchtitan_rl.engine.engine import Engine

    add = Engine._add

    def add_shortened(self, request_id, request, future):
        sampled = request.params is not None and len(request.tokens) > 1
        add(self, request_id, dataclasses.replace(request, tokens=request.tokens[1:]) if sampled else request, future)

    yield patch.object(Engine, "_add", add_shortened)


def kept_cache() -> Patches:
    """Requests under way keep the cache of older weights, though it should be computed again."""
    from vllm import LLMEngine

    yield patch.object(LLMEngine, "reset_prefix_cache", lambda self, **_: True)


def trainer_temperature() -> Patches:
    """The trainer divides logits by 1.2 times the temperature."""
    from torchtitan_rl.dispatch.mesh_training_client import MeshTrainingClient

    init = MeshTrainingClient.__init__

    def warmer(self, mesh, *, temperature, **named):
        init(self, mesh, temperature=1.2 * temperature, **named)

    yield patch.object(MeshTrainingClient, "__init__", warmer)


def _completions(change: Callable[[Any], Any]) -> Any:
    from torchtitan_rl.engine import engine

    completion = engine.completion

    def changed(output, version_starts):
        done = completion(output, version_starts)
        change(done)
        return done

    return patch.object(engine, "completion", changed)


def _sampling(change: Callable[[Any], None]) -> Any:
    from torchtitan_rl.engine import engine

    engine_params = engine.engine_params

    def changed(request, *args, **named):
        params = engine_params(request, *args, **named)
        if request.params is not None and params.temperature > 0:
            change(params)
        return params

    return patch.object(engine, "engine_params", changed)


LORA = {"trainer__lora": LoRAConfig(rank=4, alpha=8.0), "trainer__optimizer__lr": 5e-3}
LONG = {
    "task": Instructed.Config(),
    "sampling__max_prompt_tokens": 60,
    "generator__max_model_len": 96,
    "trainer__training__seq_len": 96,
}
FAULTS: dict[str, tuple[Callable[[], Patches], dict[str, Any], str]] = {
    "adapter": (adapter, LORA, "adapter"),
    "stale_cache": (stale_cache, LONG, "stale_cache"),
    "shift": (shift, {}, "shift"),
    "temperature": (temperature, {}, "temperature"),
    "dtype": (dtype, {}, "dtype"),
    "older_version": (older_version, {}, "older_version"),
    "top_k": (top_k, {}, "top_k"),
    "top_p": (top_p, {}, "top_p"),
    "stale_tensor": (stale_tensor, {}, "weights"),
    "label": (label, {}, "label"),
    "prompt": (prompt, {}, "prompt"),
    "layer_scaled": (layer_scaled, {}, "weights"),
    "kept_cache": (kept_cache, {"algorithm__max_policy_lag": 2, "generator__on_update": "recompute"}, "stale_cache"),
    "trainer_temperature": (trainer_temperature, {}, "temperature"),
}
"""Name -> (the fault, settings of the run, the name of the cause that has to be found)."""

CLEAN: dict[str, dict[str, Any]] = {
    "quickstart": {},
    "quickstart seed 1": {"seed": 1},
    "lag 1": {"algorithm__max_policy_lag": 1},
    "lag 2 keep": {"algorithm__max_policy_lag": 2},
    "lag 2 recompute": {"algorithm__max_policy_lag": 2, "generator__on_update": "recompute"},
    "lag 2 wait": {"algorithm__max_policy_lag": 2, "generator__on_update": "wait"},
    "LoRA": LORA,
    "minibatches": {"algorithm__tasks_per_minibatch": 4, "controller__num_steps": 6},
    "temperature 0.8": {"algorithm__temperature": 0.8},
    "several turns": {"name": "calculator"},
    "bfloat16": {"generator__dtype": "bfloat16"},
}


async def run(settings: dict[str, Any]) -> tuple[MismatchExplainer, list[dict[str, Any]]]:
    """The explainer of a run of its own, and the run's lines of metrics."""
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-") as directory:
        async with await Controller.launch(config_of(f"{directory}/run", **settings), backend="local") as controller:
            explained = controller.explainer
            await controller.train()
            lines = controller.run_dir.read_metrics()
    return explained, [line for line in lines if line["phase"] == "reinforcement"]


@contextmanager
def applied(fault: Callable[[], Patches]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in fault():
            stack.enter_context(one)
        yield


def faults(names: list[str]) -> int:
    named = 0
    for name in names or FAULTS:
        fault, settings, wanted = FAULTS[name]
        with applied(fault):
            explained, lines = asyncio.run(run(settings))
        cause = explained.cause
        is_named = cause is not None and cause.name == wanted
        named += is_named
        text = "nothing" if cause is None else f"{cause.part}: {cause.name}: {cause.words} (left {cause.left_mean:.1e})"
        print(f"{'named ' if is_named else 'MISSED'} {name}: {text}", flush=True)
    total = len(names or FAULTS)
    print(f"{named} of {total} faults named")
    return int(named < total)


def clean(names: list[str]) -> int:
    alarms = 0
    for name in names or CLEAN:
        explained, lines = asyncio.run(run(dict(CLEAN[name])))
        alarms += explained.cause is not None
        text = "nothing" if explained.cause is None else f"ALARM {explained.cause}"
        worst = [max(line.get(f"mismatch/{of}", 0.0) for line in lines) for of in WORST]
        tokens = [line.get("mismatch/explained_tokens", 0) for line in lines]
        numbers = ", ".join(f"{of} {value:.1e}" for of, value in zip(WORST, worst))
        print(f"{name}: {text}; {numbers}; tokens {tokens}", flush=True)
    print(f"{alarms} alarms in {len(names or CLEAN)} clean runs")
    return int(alarms > 0)


WORST = ("noise_max", "stale_mean", "kept_max", "unexplained_mean", "unexplained_max")


class Seconds(Listener):
    """Wall and processor seconds of every step of the reinforcement phase, the latter of all processes of the run."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self._began = 0.0

    def begin(self, span: Span) -> None:
        if span.name == "reinforcement":
            self.steps.clear()  # those of the warm start
        elif span.name == "step":
            self._began = self._used()

    def end(self, span: Span, failed: bool) -> None:
        if span.name == "step":
            self.steps.append((span.seconds, self._used() - self._began))

    def _used(self) -> float:
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in processes)


def cost(names: list[str]) -> int:
    """Seconds of the quickstart's steps with an explanation, every other step, and without, in one run with actors."""

    async def measured() -> list[tuple[float, float]]:
        with tempfile.TemporaryDirectory(prefix="torchtitan-rl-") as directory:
            config = load_config(str(CONFIGS / "quickstart.py"))
            config.output_dir, config.supervised.num_steps = f"{directory}/run", 30
            config.controller.num_steps, config.controller.eval_every, config.controller.pass_at_k = 45, 0, 0
            config.controller.eval_tasks = config.controller.test_tasks = 4
            config.record.explain_mismatch_every = 2
            async with await Controller.launch(config) as controller:
                controller.recorder.listeners.append(seconds := Seconds())
                await controller.train()
        return seconds.steps

    steps, status = asyncio.run(measured())[3:], 0  # the first steps allocate; the one at index 0 is explained
    for clock, values in zip(("wall", "processor"), zip(*steps)):
        pairs = [(values[i], (values[i - 1] + values[i + 1]) / 2) for i in range(2, len(values) - 1, 2)]
        added = statistics.median(explained / plain for explained, plain in pairs) - 1
        plain, explained = (statistics.median(side) for side in ([p for _, p in pairs], [e for e, _ in pairs]))
        print(f"{clock} seconds of {len(pairs)} pairs: {explained:.3f} with, {plain:.3f} without, ratio + {added:.1%}")
        status |= clock == "processor" and added > 0.05
    return int(status)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["faults", "clean", "cost"])
    parser.add_argument("--only", default="", help="names, separated by commas")
    args = parser.parse_args()
    chosen = [name.strip() for name in args.only.split(",") if name.strip()]
    sys.exit({"faults": faults, "clean": clean, "cost": cost}[args.what](chosen))
