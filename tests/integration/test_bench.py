"""`torchtitan-rl bench` on a tiny model: real actors and engines beside their floors, and nothing left."""

import json
import os
import signal
from dataclasses import replace
from functools import partial

import psutil
import pytest

from tests.integration.leftovers import nothing_left
from tests.kit.forks.server import in_use
from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.dispatch.mesh_training_client import MeshTrainingClient
from torchtitan_rl.families import Llama3Shape
from torchtitan_rl.launch.local import LocalLauncher
from torchtitan_rl.tools.bench import generation, memory_use, scaling, stepping, syncing, training
from torchtitan_rl.tools.bench.measurement import OURS, Measurement
from torchtitan_rl.tools.bench.side import opened
from torchtitan_rl.tools.bench.step_parts import step_parts
from torchtitan_rl.tools.bench.workload import LENGTHS, Workload

pytestmark = pytest.mark.whole

TINY = Workload(
    size="tiny",
    shape=Qwen3Shape(
        vocab_size=64, dim=64, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=32, hidden_dim=128, max_seq_len=512
    ),
    dtype="float32",
    num_prompts=2,
    group_size=2,
)
TINY_LLAMA = replace(
    TINY,
    shape=Llama3Shape(
        vocab_size=64, dim=64, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=32, hidden_dim=128, max_seq_len=512
    ),
)


def quiet(text: str) -> None:
    """Drops a note."""


def check(measurement: Measurement, *, num_repeats: int, amount: int) -> None:
    for repeats in measurement.sides.values():
        assert len(repeats) == num_repeats and all(r.seconds > 0 and r.amount == amount for r in repeats)
    ours = measurement.sides[OURS]
    # The parts are those of the steps that were measured, and no others.
    assert sum(measurement.parts.values()) == pytest.approx(
        sum(r.seconds for r in ours) / len(ours), rel=0.05, abs=0.005
    )
    assert measurement.ratio > 0


# Generation with Qwen3 and training are measured by `bench generate train --short`, with which `.ci/run` ends.


def test_generation_beside_vllm_alone(tmp_path, fork_server):
    children = set(psutil.Process().children(recursive=True))
    with nothing_left(), in_use(fork_server):
        (measured,) = generation.measure_generation(
            [TINY_LLAMA], ["skewed"], 1, tmp_path, quiet, floors=[generation.EAGER]
        )
    assert measured.name == "generate llama3 tiny float32 skewed" and set(measured.sides) == {OURS, generation.EAGER}
    check(measured, num_repeats=1, amount=sum(TINY.completion_lengths("skewed")))
    assert "generator-0-0: engine step" in measured.parts
    left = [" ".join(process.cmdline()) for process in set(psutil.Process().children(recursive=True)) - children]
    assert [command for command in left if "resource_tracker" not in command] == []  # that one is Python's own


def test_syncing_beside_a_memcpy(tmp_path, fork_server):
    with nothing_left(), in_use(fork_server):
        first, later = syncing.measure_sync(TINY, 2, tmp_path, quiet)
    check(first, num_repeats=1, amount=4 * TINY.shape.num_parameters)
    check(later, num_repeats=2, amount=4 * TINY.shape.num_parameters)
    for part in ("load weights", "copy weights", "pack matrices", "compare weights"):
        assert f"generator-0-0: {part}" in later.parts


def test_steps_of_a_run_have_the_lengths_of_the_work(tmp_path, fork_server):
    TINY.write_model(tmp_path / "model")
    sides = {
        str(lag): partial(stepping.steps_of_a_run, TINY, tmp_path / "model", tmp_path / f"run-{lag}", lag=lag)
        for lag in (0, 1)
    }
    with nothing_left(), in_use(fork_server), opened(sides, tmp_path / "logs") as (alone, overlapped):
        first, second = alone.once("fixed", 0), alone.once("skewed", 1)
        row, next_row = overlapped.once("skewed", 0), overlapped.once("fixed", 1)
    amounts = sum(TINY.completion_lengths("fixed")), sum(TINY.completion_lengths("skewed"))
    assert (first.step, second.step) == (1, 2) and (first.amount, second.amount) == amounts
    assert (row.step, next_row.step) == (5, 11) and row.seconds > 0  # of rows of six, the fifth is the last that counts
    for run, steps in (("run-0", ["fixed", "skewed"]), ("run-1", ["skewed"] * 6 + ["fixed"] * 6)):
        lines = [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        assert [line["tokens/generated"] for line in lines] == [sum(TINY.completion_lengths(name)) for name in steps]
    (parts,) = [step_parts(tmp_path / "run-0" / "timeline", [2])]
    assert sum(parts.values()) == pytest.approx(second.seconds, rel=0.1)


@pytest.mark.slow
@pytest.mark.skipif("TRL_PYTHON" not in os.environ, reason="TRL needs an environment of its own: TRL_PYTHON=FILE")
def test_steps_beside_trl(tmp_path):
    with nothing_left():
        measured = stepping.measure_steps(
            replace(TINY, num_prompts=4), ["fixed", "skewed"], 1, tmp_path, quiet, python=os.environ["TRL_PYTHON"]
        )
    assert [m.name for m in measured] == [f"step tiny float32 {lengths} lag {n}" for lengths in LENGTHS for n in (0, 1)]
    for measurement in measured:
        assert list(measurement.sides) == [OURS, *stepping.TRL.values()] and measurement.ratio > 0


def test_steps_of_more_groups(tmp_path, fork_server, monkeypatch):
    monkeypatch.setattr(scaling, "NUM_GROUPS", (1, 2))
    with nothing_left(), in_use(fork_server):
        measured = scaling.measure_scale(TINY, 2, tmp_path, quiet)
    assert [len(measured.steps[num_groups]) for num_groups in (1, 2)] == [2, 2]
    for num_groups, steps in measured.steps.items():
        assert all(step.amount == num_groups * 2 * 32 and 0 < step.cpu_s for step in steps)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["tokens/generated"] // 64 for line in lines] == [1, 2, 2, 1, 1, 2]  # the order changes each round


def test_memory_of_a_run_beside_bare_sides(tmp_path, fork_server):
    with nothing_left(), in_use(fork_server):
        measured = memory_use.measure_memory(TINY, 1, tmp_path, quiet)
    names = {process.name for process in measured.run}
    assert names == {"ours", "policy-0", "generator_0-0"} and len(measured.bare) == 2
    assert measured.payload == 4 * TINY.shape.num_parameters and 0.1 < measured.ratio < 5  # forks share pages


async def test_both_trainers_compute_the_same_loss(tmp_path):
    from torchtitan_rl.algorithm import presets
    from torchtitan_rl.algorithm.objective import policy_objective

    TINY.write_model(tmp_path / "model")
    batch = training.training_batch(TINY, "skewed", 1)
    bare = training.BareTrainer(TINY, tmp_path / "model")
    bare.step(batch, 2)
    launcher = LocalLauncher(log_dir=str(tmp_path / "logs"), start_timeout_s=120, call_timeout_s=120)
    config = TrainerConfig()
    config.training.seq_len = TINY.context
    model = ModelConfig(assets=str(tmp_path / "model"), shape=TINY.shape, pretrained=True)
    try:
        mesh = await launcher.start_trainer(config, model, role="policy", seed=0)
        policy = MeshTrainingClient(
            mesh, max_tokens_per_microbatch=8192, max_datum_tokens=TINY.context, temperature=1.0, vocab_size=64
        )
        output = await policy.forward_backward(batch, policy_objective(presets.grpo(), batch[0].loss_inputs))
    finally:
        await launcher.stop()
    assert bare.loss == pytest.approx(output.loss, abs=1e-5) and abs(output.loss) > 1e-3


def test_a_side_that_fails_is_named_with_its_log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="side='memcpy': its start: .*NoneType.*; what it printed is in runs/bench-"):
        with opened({"memcpy": partial(syncing._memcpy, None)}, tmp_path / "logs"):
            raise AssertionError("it did not start")
    (log,) = tmp_path.glob("runs/bench-*/memcpy.log")
    assert "Traceback" in log.read_text()


def test_a_side_that_dies_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with opened({"memcpy": partial(syncing._memcpy, TINY)}, tmp_path / "logs") as (side,):
        assert side.once("fixed", 1).amount == 4 * TINY.shape.num_parameters
        os.kill(side._process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"repeat 2 with fixed lengths: its process ended \(-9\)"):
            side.once("fixed", 2)
