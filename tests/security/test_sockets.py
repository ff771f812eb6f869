"""Every verb on one host: no socket of any of its processes is bound to more than the loopback.

Each verb is started as a user starts it, and every process below it is looked at several times a second until it ends.
"""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.security.open_sockets import open_doors, sockets

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.py")
SHORT = [
    *("--supervised.num-steps", "1", "--supervised.batch-size", "8", "--controller.num-steps", "2"),
    *("--algorithm.tasks-per-step", "4", "--algorithm.group-size", "4", "--controller.eval-every", "0"),
    *("--controller.pass-at-k", "0", "--controller.eval-tasks", "8", "--controller.test-tasks", "8"),
]
TWO_RANKS = [
    *("--trainer.parallelism.data-parallel-shard-degree", "2", "--trainer.num-threads", "1"),
    *("--generator.tensor-parallel-degree", "2", "--generator.num-threads", "1"),
]
RESTARTS = ["--max-restarts", "1"]  # under a supervisor, which is a process too
pytestmark = [pytest.mark.whole, pytest.mark.timeout(420)]


class Verb:
    """A running command, and all sockets that its processes have had."""

    def __init__(self, directory: Path, *arguments: str):
        self.output = directory / "output.txt"
        with self.output.open("w") as file:
            command = [sys.executable, "-m", "torchtitan_rl.cli", *arguments]
            self.process = psutil.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        self.sockets: dict[tuple[str, int], str] = {}
        self.processes: set[psutil.Process] = {self.process}

    def watch(self, until: str = "", within_s: float = 360.0) -> None:
        """Looks until the output has the text `until`; without one, until the command ends."""
        deadline = time.monotonic() + within_s
        while not (until and until in self.output.read_text(errors="replace")):
            if (status := self.process.poll()) is not None:
                assert status == 0 and not until, self.output.read_text(errors="replace")[-2000:]
                return
            assert time.monotonic() < deadline, self.output.read_text(errors="replace")[-2000:]
            self.look()
            time.sleep(0.2)
        self.look()

    def look(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.processes.update(self.process.children(recursive=True))
        for process in self.processes:
            self.sockets |= sockets(process)

    def end(self) -> None:
        if self.process.poll() is None:
            self.look()
            self.process.terminate()
            with suppress(psutil.TimeoutExpired):
                self.process.wait(20)
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self.processes, timeout=10)


@pytest.fixture
def start(tmp_path):
    verbs = []

    def begin(*arguments: str) -> Verb:
        verbs.append(Verb(tmp_path, *arguments))
        return verbs[-1]

    yield begin
    for verb in verbs:
        verb.end()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of a run in one process, and the sockets of that run."""
    directory = tmp_path_factory.mktemp("made")
    verb = Verb(directory, "train", QUICKSTART, *SHORT, "--backend", "local", "--output-dir", str(directory / "run"))
    try:
        verb.watch()
    finally:
        verb.end()
    return directory / "run" / "checkpoints" / "step-2", verb.sockets


def test_the_look_sees_a_door_that_is_open_to_all_and_one_that_is_not():
    program = "import socket, time; a = socket.create_server(('', 0)); b = socket.create_server(('127.0.0.2', 0)); "
    process = psutil.Popen([sys.executable, "-c", program + "print(flush=True); time.sleep(60)"], stdout=-1)
    try:
        process.stdout.readline()
        seen = sockets(process)
        assert sorted(place for place, _ in seen) == ["0.0.0.0", "127.0.0.2"]
        assert [place for place, _ in open_doors(seen)] == ["0.0.0.0"]
    finally:
        process.kill(), process.communicate()


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(
            [*RESTARTS, "--algorithm.max-policy-lag", "1", "--generator.num-spares", "1"], id="lag 1, a spare"
        ),
        pytest.param(RESTARTS, id="lag 0", marks=pytest.mark.slow),
        pytest.param(TWO_RANKS, id="two ranks each", marks=pytest.mark.slow),
        pytest.param(["--serve", "0"], id="served meanwhile", marks=pytest.mark.slow),
    ],
)
def test_train(start, tmp_path, more):
    verb = start("train", QUICKSTART, *SHORT, *more, "--output-dir", str(tmp_path / "run"))
    verb.watch()
    assert len(verb.processes) >= 4 and verb.sockets  # trainer, generator, store; the trainer's rendezvous at least
    assert open_doors(verb.sockets) == {}


def test_train_in_one_process(checkpoint):
    assert open_doors(checkpoint[1]) == {}


def test_eval(start, tmp_path, checkpoint):
    of = ["--checkpoint", str(checkpoint[0]), "--num-tasks", "4", "--output-dir", str(tmp_path / "eval")]
    verb = start("eval", QUICKSTART, *of)
    verb.watch()
    assert open_doors(verb.sockets) == {}


@pytest.mark.slow  # test_doors looks at the same server once it has answered
def test_serve(start, tmp_path, checkpoint):
    verb = start("serve", str(checkpoint[0]), "--port", "0", "--output-dir", str(tmp_path / "serve"))
    verb.watch("http://")
    assert verb.sockets and open_doors(verb.sockets) == {}


@pytest.mark.slow  # as above
def test_serve_tinker(start, tmp_path):
    verb = start("serve-tinker", QUICKSTART, "--port", "0", "--lora-rank", "4", "--output-dir", str(tmp_path / "run"))
    verb.watch("TINKER_BASE_URL=")
    assert len(verb.processes) >= 5 and open_doors(verb.sockets) == {}  # under its supervisor


def test_view(start, checkpoint):
    verb = start("view", str(checkpoint[0].parents[1]), "--port", "0")
    verb.watch("http://")
    assert verb.sockets and open_doors(verb.sockets) == {}
