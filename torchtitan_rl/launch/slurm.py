"""A run as a Slurm job: one batch script, which Slurm starts again after a preemption, a requeue or its time limit. A
sweep as an array of such jobs.

`srun` starts `torchtitan_rl.launch.torchrun` once on each node, in the place of torchrun. monarch.job has a Slurm job
too. A signal of Slurm ends the workers of that job before the run can write a checkpoint, every node listens at one
fixed port, and its state lies in the directory from which it was submitted.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.types.ends import PREEMPTED_STATUS

__all__ = [
    "STOP_BEFORE_S",
    "SlurmJob",
    "add_job_options",
    "array_script",
    "script",
    "join_script",
    "check_tools",
    "submit",
]

STOP_BEFORE_S = 120
"""The default of --stop-before."""

_TOOLS = ("sbatch", "srun", "scontrol", "scancel")

_JOB_ID = "$SLURM_JOB_ID"
_TASK_ID = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
"""An array's own number is also SLURM_JOB_ID of one of its tasks, and would name all of them."""

_SIGNALS = """\
# Slurm sends USR1 to this shell before the time limit. It sends TERM to this shell and to the run when it ends the job
# for a preemption, a requeue or scancel: then the shell only waits, and Slurm decides what follows.
late=0 slurm_ends_it=0
trap 'late=1; scancel --signal=TERM "{job_id}.0"' USR1
trap 'slurm_ends_it=1' TERM
"""

_TRAIN = """\
address=$(scontrol --oneliner show node "$SLURMD_NODENAME") || exit
export MASTER_ADDR=$(sed 's/.* NodeAddr=\\([^ ]*\\).*/\\1/' <<< "$address")
export MASTER_PORT=$({python} -c 'import socket; s = socket.create_server(("", 0)); print(s.getsockname()[1])')
export WORLD_SIZE=$SLURM_JOB_NUM_NODES
# The whole node is the run's: --cpu-bind=none. When one node's process has ended, the others have 60 s to end.
srun --ntasks-per-node=1 --cpu-bind=none --wait=60 \\
  bash -c 'RANK=$SLURM_PROCID exec "$@"' rank {train} &
"""

_SWEEP = """\
# Task I of the array trains the I-th seed. The whole node is the sweep's: --cpu-bind=none.
seeds=({seeds})
srun --ntasks-per-node=1 --cpu-bind=none {sweep} --only-seeds "${{seeds[SLURM_ARRAY_TASK_ID]}}" &
"""

_WAIT = """\
run=$!
while wait $run; status=$?; kill -0 $run 2> /dev/null; do :; done  # a trap ends `wait` before the run has ended
"""

_REQUEUE = """\
# Status {preempted}: the run has written a checkpoint and can go on from there. 143: SIGTERM came during the start;
# where it came because of the time limit, the job would come no further the next time.
can_go_on=$((status == {preempted} || status == 143 && !late))
may_try_again=$((status != 0 && ${{SLURM_RESTART_COUNT:-0}} < {max_restarts}))
if [[ -e {ended} ]]; then may_try_again=0; fi  # a restart cannot mend why the run ended
if (((can_go_on || may_try_again) && !slurm_ends_it)); then scontrol requeue "{job_id}"; fi
"""


_JOIN = """\
# Slurm sends USR1 to this shell before the time limit, which the hosts get too. It sends TERM to this shell and to the
# hosts when it ends the job for a preemption, a requeue or scancel: then the shell only waits.
trap 'scancel --signal=USR1 "$SLURM_JOB_ID.0"' USR1
trap : TERM
# Each host joins and leaves for itself: where one fails, the others stay.
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=0 {join} &
hosts=$!
while wait $hosts; status=$?; kill -0 $hosts 2> /dev/null; do :; done  # a trap ends `wait` before the hosts have left
exit $status
"""
_LET_GO_S = 30
"""Seconds before the time limit at which replicas of a joined host have no time left: the run then lets go of it."""


@dataclass(kw_only=True, frozen=True, slots=True)
class SlurmJob:
    """A job's options for sbatch. Empty strings and zeros leave a choice to Slurm."""

    name: str
    num_hosts: int
    directory: Path
    """The run's directory, where `slurm-JOB.txt` has the job's output, of an array's task `slurm-JOB_TASK.txt`; a job
    that is started again appends to it."""
    gpus_per_host: int = 0
    time_limit: str = ""
    """In one of sbatch's forms, such as HH:MM:SS."""
    stop_before_s: int
    """Seconds before the time limit at which the run is asked for a checkpoint. Slurm may be a minute early."""
    partition: str = ""
    account: str = ""
    requeue: bool = True
    max_restarts: int = 0
    """A run that fails is queued again too, unless Slurm has started the job so many times again."""
    num_tasks: int = 0
    """Tasks of an array, each a job of its own with these options; 0: the job is no array."""
    num_at_once: int = 0
    """Tasks of the array that run at the same time at most; 0: as many as there are nodes for."""


def script(job: SlurmJob, arguments: list[str]) -> str:
    """The batch script of a job that runs `torchtitan-rl train ARGUMENTS` on all its nodes. Raises ValueError for a
    number of seconds that sbatch does not take."""
    train = shlex.join([sys.executable, "-m", "torchtitan_rl.launch.torchrun", *arguments])
    return _text(job, _TRAIN.format(python=shlex.quote(sys.executable), train=train))


def array_script(job: SlurmJob, arguments: list[str], seeds: list[int]) -> str:
    """The batch script of an array that runs `torchtitan-rl sweep ARGUMENTS`, one seed in each of its tasks. Raises as
    `script` does."""
    sweep = shlex.join([sys.executable, "-m", "torchtitan_rl.cli", "sweep", *arguments])
    return _text(job, _SWEEP.format(seeds=" ".join(map(str, seeds)), sweep=sweep))


def _text(job: SlurmJob, start: str) -> str:
    """The whole batch script around the lines that start the run in the background."""
    job_id = _TASK_ID if job.num_tasks else _JOB_ID
    signals, again = _SIGNALS.format(job_id=job_id), ""
    if job.requeue:
        ended = shlex.quote(str(job.directory.absolute() / "ended.json"))
        again = _REQUEUE.format(preempted=PREEMPTED_STATUS, max_restarts=job.max_restarts, job_id=job_id, ended=ended)
    return "\n".join([*_head(job), f"{signals}{start}{_WAIT}{again}exit $status", ""])


def join_script(job: SlurmJob) -> str:
    """The batch script of a job whose nodes join the run in `job.directory`. Raises as `script` does."""
    within = max(0, job.stop_before_s - _LET_GO_S)
    run = str(job.directory.absolute())
    join = shlex.join([sys.executable, "-m", "torchtitan_rl.launch.join", run, "--leave-within", str(within)])
    return "\n".join([*_head(job), "#SBATCH --no-kill", _JOIN.format(join=join)])


def _head(job: SlurmJob) -> list[str]:
    """The first lines of a batch script, with its options."""
    if not 0 <= job.stop_before_s <= 65535:
        raise ValueError(f"--stop-before={job.stop_before_s}: sbatch takes 0 to 65535 seconds")
    last, at_once = job.num_tasks - 1, f"%{job.num_at_once}" if job.num_at_once else ""
    options = {
        "job-name": job.name,
        "array": f"0-{last}{at_once}" if job.num_tasks else "",
        "nodes": job.num_hosts,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_host,
        "time": job.time_limit,
        "partition": job.partition,
        "account": job.account,
        "output": str(job.directory.absolute()).replace("%", "%%") + f"/slurm-{'%A_%a' if job.num_tasks else '%j'}.txt",
        "open-mode": "append",
        "signal": f"B:USR1@{job.stop_before_s}",
    }
    lines = [f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in options.items() if value]
    lines += ["#SBATCH --exclusive", f"#SBATCH --{'requeue' if job.requeue else 'no-requeue'}"]
    return ["#!/bin/bash", *lines]


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Options of a job, as users name them; all but the GPUs are Slurm's."""
    parser.add_argument(
        "--gpus-per-host",
        type=int,
        default=0,
        metavar="N",
        help="GPUs of each node of a job; 0: nodes without GPUs, with as many cores as this machine",
    )
    parser.add_argument("--time-limit", default="", metavar="HH:MM:SS", help="of a Slurm job")
    parser.add_argument(
        "--stop-before",
        type=int,
        default=STOP_BEFORE_S,
        metavar="SECONDS",
        help="a Slurm job's run is asked for a checkpoint so long before the time limit (120), or up to 60 s earlier, "
        "and hosts that joined a run are asked to leave it",
    )
    parser.add_argument("--partition", default="", help="of a Slurm job")
    parser.add_argument("--account", default="", help="of a Slurm job")


def check_tools() -> None:
    """Raises ValueError naming the commands of Slurm that are not on PATH."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise ValueError(
            f"scheduler=slurm: {', '.join(missing)} not on PATH; submit from a machine of the cluster (Debian: apt "
            "install slurm-client, and the cluster's slurm.conf), or print the job with --dry-run"
        )


def submit(job: SlurmJob, text: str) -> str:
    """Submits a batch script of the job and returns the job's number. Makes the run's directory, for the job's output.
    Raises ValueError where that fails, RuntimeError with Slurm's words where Slurm refuses the job."""
    try:
        job.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"output_dir={str(job.directory)!r}: cannot be made ({error.strerror}); choose another"
        ) from None
    done = subprocess.run(["sbatch", "--parsable"], input=text, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"sbatch: the job was not accepted: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip().split(";")[0]
