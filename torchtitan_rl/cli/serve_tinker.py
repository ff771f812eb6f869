"""The verb `serve-tinker`: serves a config's model to Tinker's SDK."""

from __future__ import annotations

import argparse
import dataclasses
import traceback

from torchtitan_rl.cli import exit_status
from torchtitan_rl.cli.verb_arguments import (
    add_allow_host,
    add_api_key_file,
    add_config,
    add_restarts,
    configured,
    without_restarts,
)
from torchtitan_rl.record.disk import disk_problem
from torchtitan_rl.record.user_code import error_text

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; any other than the default needs --keys, or a key and --shared",
    )
    add_allow_host(parser)
    parser.add_argument("--port", type=int, default=8000, help="0: one that is free")
    add_api_key_file(parser)
    parser.add_argument(
        "--keys", default="", metavar="FILE", help="keys with owners, who see their own alone; torchtitan-rl keys add"
    )
    parser.add_argument(
        "--shared", action="store_true", help="one key or none: all see and may delete all, from other machines too"
    )
    parser.add_argument("--base-model", default="", metavar="NAME", help="default: the path of model.assets")
    parser.add_argument("--lora-rank", type=int, default=32, metavar="N", help="largest; 0: one model, all parameters")
    parser.add_argument("--max-models", type=int, default=8, metavar="N", help="LoRA models in the trainer at once")
    parser.add_argument(
        "--merged", action="store_true", help="generators hold one version at a time, its adapters merged in"
    )
    add_restarts(parser, 3, "begin again when the server is killed or fails")


def run(args: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM; is started again, at most `--max-restarts` times, when it is killed or fails."""
    from torchtitan_rl.cli.tinker_server import TinkerOptions, adapted, serve_tinker
    from torchtitan_rl.config.derive import settled
    from torchtitan_rl.launch.liveness.restarts import attempt, leave_outcome, run_with_restarts
    from torchtitan_rl.train.start import dated
    from torchtitan_rl.validation.run import validate

    if args.outcome is not None:
        attempt(args.outcome)
    options = TinkerOptions(**{field.name: getattr(args, field.name) for field in dataclasses.fields(TinkerOptions)})
    config = adapted(configured(args), options)
    validate(config)
    config = settled(config)
    if args.max_restarts and args.outcome is None:
        arguments = without_restarts(args.argv[args.argv.index("serve-tinker") + 1 :])
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
            return exit_status.fail(problem or error_text(error))

    args.final = True
    if args.outcome is None:
        return exit_status.end_with(serving())
    return exit_status.end_with(serving(), lambda code: leave_outcome(args.outcome, code, final=args.final))
