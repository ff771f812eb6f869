"""Who writes what where. Logging belongs to a process, so most tests have a process of their own."""

import logging
import re
import subprocess
import sys
import textwrap

from torchtitan_rl.record.console.log_records import ConsoleHandler


def run(tmp_path, code, call="setup_rank_logging(log_dir, 'trainer', 1, 2, 'INFO', device='cpu')"):
    """(stderr, lines of the log file) of a process that sets up logging and runs the code."""
    program = (
        f"import logging, sys, warnings\nfrom torchtitan_rl.record.logs import setup_rank_logging\n"
        f"log_dir = {str(tmp_path / 'logs')!r}\nfile = {call}\n{textwrap.dedent(code)}"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr, (tmp_path / "logs" / "trainer-1.log").read_text().splitlines()


def test_the_first_line_says_who_it_is(tmp_path):
    stderr, lines = run(tmp_path, "logging.getLogger('torchtitan_rl.x').info('hello')")
    assert re.search(r" INFO \S+: trainer rank 1 of 2, pid \d+, host \S+, device cpu$", lines[0])
    assert lines[1].endswith(" INFO torchtitan_rl.x: hello") and len(lines) == 2
    assert stderr == ""


def test_the_first_line_is_there_at_any_level_and_the_device_is_found(tmp_path):
    stderr, lines = run(
        tmp_path, "logging.getLogger('x').warning('no')", "setup_rank_logging(log_dir, 'trainer', 1, 2, 'ERROR')"
    )
    assert re.search("trainer rank 1 of 2, .*, device (cpu|cuda:1)$", lines[0])
    assert len(lines) == 1 and stderr == ""


def test_warnings_reach_the_console_too(tmp_path):
    stderr, lines = run(tmp_path, "logging.getLogger('torchtitan_rl.x').warning('careful')")
    assert stderr == "trainer-1 WARNING torchtitan_rl.x: careful\n"
    assert lines[1].endswith(" WARNING torchtitan_rl.x: careful")


def test_third_parties_are_quiet_on_the_console_until_something_is_an_error(tmp_path):
    stderr, lines = run(
        tmp_path,
        """
        for name in ("vllm.engine", "torch._dynamo", "root"):
            logging.getLogger(None if name == "root" else name).warning("noise")
        logging.getLogger("vllmish").warning("mine")
        logging.getLogger("vllm").error("broken")
    """,
    )
    assert stderr == "trainer-1 WARNING vllmish: mine\ntrainer-1 ERROR vllm: broken\n"
    assert sum("noise" in line for line in lines) == 3 and len(lines) == 6


def test_python_warnings_are_captured_and_shown_unless_an_installed_package_is_to_blame(tmp_path):
    stderr, lines = run(
        tmp_path,
        """
        warnings.warn("ours")
        warnings.warn_explicit("theirs", UserWarning, "/x/site-packages/y.py", 3)
    """,
    )
    assert "ours" in stderr and "theirs" not in stderr
    assert any("ours" in line for line in lines) and any("UserWarning: theirs" in line for line in lines)


def test_a_second_call_changes_nothing_but_adopts_packages_with_handlers_of_their_own(tmp_path):
    stderr, lines = run(
        tmp_path,
        """
        theirs = logging.getLogger("transformers")
        theirs.addHandler(logging.StreamHandler())
        theirs.propagate = False
        logging.getLogger().addHandler(logging.StreamHandler(sys.stdout))
        assert setup_rank_logging(log_dir, "generator", 0, 1, "INFO") == file
        theirs.warning("special tokens")
        logging.getLogger("ours").warning("once")
    """,
    )
    assert stderr == "trainer-1 WARNING ours: once\n"
    assert [line.split(": ")[-1] for line in lines[1:]] == ["special tokens", "once"]
    assert not (tmp_path / "logs" / "generator-0.log").exists()


def test_the_next_run_of_a_process_has_a_log_of_its_own(tmp_path):
    stderr, lines = run(
        tmp_path,
        """
        logging.getLogger("ours").warning("first")
        after = setup_rank_logging(log_dir + "2", "trainer", 1, 2, "INFO", device="cpu")
        logging.getLogger("ours").warning("second")
    """,
    )
    others = (tmp_path / "logs2" / "trainer-1.log").read_text().splitlines()
    assert [len(lines), len(others)] == [2, 2] and "trainer rank 1 of 2" in others[0]
    assert (lines[1].split(": ")[-1], others[1].split(": ")[-1]) == ("first", "second")
    assert stderr == "trainer-1 WARNING ours: first\ntrainer-1 WARNING ours: second\n"


def test_a_replaced_process_appends(tmp_path):
    run(tmp_path, "")
    _, lines = run(tmp_path, "")
    assert len(lines) == 2 and all("trainer rank 1 of 2" in line for line in lines)


def test_an_unknown_level(tmp_path):
    run(
        tmp_path,
        """
        try:
            setup_rank_logging(log_dir, "trainer", 1, 2, "LOUD")
        except ValueError as error:
            assert "log level='LOUD': is not known; use DEBUG, INFO, WARNING or ERROR" == str(error)
        else:
            raise AssertionError
    """,
    )


def test_the_console_is_the_present_stderr(capsys):
    """A progress bar puts itself in place of it."""
    handler = ConsoleHandler(logging.WARNING)
    handler.emit(logging.LogRecord("x", logging.WARNING, "a.py", 1, "careful", None, None))
    assert capsys.readouterr().err == "careful\n"
