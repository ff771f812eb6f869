"""The same seed gives the same run, whether its parts are actors or all in one process."""

import copy
import json
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from tests.integration.conftest import small_config
from tests.integration.test_command_line import COMMAND, QUICKSTART, ROOT, SHORT, lines
from torchtitan_rl.config.run import RoleConfig
from torchtitan_rl.observability.run_dir import RunDir
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.weights import checkpoint


def unclocked(line: dict) -> dict:
    """A line of metrics without what a clock measured."""
    return {name: value for name, value in line.items() if not name.startswith("time/") and not name.endswith("_per_s")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A short run of each backend: its directory, and the command lines of the processes it had."""
    paths, processes = {}, {}
    for backend in ("actors", "local"):
        paths[backend], processes[backend] = tmp_path_factory.mktemp(backend) / "run", set()
        process = subprocess.Popen(
            [
                *COMMAND,
                "train",
                QUICKSTART,
                *SHORT,
                "--quiet",
                "--backend",
                backend,
                "--output-dir",
                str(paths[backend]),
            ],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        end = time.monotonic() + 150
        while process.poll() is None:
            assert time.monotonic() < end
            for child in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.Error):  # it has ended by now
                    processes[backend].add(" ".join(child.cmdline()))
            time.sleep(0.2)
        assert process.returncode == 0, process.stderr.read()
    return paths, processes


def test_every_number_that_no_clock_measured_is_equal(runs):
    actors, local = ([unclocked(line) for line in lines(runs[0][backend])] for backend in ("actors", "local"))
    assert [line["phase"] for line in actors].count("reinforcement") == 2
    assert actors == local


def test_so_is_every_rollout(runs):
    actors, local = (
        [record | {"seconds": None} for record in RunDir(runs[0][backend]).tables["rollouts"].read()]
        for backend in ("actors", "local")
    )
    assert len(actors) == 32 and actors == local


def test_a_local_run_leaves_the_same_files_and_one_log(runs):
    def files(path):
        found = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
        return sorted(str(file) for file in found if file.parent.name != "logs")

    assert files(runs[0]["local"]) == files(runs[0]["actors"])
    assert [log.name for log in (runs[0]["local"] / "logs").iterdir()] == ["local-0.log"]


def test_a_local_run_starts_no_process(runs):
    _, processes = runs
    started = {backend: [c for c in commands if "monarch" in c] for backend, commands in processes.items()}
    assert len(started["actors"]) >= 1 and started["local"] == []


def test_a_breakpoint_in_a_loss_is_on_the_main_thread(tmp_path):
    config = tmp_path / "config.py"
    config.write_text(f"""
import threading
from torchtitan_rl.algorithm.losses import ppo
from torchtitan_rl.config import load_config

def watched(inputs, clip_low, clip_high):
    breakpoint()
    return ppo(inputs, clip_low=clip_low, clip_high=clip_high)

def config():
    config = load_config({QUICKSTART!r})
    config.algorithm.loss_fn = watched
    return config
""")
    commands = "p len(inputs.weights) > 0, threading.current_thread() is threading.main_thread()\nc\n"
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "torchtitan_rl.cli",
            "train",
            str(config),
            *SHORT,
            "--quiet",
            "--backend",
            "local",
            "--output-dir",
            str(tmp_path / "run"),
        ],
        input=commands * 2,
        capture_output=True,
        text=True,
        timeout=150,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("(True, True)") == 2
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2


def test_roles_share_one_process_and_runs_may_follow_each_other_in_it(loop, tmp_path):
    async def train(colocation):
        config = small_config(tmp_path / colocation, roles__colocation=colocation, roles__refresh_reference_every=1)
        config.roles.reference = RoleConfig(trainer=copy.deepcopy(config.trainer))
        config.roles.critic = RoleConfig(trainer=copy.deepcopy(config.trainer))
        async with await Controller.launch(config, backend="local") as controller:
            await controller.supervise()
            await controller.reinforce()
            moves = None if controller.placement is None else list(controller.placement.history)
        return [unclocked(line) for line in lines(tmp_path / colocation)], moves

    (apart, none), (sharing, moves) = (loop.run_until_complete(train(colocation)) for colocation in ("none", "all"))
    assert none is None and ("generator", "offload", "weights") in moves and ("policy", "load", "optimizer") in moves
    assert apart == sharing and {"critic/loss", "policy/reference_kl"} <= apart[-1].keys()


def test_generators_alone_serve_a_checkpoint_locally(loop, tmp_path):
    tokens = [20, 31, 27, 44, 14, 20, 27, 31, 44, 1]

    async def scores():
        async with await Controller.launch(small_config(tmp_path / "run"), backend="local") as controller:
            drawn = await controller.generator.score(tokens)
            await controller.supervise()
            path, trained = await controller.save_checkpoint(), await controller.generator.score(tokens)
        weights = checkpoint.hf_weights(path)
        async with await Controller.launch(
            small_config(tmp_path / "eval"), hf_weights=weights, backend="local"
        ) as controller:
            return drawn, trained, await controller.generator.score(tokens)

    drawn, trained, loaded = loop.run_until_complete(scores())
    assert loaded == trained != drawn


def test_ctrl_c_ends_a_local_run(tmp_path):
    path = tmp_path / "run"
    process = subprocess.Popen(
        [*COMMAND, "train", QUICKSTART, "--quiet", "--backend", "local", "--output-dir", str(path)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 120
    while not (path / "metrics.jsonl").exists() or len(lines(path)) < 3:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == 130 and "interrupted in the supervised phase" in stderr
