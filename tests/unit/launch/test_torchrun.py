"""What the hosts of a launch by torchrun tell each other lies in torchrun's store, which outlives an attempt."""

import re
import subprocess
import sys

import pytest
import torch.distributed as dist

from torchtitan_rl.launch import torchrun
from torchtitan_rl.launch.children import free_port
from torchtitan_rl.launch.liveness.heartbeats import HeartbeatWatch


def test_an_attempt_does_not_read_how_the_one_before_ended(monkeypatch):
    of_torchrun = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(of_torchrun.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": "1",
        "WORLD_SIZE": "2",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    outcomes = []
    for attempt in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        joined, rank, size = torchrun._join()
        assert (rank, size) == (1, 2)
        store = torchrun._of_attempt(joined, attempt)
        assert store.check(["outcome"]) is False
        leader, follower = (HeartbeatWatch(store, rank, ["tcp://one:1", "tcp://two:2"]) for rank in (0, 1))
        leader.announce("outcome", str(100 + attempt))
        store.set("beat/1", "0")
        leader._exchange(1)
        follower._exchange(1)
        outcomes.append(follower.outcome)
    assert outcomes == ["100", "101"]


CONFIG = """
import os, sys
from torchtitan_rl.launch.liveness.restarts import leave_outcome
print("begun", file=open({begun!r}, "a"))
{body}
"""


@pytest.mark.parametrize(
    "status, body",
    [
        ("75", "leave_outcome(int(sys.argv[-1]), 75, final=True); os._exit(75)"),  # as after SIGTERM or max_hours
        pytest.param("1", "raise ValueError('lr=-1: is negative')", marks=pytest.mark.slow),
    ],
    ids=["asked to stop", "mistake"],
)
def test_torchrun_does_not_begin_again_what_a_restart_cannot_mend(tmp_path, status, body):
    config, begun = tmp_path / "config.py", tmp_path / "begun"
    config.write_text(CONFIG.format(begun=str(begun), body=body))
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "1"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port("127.0.0.1"))]
    command += ["--max-restarts", "2", "-m", "torchtitan_rl.launch.torchrun", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 1
    assert len(begun.read_text().splitlines()) == 1, ended.stderr
    ends = re.findall(r"restart (\d): the run has ended with status (\d+), and is not begun again", ended.stderr)
    assert ends == [("1", status), ("2", status)], ended.stderr
