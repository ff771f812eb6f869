"""The verb `serve`: opens OpenAI's endpoints on a checkpoint."""

from __future__ import annotations

import argparse
import traceback
from pathlib import Path

from torchtitan_rl.cli import exit_status
from torchtitan_rl.cli.verb_arguments import add_address, address
from torchtitan_rl.record.user_code import error_text

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a run's checkpoints/step-N, or a Hugging Face directory")
    parser.add_argument("--port", type=int, default=8000, help="0: one that is free")
    add_address(parser)
    parser.add_argument("--max-model-len", type=int, default=0, help="default: the model's, at most 4096")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="of weights")
    parser.add_argument("--kv-cache-gib", type=float, default=1.0, help="size of the KV cache")
    parser.add_argument("--output-dir", default="", help="default: runs/serve-NAME-DATE-TIME")


def run(args: argparse.Namespace) -> int:
    return exit_status.end_with(_serve(args))


async def _serve(args: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM. Returns the exit status."""
    from torchtitan_rl.cli.openai_server import serve
    from torchtitan_rl.config.meshes import GeneratorConfig

    generator = GeneratorConfig(
        dtype=args.dtype, max_model_len=args.max_model_len, kv_cache_gib=args.kv_cache_gib, max_num_batched_tokens=16384
    )
    try:
        at = address(args, args.port, args.host)
        await serve(Path(args.checkpoint), at, generator, output_dir=args.output_dir, quiet=args.quiet)
        return 0
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        return exit_status.fail(error_text(error))
