"""The command `torchtitan-rl`."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import traceback
import warnings
from pathlib import Path

from torchtitan_rl.cli import run_verbs, serve_verbs, verbs
from torchtitan_rl.config.completion import SHELLS, script
from torchtitan_rl.record.console import say, use_json
from torchtitan_rl.record.user_code import told

__all__ = ["main"]

QUICKSTART = Path(__file__).parents[1] / "assets" / "quickstart.py"
"""The quickstart's config, for who has no checkout. In the checkout the file is a link to configs/quickstart.py."""

_VERBS = {
    "quickstart": "train the tiny model of the config that comes with the package; options as for train",
    "train": "run a config: warm start, reinforcement, evaluation, checkpoint",
    "eval": "accuracy of a checkpoint on a split",
    "sample": "complete a prompt with a checkpoint",
    "serve": "open OpenAI's endpoints on a checkpoint",
    "serve-tinker": "serve a config's model to Tinker's SDK: train, sample, save",
    "audit": "check that a run's records agree: every draw ended once",
    "export": "write a checkpoint's policy as a Hugging Face directory",
    "show": "print a resolved config and the memory each process will need",
    "doctor": "print versions, devices and what is missing",
    "completion": "print what a shell reads to complete verbs, options, config files and fields",
}

_EXAMPLES = {
    "quickstart": "torchtitan-rl quickstart --output-dir runs/first",
    "train": "torchtitan-rl train configs/quickstart.py --output-dir runs/first --controller.num-steps 20",
    "eval": "torchtitan-rl eval configs/quickstart.py --checkpoint runs/first/checkpoints/step-160 --split test",
    "sample": "torchtitan-rl sample --checkpoint runs/first/checkpoints/step-160 --prompt 'sort: dcab='",
    "serve": "torchtitan-rl serve runs/first/checkpoints/step-160 --port 8000",
    "serve-tinker": "torchtitan-rl serve-tinker configs/quickstart.py --port 8000",
    "audit": "torchtitan-rl audit runs/first",
    "export": "torchtitan-rl export runs/first/checkpoints/step-160 runs/first-hf",
    "show": "torchtitan-rl show configs/quickstart.py --algorithm.group-size 16",
    "doctor": "torchtitan-rl doctor",
    "completion": "torchtitan-rl completion bash > ~/.local/share/bash-completion/completions/torchtitan-rl",
}
"""One for each verb, for the end of its help."""


CONFIGURED = ("train", "eval", "show", "serve-tinker", *(name for name, v in run_verbs.VERBS.items() if v.overrides))
"""The verbs that take a config file, and its fields."""

_ALTERED = (
    ("top-p", float, 1.0),
    ("top-k", int, 0),
    ("min-p", float, 0.0),
    ("repetition-penalty", float, 1.0),
    ("presence-penalty", float, 0.0),
    ("frequency-penalty", float, 0.0),
)


def _add_sampling(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--prompt", required=True)
    sub.add_argument("--max-tokens", type=int, default=64)
    sub.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token, always")
    for name, kind, off in _ALTERED:
        sub.add_argument(f"--{name}", type=kind, default=off, metavar=kind.__name__, help=f"{off}: off")
    sub.add_argument("--output-dir", default="", help="default: runs/sample-NAME-DATE-TIME")


def _add_address(sub: argparse.ArgumentParser, prefix: str) -> None:
    sub.add_argument(f"--{prefix}host", default="127.0.0.1", help="any other address needs a key")
    _add_allow_host(sub, prefix)
    sub.add_argument(
        "--api-key-file",
        default="",
        metavar="FILE",
        help="the key of clients; default: $TORCHTITAN_RL_API_KEY, or none",
    )
    sub.add_argument("--tool-parser", default="", metavar="NAME", help="vLLM's parser of tool calls, such as hermes")
    sub.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="NAME",
        help="a parameter that requests are answered without, such as logit_bias; may be given again",
    )


def _add_allow_host(sub: argparse.ArgumentParser, prefix: str) -> None:
    sub.add_argument(
        f"--{prefix}allow-host",
        dest="allow_host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name of this machine, as a proxy sends it in Host; without a key only localhost and 127.0.0.1 "
        "are taken; may be repeated",
    )


def _add_serve(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("checkpoint", help="a run's checkpoints/step-N, or a Hugging Face directory")
    sub.add_argument("--port", type=int, default=8000, help="0: one that is free")
    _add_address(sub, "")
    sub.add_argument("--max-model-len", type=int, default=0, help="default: the model's, at most 4096")
    sub.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    sub.add_argument("--kv-cache-gib", type=float, default=1.0)
    sub.add_argument("--output-dir", default="", help="default: runs/serve-NAME-DATE-TIME")


def _add_serve_tinker(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--host", default="127.0.0.1", help="any other address needs a key")
    _add_allow_host(sub, "")
    sub.add_argument("--port", type=int, default=8000, help="0: one that is free")
    sub.add_argument(
        "--api-key-file",
        default="",
        metavar="FILE",
        help="the key of clients; default: $TORCHTITAN_RL_API_KEY, or none",
    )
    sub.add_argument(
        "--keys", default="", metavar="FILE", help="keys with owners, who see their own alone; torchtitan-rl keys add"
    )
    sub.add_argument(
        "--shared", action="store_true", help="one key or none: all see and may delete all, from other machines too"
    )
    sub.add_argument("--base-model", default="", metavar="NAME", help="default: the path of model.assets")
    sub.add_argument("--lora-rank", type=int, default=32, metavar="N", help="largest; 0: one model, all parameters")
    sub.add_argument("--max-models", type=int, default=8, metavar="N", help="LoRA models in the trainer at once")
    sub.add_argument(
        "--max-restarts", type=int, default=3, metavar="N", help="begin again when the server is killed or fails"
    )
    sub.add_argument("--outcome", type=int, help=argparse.SUPPRESS)


def _subparser(subparsers, verb: str, text: str, example: str) -> argparse.ArgumentParser:
    return subparsers.add_parser(
        verb,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.\n\nexample:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _options(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Verb -> its options."""
    (verbs,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {
        verb: [
            name
            for action in sub._actions
            if action.help is not argparse.SUPPRESS
            for name in action.option_strings
            if name.startswith("--")
        ]
        for verb, sub in verbs.choices.items()
    }


def _parser(chosen: str = "") -> argparse.ArgumentParser:
    """The parser of all verbs. Of the verbs that look at runs, only the one that was chosen imports its module; all do
    for `completion`."""
    parser = argparse.ArgumentParser(
        prog="torchtitan-rl",
        description="Reinforcement learning of language models on torchtitan, Monarch, vLLM and TorchStore.",
        epilog="Any field of a config is set by --field.path value; `torchtitan-rl show CONFIG` lists them.",
    )
    subparsers = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in _VERBS.items():
        sub = _subparser(subparsers, verb, text, _EXAMPLES[verb])
        if verb == "completion":
            sub.add_argument("shell", choices=SHELLS)
        if verb in CONFIGURED:
            sub.add_argument("config", help="a Python file with a config() function")
        if verb == "train":
            sub.add_argument("--dry-run", action="store_true", help="validate everything, start nothing")
            sub.add_argument(
                "--no-reward-check",
                action="store_true",
                help="do not call the reward on two made-up completions first, as for one that costs money",
            )
            sub.add_argument(
                "--resume",
                default="",
                metavar="latest|auto|DIR",
                help="go on from the newest checkpoint in --output-dir (auto: or begin), or from a run or checkpoint",
            )
            sub.add_argument(
                "--max-restarts",
                type=int,
                default=0,
                metavar="N",
                help="begin again from the newest checkpoint, at most N times, when the run is killed or fails",
            )
            sub.add_argument("--profile", metavar="STEPS", help="torch.profiler's traces, such as 3,5-6")
            sub.add_argument("--serve", type=int, metavar="PORT", help="serve the run's newest version meanwhile")
            _add_address(sub, "serve-")
            sub.add_argument("--outcome", type=int, help=argparse.SUPPRESS)  # of a run under --max-restarts
        if verb in ("train", "eval"):
            sub.add_argument(
                "--backend",
                choices=["actors", "local", "tinker"],
                default="actors",
                help="actors: processes of their own; local: all in this one, on one device, for a debugger; tinker: "
                "the service at TINKER_BASE_URL",
            )
            sub.add_argument(
                "--hosts",
                type=lambda text: text.split(","),
                default=[],
                metavar="tcp://HOST:PORT,...",
                help="workers to run on (python -m torchtitan_rl.launch.worker), or job; default: this machine",
            )
        if verb in ("eval", "sample"):
            sub.add_argument(
                "--checkpoint", required=True, help="a run's checkpoints/step-N, or a Hugging Face directory"
            )
        if verb == "eval":
            sub.add_argument("--split", default="validation", choices=["train", "validation", "test"])
            sub.add_argument("--num-tasks", type=int, help="the first so many of the split; default: the config's")
            sub.add_argument(
                "--pass-rates",
                metavar="FILE",
                help="write how often each task was passed, which tasks.pass_rate_filter reads",
            )
        if verb == "audit":
            sub.add_argument("run", help="a run directory")
        if verb == "export":
            sub.add_argument("checkpoint", help="a run's checkpoints/step-N")
            sub.add_argument("directory", help="a new directory")
            sub.add_argument(
                "--trust-code", action="store_true", help="import classes of the run's own that its config names"
            )
        if verb == "sample":
            _add_sampling(sub)
        if verb == "serve":
            _add_serve(sub)
        if verb == "serve-tinker":
            _add_serve_tinker(sub)
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
        sub.add_argument("--quiet", action="store_true", help="no progress display")
        if verb == "train":
            sub.add_argument("--json-logs", action="store_true", help="every line of the console is a JSON object")
    for name, looking in run_verbs.VERBS.items():
        sub = _subparser(subparsers, name, looking.text, looking.example)
        if chosen in (name, "completion"):
            looking.load().add_arguments(sub)
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one verb. A mistake or failure prints a message on stderr and gives exit status 1; Ctrl-C gives 130."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["quickstart"]:
        argv = ["train", str(QUICKSTART), *argv[1:]]
    every = [*_VERBS, *run_verbs.VERBS]
    if argv and not argv[0].startswith("-") and argv[0] not in every:
        near = difflib.get_close_matches(argv[0], every, 1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(every)}"
        return verbs.fail(f"verb={argv[0]!r}: there is no such verb; {hint}")
    parser = _parser(*argv[:1])
    args, overrides = parser.parse_known_args(argv)
    args.options = _options(parser)
    if args.verb not in (*CONFIGURED, "quickstart") and overrides:
        near = difflib.get_close_matches(overrides[0].partition("=")[0], args.options[args.verb], 1)
        hint = f"did you mean {near[0]}?" if near else f"see torchtitan-rl {args.verb} --help"
        return verbs.fail(f"argument={overrides[0]!r}: {args.verb} has no such option; {hint}")
    use_json(getattr(args, "json_logs", False))
    if getattr(args, "outcome", None) is not None:
        from torchtitan_rl.launch.restarts import attempt

        restarts = attempt(args.outcome)
        if args.verb == "train":
            args.resume = "auto" if restarts else args.resume
    # Show deprecated settings of the user's config: by default Python shows deprecations of __main__ only.
    warnings.filterwarnings("default", category=DeprecationWarning, module="torchtitan_rl")
    try:
        code = _run(args, overrides, argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        return verbs.fail(told(error))


def _run(args: argparse.Namespace, overrides: list[str], argv: list[str]) -> int:
    if args.verb in run_verbs.VERBS:
        args.overrides = overrides
        return run_verbs.VERBS[args.verb].load().run(args)
    if args.verb == "completion":
        options = args.options | {"quickstart": args.options["train"]}
        print(script(args.shell, options, [*CONFIGURED, "quickstart"]), end="")
        return 0
    if args.verb == "doctor":
        from torchtitan_rl.cli.doctor import report

        return report()
    if args.verb == "sample":
        return verbs.ended(verbs.sample(args))
    if args.verb == "serve":
        return verbs.ended(serve_verbs.serve(args))
    if args.verb == "audit":
        return verbs.audit(args)
    if args.verb == "export":
        return verbs.ended(verbs.export(args))
    from torchtitan_rl.config.derive import settled
    from torchtitan_rl.config.load import apply_overrides, load_config
    from torchtitan_rl.config.recording import steps_of
    from torchtitan_rl.validation.advice import advice
    from torchtitan_rl.validation.remote import check_remote
    from torchtitan_rl.validation.run import check_local, validate

    config = load_config(args.config)
    apply_overrides(config, overrides, args.options[args.verb])
    if getattr(args, "profile", None) is not None:
        config.record.profile.steps = steps_of(args.profile)
    if args.verb == "show":
        from torchtitan_rl.cli.show import show

        show(config)
        return 0
    if args.verb == "serve-tinker":
        return serve_verbs.serve_tinker(args, config, argv)
    validate(config)
    if args.verb == "train":
        config.controller.check_reward &= not args.no_reward_check
        for line in advice(config):
            say(f"warning: {line}", event="advice", level="warning")
    config = settled(config)
    if args.backend != "actors" and args.hosts:
        raise ValueError(
            f"--hosts={','.join(args.hosts)}: --backend {args.backend} is this process alone; leave one of them out"
        )
    if args.backend == "tinker":
        check_remote(config, generators_only=args.verb == "eval")
    if args.backend == "local":
        check_local(config, generators_only=args.verb == "eval")
    if args.verb == "eval":
        return verbs.ended(verbs.evaluate(args, config))
    if args.dry_run:
        return verbs.dry_run(args, config)
    if args.max_restarts:
        return verbs.train_with_restarts(args, config, argv)
    if args.outcome is None:
        return verbs.ended(verbs.train(args, config))
    from torchtitan_rl.launch.restarts import leave_outcome

    return verbs.ended(verbs.train(args, config), lambda code: leave_outcome(args.outcome, code, final=args.final))
