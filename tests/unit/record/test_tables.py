"""Tables of records: JSON lines that become Parquet, whatever a crash interrupts."""

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchtitan_rl.record.tables import Table

SCHEMA = pa.schema(
    {
        "step": pa.int32(),
        "text": pa.string(),
        "reward": pa.float64(),
        "parts": pa.map_(pa.string(), pa.float64()),
        "turns": pa.list_(pa.struct({"tokens": pa.list_(pa.int32()), "logprobs": pa.list_(pa.float64())})),
    }
)
FULL = {
    "step": 3,
    "text": "abc \u00e9\u2028\n",
    "reward": 1 / 3,
    "parts": {"exact": 1e-300, "format": math.inf},
    "turns": [{"tokens": [4, 5], "logprobs": [-0.1, -math.inf]}, {"tokens": [], "logprobs": []}],
}


def test_a_record_read_back_is_the_record_that_was_written_before_and_after_sealing(tmp_path):
    table = Table(tmp_path / "rollouts", SCHEMA)
    assert not table and list(table.read()) == []
    table.append([FULL, {"step": 4}])
    expected = [FULL, {"step": 4, "text": None, "reward": None, "parts": None, "turns": None}]
    assert table and list(table.read()) == expected
    table.rotate()
    table.seal()
    assert [file.name for file in table.directory.iterdir()] == ["000001.parquet"]
    assert list(table.read()) == expected
    table.append([{"step": 5}])
    assert [file.name for file in sorted(table.directory.iterdir())] == ["000001.parquet", "000002.jsonl"]
    assert [record["step"] for record in Table(table.directory, SCHEMA).read()] == [3, 4, 5]


def test_other_programs_read_a_part_by_its_columns(tmp_path):
    table = Table(tmp_path / "rollouts", SCHEMA)
    table.append([FULL])
    assert json.loads((table.directory / "000001.jsonl").read_text())["parts"]["format"] == "Infinity"
    table.rotate()
    table.seal()
    assert pq.read_table(table.directory).column("reward").to_pylist() == [1 / 3]


def test_a_part_that_grows_is_not_sealed_and_rotating_without_records_begins_none(tmp_path):
    table = Table(tmp_path / "ledger", SCHEMA)
    table.rotate()
    table.seal()
    assert not table
    table.append([{"step": 1}])
    table.seal()
    assert [file.name for file in table.directory.iterdir()] == ["000001.jsonl"]
    table.rotate()
    table.rotate()
    table.append([{"step": 2}])
    assert [file.name for file in sorted(table.directory.iterdir())] == ["000001.jsonl", "000002.jsonl"]


def test_a_crash_while_sealing_leaves_every_record_once(tmp_path):
    table = Table(tmp_path / "ledger", SCHEMA)
    table.append([{"step": 1}])
    lines = (table.directory / "000001.jsonl").read_text()
    table.rotate()
    table.seal()
    (table.directory / "000001.jsonl").write_text(lines)  # killed before the JSON lines were removed
    (table.directory / "000002.writing").write_bytes(b"PAR1 half")  # killed while it was written
    (table.directory / "000002.jsonl").write_text('{"step": 2}\n{"st')  # killed in the middle of a line
    table = Table(table.directory, SCHEMA)
    assert [record["step"] for record in table.read()] == [1, 2]
    table.append([{"step": 3}])
    table.rotate()
    table.seal()
    assert [record["step"] for record in table.read()] == [1, 2, 3]
    assert {file.suffix for file in table.directory.iterdir()} == {".parquet"}


def test_text_that_is_no_unicode_is_kept_as_question_marks(tmp_path):
    table = Table(tmp_path / "rollouts", SCHEMA)
    table.append([{"text": "a\udc80"}])
    assert [record["text"] for record in table.read()] == ["a?"]
    table.rotate()
    table.seal()
    assert [record["text"] for record in table.read()] == ["a?"]


def test_a_column_that_the_schema_lacks_is_refused(tmp_path):
    table = Table(tmp_path / "ledger", SCHEMA)
    with pytest.raises(ValueError, match="table=ledger: has no column rewards; its columns are step, text"):
        table.append([{"rewards": 1.0}])
    assert not table


def test_a_value_that_does_not_fit_its_column_is_named(tmp_path):
    table = Table(tmp_path / "rollouts", SCHEMA)
    table.append([{"step": 1, "text": "\ud800"}, {"step": 2, "text": 7}])
    with pytest.raises(RuntimeError, match=r"000001.jsonl, line 2, column text: is no string .*; remove that line"):
        list(table.read())
    table.rotate()
    with pytest.raises(RuntimeError, match=r"line 2, column text: is no string"):
        table.seal()
    assert table.files()[0].suffix == ".jsonl"
    numbers = Table(tmp_path / "ledger", SCHEMA)
    numbers.append([{"step": "one", "text": "\ud800"}])
    numbers.rotate()
    with pytest.raises(RuntimeError, match="000001.jsonl: does not fit the columns of the table"):
        numbers.seal()


def test_a_line_that_is_no_text_is_named(tmp_path):
    table = Table(tmp_path / "rollouts", SCHEMA)
    table.append([FULL])
    with open(table.directory / "000001.jsonl", "ab") as file:
        file.write(b'{"step": 4, "text": "\xff"}\n')
    with pytest.raises(RuntimeError, match=r"000001.jsonl, line 2: is not JSON .*byte 0xff.*; remove that line"):
        list(table.read())
