"""A run at lag 2, by actors, and its replay in one process are the same to the last bit, weights included."""

import json

import pytest

from tests.integration.conftest import ROOT, SHORT, watched
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.schedule import engine_files, read_schedule, schedule_of

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("forked")]

LAG = ["--algorithm.max-policy-lag", "2", "--algorithm.batch-order", "finished", "--controller.num-steps", "5"]


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
    assert [of_batch["step"] for of_batch in weighed] == [1, 2, 3, 4] and any(of_batch["gain"] for of_batch in weighed)
    assert RunDir(tmp_path / "replay").read_metrics()[-1]["step"] == 4
    entries = [list(read_schedule(engine_files(schedule_of(path, 1))[0])) for path in (recorded, tmp_path / "replay")]
    was, is_now = ([(e.iteration, e.unfinished, e.version, e.weights) for e in of_run] for of_run in entries)
    assert len(is_now) > 8 and is_now == was[: len(is_now)]


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
