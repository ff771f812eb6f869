"""A run at lag 2, by actors, and its replay in one process are the same to the last bit, weights included."""

import json
from contextlib import contextmanager

import pytest

from scripts.gpu_checks.engines import random_weights, untrained_dir
from tests.integration.conftest import ROOT, SHORT, watched
from torchtitan_rl import adapters
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.environment import prepare_environment
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.schedule import Schedules, company, engine_files, read_schedule, schedule_of, since_load
from torchtitan_rl.types import Request, SamplingParams

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("forked")]

LAG = [
    *("--algorithm.max-policy-lag", "2", "--algorithm.batch-order", "finished", "--controller.num-steps", "5"),
    *("--sampling.max-tokens", "40", "--controller.checkpoint-every", "2"),  # so long that loads meet requests
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("replay") / "run"
    watched(["train", str(ROOT / "configs" / "quickstart.py"), *SHORT, *LAG, "--record.diagnose", "False"], path)
    return path


def test_a_replay_in_one_process_is_the_run_to_the_last_bit_also_while_batches_are_weighed(recorded, tmp_path):
    arguments = ["--to", "4", "--verify", "--influence", "--backend", "local"]
    replayed = watched(["replay", str(recorded), *arguments], tmp_path / "replay")
    assert "the same: 4 batches, 64 rollouts" in replayed.stdout
    weighed = [json.loads(line) for line in (tmp_path / "replay" / "influence.jsonl").read_text().splitlines()]
    assert [of_batch["step"] for of_batch in weighed] == [1, 2, 3, 4] and all(
        0 < abs(of["alignment"]) < 1 for of in weighed
    )
    assert RunDir(tmp_path / "replay").read_metrics()[-1]["step"] == 4
    entries = [list(read_schedule(engine_files(schedule_of(path, 1))[0])) for path in (recorded, tmp_path / "replay")]
    was, is_now = ([(e.iteration, e.unfinished, e.version, e.weights) for e in of_run] for of_run in entries)
    assert len(is_now) > 8 and is_now == was[: len(is_now)]


def test_a_replay_from_a_checkpoint_is_the_run_although_requests_were_under_way(recorded, tmp_path):
    replayed = watched(["replay", str(recorded), "--from", "2", "--verify", "--backend", "local"], tmp_path / "replay")
    assert "the same: 3 batches, 48 rollouts" in replayed.stdout
    lines = RunDir(tmp_path / "replay").read_metrics()
    assert [line["step"] for line in lines if line["phase"] == "reinforcement"] == [3, 4, 5]
    assert [line["step"] for line in lines if line["phase"] == "evaluation"][0] == 2  # beside the checkpoint


def test_bad_input_changes_nothing_on_disk(recorded, tmp_path, here):
    environment = schedule_of(recorded, 1) / "environment.json"
    text, replay = environment.read_text(), tmp_path / "replay"
    files = {file: file.stat().st_mtime_ns for file in recorded.rglob("*")}
    arguments = ["replay", str(recorded), "--backend", "local", "--output-dir", str(replay)]
    refused = here(*arguments, "--to", "77")
    assert refused.returncode == 1 and "--to=77: no batch of the run ended at that step" in refused.stderr
    environment.write_text(text.replace('"cores": ', '"cores": 9').replace('"torch": "', '"torch": "0.'))
    try:
        refused = here(*arguments)
    finally:
        environment.write_text(text)
    assert refused.returncode == 1 and ": ran with cores 9" in refused.stderr and "torch '0.2" in refused.stderr
    files.pop(environment)
    assert not replay.exists() and files == {file: file.stat().st_mtime_ns for file in files}


OLD, NEW = [20, 31, 27, 44] * 33, [44, 20, 9] * 44  # 132 tokens: a block of the cache and a bit


def request(seed, prompt, max_tokens, **params):
    return Request(prompt, SamplingParams(max_tokens=max_tokens, seed=seed, **params), number=seed)


@pytest.fixture(scope="module")
def engine_parts(tmp_path_factory):
    """A model directory without weights, and three versions of its weights."""
    model = load_config(str(ROOT / "configs" / "quickstart.py")).model
    versions = {version: random_weights(model, "float32", seed=version) for version in (1, 2, 3)}
    for weights in versions.values():
        weights["norm.weight"] *= 6  # random weights alone draw all tokens nearly alike
    return untrained_dir(tmp_path_factory.mktemp("model"), model), versions


@contextmanager
def by_hand(directory, schedules):
    """An engine without its thread: the test takes each step."""
    prepare_environment()
    adapters.prepare_vllm(eager=True)
    from torchtitan_rl.engine.engine import Engine
    from torchtitan_rl.engine.vllm_internals import shut_down

    config = GeneratorConfig(dtype="float32", max_model_len=192, max_num_seqs=10, kv_cache_gib=0.25)
    engine = Engine(config, ModelConfig(assets=str(directory)), seed=0, rank=0, schedules=schedules)
    engine._engine = engine._build()
    try:
        yield engine
    finally:
        shut_down(engine._engine)


def ended(engine, futures):
    while not all(future.done() for future in futures):
        engine._iterate()
    return [future.result() for future in futures]


def test_an_engine_begins_at_a_load_in_the_company_of_what_was_under_way(engine_parts, tmp_path):
    directory, versions = engine_parts

    def load(engine, *numbers):
        for number in numbers:
            engine.stage(number, versions[number])
            engine.load(number)

    # The lengths are mixed: rows of the batch are free at the load, and have been filled again before it.
    old = [request(1 + i, OLD[: 132 - 9 * i], most) for i, most in enumerate((30, 2, 25, 6, 40, 6, 12, 31))]
    old[2].params.temperature = 0.0
    queued = [request(20 + i, OLD, 9 + i) for i in range(4)]
    new = [request(40 + i, NEW[: 132 - i], 12 + 3 * i) for i in range(6)]
    newer = [request(60 + i, NEW, 10) for i in range(3)]
    with by_hand(directory, Schedules(directory=str(tmp_path / "run"))) as engine:
        load(engine, 1)
        futures = engine.submit(old[:5])
        for _ in range(3):
            engine._iterate()
        futures += engine.submit(old[5:])
        for _ in range(3):
            engine._iterate()
        futures += engine.submit(queued)  # nothing of them is computed at the load, and the cache has their prompt
        load(engine, 2)
        engine.cancel([queued[1].number])  # its caller has gone before its first step
        recorded = engine.submit(new)
        for _ in range(4):
            engine._iterate()
        engine.cancel([old[4].number, new[3].number, 9999])
        for _ in range(4):
            engine._iterate()
        load(engine, 3)
        recorded += engine.submit(newer)
        ended(engine, [*futures, *recorded])
        recorded = [future.result() for future in recorded]
        assert [futures[4].result(), futures[9].result(), recorded[3]] == [None] * 3 and None not in recorded[:3]
    (file,) = engine_files(tmp_path / "run")
    first = since_load(list(read_schedule(file)), 2)
    rows = [tuple(row) for row in first[0].under_way]
    assert (0, 0) in rows and sum(len(row) == 3 for row in rows) == 4 and len(rows) > 8
    assert max(companion.num_computed for companion in company(first) if companion.waits) == 128
    answered = [answer for answer in recorded if answer is not None]
    assert {version for answer in answered for version in answer.policy_versions} == {2, 3}
    assert [entry.cancelled for entry in first if entry.cancelled] == [[21], [5, 43]]

    schedules = Schedules(directory=str(tmp_path / "replay"), followed={"generator-0": str(file)}, after_load=2)
    with by_hand(directory, schedules) as engine:
        load(engine, 2, 3)
        assert ended(engine, engine.submit([*newer, *new])) == [*recorded[6:], *recorded[:6]]
        load(engine, 2)
        alone = ended(engine, engine.submit(new))
    assert alone != recorded[:6]  # the company matters
