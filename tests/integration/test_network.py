"""Hosts with a network between them (tests/network): every layout, every fault, and what is refused before a start."""

import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from tests.network.bed import ROOT, Bed
from tests.network.faults import FAULTS, run_of, well
from tests.network.runs import LAYOUTS, QUICKSTART, SHORT, WORKER_PORT, Run

pytestmark = [
    pytest.mark.whole,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(Bed.missing()), reason=Bed.missing() or "a bed can be made"),
]


@pytest.mark.parametrize("layout, door", [(layout, "torchrun") for layout in LAYOUTS] + [("over-both", "workers")])
def test_a_run_on_hosts_with_a_network_ends_well_and_leaves_nothing(tmp_path, layout, door):
    with run_of(layout, tmp_path, door=door) as run:
        well(run)
        sent = [host.counters()[0] for host in run.bed.hosts]
        assert max(sent) > 3_000_000  # the network carried gradients or weights: 0.8M parameters of 4 bytes
        assert (run.path / "checkpoints" / "step-20" / "COMPLETE").exists()


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "undisturbed"])
def test_what_a_fault_does_is_what_is_promised(tmp_path, fault):
    FAULTS[fault](tmp_path)


def test_a_host_that_comes_back_is_used_again(tmp_path):
    with Bed(2, own_cores=False) as bed:
        workers = [f"tcp://{host.address}:{WORKER_PORT}" for host in bed.hosts]

        def start(index: int):
            command = [sys.executable, "-m", "torchtitan_rl.launch.worker", workers[index]]
            return bed.hosts[index].popen(command, stdin=subprocess.DEVNULL)

        start(0), start(1)
        controller = bed.hosts[0].popen(
            [sys.executable, "-m", "tests.network.attached", *workers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        def used() -> list[str]:
            print(file=controller.stdin, flush=True)
            for line in iter(controller.stdout.readline, ""):
                print(line)
                if line.startswith("answer"):
                    return line.split()[1:]
            raise AssertionError("the controller has ended")

        assert "attached\n" in iter(controller.stdout.readline, "")
        assert used()[0] == "host1"  # nothing has happened
        for _ in range(2):
            bed.hosts[1].kill()
            time.sleep(1)
            bed.hosts[1].start()
            start(1)
            answer = used()
            print(answer)
            assert answer[0] == "host1" and len(bed.hosts[1].processes()) >= 2
        bed.hosts[1].disconnect()
        time.sleep(12)
        bed.hosts[1].connect()
        answer = used()
        print(answer)
        assert answer[0] == "host1"
    assert bed.left() == []


def refused(run: Run, within_s: float = 120) -> str:
    """The error line of host 0 of a run that nothing was started for."""
    statuses = run.ended(within_s)
    assert all(status != 0 for status in statuses.values()), run.tail()
    assert not run.path.exists() or not (run.path / "logs").exists(), "something was started"
    return next(line for line in run.text().splitlines() if line.startswith("error: "))


def test_clocks_apart_by_minutes(tmp_path):
    late = tmp_path / "late"
    late.mkdir()
    (late / "sitecustomize.py").write_text(
        "import socket, time\nif socket.gethostname() == 'host1':\n"
        "    now = time.time\n    time.time = lambda: now() + 180\n"
    )
    with Bed(2) as bed:
        path = f"{late}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        run = Run(bed, tmp_path, [*SHORT, *LAYOUTS["over-both"][1]], PYTHONPATH=path)
        told = refused(run)
    found = re.fullmatch(r"error: host 10\.77\.0\.2:\d+: its clock is (\d+) s ahead of this host's, and 30 s .*", told)
    assert found and 170 <= int(found[1]) <= 181, told


def test_other_code_on_one_host(tmp_path):
    shutil.copytree(ROOT / "torchtitan_rl", tmp_path / "other" / "torchtitan_rl")
    with (tmp_path / "other" / "torchtitan_rl" / "hosts" / "gpus.py").open("a") as file:
        file.write("# changed\n")
    with Bed(2) as bed:
        mounted = f"mount --bind {tmp_path}/other/torchtitan_rl {ROOT}/torchtitan_rl"
        bed.hosts[1].run(["sh", "-c", mounted])
        told = refused(Run(bed, tmp_path, [*SHORT, *LAYOUTS["over-both"][1]]))
    assert "10.77.0.2" in told and "has other code than this host (torchtitan_rl/launch/gpus.py); install" in told


def test_another_config_on_one_host(tmp_path):
    ours, theirs = tmp_path / "mine.py", tmp_path / "theirs.py"
    ours.write_text((ROOT / "configs" / "quickstart.py").read_text())
    theirs.write_text(ours.read_text() + "\n")
    with Bed(2) as bed:
        bed.hosts[1].run(["mount", "--bind", str(theirs), str(ours)])
        told = refused(Run(bed, tmp_path, [*SHORT, *LAYOUTS["over-both"][1]], config=str(ours)))
    assert "10.77.0.2" in told and f"has another config file than this host at {ours}; copy" in told


def test_a_name_that_resolves_to_the_loopback(tmp_path):
    """Debian's habit: a host's own name is 127.0.1.1 in its /etc/hosts."""
    with Bed(2) as bed:
        for host in bed.hosts:
            host.run(["sh", "-c", f"echo 127.0.1.1 {host.name} > /etc/hosts"])
        script = ["bash", str(ROOT / "scripts" / "train_torchrun.sh"), QUICKSTART]
        launch = {"NNODES": "2", "MASTER_ADDR": "host0", "TORCHTITAN_RL_PYTHON": sys.executable}
        with pytest.raises(RuntimeError, match="error: MASTER_ADDR=host0: resolves to 127.0.1.1, the loopback of this"):
            bed.hosts[0].run(script, env=launch)
        with pytest.raises(RuntimeError, match="host0 resolves to 127.0.1.1, the loopback of this host"):
            bed.hosts[0].run([sys.executable, "-m", "torchtitan_rl.launch.worker", "tcp://host0:26600"])
