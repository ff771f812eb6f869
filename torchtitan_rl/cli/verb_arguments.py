"""Arguments that several verbs take, and what is read of them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtitan_rl.config.run import RunConfig
    from torchtitan_rl.serve.run_gateway import Address

__all__ = [
    "add_address",
    "add_allow_host",
    "add_api_key_file",
    "add_checkpoint",
    "add_config",
    "add_max_restarts",
    "add_processes",
    "add_restarts",
    "address",
    "configured",
    "without_restarts",
]


def add_config(parser: argparse.ArgumentParser) -> None:
    """The config file of a verb whose unknown options are fields of the config; `configured` reads both."""
    parser.add_argument("config", help="a Python file with a config() function")


def configured(args: argparse.Namespace) -> RunConfig:
    """The config of the file, with the fields that the command sets. Raises ValueError for a mistake in either."""
    from torchtitan_rl.config.load import apply_overrides, load_config

    file = next((word for word in args.overrides if word.endswith(".py")), None)
    if file is not None and not args.config.endswith(".py"):
        raise ValueError(
            f"config={args.config!r}: is no config file; put the file first: torchtitan-rl {args.verb} {file} ..."
        )
    config = load_config(args.config)
    apply_overrides(config, args.overrides, args.options[args.verb])
    return config


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, help="a run's checkpoints/step-N, or a Hugging Face directory")


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Where the processes of a run are."""
    parser.add_argument(
        "--backend",
        choices=["actors", "local", "tinker"],
        default="actors",
        help="actors: processes of their own; local: all in this one, on one device, for a debugger; tinker: "
        "the service at TINKER_BASE_URL",
    )
    parser.add_argument(
        "--hosts",
        type=lambda text: text.split(","),
        default=[],
        metavar="tcp://HOST:PORT,...",
        help="workers to run on (python -m torchtitan_rl.launch.worker), or job; default: this machine",
    )


def add_restarts(parser: argparse.ArgumentParser, default: int, text: str) -> None:
    """How often a supervisor starts the verb again, and where the attempt that it started reports to it."""
    add_max_restarts(parser, default, text)
    parser.add_argument("--outcome", type=int, help=argparse.SUPPRESS)


def add_max_restarts(parser: argparse.ArgumentParser, default: int, text: str) -> None:
    parser.add_argument("--max-restarts", type=_num_restarts, default=default, metavar="N", help=text)


def _num_restarts(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number}: must not be negative; use 0 for none")
    return number


def without_restarts(arguments: list[str]) -> list[str]:
    """The arguments of an attempt, which restarts nothing itself: of an option that is given twice the last counts."""
    return [*arguments, "--max-restarts", "0"]


def add_address(parser: argparse.ArgumentParser, prefix: str = "") -> None:
    """Where clients of OpenAI's endpoints come in; `address` reads it."""
    parser.add_argument(
        f"--{prefix}host", default="127.0.0.1", help="address to listen on; any other than the default needs a key"
    )
    add_allow_host(parser, prefix)
    add_api_key_file(parser)
    parser.add_argument("--tool-parser", default="", metavar="NAME", help="vLLM's parser of tool calls, such as hermes")
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="NAME",
        help="a parameter that requests are answered without, such as logit_bias; may be given again",
    )


def add_allow_host(parser: argparse.ArgumentParser, prefix: str = "") -> None:
    """Names in `Host` headers, which `guard.allowed_hosts` takes."""
    parser.add_argument(
        f"--{prefix}allow-host",
        dest="allow_host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name of this machine, as a proxy sends it in Host; without a key only localhost and 127.0.0.1 "
        "are taken; may be repeated",
    )


def add_api_key_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api-key-file",
        default="",
        metavar="FILE",
        help="the key of clients; default: $TORCHTITAN_RL_API_KEY, or none",
    )


def address(args: argparse.Namespace, port: int | None, host: str) -> Address | None:
    """Where clients come in; None: nothing is served."""
    from torchtitan_rl.serve.guard import host_names
    from torchtitan_rl.serve.run_gateway import Address

    if port is None:
        return None
    return Address(
        host=host,
        port=port,
        api_key_file=args.api_key_file,
        tool_parser=args.tool_parser,
        allow_hosts=host_names(args.allow_host),
        ignored=tuple(args.ignore),
    )
