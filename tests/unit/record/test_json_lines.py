import resource
from contextlib import contextmanager

import pyarrow as pa
import pytest

from torchtitan_rl.record.json_lines import append_lines
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.tables import Table


@contextmanager
def room(nbytes):
    """No file of this process can grow beyond so many bytes. As on a full disk, a write that does not fit is cut."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_lines_without_room_leave_nothing_of_them(tmp_path):
    file = tmp_path / "lines.jsonl"
    append_lines(file, b"0123456\n", durable=True)
    with room(12), pytest.raises(OSError, match="too large"):
        append_lines(file, b"abcdefg\n")
    append_lines(file, b"hijklmn\n")
    assert file.read_bytes() == b"0123456\nhijklmn\n"


def test_records_after_a_moment_without_room_are_read_and_sealed(tmp_path):
    table = Table(tmp_path / "table", pa.schema({"step": pa.int32(), "text": pa.string()}))
    table.append([{"step": 1, "text": "a"}])
    with room(30), pytest.raises(OSError, match="too large"):
        table.append([{"step": 2, "text": "b" * 100}])
    table.append([{"step": 3, "text": "c"}])
    table.rotate()
    table.seal()
    assert [record["step"] for record in table.read()] == [1, 3]


def test_metrics_after_a_moment_without_room_are_read(tmp_path):
    run_dir = RunDir.create(tmp_path / "run")
    run_dir.log_metrics({"step": 1, "phase": "reinforcement"})
    with room(50), pytest.raises(OSError, match="too large"):
        run_dir.log_metrics({"step": 2, "phase": "reinforcement"})
    run_dir.log_metrics({"step": 3, "phase": "reinforcement"})
    assert [line["step"] for line in run_dir.read_metrics()] == [1, 3]
