"""The verb `sample`: completes a prompt with the weights of a checkpoint, in a run directory of its own."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl.cli import exit_status
from torchtitan_rl.cli.verb_arguments import add_checkpoint
from torchtitan_rl.record.user_code import error_text

if TYPE_CHECKING:
    from torchtitan_rl.config.sampling import AlteredSampling
    from torchtitan_rl.types import SamplingParams

__all__ = ["add_arguments", "run", "sample"]

_ALTERED = (
    ("top-p", float, 1.0),
    ("top-k", int, 0),
    ("min-p", float, 0.0),
    ("repetition-penalty", float, 1.0),
    ("presence-penalty", float, 0.0),
    ("frequency-penalty", float, 0.0),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-tokens", type=int, default=64, help="of the answer, at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token, always")
    for name, kind, off in _ALTERED:
        parser.add_argument(f"--{name}", type=kind, default=off, metavar=kind.__name__, help=f"{off}: off")
    parser.add_argument("--output-dir", default="", help="default: runs/sample-NAME-DATE-TIME")


def run(args: argparse.Namespace) -> int:
    return exit_status.end_with(_sample(args))


async def _sample(args: argparse.Namespace) -> int:
    from torchtitan_rl.config.sampling import AlteredSampling
    from torchtitan_rl.types import MIN_TEMPERATURE, SamplingParams
    from torchtitan_rl.validation.sampling import check_greedy

    try:
        altered = AlteredSampling(**{f.name: getattr(args, f.name) for f in dataclasses.fields(AlteredSampling)})
        _check_flags(altered)
        if args.max_tokens < 1:
            raise ValueError(f"--max-tokens={args.max_tokens}: an answer needs at least 1; use 1 or more")
        if not 0 <= args.temperature < math.inf:
            raise ValueError(f"--temperature={args.temperature}: must be finite and not negative; 0 is greedy")
        if 0 < args.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"--temperature={args.temperature}: is below the engine's smallest; use 0, or {MIN_TEMPERATURE} or more"
            )
        if not args.temperature:
            check_greedy("--", altered, "add --temperature 1")
        params = SamplingParams(
            max_tokens=args.max_tokens, temperature=args.temperature, seed=0, **dataclasses.asdict(altered)
        )
        checkpoint = Path(args.checkpoint)
        print(await sample(checkpoint, args.prompt, params, output_dir=args.output_dir, quiet=args.quiet))
        return 0
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        return exit_status.fail(error_text(error))


def _check_flags(altered: AlteredSampling) -> None:
    """Raises ValueError for a value out of range, under the name of its flag."""
    from torchtitan_rl.config.values import field_types
    from torchtitan_rl.constraints import complaint

    for name, kind in field_types(type(altered), constraints=True).items():
        if problem := complaint(value := getattr(altered, name), kind):
            raise ValueError(f"--{name.replace('_', '-')}={value}: {problem}")


async def sample(
    checkpoint: Path, prompt: str, params: SamplingParams, *, output_dir: str = "", quiet: bool = False
) -> str:
    """The completion of a prompt, by one generator with the weights and tokenizer of the checkpoint's Hugging Face
    directory. Logs, and the request with its answer (`sample.json`), are in `output_dir`, or in runs/sample-NAME-DATE.

    Raises ValueError, before anything starts, for a checkpoint or a prompt that cannot be used.
    """
    from torchtitan_rl.config.meshes import GeneratorConfig
    from torchtitan_rl.config.model import ModelConfig
    from torchtitan_rl.dispatch.mesh_sampling_client import MeshSamplingClient
    from torchtitan_rl.dispatch.versions import OneVersion
    from torchtitan_rl.families import shape_of_directory
    from torchtitan_rl.launch.actors import ActorLauncher
    from torchtitan_rl.model.files import load_tokenizer
    from torchtitan_rl.record.run_dir import RunDir
    from torchtitan_rl.train.start import dated
    from torchtitan_rl.validation.generator import cache_bytes, check_alone
    from torchtitan_rl.weights.checkpoint import hf_weights, write_json
    from torchtitan_rl.weights.origin import origin

    weights = hf_weights(checkpoint)
    source = origin(checkpoint)
    shape = shape_of_directory(weights)  # refuses a model of no family
    longest = shape.max_seq_len
    tokenizer = load_tokenizer(weights)
    tokens = tokenizer.encode(prompt, add_special_tokens=False)
    if not tokens:
        raise ValueError(f"--prompt={prompt!r}: has no tokens; give some text")
    if len(tokens) + params.max_tokens > longest:
        raise ValueError(
            f"--max-tokens={params.max_tokens}: with the prompt's {len(tokens)} above the model's {longest} tokens; "
            "lower it, or shorten the prompt"
        )
    config = GeneratorConfig(dtype="float32", max_model_len=len(tokens) + params.max_tokens)
    config.kv_cache_gib = max(0.25, cache_bytes(config, shape) / 2**30)
    check_alone(config, shape, {})
    run_dir = RunDir.create(output_dir or dated(f"sample-{source.name}"))
    if not quiet:  # on stderr: standard output is the completion alone
        print(f"{source.text or 'no known step'} of {source.name}; {run_dir.path}", file=sys.stderr)
    launcher = ActorLauncher(log_dir=str(run_dir.logs), start_timeout_s=300, call_timeout_s=600)
    try:
        mesh = await launcher.start_generator(config, ModelConfig(assets=str(weights)), role="generator-0", seed=0)
        client = MeshSamplingClient([mesh], OneVersion(), max_model_len=config.max_model_len, timeout_s=600)
        await client.load_hf(str(weights))
        completion = await client.sample(tokens, params)
    finally:
        launcher.kill()
    text = tokenizer.decode(completion.tokens, skip_special_tokens=True)
    record = {"checkpoint": str(checkpoint), "step": source.step, "prompt": prompt, "text": text}
    record |= {"params": dataclasses.asdict(params), "completion": dataclasses.asdict(completion)}
    write_json(run_dir.path / "sample.json", record)
    return text
