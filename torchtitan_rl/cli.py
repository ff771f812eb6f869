"""The command `torchtitan-rl`."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import traceback
import warnings
from functools import partial
from pathlib import Path

__all__ = ["main"]

_VERBS = {
    "train": "run a config: warm start, reinforcement, evaluation, checkpoint",
    "eval": "accuracy of a checkpoint on a split",
    "sample": "complete a prompt with a checkpoint",
    "show": "print a resolved config and the memory each process will need",
    "doctor": "print versions, devices and what is missing",
}

_ATTACH_S = 60.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchtitan-rl",
        description="Reinforcement learning of language models on torchtitan, Monarch, vLLM and TorchStore.",
        epilog="Any field of a config is set by --field.path value; `torchtitan-rl show CONFIG` lists them.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in _VERBS.items():
        sub = verbs.add_parser(verb, help=text, description=text, allow_abbrev=False)
        if verb in ("train", "eval", "show"):
            sub.add_argument("config", help="a Python file with a config() function")
        if verb == "train":
            sub.add_argument("--dry-run", action="store_true", help="validate everything, start nothing")
        if verb in ("train", "eval"):
            sub.add_argument(
                "--backend",
                choices=["actors", "local"],
                default="actors",
                help="actors: processes of their own; local: all in this one, on one device, for a debugger",
            )
            sub.add_argument(
                "--hosts",
                type=lambda text: text.split(","),
                default=[],
                metavar="tcp://HOST:PORT,...",
                help="workers to run on (python -m torchtitan_rl.hosts.worker), or job; default: this machine",
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
        if verb == "sample":
            sub.add_argument("--prompt", required=True)
            sub.add_argument("--max-tokens", type=int, default=64)
            sub.add_argument("--temperature", type=float, default=0.0)
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
        sub.add_argument("--quiet", action="store_true", help="no progress display")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one verb. A mistake or failure prints a message on stderr and gives exit status 1; Ctrl-C gives 130."""
    args, overrides = _parser().parse_known_args(argv)
    if args.verb in ("doctor", "sample") and overrides:
        return _fail(f"argument={overrides[0]!r}: {args.verb} has no such option; see torchtitan-rl {args.verb} --help")
    # Show deprecated settings of the user's config: by default Python shows deprecations of __main__ only.
    warnings.filterwarnings("default", category=DeprecationWarning, module="torchtitan_rl")
    try:
        return _run(args, overrides)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        return _fail(str(error) or type(error).__name__)


def _fail(message: str) -> int:
    lines = message.strip().splitlines()[:3] or ["unknown"]
    print("\n".join(["error: " + lines[0], *lines[1:]]), file=sys.stderr)
    return 1


def _run(args: argparse.Namespace, overrides: list[str]) -> int:
    if args.verb == "doctor":
        from torchtitan_rl.doctor import report

        return report()
    if args.verb == "sample":
        return asyncio_run(_sample(args), "sample")
    from torchtitan_rl.config.load import apply_overrides, load_config
    from torchtitan_rl.validation.run import check_local, missing_weights, validate

    config = load_config(args.config)
    apply_overrides(config, overrides)
    if args.verb == "show":
        from torchtitan_rl.show import show

        show(config)
        return 0
    validate(config)
    if args.backend == "local":
        if args.hosts:
            raise ValueError(
                f"--hosts={','.join(args.hosts)}: --backend local is this process alone; leave one of them out"
            )
        check_local(config, generators_only=args.verb == "eval")
    if args.verb == "eval":
        return asyncio_run(_evaluate(args, config), "eval")
    if args.dry_run:
        from torchtitan_rl.hosts.inventory import check_fits, local_host
        from torchtitan_rl.hosts.preflight import busy_problem, host_problem, memory_problem
        from torchtitan_rl.run.evaluation import eval_families

        # A dry run connects to no other host: it takes each host to be like this machine.
        hosts = [local_host(worker) for worker in args.hosts] or [local_host()]
        check_fits(config, hosts)
        if problem := memory_problem(config, hosts):
            raise ValueError(problem)
        eval_families(config, config.task.build())
        print(f"{args.config}: valid; nothing was started")
        # Problems of this machine now, not of the config: a dry run only reports them.
        for missing in (missing_weights(config), host_problem(hosts[0]), busy_problem(config, hosts)):
            if missing:
                print(f"still needed: {missing}")
        return 0
    return asyncio_run(_train(args, config), "train")


def asyncio_run(main_coroutine, verb: str) -> int:
    """Runs a coroutine to its end; Ctrl-C gives exit status 130. Ends this process at once."""
    try:
        code = asyncio.run(main_coroutine)
    except KeyboardInterrupt:
        code = 130
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of Monarch, or of a reward that hangs, must not keep a finished run alive.
    os._exit(code)


async def _guarded(args, start, body) -> int:
    """Starts a controller on `args.hosts`, runs `body(controller)`, and leaves no process behind. Returns an exit
    status.

    `start` is `Controller.launch` with all arguments bound but `hosts` and `backend`.
    """
    controller = None
    try:
        hosts = None
        if args.hosts:
            from torchtitan_rl.hosts.attach import attach

            hosts = await attach(args.hosts, timeout_s=_ATTACH_S)
        controller = await start(hosts=hosts, backend=args.backend)
        await body(controller)
        return 0
    except asyncio.CancelledError:
        where = (
            f"in the {controller.state.phase} phase at step {controller.state.phase_step}; "
            f"metrics so far are in {controller.run_dir.path}"
            if controller
            else "during start-up"
        )
        print(f"\ninterrupted {where}", file=sys.stderr)
        return 130
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        return _fail(str(error) or type(error).__name__)
    finally:
        if controller and args.hosts:
            await controller.close()  # other hosts' processes cannot be killed from here
        elif controller:
            controller.launcher.kill()  # `close` would take seconds; all files are written


async def _train(args: argparse.Namespace, config) -> int:
    from torchtitan_rl.observability.plot import plot_curve
    from torchtitan_rl.observability.progress import Progress
    from torchtitan_rl.run.controller import Controller

    progress = Progress(quiet=args.quiet)

    async def body(controller: Controller) -> None:
        report = await controller.train()
        curve = controller.run_dir.path / "curve.png"
        plot_curve(controller.run_dir.read_metrics(), curve)
        warm, k = report["warm start"], config.controller.pass_at_k
        progress.final_table(
            [
                ("greedy accuracy before reinforcement (validation)", f"{warm.accuracy:.3f}"),
                *(
                    [(f"pass@{k} before reinforcement (validation)", f"{warm.pass_at_k:.3f}")]
                    if warm.pass_at_k is not None
                    else []
                ),
                ("greedy accuracy after reinforcement (validation)", f"{report['validation'].accuracy:.3f}"),
                *(
                    (f"greedy accuracy after reinforcement ({name})", f"{report[name].accuracy:.3f}")
                    for name in config.controller.eval_sets
                ),
                ("greedy accuracy after reinforcement (test, looked at once)", f"{report['test'].accuracy:.3f}"),
                ("curve", str(curve)),
                ("checkpoint", str(controller.run_dir.checkpoint_path(controller.state.step))),
            ]
        )

    return await _guarded(args, partial(Controller.launch, config, progress=progress), body)


async def _evaluate(args: argparse.Namespace, config) -> int:
    from torchtitan_rl.observability.progress import Progress
    from torchtitan_rl.run.controller import Controller
    from torchtitan_rl.tasks.pass_rate_filter import write_pass_rates
    from torchtitan_rl.weights.checkpoint import hf_weights

    weights = hf_weights(Path(args.checkpoint))
    if args.num_tasks is not None and args.num_tasks < 1:
        raise ValueError(f"--num-tasks={args.num_tasks}: must be at least 1")
    if args.pass_rates is not None and not os.access(Path(args.pass_rates).absolute().parent, os.W_OK):
        raise ValueError(f"--pass-rates={args.pass_rates}: cannot be written; give a file in a directory that can")

    async def body(controller: Controller) -> None:
        result = await controller.evaluate(args.split, num_tasks=args.num_tasks, pass_at_k=config.controller.pass_at_k)
        print(f"{args.split} accuracy {result.accuracy:.4f}")
        if args.pass_rates is not None:
            write_pass_rates(args.pass_rates, result.pass_rates)
        for name, result in (await controller.evaluate_sets()).items():
            print(f"{name} {result.split} accuracy {result.accuracy:.4f}")

    return await _guarded(
        args, partial(Controller.launch, config, progress=Progress(quiet=args.quiet), hf_weights=weights), body
    )


async def _sample(args: argparse.Namespace) -> int:
    """Starts one generator with the weights and tokenizer of the checkpoint's Hugging Face directory."""
    from transformers import AutoTokenizer

    from torchtitan_rl.config.actors import GeneratorConfig
    from torchtitan_rl.dispatch.sampling_client import SamplingClient
    from torchtitan_rl.dispatch.versions import OneVersion
    from torchtitan_rl.launch.actors import Launcher
    from torchtitan_rl.types import SamplingParams
    from torchtitan_rl.weights.checkpoint import hf_weights

    try:
        weights = hf_weights(Path(args.checkpoint))
        tokenizer = AutoTokenizer.from_pretrained(str(weights))
        tokens = tokenizer.encode(args.prompt, add_special_tokens=False)
        if not tokens:
            raise ValueError(f"--prompt={args.prompt!r}: has no tokens; give some text")
        params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=0)
        config = GeneratorConfig(dtype="float32", max_model_len=len(tokens) + args.max_tokens, kv_cache_gib=0.25)
    except ValueError as error:
        return _fail(str(error))
    logs = tempfile.TemporaryDirectory(prefix="torchtitan-rl-")
    launcher = Launcher(log_dir=logs.name, start_timeout_s=300, call_timeout_s=600)
    try:
        mesh = await launcher.start_generator(config, weights, role="generator-0", seed=0)
        client = SamplingClient([mesh], OneVersion(), max_model_len=config.max_model_len, timeout_s=600)
        await client.load_hf(str(weights))
        completion = await client.sample(tokens, params)
        print(tokenizer.decode(completion.tokens, skip_special_tokens=True))
        return 0
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        return _fail(str(error) or type(error).__name__)
    finally:
        launcher.kill()
        logs.cleanup()


if __name__ == "__main__":
    sys.exit(main())
