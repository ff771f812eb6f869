"""A run as a Slurm or Kubernetes job, through monarch.job (see scripts/train_job.sh).

Validated by --dry-run only: no scheduler has been given such a job yet. A dry run hands the job to a stand-in for the
scheduler and prints what Monarch sends to the stand-in.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from torchtitan_rl.hosts.inventory import Host, check_fits, local_host

__all__ = ["main"]

_PREEMPTED = 75
"""Exit status of a run that was asked to stop and has written a checkpoint: `run.ends.PREEMPTED_STATUS`."""

_WARNING = "validated by --dry-run only: no scheduler has been given such a job yet"


def main(argv: list[str]) -> int:
    """Submits a job, or with --dry-run prints the job. Returns an exit status."""
    args, overrides = _parser().parse_known_args(argv)
    from torchtitan_rl.config.load import apply_overrides, load_config
    from torchtitan_rl.validation.run import validate

    try:
        config = load_config(args.config)
        apply_overrides(config, overrides)
        validate(config)
        check_fits(config, [_node(args, index) for index in range(args.num_hosts)])
        print(f"note: {_WARNING}", file=sys.stderr)
        train = [sys.executable, "-m", "torchtitan_rl.cli", "train", args.config, *overrides, "--hosts", "job"]
        if args.requeue and args.scheduler != "slurm":
            raise ValueError("--requeue: is Slurm's; use train --max-restarts, or the cluster's restart policy")
        if args.resume or args.requeue:
            if not config.output_dir:
                raise ValueError(
                    "output_dir='': a job that goes on with a run needs the run's directory; set --output-dir"
                )
            train += ["--resume", args.resume or "auto"]
        return (_slurm if args.scheduler == "slurm" else _kubernetes)(args, train)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_rl.hosts.jobs",
        allow_abbrev=False,
        description=f"Trains a config as a job of a scheduler, through monarch.job ({_WARNING}).",
        epilog="Any field of the config is set by --field.path value.",
    )
    parser.add_argument("scheduler", choices=["slurm", "kubernetes"])
    parser.add_argument("config", help="a Python file with a config() function")
    parser.add_argument("--num-hosts", type=int, default=1)
    parser.add_argument(
        "--gpus-per-host", type=int, default=0, help="0: hosts without GPUs, with as many cores as this one"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be submitted, submit nothing")
    parser.add_argument(
        "--resume", default="", metavar="latest|auto|DIR", help="go on with a run, as train --resume does"
    )
    parser.add_argument(
        "--requeue", action="store_true", help="slurm: submit the job again when it was preempted or its time was up"
    )
    parser.add_argument("--time-limit", help="slurm: HH:MM:SS")
    parser.add_argument("--partition", help="slurm")
    parser.add_argument("--account", help="slurm")
    parser.add_argument("--namespace", default="default", help="kubernetes")
    parser.add_argument(
        "--image", help="kubernetes: with this package installed; the operator of MonarchMesh must be there"
    )
    return parser


def _node(args: argparse.Namespace, index: int) -> Host:
    """An assumed node: as many cores as this machine, and `--gpus-per-host` GPUs. The run examines the real nodes when
    it attaches."""
    return Host(
        address=f"host {index}",
        num_cores=local_host().num_cores,
        devices=[str(device) for device in range(args.gpus_per_host)],
    )


def _slurm(args: argparse.Namespace, train: list[str]) -> int:
    """Submits one Slurm allocation, which runs the workers and, on its first node, the controller."""
    from monarch.job import SlurmJob

    if args.requeue:  # the run has written a checkpoint and ended with this status
        again = f'test $status -eq {_PREEMPTED} && scontrol requeue "$SLURM_JOB_ID"'
        train = ["bash", "-c", f"{shlex.join(train)}; status=$?; {again}; exit $status"]
    job = SlurmJob(
        {"hosts": args.num_hosts},
        python_exe=sys.executable,
        job_name="torchtitan-rl",
        time_limit=args.time_limit,
        partition=args.partition,
        account=args.account,
        gpus_per_node=args.gpus_per_host or None,
    )
    if not args.dry_run:
        job.apply(client_script=shlex.join(train))
        return 0
    _say_nothing("monarch._src.job.slurm")
    with _stand_in_sbatch() as submitted:
        job.apply(client_script=shlex.join(train))
        print(submitted.read_text())
    return 0


def _say_nothing(logger: str) -> None:
    """Silences Monarch's messages about a submission: a dry run submits nothing."""
    logging.getLogger(logger).setLevel(logging.WARNING)


@contextmanager
def _stand_in_sbatch():
    """Puts an sbatch on PATH that writes its input to a file; yields the path of that file. Monarch's state file goes
    to the same temporary directory."""
    path, here = os.environ["PATH"], os.getcwd()
    with tempfile.TemporaryDirectory() as directory:
        submitted, sbatch = Path(directory) / "submitted", Path(directory) / "sbatch"
        sbatch.write_text(f"#!/bin/sh\ncat > {submitted}\necho Submitted batch job 0\n")
        sbatch.chmod(0o755)
        os.environ["PATH"] = f"{directory}:{path}"
        os.chdir(directory)
        try:
            yield submitted
        finally:
            os.chdir(here)
            os.environ["PATH"] = path


def _kubernetes(args: argparse.Namespace, train: list[str]) -> int:
    """Pods run the workers. The controller runs on this machine, which must be inside the cluster."""
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
