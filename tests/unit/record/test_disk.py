"""A failure that is a file system's: its path and the bytes that are free there, in one sentence."""

import errno
import os
import re

import pytest

from torchtitan_rl.record import disk
from torchtitan_rl.record.disk import disk_problem, full_disk


def refused(number: int, *file: str) -> OSError:
    return OSError(number, os.strerror(number), *file)


def free(path) -> int:
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize


def test_an_error_of_a_full_disk_names_its_file_and_one_without_a_file_the_directory(tmp_path):
    file = tmp_path / "not" / "there" / "metrics.jsonl"
    sentence = disk_problem(refused(errno.ENOSPC, str(file)), "/")
    number = re.fullmatch(
        rf"{re.escape(str(file))}: its file system is full \((\d+) bytes are free\); make room there, then go on with "
        "--resume latest",
        sentence,
    )
    assert number and abs(int(number[1]) - free(tmp_path)) < 1 << 30
    assert disk_problem(refused(errno.EDQUOT), tmp_path).startswith(f"{tmp_path}: its file system has no quota left (")


def test_the_cause_is_looked_for_behind_other_errors_in_groups_and_in_texts(tmp_path):
    behind = RuntimeError("the last checkpoint could not be written")
    behind.__cause__ = refused(errno.ENOSPC)
    from_a_process = RuntimeError(f"policy-0.run: {refused(errno.ENOSPC, '/a/b')}")
    for error in (behind, ExceptionGroup("some", [ValueError("x"), behind]), from_a_process):
        assert disk_problem(error, tmp_path).startswith(f"{tmp_path}: its file system is full (")


@pytest.mark.parametrize("error", [RuntimeError("died"), ValueError("x"), refused(errno.ENOENT, "/a"), OSError("x")])
def test_other_errors_are_no_problem_of_a_disk(tmp_path, error):
    assert disk_problem(error, tmp_path) == ""


def test_the_fullest_of_several_directories_is_named(tmp_path):
    fuller = min((tmp_path, "/dev/shm", "/proc"), key=free)
    assert disk_problem(refused(errno.ENOSPC), tmp_path, "/dev/shm", "/proc").startswith(f"{fuller}: ")


def test_a_file_system_is_full_below_the_limit(tmp_path, monkeypatch):
    assert full_disk([tmp_path]) == ""
    monkeypatch.setattr(disk, "FULL_BYTES", 1 << 62)
    assert full_disk([tmp_path]).startswith(f"{tmp_path}: its file system is full (")
