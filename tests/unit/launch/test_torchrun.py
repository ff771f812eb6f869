"""What the hosts of a launch by torchrun tell each other lies in torchrun's store, which outlives an attempt."""

import torch.distributed as dist

from torchtitan_rl.launch import torchrun
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
        store, rank, size = torchrun._join()
        assert (rank, size) == (1, 2)
        assert torchrun._join()[0].check(["outcome"]) is False
        leader, follower = (HeartbeatWatch(store, rank, ["tcp://one:1", "tcp://two:2"]) for rank in (0, 1))
        leader.announce("outcome", str(100 + attempt))
        store.set("beat/1", "0")
        leader._exchange(1)
        follower._exchange(1)
        outcomes.append(follower.outcome)
    assert outcomes == ["100", "101"]
