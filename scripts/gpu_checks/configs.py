"""The runs of the battery that no file in configs/ is: random weights at the Qwen3-0.6B shape, nothing to download."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from torchtitan_rl import platform
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.meshes import AdamWConfig, GeneratorConfig, TrainerConfig
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.config.run import ControllerConfig, RunConfig, SamplingConfig
from torchtitan_rl.tasks.letter_sort import LetterSort

__all__ = ["STEPS", "family", "quickstart", "steps", "sized_model"]

ROOT = Path(__file__).parents[2]

STEPS: dict[str, dict] = {
    "local-eager": dict(colocation="none", eager=True),
    "local-graphs": dict(colocation="none", eager=False),
    "colocated-eager": dict(colocation="all", eager=True),
    "colocated-graphs": dict(colocation="all", eager=False),
    "apart-eager": dict(colocation="none", eager=True),
    "apart-ahead": dict(colocation="none", eager=False, ahead=True),
    "apart-compiled": dict(colocation="none", eager=False, ahead=True, compiled=True),
    "apart-lag": dict(colocation="none", eager=False, ahead=True, compiled=True, lag=1),
    "transport-shared-memory": dict(colocation="none", eager=True, transport="shared_memory", max_tokens=64),
    "transport-store": dict(colocation="none", eager=True, transport="store", max_tokens=64),
}
"""The variants of `steps`, by name. Roles apart share the device of a machine that has only one. Those whose names
begin with `local` run in one process."""


def quickstart() -> RunConfig:
    """The quickstart as it is."""
    return load_config(str(ROOT / "configs" / "quickstart.py"))


def family(*, name: str, num_steps: int | None = None, dtype: Any = "float32", eager: bool = False) -> RunConfig:
    """The quickstart's task with a model of another family, `configs/letter_sort_NAME.py`. `num_steps`: so many steps
    and no evaluation between them; None: as many as the file says. `dtype`: of trainer and generator. `eager`: the
    engine has no CUDA graphs and is not scheduled ahead, wherever it runs."""
    config = load_config(str(ROOT / "configs" / f"letter_sort_{name}.py"))
    if num_steps is not None:
        config.controller.num_steps, config.controller.eval_every = num_steps, 0
    config.generator.dtype = config.trainer.training.mixed_precision_param = dtype
    if eager:
        config.generator.enforce_eager, config.generator.async_scheduling = True, False
    return config


def sized_model(tiny: bool) -> ModelConfig:
    """Qwen3-0.6B with the built-in tokenizer, or something a CPU can train that has more tokens than it too."""
    if not tiny:
        return ModelConfig(assets="chars", flavor="0.6B")
    return ModelConfig(
        assets="chars",
        shape=Qwen3Shape(vocab_size=640, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=96),
    )


def chance(task, completions: list[str]) -> list[float]:
    """A reward that has nothing to do with the task: a model that cannot answer still gets gradients."""
    return [float(zlib.crc32(f"{task.id} {completion}".encode()) % 2) for completion in completions]


def steps(
    *,
    colocation: Any,
    eager: bool,
    ahead: bool = False,
    compiled: bool = False,
    lag: int = 0,
    transport: Any = "auto",
    max_tokens: int = 512,
    tiny: bool = False,
) -> RunConfig:
    """Three steps of 256 completions. Random weights rarely end a completion: nearly all have `max_tokens` tokens.
    `ahead`: with asynchronous scheduling, where there is a GPU. `compiled`: the trainer's layers are. `lag`: versions
    that a batch may be behind, and three more steps."""
    if tiny:
        max_tokens = 16
    config = RunConfig(
        name="gpu-battery",
        task=LetterSort.Config(min_letters=4, max_letters=6, reward=chance),
        model=sized_model(tiny),
        algorithm=AlgorithmConfig(tasks_per_step=4 if tiny else 32, group_size=8, max_policy_lag=lag),
        controller=ControllerConfig(num_steps=3 + 3 * lag, eval_every=0, eval_tasks=8, test_tasks=8, pass_at_k=0),
        sampling=SamplingConfig(max_prompt_tokens=16, max_tokens=max_tokens),
        trainer=TrainerConfig(
            optimizer=AdamWConfig(lr=1e-6), max_tokens_per_microbatch=16384, activation_checkpoint="selective"
        ),
        # 256 sequences of 528 tokens at 112 KiB a token (28 layers, 8 heads of 128, keys and values) are 14.4 GiB.
        generator=GeneratorConfig(
            dtype="bfloat16",
            max_model_len=1024,
            kv_cache_gib=0.25 if tiny else 16.0,
            enforce_eager=eager,
            async_scheduling=ahead and platform.device_type() == "cuda",
        ),
    )
    config.trainer.training.mixed_precision_param = "bfloat16"
    config.trainer.compile.enable = compiled and not tiny  # a CPU would compile for minutes
    # Less than the check's own limit, so that what hangs is named.
    waits = config.controller
    waits.start_timeout_s = waits.call_timeout_s = waits.sample_timeout_s = 180.0
    config.roles.colocation, config.weight_sync.transport = colocation, transport
    return config
