"""Addresses that lead back to the host that uses them: each sentence, and what is not refused."""

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from torchtitan_rl.launch import addresses
from torchtitan_rl.launch.addresses import torchrun_problem, worker_problem, workers_problem

NAMES = {"own": "127.0.1.1", "other": "10.0.0.2", "localhost": "127.0.0.1"}


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """A host whose /etc/hosts says `127.0.1.1 own`, as Debian's does."""
    ask = socket.getaddrinfo

    def getaddrinfo(host, *arguments, **options):
        if host == "unknown":
            raise socket.gaierror(-2, "Name or service not known")
        return ask(NAMES.get(host, host), *arguments, **options)

    monkeypatch.setattr(addresses.socket, "getaddrinfo", getaddrinfo)


def torchrun(**environment: str) -> str:
    return torchrun_problem({"NNODES": "2", "NODE_RANK": "0", **environment})


def test_one_host_may_be_its_own_loopback():
    assert torchrun_problem({}) == torchrun_problem({"NNODES": "1", "MASTER_ADDR": "own"}) == ""


def test_a_rank_that_does_not_exist():
    assert torchrun(NODE_RANK="2", MASTER_ADDR="10.0.0.1") == (
        "NODE_RANK=2: with NNODES=2 the last rank is 1; give this host's, from 0"
    )
    assert torchrun(NODE_RANK="1", MASTER_ADDR="10.0.0.1", TORCHTITAN_RL_HOST_ADDRESS="10.0.0.2") == ""
    assert torchrun(NNODES="0").startswith("NNODES=0: a run needs a host")


def test_the_script_says_that_a_number_is_missing():
    script = Path(__file__).parents[3] / "scripts" / "train_torchrun.sh"
    environment = os.environ | {"TORCHTITAN_RL_PYTHON": "/bin/true"}
    done = subprocess.run([script, "a.py", "--max-restarts"], env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and "--max-restarts: has no number; write --max-restarts N" in done.stderr


def test_rank_0_by_the_name_that_its_own_host_has_for_it():
    assert torchrun(MASTER_ADDR="own") == (
        "MASTER_ADDR=own: resolves to 127.0.1.1, the loopback of this host, where none of the other 1 finds it; set "
        "TORCHTITAN_RL_HOST_ADDRESS to this host's address on the network that the hosts share"
    )
    assert torchrun(MASTER_ADDR="own", TORCHTITAN_RL_HOST_ADDRESS="10.0.0.1") == ""  # rank 0 listens everywhere


def test_rank_0_by_an_address_that_leads_another_host_to_itself():
    for master in ("own", "localhost", "127.0.0.1"):
        problem = torchrun(MASTER_ADDR=master, NODE_RANK="1", TORCHTITAN_RL_HOST_ADDRESS="10.0.0.2")
        assert (
            problem.startswith(f"MASTER_ADDR={master}: resolves to 127.0.") and "rank 0 is on another host" in problem
        )
    assert torchrun(NODE_RANK="1").startswith("MASTER_ADDR=127.0.0.1: ")


def test_the_own_address_by_name():
    problem = torchrun(MASTER_ADDR="10.0.0.1", TORCHTITAN_RL_HOST_ADDRESS="own")
    assert problem.startswith("TORCHTITAN_RL_HOST_ADDRESS=own: resolves to 127.0.1.1, the loopback of this host")


def test_a_loopback_as_a_number_says_that_all_hosts_are_one_machine():
    assert torchrun(TORCHTITAN_RL_HOST_ADDRESS="127.0.0.1") == ""
    assert torchrun(NODE_RANK="1", TORCHTITAN_RL_HOST_ADDRESS="127.0.0.2") == ""


def test_what_resolves_to_nothing_is_left_to_who_connects():
    assert torchrun(MASTER_ADDR="unknown") == torchrun(MASTER_ADDR="other") == ""


@pytest.mark.parametrize("name, value", [("NNODES", "two"), ("NODE_RANK", "-1")])
def test_what_is_no_number_of_hosts(name, value):
    assert torchrun(**{name: value}).startswith(f"{name}={value!r}: is not a number; ")


def test_workers_are_all_of_one_machine_or_none_is():
    outside, inside = ["tcp://other:1", "tcp://10.0.0.3:1"], ["tcp://127.0.0.1:1", "tcp://localhost:2"]
    assert workers_problem(outside, "10.0.0.1") == workers_problem(inside, "127.0.0.1") == ""
    assert workers_problem(["tcp://own:7", *outside], "10.0.0.1") == (
        "hosts=tcp://own:7: resolves to 127.0.1.1, the loopback of this host, where tcp://other:1 does not find it; "
        "give its address on the network that the hosts share"
    )
    assert workers_problem(outside, "own").startswith("TORCHTITAN_RL_HOST_ADDRESS=own: resolves to 127.0.1.1, ")


def test_a_worker_is_not_started_where_its_name_hides_it():
    assert worker_problem("tcp://own:26600") == (
        "tcp://own:26600: own resolves to 127.0.1.1, the loopback of this host, where no other host finds the worker; "
        "give the address that the others reach it at (tcp://127.0.0.1:26600 if they are on this machine)"
    )
    assert worker_problem("tcp://127.0.0.2:1") == worker_problem("tcp://other:1") == ""
    assert "give the address that the others reach it at" in worker_problem("tcp://0.0.0.0:26600")


@pytest.mark.parametrize(
    ("worker", "problem"),
    [
        ("other:1", "is not the address of a worker"),
        ("tcp://other:\u00b2", "is not the address of a worker"),
        ("tcp://127.0.0.1:99999", "no port is above 65535"),
        ("tcp://[::1]:0", "workers listen on IPv4 alone"),
        ("tcp://::1:80", "workers listen on IPv4 alone"),
    ],
)
def test_what_is_no_address_of_a_worker_is_refused(worker, problem):
    with pytest.raises(ValueError, match=f"hosts={re.escape(repr(worker))}: {problem}; write "):
        worker_problem(worker)
