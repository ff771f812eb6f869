"""What the verbs of the command do that open an HTTP server on a model."""

from __future__ import annotations

import argparse
import dataclasses
import traceback
from pathlib import Path

from torchtitan_rl.cli import verbs
from torchtitan_rl.record.disk import disk_problem
from torchtitan_rl.record.user_code import told

__all__ = ["serve", "serve_tinker"]


async def serve(args: argparse.Namespace) -> int:
    """Until SIGINT or SIGTERM."""
    from torchtitan_rl.cli.serve_openai import serve
    from torchtitan_rl.config.meshes import GeneratorConfig

    generator = GeneratorConfig(
        dtype=args.dtype, max_model_len=args.max_model_len, kv_cache_gib=args.kv_cache_gib, max_num_batched_tokens=16384
    )
    try:
        at = verbs.address(args, args.port, args.host)
        await serve(Path(args.checkpoint), at, generator, output_dir=args.output_dir, quiet=args.quiet)
        return 0
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        return verbs.fail(told(error))


def serve_tinker(args: argparse.Namespace, config, argv: list[str]) -> int:
    """Serves until SIGINT or SIGTERM; is started again, at most `--max-restarts` times, when it is killed or fails."""
    from torchtitan_rl.cli.serve_tinker import TinkerOptions, adapted, serve_tinker
    from torchtitan_rl.config.derive import settled
    from torchtitan_rl.launch.restarts import leave_outcome, run_with_restarts
    from torchtitan_rl.train.start import dated
    from torchtitan_rl.validation.run import validate

    options = TinkerOptions(**{field.name: getattr(args, field.name) for field in dataclasses.fields(TinkerOptions)})
    config = settled(adapted(config, options))
    validate(config)
    if args.max_restarts and args.outcome is None:
        arguments = verbs.without_restarts(argv[argv.index("serve-tinker") + 1 :]) + ["--max-restarts", "0"]
        directory = config.output_dir
        if not directory:  # the same one for every attempt
            directory = dated(f"tinker-{config.name}")
            arguments += ["--output-dir", directory]
        return run_with_restarts("serve-tinker", arguments, args.max_restarts, directory)

    async def serving() -> int:
        try:
            await serve_tinker(config, options, quiet=args.quiet)
            return 0
        except Exception as error:
            problem = disk_problem(error, config.output_dir or ".")
            args.final = isinstance(error, ValueError) or bool(problem)
            if args.debug:
                traceback.print_exc()
            return verbs.fail(problem or told(error))

    args.final = True
    if args.outcome is None:
        return verbs.ended(serving())
    return verbs.ended(serving(), lambda code: leave_outcome(args.outcome, code, final=args.final))
