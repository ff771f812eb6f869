"""One running stack, shared by the tests that do not break it: real actors, real engine, real store."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.integration.leftovers import nothing_left
from tests.kit.forks.server import ACTORS_ALONE, in_use, started_by_themselves
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.run import RunConfig

ROOT = Path(__file__).parents[2]


def small_config(output_dir: Path, **overrides) -> RunConfig:
    """The quickstart's model and task, with short phases."""
    config = load_config(str(ROOT / "configs" / "quickstart.py"))
    config.output_dir = str(output_dir)
    config.supervised.num_steps, config.supervised.batch_size = 2, 8
    config.algorithm.tasks_per_step, config.algorithm.group_size = 4, 4
    config.controller.num_steps, config.controller.eval_every = 2, 0
    config.controller.eval_tasks, config.controller.test_tasks, config.controller.pass_at_k = 8, 8, 2
    config.controller.call_timeout_s = config.controller.sample_timeout_s = 120
    config.generator.max_num_seqs, config.generator.num_spares = 64, 0
    for path, value in overrides.items():
        *parents, last = path.split("__")
        target = config
        for name in parents:
            target = getattr(target, name)
        setattr(target, last, value)
    return config


@pytest.fixture(scope="session")
def loop():
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield loop
    loop.close()


async def answers_of(replica, requests) -> list:
    """What one replica of a `SamplingClient` answers to unpinned requests, in their order."""
    answers: dict[int, object] = {}
    async for some in replica.sample(requests, None, 60):
        answers |= dict(some)
    return [answers[index] for index in range(len(requests))]


SHORT = [
    *("--supervised.num-steps", "2", "--supervised.batch-size", "8"),
    *("--algorithm.tasks-per-step", "4", "--algorithm.group-size", "4"),
    *("--controller.num-steps", "2", "--controller.eval-every", "1", "--controller.pass-at-k", "2"),
    *("--controller.eval-tasks", "8", "--controller.test-tasks", "8"),
]
"""A short run of the quickstart, as arguments of the command."""


@pytest.fixture(scope="session")
def short_run(tmp_path_factory) -> SimpleNamespace:
    """A short run by the command, with actors: its directory `path`, its `stdout`, and the command lines of the
    `processes` it had. It looks at its processes, of which a fork is none."""
    path = tmp_path_factory.mktemp("short") / "run"
    with nothing_left(), started_by_themselves():
        return watched(["train", str(ROOT / "configs" / "quickstart.py"), *SHORT, "--record.timeline", "True"], path)


def watched(arguments: list[str], path: Path, typed: str = "") -> SimpleNamespace:
    """Runs the command to its end; `typed` is its standard input. See `short_run`."""
    command, processes = [sys.executable, "-m", "torchtitan_rl.cli", *arguments, "--output-dir", str(path)], set()
    with (
        tempfile.TemporaryFile("w+") as stdin,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        stdin.write(typed)
        stdin.seek(0)
        environment = os.environ | ACTORS_ALONE  # the processes below are to be all that it has
        process = subprocess.Popen(command, cwd=ROOT, stdin=stdin, stdout=out, stderr=err, env=environment)
        end = time.monotonic() + 150
        while process.poll() is None:
            assert time.monotonic() < end
            for child in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.Error):  # it has ended by now
                    processes.add(" ".join(child.cmdline()))
            time.sleep(0.2)
        out.seek(0), err.seek(0)
        assert process.returncode == 0, err.read()
        return SimpleNamespace(path=path, stdout=out.read(), processes=processes)


@pytest.fixture
def here(monkeypatch, capsys):
    """The command in this process: for what is refused before anything starts, and for `--backend local` while no other
    local run is open."""
    from torchtitan_rl.cli import exit_status, main

    monkeypatch.chdir(ROOT)
    launchers = []

    async def to_the_end(coroutine) -> int:
        try:
            return await coroutine
        finally:
            for launcher in launchers:
                await launcher.stop()
            launchers.clear()

    def end_with(coroutine, status=int) -> int:
        """Returns the status with which the command ends its process, and ends a local run, which would end with that
        process; nothing else of the command is replaced."""
        from torchtitan_rl.launch.local import LocalLauncher

        monkeypatch.setattr(LocalLauncher, "kill", lambda launcher: launchers.append(launcher))
        return status(asyncio.run(to_the_end(coroutine)))

    monkeypatch.setattr(exit_status, "end_with", end_with)

    def run(*arguments: str) -> subprocess.CompletedProcess:
        capsys.readouterr()
        status = main.main(list(arguments))
        return subprocess.CompletedProcess(arguments, status, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def controller(loop, tmp_path_factory, fork_server):
    from torchtitan_rl.train.controller import Controller

    config = small_config(tmp_path_factory.mktemp("run") / "shared")
    with in_use(fork_server):
        controller = loop.run_until_complete(Controller.launch(config))
    yield controller
    loop.run_until_complete(controller.close())
