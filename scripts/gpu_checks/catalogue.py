"""Every check of the battery, as data, the one that teaches most first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_rl.config.run import RunConfig

__all__ = ["Check", "CHECKS", "FAMILIES", "GPU_TESTS", "PARTS"]

PARTS = {
    "nothing": ("torch",),
    "trainer": ("torch", "torchtitan"),
    "generator": ("torch", "torchtitan", "vllm"),
    "stack": ("torch", "torchtitan", "vllm", "monarch", "torchstore"),
}
"""Modules that a part of the whole is made of. A generator runs torchtitan's model, so it needs both, and a
run in one process needs no more."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A command in a process of its own, which is given `--result FILE`, and `--tiny` for small shapes."""

    name: str
    teaches: str
    needs: str
    """A name of `PARTS`."""
    time_limit_s: int
    command: tuple[str, ...]
    """Arguments of Python."""
    num_gpus: int = 1
    """0: needs none."""
    tiny: bool = False
    """Has a form for a machine without a GPU."""
    measures: bool = True
    """Says how long something takes or what memory it needs, so that nothing else may run on the device."""
    config: Callable[[], RunConfig] | None = None
    """The run it makes, which `--dry-run` validates."""


GPU_TESTS = tuple(
    f"tests/gpu/test_{name}.py"
    for name in ("stack", "quickstart", "residency", "lora", "moe", "numerics", "logprob_kernels", "fused_layers")
)
"""Whole stacks first: what a limit cuts off is the many small tests of kernels. `test_two_gpus.py` needs two."""


_FAMILY_NAMES = ("llama3", "qwen2", "qwen3_5", "gpt_oss", "deepseek_v3")
FAMILIES: dict[str, dict[str, Any]] = {
    **{f"family-{name}": {"name": name} for name in _FAMILY_NAMES},
    **{f"family-{name}-bfloat16": {"name": name, "num_steps": 20, "dtype": "bfloat16"} for name in _FAMILY_NAMES},
    **{
        f"family-{name}-eager": {"name": name, "num_steps": 20, "dtype": "bfloat16", "eager": True}
        for name in ("gpt_oss", "deepseek_v3")  # beside the same with graphs, a mixture's default on Hopper
    },
}
"""Runs with other families of models: name of the check -> arguments of `configs.family`."""


def _family_teaches(name: str, num_steps: int | None = None, dtype: str = "float32", eager: bool = False) -> str:
    if num_steps is None:
        return f"{name}: whether a whole run learns what it learns on a CPU"
    return f"{name}: {num_steps} steps in {dtype}{', without CUDA graphs' * eager}: trainer against engine"


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"scripts.gpu_checks.{name}", *arguments)


def _steps(variant: str) -> Callable[[], RunConfig]:
    def config() -> RunConfig:
        from scripts.gpu_checks.configs import STEPS, steps  # imports torchtitan

        return steps(**STEPS[variant])

    return config


def _family(variant: str) -> Callable[[], RunConfig]:
    def config() -> RunConfig:
        from scripts.gpu_checks.configs import family  # imports torchtitan

        return family(**FAMILIES[variant])

    return config


def _quickstart() -> RunConfig:
    from scripts.gpu_checks.configs import quickstart

    return quickstart()


def _run(
    name: str,
    variant: str,
    teaches: str,
    time_limit_s: int,
    config: Callable[[], RunConfig],
    *,
    needs: str = "stack",
    tiny: bool = True,
    measures: bool = True,
) -> Check:
    command = _module("steps", "--variant", variant)
    return Check(
        name=name,
        teaches=teaches,
        needs=needs,
        time_limit_s=time_limit_s,
        command=command,
        tiny=tiny,
        measures=measures,
        config=config,
    )


# What starts real actors, engine and store, and asserts no bound or bit that only float32 on a CPU keeps: those have
# their own form in tests/gpu. Left out besides: layouts of two ranks (tests/gpu/test_two_gpus.py).
_INTEGRATION = (
    "tests/integration/test_stack.py",
    "tests/integration/test_batches.py",
    "tests/integration/test_multi_turn.py",
    "tests/integration/test_replicas.py",
    "--deselect=tests/integration/test_stack.py::test_generator_and_trainer_agree_on_log_probabilities",
    "--deselect=tests/integration/test_stack.py::test_sampling_log_probabilities_are_those_after_temperature",
    "--deselect=tests/integration/test_stack.py::test_the_same_requests_give_the_same_tokens_and_bits_whatever_the_cache_holds",
    "--deselect=tests/integration/test_stack.py::test_a_gradient_does_not_depend_on_microbatches_or_calls",
    "--deselect=tests/integration/test_stack.py::test_loss_weight_and_grad_scale_scale_the_gradient_alike",
    "--deselect=tests/integration/test_stack.py::test_save_load_step_equals_step_step",
    "--deselect=tests/integration/test_stack.py::test_exported_model_loads_in_transformers_with_the_same_log_probabilities",
    "--deselect=tests/integration/test_stack.py::test_versions_can_be_pinned_scored_and_are_deleted_when_nobody_holds_them",
    "--deselect=tests/integration/test_stack.py::test_any_loss_gets_the_check_of_generator_against_trainer",
    "--deselect=tests/integration/test_replicas.py::test_replicas_give_the_tokens_and_log_probabilities_of_one",
    "--deselect=tests/integration/test_replicas.py::test_the_same_requests_give_the_same_bits_on_several_replicas",
)

CHECKS = [
    Check(
        name="environment",
        teaches="driver, GPUs, compiler and versions; which attention and which vLLM runner come to be used",
        needs="nothing",
        time_limit_s=150,
        command=_module("environment"),
        num_gpus=0,
        tiny=True,
        measures=False,
    ),
    Check(
        name="attention-kernels",
        teaches="whether training attention is right, forward and backward, at head sizes 128 and 32",
        needs="trainer",
        time_limit_s=90,
        command=_module("attention"),
        tiny=True,
        measures=False,
    ),
    Check(
        name="trainer-steps",
        teaches="tokens per second, MFU and peak memory of whole training steps at 0.6B, 1.7B and 4B, by layout",
        needs="trainer",
        time_limit_s=240,
        command=_module("trainer_steps", "--budget-s", "150"),
        tiny=True,
    ),
    Check(
        name="engine-ladder",
        teaches="0.6B: decoding from our engine without graphs to plain vLLM, and each against the trainer's forward",
        needs="generator",
        time_limit_s=600,
        command=_module("engine_ladder", "--budget-s", "380"),
        tiny=True,
    ),
    Check(
        name="engine-versions",
        teaches="0.6B: whether every token is labelled with the version that sampled it, with steps scheduled ahead",
        needs="generator",
        time_limit_s=150,
        command=_module("versions"),
        tiny=True,
        measures=False,
    ),
    _run(
        "steps-local-eager",
        "local-eager",
        "0.6B: steps of trainer and engine in one process, without actors",
        210,
        _steps("local-eager"),
        needs="generator",
    ),
    _run(
        "steps-local-graphs",
        "local-graphs",
        "0.6B: the same with CUDA graphs in decoding",
        210,
        _steps("local-graphs"),
        needs="generator",
    ),
    _run(
        "local-quickstart",
        "local-quickstart",
        "whether a run in one process learns what it learns on a CPU",
        270,
        _quickstart,
        needs="generator",
        tiny=False,
        measures=False,
    ),
    _run(
        "quickstart",
        "quickstart",
        "whether a whole run learns what it learns on a CPU",
        270,
        _quickstart,
        tiny=False,
        measures=False,
    ),
    Check(
        name="tests-gpu",
        teaches="weights, versions, numbers, residency, LoRA and experts on one GPU",
        needs="stack",
        time_limit_s=480,
        command=_module("suite", "--marker", "gpu", *GPU_TESTS),
        measures=False,
    ),
    *(
        _run(name, name, _family_teaches(**arguments), 300, _family(name), tiny=False, measures=False)
        for name, arguments in FAMILIES.items()
    ),
    _run(
        "steps-colocated-eager",
        "colocated-eager",
        "0.6B: what a step costs where trainer and generator take turns",
        240,
        _steps("colocated-eager"),
    ),
    _run(
        "steps-colocated-graphs",
        "colocated-graphs",
        "0.6B: what CUDA graphs save in decoding",
        270,
        _steps("colocated-graphs"),
    ),
    _run(
        "steps-apart-eager",
        "apart-eager",
        "0.6B: steps with both on the device at once, or each on its own",
        240,
        _steps("apart-eager"),
    ),
    _run(
        "steps-apart-ahead",
        "apart-ahead",
        "0.6B: the same with CUDA graphs and asynchronous scheduling",
        240,
        _steps("apart-ahead"),
    ),
    _run(
        "steps-apart-compiled",
        "apart-compiled",
        "0.6B: the same with the trainer's layers compiled, and how far it is from the generator then",
        270,
        _steps("apart-compiled"),
    ),
    _run(
        "steps-apart-lag",
        "apart-lag",
        "0.6B: the same with batches of the version before, so that sampling and training overlap",
        300,
        _steps("apart-lag"),
    ),
    Check(
        name="decode-profile",
        teaches="0.6B: which kernels a decode step spends its time in, and how long the device is idle between them",
        needs="generator",
        time_limit_s=120,
        command=_module("decode_profile"),
        tiny=True,
    ),
    Check(
        name="copies",
        teaches="GB/s of pinning, copies, casts, checksums, publications and offloads, beside one flat copy",
        needs="trainer",
        time_limit_s=240,
        command=_module("copies"),
        tiny=True,
    ),
    Check(
        name="integration",
        teaches="batches, turns, versions and failing replicas with CUDA processes",
        needs="stack",
        time_limit_s=600,
        command=_module("suite", *_INTEGRATION),
        measures=False,
    ),
    _run(
        "transport-shared-memory",
        "transport-shared-memory",
        "0.6B: seconds of a weight sync through shared memory",
        240,
        _steps("transport-shared-memory"),
    ),
    _run(
        "transport-store",
        "transport-store",
        "0.6B: seconds of a weight sync through the store",
        240,
        _steps("transport-store"),
    ),
    Check(
        name="logprob-chunk",
        teaches="seconds and peak memory of 16,384 tokens by trainer.logprob_chunk_mib and trainer.logprob_kernels",
        needs="trainer",
        time_limit_s=300,
        command=_module("logprob_chunk"),
        tiny=True,
    ),
    Check(
        name="residency",
        teaches="whether offload and sleep really free the device's memory",
        needs="stack",
        time_limit_s=240,
        command=_module("residency"),
        config=_steps("colocated-eager"),
    ),
    Check(
        name="model-runners",
        teaches="vLLM's V1 runner against V2: tokens per second, and whether they say the same",
        needs="generator",
        time_limit_s=600,
        command=_module("runners"),
    ),
    Check(
        name="tests-two-gpus",
        teaches="FSDP, TP, HSDP, experts, TP generators and replicas on NCCL",
        needs="stack",
        time_limit_s=600,
        command=_module("suite", "--marker", "gpu", "tests/gpu/test_two_gpus.py"),
        num_gpus=2,
    ),
]
