"""The same seed gives the same run, whether its parts are actors or all in one process."""

import json
import subprocess
import sys

import psutil
import pytest

from tests.integration.test_command_line import COMMAND, QUICKSTART, ROOT, SHORT, lines, run


def unclocked(line: dict) -> dict:
    """A line of metrics without what a clock measured."""
    return {name: value for name, value in line.items() if not name.startswith("time/") and not name.endswith("_per_s")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    paths = {}
    for backend in ("actors", "local"):
        paths[backend] = tmp_path_factory.mktemp(backend) / "run"
        result = run("train", QUICKSTART, *SHORT, "--quiet", "--backend", backend, "--output-dir", str(paths[backend]))
        assert result.returncode == 0, result.stderr
    return paths


def test_every_number_that_no_clock_measured_is_equal(runs):
    actors, local = ([unclocked(line) for line in lines(runs[backend])] for backend in ("actors", "local"))
    assert [line["phase"] for line in actors].count("reinforcement") == 2
    assert actors == local


def test_so_is_every_rollout(runs):
    for step in (1, 2):
        actors, local = (
            (runs[backend] / "rollouts" / f"step-{step:06d}.jsonl").read_text() for backend in ("actors", "local"))
        assert len(actors.splitlines()) == 16 and actors == local


def test_a_local_run_leaves_the_same_files_and_one_log(runs):
    def files(path):
        found = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
        return sorted(str(file) for file in found if file.parent.name != "logs")

    assert files(runs["local"]) == files(runs["actors"])
    assert [log.name for log in (runs["local"] / "logs").iterdir()] == ["local-0.log"]


def test_a_local_run_starts_no_process(tmp_path):
    process = subprocess.Popen(
        [*COMMAND, "train", QUICKSTART, *SHORT, "--quiet", "--backend", "local", "--output-dir", str(tmp_path / "run")],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seen = set()
    while process.poll() is None:
        seen |= {" ".join(child.cmdline()) for child in psutil.Process(process.pid).children(recursive=True)}
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            pass
    assert process.returncode == 0
    assert not [command for command in seen if "monarch" in command or "torchstore" in command], seen


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
        [sys.executable, "-m", "torchtitan_rl.cli", "train", str(config), *SHORT, "--quiet", "--backend", "local",
         "--output-dir", str(tmp_path / "run")],
        input=commands * 2, capture_output=True, text=True, timeout=150, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("(True, True)") == 2
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2
