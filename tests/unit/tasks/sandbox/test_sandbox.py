"""Sandboxes of both kinds: files in, commands, files out; and what a machine without bubblewrap is answered."""

import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from torchtitan_rl.tasks.sandbox import bubblewrap, inside
from torchtitan_rl.tasks.sandbox.config import SandboxConfig
from torchtitan_rl.tasks.sandbox.plain import Plain, no_isolation
from torchtitan_rl.tasks.sandbox.sandbox import SandboxError, SandboxLimits

KINDS = [
    "none",
    pytest.param(
        "bubblewrap",
        marks=pytest.mark.skipif(bool(bubblewrap.problem()), reason=f"no bubblewrap here: {bubblewrap.problem()}"),
    ),
]


@pytest.fixture(params=KINDS)
def small(request):
    return SandboxConfig(
        kind=request.param, memory_gib=0.5, max_disk_mib=16, max_output_mib=0.0625, max_processes=20, cpu_s=30
    )


async def test_files_go_in_commands_run_and_files_come_out(small):
    async with small.open({"a.txt": b"3\n", "tests/b.txt": b"4\n"}) as sandbox:
        done = await sandbox.run(
            ["sh", "-c", "cat a.txt tests/b.txt; echo no >&2; printf 7 > sum; exit 2"], timeout_s=20
        )
        assert (done.status, done.stdout, done.stderr, done.limit) == (2, b"3\n4\n", b"no\n", "")
        assert done.tail() == "3 | 4 | no"
        assert (await sandbox.read("sum"), await sandbox.read("tests/b.txt")) == (b"7", b"4\n")
        assert await sandbox.read("product") is None and await sandbox.read("none/at/all") is None
        assert (await sandbox.run(["test", "-e", "none"], timeout_s=20)).status == 1  # reading makes no directories
        await sandbox.write({"a.txt": b"5"})
        assert await sandbox.read("a.txt") == b"5"
        directory = sandbox.directory
    assert not Path(directory).exists()


async def test_a_command_has_its_directory_and_no_environment_but_its_own(small, monkeypatch):
    monkeypatch.setenv("SECRET", "key")
    async with small.open() as sandbox:
        done = await sandbox.run(["sh", "-c", "pwd; env"], timeout_s=20, env={"SEED": "5"}, cwd="home")
    there, *rows = done.stdout.decode().split("\n")
    names = dict(row.split("=", 1) for row in rows if "=" in row)
    assert there == names["HOME"] == names["TMPDIR"] == f"{sandbox.directory}/home" and names["SEED"] == "5"
    assert "SECRET" not in names and Path(names["PATH"].split(":")[0]).is_dir()


@pytest.mark.parametrize(
    "script, timeout_s, limit",
    [
        ("import time; time.sleep(60)", 0.5, "time"),
        ("while True: print('x' * 1000)", 20, "output"),
        ("print('x' * 65536)", 20, "output"),
    ],
)
async def test_a_command_over_a_limit_is_killed_and_says_which(small, script, timeout_s, limit):
    began = time.monotonic()
    async with small.open() as sandbox:
        done = await sandbox.run([sys.executable, "-c", script], timeout_s=timeout_s)
        assert (done.limit, done.status) == (limit, -9) and len(done.stdout) <= 65536
        assert (await sandbox.run(["true"], timeout_s=20)).status == 0  # the next one is not held to account
    assert time.monotonic() - began < 20


async def test_signals_that_mean_the_controller_do_not_end_a_sandbox_but_end_a_command(small):
    async with small.open() as sandbox:
        running = asyncio.create_task(sandbox.run(["sleep", "1"], timeout_s=20))
        if isinstance(sandbox, bubblewrap.Bubblewrap):
            await asyncio.sleep(0.3)
            for number in (signal.SIGTERM, signal.SIGINT):
                sandbox._process.send_signal(number)
        assert (await running).status == 0
        for number in (signal.SIGTERM, signal.SIGPIPE):
            ended = await sandbox.run(["sh", "-c", f"kill -{int(number)} $$; sleep 1"], timeout_s=20)
            assert ended.status == -number


async def test_a_command_that_is_none_has_status_127(small):
    async with small.open() as sandbox:
        done = await sandbox.run(["no-such-program"], timeout_s=20)
    assert done.status == 127 and b"'no-such-program' cannot be started" in done.stdout + done.stderr


def test_the_directory_of_a_file_is_made_for_writing_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(inside, "DIRECTORY", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        inside._parent("none/a", make=False)
    assert not list(tmp_path.iterdir())
    os.close(inside._parent("some/a", make=True)[0])
    assert (tmp_path / "some").is_dir()


async def test_what_cannot_be_executed_or_passed_on_has_status_127(small):
    async with small.open({"plain": b"#!/bin/sh\n"}) as sandbox:
        for command in ([f"{sandbox.directory}/plain"], ["echo", "x" * 2**18], ["echo", "a\0b"]):
            done = await sandbox.run(command, timeout_s=20)
            assert done.status == 127 and b"cannot be started" in done.stdout + done.stderr, command[0]


async def test_surroundings_that_cannot_be_made_are_the_sandboxs_failure_and_not_the_commands(small):
    async with small.open({"home": b""}) as sandbox:
        with pytest.raises(SandboxError, match="home"):
            await sandbox.run(["true"], timeout_s=20, cwd="home")
        for status in (125, 127):
            assert (await sandbox.run(["sh", "-c", f"exit {status}"], timeout_s=20)).status == status
    async with SandboxConfig(kind=small.kind, memory_gib=2.0**40).open() as sandbox:  # more than the kernel can count
        with pytest.raises(SandboxError, match="the surroundings of 'true' cannot be made"):
            await sandbox.run(["true"], timeout_s=20)


async def test_a_second_command_waits_for_the_first(small):
    async with small.open() as sandbox:
        script = "test ! -e busy && touch busy && sleep 0.3 && rm busy"
        both = await asyncio.gather(*(sandbox.run(["sh", "-c", script], timeout_s=20) for _ in range(2)))
        assert [done.status for done in both] == [0, 0]


async def test_a_cancelled_call_breaks_a_sandbox_in_words():
    if reason := bubblewrap.problem():
        pytest.skip(f"no bubblewrap here: {reason}")
    async with SandboxConfig(kind="bubblewrap").open() as sandbox:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sandbox.run(["sleep", "20"], timeout_s=30), 0.3)
        with pytest.raises(SandboxError, match="is closed, because a call was cancelled"):
            await sandbox.run(["true"], timeout_s=20)


async def test_variables_of_the_caller_come_first(small):
    async with small.open() as sandbox:
        done = await sandbox.run(["sh", "-c", "echo $HOME $TMPDIR"], timeout_s=20, env={"HOME": "/x"})
    assert done.stdout.decode().split() == ["/x", sandbox.directory]


@pytest.mark.parametrize("isolated", [False, True])
async def test_a_signal_is_a_negative_status_and_one_process_is_one(isolated):
    if isolated and (reason := no_isolation()):
        pytest.skip(f"no namespaces here: {reason}")
    limits = SandboxLimits(memory_bytes=2**30, disk_bytes=2**24, output_bytes=2**16, processes=1, cpu_s=0.0)
    sandbox = Plain(limits, isolated=isolated)
    try:
        signalled = await sandbox.run(["sh", "-c", "kill -9 $$"], timeout_s=20)
        exited = await sandbox.run(["sh", "-c", "exit 137"], timeout_s=20)
        alone = await sandbox.run(["sleep", "0.6"], timeout_s=20)
        two = await sandbox.run(["sh", "-c", "sleep 20; true"], timeout_s=20)
    finally:
        await sandbox.close()
    assert [(done.status, done.limit) for done in (signalled, exited, alone)] == [(-9, ""), (137, ""), (0, "")]
    assert two.limit == "processes"


async def test_neither_links_nor_pipes_nor_too_much_is_read(small):
    async with small.open({"d/a": b"1"}) as sandbox:
        await sandbox.run(
            ["sh", "-c", "ln -s d/a link; ln -s d way; mkfifo pipe; head -c 2000 /dev/zero > b"], timeout_s=20
        )
        for name in ("link", "way/a", "pipe", "d"):
            with pytest.raises(SandboxError, match=name):
                await sandbox.read(name)
        with pytest.raises(SandboxError, match="way/a"):
            await sandbox.write({"way/a": b"2"})
        with pytest.raises(SandboxError, match="'b' has more than 1999 bytes"):
            await sandbox.read("b", max_bytes=1999)
        assert await sandbox.read("b", max_bytes=2000) == b"\0" * 2000


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../a", "a/../../b", "a//b", "a\0b"])
async def test_names_stay_below_the_directory(small, name):
    async with small.open() as sandbox:
        with pytest.raises(ValueError, match="is no name below the sandbox's directory"):
            await sandbox.read(name)
        with pytest.raises(ValueError, match="is no name below"):
            await sandbox.write({name: b""})


async def test_what_the_config_names_is_seen_and_cannot_be_written(tmp_path):
    if reason := bubblewrap.problem():
        pytest.skip(f"no bubblewrap here: {reason}")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_text("3")
    (tmp_path / "other").write_text("4")
    (tmp_path / "data").chmod(0o755)  # for the user that a sandbox of root's runs as
    script = f"cat {tmp_path}/data/a; touch {tmp_path}/data/b || ls {tmp_path}"
    async with SandboxConfig(kind="bubblewrap", read_only=(str(tmp_path / "data"),)).open() as sandbox:
        done = await sandbox.run(["sh", "-c", script], timeout_s=20)
    assert done.stdout == b"3data\n" and b"Read-only" in done.stderr
    with pytest.raises(ValueError, match="read_only='/no/such': does not exist"):
        async with SandboxConfig(kind="bubblewrap", read_only=("/no/such",)).open():
            pass


def test_a_machine_without_bubblewrap_is_told_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    bubblewrap.problem.cache_clear()
    try:
        with pytest.raises(
            RuntimeError, match=r"task.sandbox.kind='bubblewrap': bwrap is not installed; .*apt install"
        ):
            SandboxConfig(kind="bubblewrap").check("task.sandbox")
        SandboxConfig(kind="none").check("task.sandbox")
    finally:
        bubblewrap.problem.cache_clear()


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"kind": "lxc"}, "sandbox.kind='lxc': there is no such kind; use none, bubblewrap, docker, podman"),
        ({"kind": "docker"}, "sandbox.image='': is no image, and kind 'docker' runs one"),
        ({"kind": "podman", "image": "--privileged"}, "sandbox.image='--privileged': is no image"),
        ({"kind": "bubblewrap", "image": "debian"}, "sandbox.image='debian': kind 'bubblewrap' runs no image"),
        ({"memory_gib": 0}, "sandbox.memory_gib=0: allows nothing"),
        ({"max_processes": -1}, "sandbox.max_processes=-1"),
        ({"max_processes": 32 / 2}, "sandbox.max_processes=16.0: is no whole number"),
        ({"cpu_s": float("inf")}, "sandbox.cpu_s=inf"),
    ],
)
def test_settings_without_meaning_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SandboxConfig(**fields)


@pytest.mark.parametrize("name, message", [("/tmp", "is the sandbox's own"), ("/no/such", "does not exist")])
def test_paths_that_cannot_be_shown_are_refused_before_a_start(name, message):
    with pytest.raises(ValueError, match=f"sandbox.read_only='{name}': {message}"):
        SandboxConfig(kind="bubblewrap", read_only=(name,)).check("task.sandbox")


async def test_plain_leaves_no_directory():
    parent = Path(tempfile.gettempdir()).resolve() / f"torchtitan-rl-agents-{os.geteuid()}"
    async with SandboxConfig().open({"a": b"1"}) as sandbox:
        assert Path(sandbox.directory).parent == parent
    assert not Path(sandbox.directory).exists()
