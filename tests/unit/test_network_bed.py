"""The test bed itself: hosts that see each other and nothing else of each other, and nothing left."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.network import namespaces
from tests.network.bed import Bed, shares

ROOT = Path(__file__).parents[2]
needs_bed = pytest.mark.skipif(bool(Bed.missing()), reason=Bed.missing() or "a bed can be made")


@needs_bed
def test_two_hosts_share_a_network_and_nothing_else():
    with Bed(2) as bed:
        here, there = bed.hosts
        assert here.run(["sh", "-c", "hostname; echo $PPID; touch /dev/shm/mine; ls /dev/shm"]) == "host0\n0\nmine\n"
        assert there.run(["ls", "/dev/shm"]) == "" and "mine" not in os.listdir("/dev/shm")
        assert here.run(["getent", "hosts", "host1"]).split() == ["10.77.0.2", "host1"]
        before = there.counters()[1]
        assert bed.stream(0, 1, nbytes=1_000_000) > 0
        assert 1_000_000 <= there.counters()[1] - before < 1_300_000  # headers
        sleeper = there.popen(["sleep", "60"])
        end = time.monotonic() + 10
        while not any("sleep" in process for process in there.processes()):  # first it is `nsenter`
            assert time.monotonic() < end
            time.sleep(0.01)
        assert here.processes() == []
        there.kill()
        assert sleeper.poll() == -9
        there.start()
        assert there.run(["ls", "/dev/shm"]) == "" and there.processes() == []
        there.disconnect()
        with pytest.raises((TimeoutError, subprocess.TimeoutExpired)):
            bed.stream(0, 1, nbytes=1000, timeout_s=0.5)
        there.connect()
        assert bed.stream(1, 0, nbytes=1000) > 0
    assert bed.left() == []


@needs_bed
def test_a_rate_holds():
    with Bed(2, rate_mbit=80) as bed:
        assert bed.stream(0, 1, nbytes=4_000_000) == pytest.approx(10e6, rel=0.15)


@needs_bed
def test_delay_is_one_way_and_a_round_trip_has_it_twice():
    connect = "import socket, time; t = time.perf_counter(); s = socket.create_connection(('10.77.0.2', int({port})));"
    with Bed(2, delay_ms=20) as bed:
        serve = "import socket; s = socket.create_server(('10.77.0.2', 0)); print(s.getsockname()[1], flush=True);"
        server = bed.hosts[1].popen(
            [sys.executable, "-c", serve + "s.accept(); s.accept()"], stdout=subprocess.PIPE, text=True
        )
        port = server.stdout.readline().strip()
        code = connect.format(port=port) + " print(time.perf_counter() - t)"
        took = [float(bed.hosts[0].run([sys.executable, "-c", code])) for _ in range(2)]
    assert 0.040 <= took[1] < 0.080, took  # the first one asks for the address too


@needs_bed
def test_a_share_of_the_packets_is_lost():
    count = (
        "import socket\ns = socket.socket(type=socket.SOCK_DGRAM); s.bind(('10.77.0.2', 5000)); s.settimeout(1)\n"
        "print('ready', flush=True); n = 0\ntry:\n    while True: s.recv(10); n += 1\nexcept TimeoutError: print(n)"
    )
    send = (
        "import socket, time\ns = socket.socket(type=socket.SOCK_DGRAM)\n"
        "for i in range(2000): s.sendto(b'x', ('10.77.0.2', 5000)); i % 10 or time.sleep(.002)"
    )
    with Bed(2, loss=0.1) as bed:
        there = bed.hosts[1].popen([sys.executable, "-c", count], stdout=subprocess.PIPE, text=True)
        assert there.stdout.readline() == "ready\n"
        bed.hosts[0].run([sys.executable, "-c", send])
        arrived = int(there.communicate()[0])
    assert 1800 - 5 * 13.4 < arrived < 1800 + 5 * 13.4  # five standard deviations of a binomial


@needs_bed
def test_a_bed_whose_maker_is_killed_leaves_nothing():
    code = (
        "import sys, time\nfrom tests.network.bed import Bed\nbed = Bed(2, delay_ms=1, loss=.01).__enter__()\n"
        "bed.hosts[1].popen(['sleep', '60'])\n"
        "print(' '.join(set.union(*(h.namespaces for h in bed.hosts))), flush=True)\ntime.sleep(60)"
    )
    maker = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    spaces = set(maker.stdout.readline().split())
    assert len(spaces) == 10 and len(namespaces.users_of(spaces)) >= 3
    maker.kill(), maker.wait()
    end = time.monotonic() + 5
    while (left := namespaces.users_of(spaces)) and time.monotonic() < end:
        time.sleep(0.05)
    assert left == []


def test_hosts_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert shares(2) == [{0, 2}, {1, 3}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 6})
    assert shares(3) == [{4}, {6}, {4}]


@pytest.mark.parametrize("tool", ["ip", "tc"])
def test_a_missing_tool_is_named_with_its_package(monkeypatch, tool):
    which = namespaces.shutil.which
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None if name == tool else which(name))
    expected = f"{tool}: is not on PATH, and the network test bed needs it; apt install iproute2"
    assert Bed.missing() == expected
    with pytest.raises(RuntimeError, match=expected):
        Bed(2)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root can")
def test_without_rights_the_sentence_says_so():
    code = (
        "import os; os.setgroups([]); os.setgid(65534); os.setuid(65534)\nfrom tests.network.namespaces import missing"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import psutil, tests.network.namespaces\n{code}\nprint(missing())"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("uid=65534: may not make namespaces ("), done.stderr
    assert done.stdout.endswith("; start the network test bed as root\n")


@pytest.mark.parametrize("wrong", [{"loss": 1}, {"loss": -0.1}, {"rate_mbit": -1}, {"delay_ms": 1, "jitter_ms": 2}])
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="none may be negative"):
        Bed(2, **wrong)


def test_the_script_says_what_is_missing_and_starts_nothing(monkeypatch, capsys):
    from scripts import network_bed

    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None)
    assert network_bed.main(["faults"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("error: ip: is not on PATH, ") and said.err.count("\n") == 1 and said.out == ""
