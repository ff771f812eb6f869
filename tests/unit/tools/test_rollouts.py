"""Questions about recorded rollouts, in Parquet and in JSON lines that grow."""

import json

import duckdb
import pytest

from tests.kit.runs import group, made_run, write_step
from torchtitan_rl.record import attempts
from torchtitan_rl.record.attempts import read_rollouts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tools.rollout_parts import COLUMNS, RolloutParts
from torchtitan_rl.tools.rollouts import Query, Rollouts


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    return made_run(tmp_path / "run")


def ids(rollouts, **query):
    return [row["rollout_id"] for row in rollouts.find(Query(**query)).rows]


def known(value):
    """A record without what it lacks: a line leaves out what a Parquet file has as null."""
    if isinstance(value, dict):
        return {name: known(item) for name, item in value.items() if item is not None}
    return [known(item) for item in value] if isinstance(value, list) else value


def test_both_forms_of_a_part_are_listed_newest_first(run_dir):
    found = Rollouts(run_dir).find(Query())
    assert [row["rollout_id"] for row in found.rows] == [r["rollout_id"] for r in read_rollouts(run_dir)][::-1]
    assert (found.total, found.notes) == (12, [])
    row = found.rows[3]
    assert (row["step"], row["num_tokens"], row["num_turns"], row["text"]) == (3, 3, 2, "answer 3 is Right")
    assert {type(row["part"]) for row in found.rows} == {int} and len({row["part"] for row in found.rows}) == 2


def test_lists_are_searched_filtered_sorted_and_cut_into_pages(run_dir):
    rollouts = Rollouts(run_dir)
    assert ids(rollouts, text="IS right") == ["6/0/0", "4/0/0", "2/0/0"]
    assert ids(rollouts, text="prompt 7") == ["7/0/1", "7/0/0"] and ids(rollouts, text="no such") == []
    assert ids(rollouts, text="100%_") == []  # nothing is a pattern
    assert ids(rollouts, reason="zero_variance", step_max=1) == ["3/0/1", "3/0/0"]
    assert len(ids(rollouts, reason="trained")) == 6 and ids(rollouts, reason="masked") == []
    assert len(ids(rollouts, reason="stop")) == 12 and ids(rollouts, tokens_min=4) == []
    assert ids(rollouts, reward_min=0.75, descending=False) == ["2/0/0", "4/0/0", "6/0/0"]
    assert ids(rollouts, task="TRAIN/4", sort="reward") == ["4/0/0", "4/0/1"]
    assert ids(rollouts, group="5/0", descending=False) == ["5/0/0", "5/0/1"]
    page = rollouts.find(Query(per_page=5, page=3))
    assert (len(page.rows), page.total) == (2, 12)
    past = rollouts.find(Query(per_page=5, page=9))
    assert (past.rows, past.total) == ([], 12)
    assert rollouts.find(Query(text="is right", page=2)).total == 3
    with pytest.raises(ValueError, match="sort='text'"):
        rollouts.find(Query(sort="text"))


def test_one_rollout_is_the_record_that_was_written(run_dir):
    rollouts, written = Rollouts(run_dir), {r["rollout_id"]: r for r in read_rollouts(run_dir)}
    for rollout_id in ("2/0/1", "6/0/1"):  # in Parquet, in JSON lines
        found = rollouts.complete(rollout_id)
        assert known(found) == known(written[rollout_id])
    assert rollouts.complete("99/0/0") is None
    assert [row["rollout_id"] for row in rollouts.siblings("2/0")] == ["2/0/0", "2/0/1"]
    assert rollouts.steps() == [1, 2, 3] and rollouts.reasons()[0] == "stop"
    first, second = rollouts.groups(2)
    assert (first["group_id"], first["rewards"], second["left_out"]) == ("4/0", [1.0, 0.0], "zero_variance")


def test_what_is_written_meanwhile_is_seen_once_its_line_is_complete(run_dir):
    rollouts = Rollouts(run_dir)
    assert rollouts.find(Query()).total == 12
    write_step(run_dir, 4, [group(8, ["new"], [1.0])])
    part = run_dir.path / "rollouts" / "000002.jsonl"
    with open(part, "a") as file:
        file.write('{"step": 4, "rollout_id": "9/0/0"')
    assert ids(rollouts, step_min=4) == ["8/0/0"] and ids(rollouts, text="new") == ["8/0/0"]
    with open(part, "a") as file:
        file.write(', "attempt": 1, "text": "whole"}\n')
    assert ids(rollouts, text="whole") == ["9/0/0"]


def test_a_part_that_becomes_parquet_keeps_its_rollouts(run_dir):
    rollouts = Rollouts(run_dir)
    before = ids(rollouts)
    run_dir.tables["rollouts"].rotate()
    run_dir.tables["rollouts"].seal()
    assert ids(rollouts) == before and ids(rollouts, text="3 is right") == ["6/0/0"]
    assert rollouts.complete("6/0/1")["turns"][0]["tokens"] == [3, 4]


def test_rollouts_of_steps_that_were_taken_again_are_left_out(run_dir):
    attempts.begin(run_dir, "step-1", "reinforcement", 1)
    write_step(run_dir, 2, [group(4, ["again"], [1.0])])
    rollouts = Rollouts(run_dir)
    found = rollouts.find(Query(descending=False))
    assert [(r["step"], r["attempt"]) for r in found.rows] == [(1, 1)] * 4 + [(2, 2)]
    assert found.notes == ["8 rollouts of steps that a later attempt took again are left out"]
    assert rollouts.complete("4/0/0")["text"] == "again" and rollouts.complete("6/0/0") is None
    assert rollouts.steps() == [1, 2] and len(rollouts.groups(2)) == 1


def test_what_cannot_be_read_is_named_and_the_rest_is_shown(run_dir):
    directory = run_dir.path / "rollouts"
    (directory / "000007.parquet").write_bytes(b"PAR1 cut off")
    (directory / "000008.jsonl").write_text(
        'no json\n{"step": 9, "rollout_id": "r", "num_tokens": "?", "novel": [1]}\n[]\n'
    )
    rollouts = Rollouts(run_dir)
    found = rollouts.find(Query())
    assert found.total == 13 and found.rows[0]["rollout_id"] == "r" and found.rows[0]["num_tokens"] is None
    assert len(found.notes) == 2 and "000007.parquet: cannot be read" in found.notes[0]
    assert rollouts.complete("r")["novel"] == [1]


def test_what_follows_a_line_that_is_no_json_is_read_however_often_one_looks(tmp_path):
    (tmp_path / "rollouts").mkdir()
    lines = [json.dumps({"step": 1, "rollout_id": str(i)}) for i in range(1200)]
    (tmp_path / "rollouts" / "000001.jsonl").write_text("\n".join(["no json", *lines]) + "\n")
    connection = duckdb.connect(":memory:")
    parts = RolloutParts(tmp_path / "rollouts", connection, COLUMNS)
    for _ in range(4):
        parts.refresh(limit_s=0.0)  # 500 lines each time
    assert connection.execute("select count(*) from records").fetchone() == (1200,)
    assert (list(parts.notes.values()), parts.pending_bytes) == (["rollouts/000001.jsonl: a line is no JSON"], 0)


@pytest.mark.parametrize("line", ["no json", '{"attempt": 3, "phase": "reinforcement"}', "[]"])
def test_damaged_attempts_leave_no_rollout_out_and_are_named(run_dir, line):
    attempts.begin(run_dir, "step-1", "reinforcement", 1)
    part = max((run_dir.path / "attempts").iterdir())
    part.write_text(line + "\n" + part.read_text())
    found = Rollouts(run_dir).find(Query())
    assert found.total == 12 and len(found.notes) == 1
    assert found.notes[0].startswith("attempts: cannot be read (") and "are shown too" in found.notes[0]


def test_a_directory_may_have_any_name(tmp_path):
    rollouts = Rollouts(made_run(tmp_path / "lr=[0-1]*" / "step=3?" / "run"))
    assert ids(rollouts, text="1 is right") == ["2/0/0"] and rollouts.find(Query()).rows[-1]["step"] == 1
    record = rollouts.complete("2/0/0")
    assert record["step"] == 1 and "lr" not in record and "filename" not in record


def test_a_run_without_rollouts_has_none(tmp_path):
    rollouts = Rollouts(RunDir(tmp_path))
    assert rollouts.find(Query(text="x")).rows == [] and rollouts.steps() == [] and rollouts.groups(1) == []
    assert rollouts.complete("0/0/0") is None


def test_a_key_or_a_text_called_turns_hides_nothing(tmp_path):
    run_dir = RunDir.create(tmp_path)
    (run_dir.path / "rollouts").mkdir()
    records = [
        {"step": 1, "text": 'he said, "turns": 3', "turns": [{"tokens": [1]}], "reward": 1.0, "rollout_id": "after"},
        {"step": 1, "reward_parts": {"a": 1, "turns": 2}, "rollout_id": "nested", "reward": 2.0},
    ]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (run_dir.path / "rollouts" / "000001.jsonl").write_text(text)
    nested, after = Rollouts(run_dir).find(Query()).rows
    assert (nested["rollout_id"], nested["reward"], after["reward"], after["text"]) == (
        *("nested", 2.0, 1.0),
        'he said, "turns": 3',
    )


def test_old_records_need_no_newer_columns(tmp_path):
    run_dir = RunDir.create(tmp_path)
    (run_dir.path / "rollouts").mkdir()
    old = {"step": 1, "attempt": 1, "rollout_id": "0/0/0", "text": "a", "reward": "NaN"}
    (run_dir.path / "rollouts" / "000001.jsonl").write_text(json.dumps(old) + "\n")
    (row,) = Rollouts(run_dir).find(Query()).rows
    assert row["reward"] != row["reward"] and row["masked"] is None and row["group_id"] is None
