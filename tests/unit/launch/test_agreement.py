"""Hosts that disagree about code, packages, config or the time: each sentence, and what is no disagreement."""

import dataclasses
import time

import pytest

from torchtitan_rl.launch.agreement import HostFacts, disagreement, facts, joined, joined_problem

OURS = HostFacts(
    files={"a.py": "1", "b.py": "2"}, versions={"Python": "3.11.7", "torch": "2.13.0"}, config="c", clock=0.0
)


def problem(clock_bounds=(1000.0, 1002.0), **theirs) -> str:
    found = dataclasses.replace(OURS, **{"clock": 1001.0, **theirs})
    message = disagreement("10.0.0.2:5", OURS, found, "/configs/mine.py", clock_bounds)
    assert len(message.splitlines()) <= 1 and len(message) < 300
    return message


def test_facts_are_of_contents(tmp_path):
    config = tmp_path / "mine.py"
    config.write_text("a = 1")
    first = facts(str(config))
    assert len(first.files) > 200 and "launch/agreement.py" in first.files and first.versions["torch"].startswith("2.")
    assert first.clock == pytest.approx(time.time(), abs=5)
    config.touch()
    again = facts(str(config))
    assert (again.files, again.config) == (first.files, first.config) and len(first.config) == 16
    config.write_text("a = 2")
    assert facts(str(config)).config != first.config
    assert facts(None).config == facts(str(tmp_path / "none.py")).config == ""


def test_hosts_that_agree():
    assert problem() == ""
    assert problem(config="") == ""  # the controller alone reads the config


def test_another_version_of_a_package():
    told = "host 10.0.0.2:5: has other packages than this host (torch: {} there, 2.13.0 here); install the same"
    assert problem(versions={"Python": "3.11.7", "torch": "2.12.0"}) == told.format("2.12.0")
    assert problem(versions={"Python": "3.11.7"}) == told.format("is not installed")


def test_other_code():
    told = "host 10.0.0.2:5: has other code than this host (torchtitan_rl/{}); install the same version on every host"
    assert problem(files={"a.py": "1", "b.py": "3"}) == told.format("b.py")
    assert problem(files={"a.py": "2", "c.py": "3"}) == told.format("a.py and 2 more")


def test_another_config_file():
    assert problem(config="d") == (
        "host 10.0.0.2:5: has another config file than this host at /configs/mine.py; copy it to every host, or keep "
        "it on a file system that they share"
    )


@pytest.mark.parametrize("clock, told", [(1182.0, "180 s ahead of"), (700.0, "300 s behind")])
def test_clocks_apart_by_minutes(clock, told):
    assert problem(clock=clock) == (
        f"host 10.0.0.2:5: its clock is {told} this host's, and 30 s are allowed; synchronise the clocks of all hosts "
        "(NTP)"
    )


def test_what_an_answer_took_is_no_difference_of_clocks():
    assert (
        problem(clock_bounds=(1000.0, 1090.0), clock=1001.0)
        == problem(clock_bounds=(1000.0, 1090.0), clock=1089.0)
        == ""
    )
    assert problem(clock=1031.0) == problem(clock=971.0) == ""


def test_hosts_that_join_one_launch():
    hosts = [joined(f"tcp://10.0.0.{rank}:5", ["mine.py", "--seed", "1"]) for rank in (1, 2)]
    assert joined_problem(hosts) == ""
    hosts[1]["arguments"] = ["mine.py", "--seed", "2"]
    assert joined_problem(hosts) == (
        "host 10.0.0.2:5 (rank 1): was started with other arguments than rank 0 (2); start the same line on every host"
    )
    hosts[1]["arguments"] = ["mine.py"]
    assert "other arguments than rank 0; start" in joined_problem(hosts)


def test_loopbacks_of_two_machines_do_not_join():
    hosts = [joined(f"tcp://127.0.0.{rank}:5", []) for rank in (1, 2)]
    assert joined_problem(hosts) == ""  # two hosts on one machine
    hosts[1]["network"] = "another boot net:[1]"
    assert joined_problem(hosts).startswith(
        "host 127.0.0.1:5 (rank 0): resolves to 127.0.0.1, the loopback of that host"
    )
