"""A Slurm cluster of several nodes on this machine, with everything it has in one temporary directory.

    .venv/bin/python -m tests.slurm.bed [--nodes 2] COMMAND ...     # runs the command with the cluster around it

Needs Debian's slurm-wlm (`apt install slurm-wlm`), which is built with several slurmd per machine. A node is a slurmd
with a port of its own. Nodes share the machine's cores, memory and network: they are no hosts of their own.
"""

from __future__ import annotations

import argparse
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

_TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
_USER = pwd.getpwuid(os.getuid()).pw_name
_START_S = 30.0
_STOP_S = 60.0

_CONF = """\
ClusterName=bed
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/linear
SchedulerParameters=sched_interval=2
MpiDefault=none
MailProg=/bin/true
KillWait={kill_wait_s}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace_s}
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """What this machine lacks for a cluster; "" when it lacks nothing."""
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"{', '.join(absent)}: not on PATH; apt install slurm-wlm" if absent else ""


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Cluster:
    """A cluster with nodes node0, node1, ..., each of which says that it has one CPU, and two partitions of all nodes:
    jobs of `high` preempt jobs of `low`, the default, which are queued again.

    `kill_wait_s`: seconds from SIGTERM to SIGKILL when Slurm ends a job. `grace_s`: seconds that a preempted job has
    before. Leaving the context cancels all jobs and ends everything.
    """

    def __init__(self, num_nodes: int = 2, *, kill_wait_s: int = 30, grace_s: int = 0) -> None:
        self.num_nodes, self._kill_wait_s, self._grace_s = num_nodes, kill_wait_s, grace_s
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> Cluster:
        if problem := missing():
            raise RuntimeError(problem)
        self.directory = Path(tempfile.mkdtemp(prefix="torchtitan-rl-slurm-"))
        self.environment = os.environ | {"SLURM_CONF": str(self.directory / "slurm.conf")}
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        directory, nodes = self.directory, [f"node{index}" for index in range(self.num_nodes)]
        directory.chmod(0o755)  # munged wants everybody to reach its socket
        controller_port, *ports = _free_ports(1 + self.num_nodes)
        conf = _CONF.format(
            host=socket.gethostname(),
            controller_port=controller_port,
            directory=directory,
            user=_USER,
            kill_wait_s=self._kill_wait_s,
            grace_s=self._grace_s,
        )
        for node, port in zip(nodes, ports, strict=True):
            conf += f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=1\n"
            (directory / f"spool-{node}").mkdir()
        (directory / "slurm.conf").write_text(conf)
        (directory / "state").mkdir()
        key = directory / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {name: f"--{name}-file={directory}/munge.{name}" for name in ("key", "pid", "seed", "log")}
        self._daemon("munged", "--foreground", f"--socket={directory}/munge.socket", *files.values())
        self._wait(lambda: (directory / "munge.socket").exists(), "munged")
        self._daemon("slurmctld", "-D")
        for node in nodes:
            self._daemon("slurmd", "-D", "-N", node)
        idle = "\n".join(f"{node} idle" for node in nodes)
        self._wait(lambda: self.run("sinfo", "-hNp", "low", "-o", "%N %T", check=False) == idle, "the nodes")

    def _daemon(self, *command: str) -> None:
        output = (self.directory / f"{command[0]}{len(self._processes)}.out").open("w")
        self._processes.append(
            subprocess.Popen(
                command, env=self.environment, stdout=output, stderr=output, start_new_session=True, cwd=self.directory
            )
        )

    def _wait(self, condition, what: str) -> None:
        end = time.monotonic() + _START_S
        while not condition():
            ended = [process for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > end:
                outputs = "".join(file.read_text()[-1000:] for file in self.directory.glob("*.out"))
                raise RuntimeError(f"{what}: did not come up within {_START_S:g} s: {outputs}")
            time.sleep(0.1)

    def __exit__(self, *_) -> None:
        try:
            if len(self._processes) > 1:
                self.run("scancel", "--user", _USER, check=False)
                end = time.monotonic() + self._kill_wait_s + _STOP_S
                while self.run("squeue", "-h", check=False) and time.monotonic() < end:
                    time.sleep(0.2)
        finally:
            for process in reversed(self._processes):
                process.terminate()
            for process in reversed(self._processes):
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            for process in self.steps():
                process.kill()
            shutil.rmtree(self.directory)

    def steps(self) -> list[psutil.Process]:
        """The processes that Slurm has started on the nodes: slurmstepd, which runs a step, and all of the steps."""
        conf, found = self.environment["SLURM_CONF"], []
        for process in psutil.process_iter(["environ", "name"]):
            variables = process.info["environ"] or {}
            name = process.info["name"]
            if variables.get("SLURM_CONF") == conf and (name == "slurmstepd" or "SLURM_JOB_ID" in variables):
                found.append(process)
        return found

    def run(self, *command: str, check: bool = True) -> str:
        """What a command of Slurm prints, without the last line's end."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: status {done.returncode}: {done.stderr}")
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job, such as {"JobState": "RUNNING", "Restarts": "0"}."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def start_now(self, number: str) -> None:
        """Starts a job that waits: Slurm leaves a job that is queued again alone for two minutes."""
        self.run("scontrol", "update", f"JobId={number}", "StartTime=now")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if problem := missing():
        sys.exit(f"error: {problem}")
    with Cluster(args.nodes) as cluster:
        return subprocess.run(args.command, env=cluster.environment).returncode


if __name__ == "__main__":
    sys.exit(main())
