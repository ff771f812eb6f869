"""A run as a job of a scheduler (see scripts/train_job.sh): of Slurm through `launch.slurm`, of Kubernetes through
monarch.job; and a job of Slurm whose nodes join a run that goes on.

No Kubernetes has been given such a job yet. Its dry run hands the job to a stand-in for the API server and prints what
Monarch sends there.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import threading
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl.launch.inventory import assumed_host, check_fits
from torchtitan_rl.launch.slurm import SlurmJob, add_job_options, check_tools, join_script, script, submit

if TYPE_CHECKING:
    from torchtitan_rl.config.run import RunConfig

__all__ = ["main"]

_OF_OTHERS = {
    "slurm": ("namespace", "image"),
    "slurm-join": ("resume", "max_restarts", "namespace", "image"),
    "kubernetes": ("requeue", "max_restarts", "time_limit", "stop_before", "partition", "account"),
}
"""Scheduler -> the options that mean nothing to it."""


def main(argv: list[str]) -> int:
    """Submits a job, or with --dry-run prints the job. Returns an exit status."""
    parser = _parser()
    args, overrides = parser.parse_known_args(argv)
    for name in _OF_OTHERS[args.scheduler]:
        if (value := getattr(args, name)) != parser.get_default(name):
            flag = f"--{name.replace('_', '-')}={value}" if name != "requeue" else f"--{'' if value else 'no-'}requeue"
            print(f"error: {flag}: is not for scheduler={args.scheduler}; leave it out", file=sys.stderr)
            return 1
    for name, least in (("num_hosts", 1), ("gpus_per_host", 0), ("max_restarts", 0)):
        if (number := getattr(args, name)) < least:
            flag = f"--{name.replace('_', '-')}"
            print(f"error: {flag}={number}: must be at least {least}; give another number", file=sys.stderr)
            return 1
    if args.scheduler == "slurm-join":
        return _slurm_join(args, overrides)
    from torchtitan_rl.config.load import apply_overrides, load_config
    from torchtitan_rl.validation.run import validate

    try:
        if args.scheduler == "slurm" and not args.dry_run:
            check_tools()
        config = load_config(args.config)
        apply_overrides(config, overrides)
        validate(config)
        check_fits(config, [assumed_host(index, args.gpus_per_host) for index in range(args.num_hosts)])
        return (_slurm if args.scheduler == "slurm" else _kubernetes)(args, config, overrides)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_rl.launch.jobs",
        allow_abbrev=False,
        description="Trains a config as a job of a scheduler.",
        epilog="Any field of the config is set by --field.path value.",
    )
    parser.add_argument("scheduler", choices=["slurm", "slurm-join", "kubernetes"])
    parser.add_argument(
        "config", help="a Python file with a config() function; slurm-join: the directory of a run that goes on"
    )
    parser.add_argument("--num-hosts", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true", help="print what would be submitted, submit nothing")
    parser.add_argument(
        "--resume",
        default="",
        metavar="latest|auto|DIR",
        help="go on with a run, as train --resume does; slurm: auto unless --no-requeue",
    )
    parser.add_argument(
        "--requeue",
        action=argparse.BooleanOptionalAction,
        help="slurm: the job goes on by itself after a preemption, a requeue or its time limit; on unless --no-requeue",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="slurm: a run that fails is queued again too, unless Slurm has started the job N times again (0)",
    )
    add_job_options(parser)
    parser.add_argument("--namespace", default="default", help="kubernetes")
    parser.add_argument(
        "--image", help="kubernetes: with this package installed; the operator of MonarchMesh must be there"
    )
    return parser


def _slurm(args: argparse.Namespace, config: RunConfig, overrides: list[str]) -> int:
    """Submits one job, which runs a worker on each node and, on its first node, the controller."""
    requeue = args.requeue is not False
    if args.max_restarts and not requeue:
        raise ValueError(f"--max-restarts={args.max_restarts}: a job with --no-requeue is never started again")
    if requeue and args.resume not in ("", "latest", "auto"):
        raise ValueError(
            f"--resume={args.resume}: a job that is started again would begin there each time; give the run's "
            "directory as --output-dir and leave --resume out, or add --no-requeue"
        )
    resume = args.resume or ("auto" if requeue else "")
    # An attempt that goes on must find the directory of the one before: the name is chosen now, not by the run.
    directory = Path(config.output_dir or f"runs/{config.name}-{datetime.now():%Y%m%d-%H%M%S}")
    job = SlurmJob(
        name=config.name,
        num_hosts=args.num_hosts,
        directory=directory,
        gpus_per_host=args.gpus_per_host,
        time_limit=args.time_limit,
        stop_before_s=args.stop_before,
        partition=args.partition,
        account=args.account,
        requeue=requeue,
        max_restarts=args.max_restarts,
    )
    place = [] if config.output_dir else ["--output-dir", str(directory)]
    arguments = [args.config, *overrides, *place, *(["--resume", resume] if resume else [])]
    if args.dry_run:
        print(script(job, arguments))
        return 0
    number = submit(job, script(job, arguments))
    print(f"job {number}: submitted; its output goes to {directory}/slurm-{number}.txt; scancel {number} ends it")
    return 0


def _slurm_join(args: argparse.Namespace, overrides: list[str]) -> int:
    """Submits one job, whose nodes join the run in a directory with generator replicas."""
    from torchtitan_rl.launch.request import check_going_on

    try:
        if overrides:
            raise ValueError(
                f"{' '.join(overrides)}: is for a job with a run of its own; a host that joins has the run's config"
            )
        if not args.dry_run:
            check_tools()
        run = Path(args.config)
        check_going_on(run)
        job = SlurmJob(
            name=f"{run.name}-hosts",
            num_hosts=args.num_hosts,
            directory=run,
            gpus_per_host=args.gpus_per_host,
            time_limit=args.time_limit,
            stop_before_s=args.stop_before,
            partition=args.partition,
            account=args.account,
            requeue=args.requeue is not False,
        )
        if args.dry_run:
            print(join_script(job))
            return 0
        number = submit(job, join_script(job))
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"job {number}: submitted; its output goes to {run}/slurm-{number}.txt; scancel {number} takes its hosts back"
    )
    return 0


def _say_nothing(logger: str) -> None:
    """Silences Monarch's messages about a submission: a dry run submits nothing."""
    logging.getLogger(logger).setLevel(logging.WARNING)


def _kubernetes(args: argparse.Namespace, config: RunConfig, overrides: list[str]) -> int:
    """Pods run the workers. The controller runs on this machine, which must be inside the cluster."""
    print("note: validated by --dry-run only: no Kubernetes has been given such a job yet", file=sys.stderr)
    train = [sys.executable, "-m", "torchtitan_rl.cli", "train", args.config, *overrides, "--hosts", "job"]
    if args.resume:
        if not config.output_dir:
            raise ValueError("output_dir='': a job that goes on with a run needs the run's directory; set --output-dir")
        train += ["--resume", args.resume]
    try:
        from monarch.job.kubernetes import ImageSpec, KubeConfig, KubernetesJob
    except RuntimeError:
        raise ValueError(
            "scheduler=kubernetes: the kubernetes package is missing; run scripts/setup.sh kubernetes"
        ) from None
    if not args.image:
        raise ValueError("image=None: pods need an image with this package installed; give --image")

    def new_job(config: KubeConfig | None) -> KubernetesJob:
        job = KubernetesJob(namespace=args.namespace, timeout=1800, kubeconfig=config)
        resources = {"nvidia.com/gpu": args.gpus_per_host} if args.gpus_per_host else None
        image = ImageSpec(args.image, resources=resources, shared_memory_size="16Gi")
        job.add_mesh("hosts", args.num_hosts, image_spec=image)
        return job

    if args.dry_run:
        _say_nothing("monarch._src.job.kubernetes")
        with _stand_in_api_server() as (address, received):
            from kubernetes.client import Configuration

            new_job(KubeConfig.from_config(Configuration(host=address))).apply()
            print("\n---\n".join(json.dumps(body, indent=2) for body in received))
        return 0
    from monarch.job import DEFAULT_JOB_PATH

    job = new_job(None)
    job.apply()
    try:
        job.dump(DEFAULT_JOB_PATH)
        return subprocess.run(train).returncode
    finally:
        job.kill()


@contextmanager
def _stand_in_api_server():
    """A Kubernetes API server that holds no objects. Yields its address and the list of bodies that it has received."""
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._answer(404)

        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._answer(201)

        def _answer(self, status: int):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
