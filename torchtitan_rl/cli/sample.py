"""Completes a prompt with the weights of a checkpoint, in a run directory of its own."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from transformers import AutoTokenizer

from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import Qwen3Shape
from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.dispatch.versions import OneVersion
from torchtitan_rl.launch.actors import Launcher
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.train.start import dated
from torchtitan_rl.types import SamplingParams
from torchtitan_rl.weights.checkpoint import hf_weights, write_json
from torchtitan_rl.weights.origin import origin

__all__ = ["sample"]


async def sample(
    checkpoint: Path, prompt: str, params: SamplingParams, *, output_dir: str = "", quiet: bool = False
) -> str:
    """The completion of a prompt, by one generator with the weights and tokenizer of the checkpoint's Hugging Face
    directory. Logs, and what was asked and answered (`sample.json`), are in `output_dir`, or in runs/sample-NAME-DATE.

    Raises ValueError, before anything starts, for a checkpoint or a prompt that cannot be used.
    """
    weights = hf_weights(checkpoint)
    source = origin(checkpoint)
    Qwen3Shape.from_hf(weights / "config.json")  # refuses another model
    tokenizer = AutoTokenizer.from_pretrained(str(weights))
    tokens = tokenizer.encode(prompt, add_special_tokens=False)
    if not tokens:
        raise ValueError(f"--prompt={prompt!r}: has no tokens; give some text")
    config = GeneratorConfig(dtype="float32", max_model_len=len(tokens) + params.max_tokens, kv_cache_gib=0.25)
    run_dir = RunDir.create(output_dir or dated(f"sample-{source.name}"))
    if not quiet:  # on stderr: standard output is the completion alone
        print(f"{source.text or 'no known step'} of {source.name}; {run_dir.path}", file=sys.stderr)
    launcher = Launcher(log_dir=str(run_dir.logs), start_timeout_s=300, call_timeout_s=600)
    try:
        mesh = await launcher.start_generator(config, weights, role="generator-0", seed=0)
        client = SamplingClient([mesh], OneVersion(), max_model_len=config.max_model_len, timeout_s=600)
        await client.load_hf(str(weights))
        completion = await client.sample(tokens, params)
    finally:
        launcher.kill()
    text = tokenizer.decode(completion.tokens, skip_special_tokens=True)
    said = {"checkpoint": str(checkpoint), "step": source.step, "prompt": prompt, "text": text}
    asked = dataclasses.asdict(params)
    write_json(run_dir.path / "sample.json", {**said, "params": asked, "completion": dataclasses.asdict(completion)})
    return text
