"""A generator's engine in this process, without actors, store or trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_rl import adapters, platform
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.environment import prepare_environment
from torchtitan_rl.model.files import assets_dir, write_model_dir
from torchtitan_rl.model.shape import resolve_shape

__all__ = ["untrained_dir", "started", "runner_of", "random_weights"]


def untrained_dir(directory: Path, model: ModelConfig) -> Path:
    """A model directory without weights, which is what an engine starts from."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(assets_dir(model)))
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    write_model_dir(directory, resolve_shape(model), assets_dir(model), eos=eos, pad=eos if pad is None else pad)
    return directory


@contextmanager
def started(config: GeneratorConfig, model_dir: Path, *, sleeps: bool = False) -> Iterator:
    """An `engine.Engine` that is ready, with vLLM's random weights. One a process: vLLM has global state. `sleeps`: it
    can give its device memory away."""
    prepare_environment()
    adapters.prepare_vllm(eager=config.compiles_nothing)
    platform.local_device(0)
    from torchtitan_rl.engine.engine import Engine

    engine = Engine(config, ModelConfig(assets=str(model_dir)), seed=0, rank=0, sleeps=sleeps)
    engine.start()
    engine.ready.result()
    try:
        yield engine
    finally:
        engine.close()


def runner_of(engine) -> str:
    """Which of vLLM's model runners an engine has come to: `"v1"` or `"v2"`."""
    return engine.model_runner


def random_weights(model: ModelConfig, dtype: str, seed: int = 0) -> dict:
    """A state dict as torchtitan initialises the model, in a generator's dtype."""
    import torch

    from torchtitan_rl.model.spec import build_spec

    torch.manual_seed(seed)
    whole = build_spec(model).model.build()
    whole.init_weights()
    buffers = {name for name, _ in whole.named_buffers()}
    return {
        name: tensor if name in buffers else tensor.to(getattr(torch, dtype))
        for name, tensor in whole.state_dict().items()
    }
