import resource
from contextlib import contextmanager

import pyarrow as pa
import pytest

from torchtitan_rl.record.checksums import Checksums
from torchtitan_rl.record.json_lines import append_lines, replace_text
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.schedule import ScheduleFile, read_schedule
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


def test_checksums_after_a_moment_without_room_are_read(tmp_path):
    checksums, file = Checksums(tmp_path), tmp_path / "file"
    for content, nbytes in (("a", 1000), ("b", 90), ("c", 1000)):
        file.write_text(content)
        with room(nbytes):
            checksums.replace(file)
    assert Checksums(tmp_path).problems() == []


def test_a_schedule_after_a_moment_without_room_is_read(tmp_path):
    schedule = ScheduleFile(str(tmp_path), "generator-0")
    schedule.loaded(0, 0, 1, "00000001", ["embedding"])
    with room(schedule.path.stat().st_size + 10), pytest.raises(OSError, match="too large"):
        schedule.loaded(1, 0, 2, "00000002", ["embedding"])
    schedule.loaded(2, 0, 3, "00000003", ["embedding"])
    assert [entry.version for entry in read_schedule(schedule.path)] == [1, 3]


def test_a_text_that_has_no_room_leaves_the_one_before(tmp_path):
    file = tmp_path / "config.json"
    replace_text(file, "{}")
    with room(10), pytest.raises(OSError, match="too large"):
        replace_text(file, "x" * 100)
    assert file.read_text() == "{}"


def test_metrics_after_a_moment_without_room_are_read(tmp_path):
    run_dir = RunDir.create(tmp_path / "run")
    run_dir.log_metrics({"step": 1, "phase": "reinforcement"})
    with room(50), pytest.raises(OSError, match="too large"):
        run_dir.log_metrics({"step": 2, "phase": "reinforcement"})
    run_dir.log_metrics({"step": 3, "phase": "reinforcement"})
    assert [line["step"] for line in run_dir.read_metrics()] == [1, 3]
