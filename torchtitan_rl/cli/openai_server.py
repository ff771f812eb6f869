"""Serving what was trained: OpenAI's endpoints on a checkpoint."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.dispatch.mesh_sampling_client import MeshSamplingClient
from torchtitan_rl.dispatch.versions import OneVersion
from torchtitan_rl.families import shape_of_directory
from torchtitan_rl.launch.actors import ActorLauncher
from torchtitan_rl.model.files import load_tokenizer
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.serve.gateway import Served
from torchtitan_rl.serve.run_gateway import Address, announce, policy_of
from torchtitan_rl.train.start import dated
from torchtitan_rl.validation.generator import check_alone
from torchtitan_rl.weights.checkpoint import hf_weights
from torchtitan_rl.weights.origin import origin

__all__ = ["serve"]

_MAX_CONTEXT = 4096
_TIMEOUT_S = 600
_FLAGS = {"max_model_len": "--max-model-len", "kv_cache_gib": "--kv-cache-gib", "dtype": "--dtype"}


async def serve(
    checkpoint: Path, address: Address, generator: GeneratorConfig, *, output_dir: str = "", quiet: bool = False
) -> None:
    """Serves a checkpoint, or a Hugging Face directory, until SIGINT or SIGTERM. `generator.max_model_len` 0: the
    model's own length, at most 4,096. Logs are in `output_dir`, or in runs/serve-NAME-DATE.

    Raises ValueError, before anything starts, for what cannot be served.
    """
    weights, source = _hf_weights(checkpoint), origin(checkpoint)
    shape = shape_of_directory(weights)
    tokenizer = _tokenizer(weights)
    longest = shape.max_seq_len
    generator.max_model_len = generator.max_model_len or min(longest, _MAX_CONTEXT)
    if not 0 < generator.max_model_len <= longest:
        raise ValueError(
            f"--max-model-len={generator.max_model_len}: the model reads {longest} tokens; use 1 to {longest}, or "
            "leave it out"
        )
    check_alone(generator, shape, _FLAGS)
    address.check()
    run_dir = RunDir.create(output_dir or dated(f"serve-{source.name}"))
    launcher = ActorLauncher(log_dir=str(run_dir.logs), start_timeout_s=300, call_timeout_s=_TIMEOUT_S)
    try:
        mesh = await launcher.start_generator(generator, ModelConfig(assets=str(weights)), role="generator-0", seed=0)
        client = MeshSamplingClient([mesh], OneVersion(), max_model_len=generator.max_model_len, timeout_s=_TIMEOUT_S)
        await client.load_hf(str(weights), version=source.step or 0)
        served = Served(
            name="policy",
            policy=policy_of(client, tokenizer, generator.max_model_len),
            versions=list,
            no_base="a checkpoint is served whole, with its adapters merged; use policy, or serve the base's directory",
        )
        opened = address.gateway(served, context_tokens=generator.max_model_len, vocab_size=shape.vocab_size)
        async with opened as gateway:
            announce(gateway, f"{source.text or 'no known step'} of {source.name}; logs in {run_dir.path}", quiet)
            await _asked_to_end()
    finally:
        launcher.kill()


def _hf_weights(path: Path) -> Path:
    """`checkpoint.hf_weights`. Raises ValueError for a path that is nothing to serve, and says what it lacks."""
    if not path.exists():
        raise ValueError(
            f"checkpoint={str(path)!r}: is not there; give a run's checkpoints/step-N, or a Hugging Face directory (a "
            "model's name on the Hub is downloaded first)"
        )
    if (path / "config.json").exists() and not any(path.glob("*.safetensors")):
        raise ValueError(
            f"checkpoint={str(path)!r}: is a Hugging Face directory without *.safetensors; add the weights in this form"
        )
    return hf_weights(path)


def _tokenizer(weights: Path) -> Any:
    try:
        return load_tokenizer(weights)
    except Exception as error:  # transformers raises many types, always about the files
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"checkpoint={str(weights)!r}: holds no tokenizer that can be read ({reason}); add tokenizer.json and "
            "tokenizer_config.json of the model"
        ) from error


async def _asked_to_end() -> None:
    loop, end_requested = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end_requested.set)
    await end_requested.wait()
