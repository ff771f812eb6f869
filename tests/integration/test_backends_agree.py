"""The same seed gives the same run, whether its parts are actors or all in one process."""

import copy
import signal
import subprocess
import time

import pytest

from tests.integration.conftest import SHORT, small_config, watched
from tests.integration.test_command_line import COMMAND, QUICKSTART, ROOT, lines
from torchtitan_rl.config.run import RoleConfig
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.schemas import SCHEMAS
from torchtitan_rl.train.controller import Controller
from torchtitan_rl.weights import checkpoint

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("forked")]


def unclocked(line: dict) -> dict:
    """A line of metrics without what a clock measured."""
    clocked = ("time/", "perf/")
    return {name: value for name, value in line.items() if not name.startswith(clocked) and not name.endswith("_per_s")}


WATCHED = f"""
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
"""


@pytest.fixture(scope="module")
def runs(short_run, tmp_path_factory):
    """The short run with each backend; the local one stops at a breakpoint in its loss, and goes on."""
    directory = tmp_path_factory.mktemp("local")
    (directory / "config.py").write_text(WATCHED)
    typed = "p len(inputs.token_weights) > 0, threading.current_thread() is threading.main_thread()\nc\n"
    arguments = ["train", str(directory / "config.py"), *SHORT, "--quiet", "--backend", "local"]
    return {"actors": short_run, "local": watched(arguments, directory / "run", typed * 2)}


def test_every_number_that_no_clock_measured_is_equal(runs):
    actors, local = ([unclocked(line) for line in lines(runs[backend].path)] for backend in ("actors", "local"))
    assert [line["phase"] for line in actors].count("reinforcement") == 2
    assert actors == local


def test_so_is_every_rollout(runs):
    actors, local = (
        [record | {"seconds": None} for record in RunDir(runs[backend].path).tables["rollouts"].read()]
        for backend in ("actors", "local")
    )
    assert len(actors) == 32 and actors == local


def test_a_local_run_leaves_the_same_files_and_one_log(runs):
    watching = ("events", "samples", "status.json", "timeline")  # nobody watches a run in a debugger

    def files(path):
        """The files below `path`. A table counts once: its parts depend on when a checkpoint is written."""
        found = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
        kept = [file for file in found if file.parent.name != "logs" and file.parts[0] not in watching]
        return sorted({file.parts[0] if file.parts[0] in SCHEMAS else str(file) for file in kept})

    assert files(runs["local"].path) == files(runs["actors"].path)
    assert [log.name for log in (runs["local"].path / "logs").iterdir()] == ["local-0.log"]


def test_a_local_run_starts_no_process(runs):
    started = {backend: [c for c in run.processes if "monarch" in c] for backend, run in runs.items()}
    assert len(started["actors"]) >= 1 and started["local"] == []


def test_a_breakpoint_in_a_loss_is_on_the_main_thread(runs):
    assert runs["local"].stdout.count("(True, True)") == 2
    assert lines(runs["local"].path)[-1]["step"] == 2


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
