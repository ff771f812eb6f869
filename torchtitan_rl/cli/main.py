"""The command `torchtitan-rl`."""

from __future__ import annotations

import argparse
import difflib
import sys
import traceback
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torchtitan_rl.cli.exit_status import fail, flush
from torchtitan_rl.cli.verbs import VERBS
from torchtitan_rl.record.console.log_records import use_json
from torchtitan_rl.record.user_code import error_text

__all__ = ["main"]

_FIELDS = "Any field of a config is set by --field.path value; `torchtitan-rl show CONFIG` lists them."

QUICKSTART = Path(__file__).parents[1] / "assets" / "quickstart.py"
"""The quickstart's config, for who has no checkout. In the checkout the file is a link to configs/quickstart.py."""


def main(argv: list[str] | None = None) -> int:
    """Runs one verb. A mistake or failure prints a message on stderr and gives exit status 1; Ctrl-C gives 130. What
    argparse refuses, such as an option without its value, raises SystemExit with status 2."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["quickstart"]:
        argv = ["train", str(QUICKSTART), *argv[1:]]
    if argv == ["--version"]:
        print(f"torchtitan-rl {_version()}")
        return 0
    if argv and argv[0].startswith("-") and argv[0] not in ("-h", "--help"):
        return fail(f"argument={argv[0]!r}: the verb comes first; write torchtitan-rl VERB {argv[0]}")
    if argv and not argv[0].startswith("-") and argv[0] not in VERBS:
        near = difflib.get_close_matches(argv[0], VERBS, 1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(VERBS)}"
        return fail(f"verb={argv[0]!r}: there is no such verb; {hint}")
    parser = _parser(*argv[:1])
    args, overrides = parser.parse_known_args(argv)
    args.argv, args.overrides, args.options = argv, overrides, _options(parser)
    if overrides and not VERBS[args.verb].overrides:
        near = difflib.get_close_matches(overrides[0].partition("=")[0], args.options[args.verb], 1)
        hint = f"did you mean {near[0]}?" if near else f"see torchtitan-rl {args.verb} --help"
        return fail(f"argument={overrides[0]!r}: {args.verb} has no such option; {hint}")
    use_json(getattr(args, "json_logs", False))
    # Show deprecated settings of the user's config: by default Python shows deprecations of __main__ only.
    warnings.filterwarnings("default", category=DeprecationWarning, module="torchtitan_rl")
    try:
        load = VERBS[args.verb].load
        status = _print_completion(args) if load is None else load().run(args)
        flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output, such as `head`, has enough
        flush()
        return 0
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        return fail(error_text(error))


def _version() -> str:
    try:
        return version("torchtitan-rl")
    except PackageNotFoundError:
        return "of a checkout that is not installed"


class _WithDefaults(argparse.RawDescriptionHelpFormatter):
    """Descriptions as they are written, and the default of an option that has a number or a text as one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        has_one = bool(action.option_strings) and isinstance(default, int | float | str) and default is not False
        if not has_one or default in ("", argparse.SUPPRESS) or "default" in text:
            return text
        return f"{text}; default: %(default)s" if text else "default: %(default)s"


def _parser(chosen: str = "") -> argparse.ArgumentParser:
    """The parser of the command. Of all verbs only the chosen one's module is imported, for its arguments; every one is
    for `completion`, whose script knows them all."""
    parser = argparse.ArgumentParser(
        prog="torchtitan-rl",
        description="Reinforcement learning of language models on torchtitan, Monarch, vLLM and TorchStore.",
        epilog=_FIELDS,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, verb in VERBS.items():
        subparser = subparsers.add_parser(
            name,
            help=verb.text,
            description=f"{verb.text[0].upper()}{verb.text[1:]}.\n\nexample:\n  {verb.example}",
            epilog=_FIELDS if verb.overrides else None,
            formatter_class=_WithDefaults,
            allow_abbrev=False,
        )
        if verb.load is not None and chosen in (name, "completion"):
            verb.load().add_arguments(subparser)
        elif name == chosen == "completion":
            from torchtitan_rl.config.completion import SHELLS

            subparser.add_argument("shell", choices=SHELLS)
        subparser.add_argument("--debug", action="store_true", help="show tracebacks")
        if verb.quiet:
            subparser.add_argument("--quiet", action="store_true", help="no progress display")
    return parser


def _options(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Verb -> its options."""
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {
        verb: [
            name
            for action in sub._actions
            if action.help is not argparse.SUPPRESS
            for name in action.option_strings
            if name.startswith("--")
        ]
        for verb, sub in subparsers.choices.items()
    }


def _print_completion(args: argparse.Namespace) -> int:
    """The verb `completion`: it prints what the parser knows of every verb."""
    from torchtitan_rl.config.completion import script

    options = args.options | {"quickstart": args.options["train"]}
    print(script(args.shell, options, [name for name, verb in VERBS.items() if verb.overrides]), end="")
    return 0
