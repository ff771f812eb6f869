"""What people see, on a terminal and in a file."""

import io
import re

import pytest

from torchtitan_rl.observability.progress import Bar, Progress


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock():
    return Clock()


def test_time_left_follows_the_pace_so_far(clock):
    bar = Bar("supervised", 10, clock, lambda bar: None)
    assert bar.left_s is None and bar.fraction == 0.0
    clock.now += 6
    bar.advance(3)
    assert bar.left_s == 14.0  # 2 s each, 7 to go
    clock.now += 1
    assert (bar.elapsed_s, bar.left_s, bar.count) == (7.0, 13.0, "3/10")
    clock.now += 50
    assert bar.left_s == 0.0


def test_time_left_of_a_wait(clock):
    bar = Bar("start", 20, clock, lambda bar: None, counts=False)
    clock.now += 5
    assert (bar.left_s, bar.fraction, bar.count) == (15.0, 0.25, "")
    clock.now += 20
    assert (bar.left_s, bar.fraction) == (0.0, 1.0)
    unknown = Bar("start", 0, clock, lambda bar: None, counts=False)
    assert (unknown.left_s, unknown.fraction) == (None, None)


def test_a_file_gets_a_line_every_5_seconds_and_one_at_the_end(clock):
    out = io.StringIO()
    progress = Progress(file=out, clock=clock)
    with progress.phase("supervised", total=120) as bar:
        for step in range(1, 121):
            clock.now += 0.125
            bar.advance(text=f"loss {step}")
    assert out.getvalue().splitlines() == [
        "supervised 40/120, 0:05, 0:10 left, loss 40",
        "supervised 80/120, 0:10, 0:05 left, loss 80",
        "supervised: 120/120 done in 15.0 s, loss 120",
    ]


def test_lines_are_always_printed_as_they_are(clock):
    out = io.StringIO()
    progress = Progress(file=out, clock=clock)
    long = "[red]x[/red] :smile: 0.5 " + "word " * 100
    with progress.phase("supervised", total=2):
        progress.line(long)
    assert out.getvalue() == f"{long}\nsupervised: 0/2 done in 0.0 s\n"


def test_no_control_codes_outside_a_terminal(clock, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    progress = Progress(file=out, clock=clock)
    with progress.waiting("starting", expected_s=20):
        clock.now += 3
    progress.final_table([("accuracy", "0.31 -> 0.93")])
    assert "\x1b" not in out.getvalue() and "\r" not in out.getvalue()
    assert out.getvalue().startswith("starting: about 20 s\nstarting: done in 3.0 s\n")
    assert re.search(r"accuracy\W+0\.31 -> 0\.93", out.getvalue())


def test_an_inner_phase_leaves_no_line_unless_it_fails(clock):
    out = io.StringIO()
    progress = Progress(file=out, clock=clock)
    with pytest.raises(RuntimeError), progress.phase("reinforcement", total=9) as outer:
        outer.advance(text="reward 0.5")
        with progress.phase("evaluation", total=1) as inner:
            inner.advance()
        with progress.phase("evaluation", total=2):
            raise RuntimeError
    assert out.getvalue() == (
        "evaluation: 0/2 stopped after 0.0 s\nreinforcement: 1/9 stopped after 0.0 s, reward 0.5\n"
    )


def test_quiet_prints_errors_and_the_final_table(clock, capsys):
    out = io.StringIO()
    progress = Progress(quiet=True, file=out, clock=clock)
    with progress.waiting("starting"):
        progress.line("hello")
    with progress.phase("supervised", total=1) as bar:
        clock.now += 60
        bar.advance(text="loss 1")
    progress.final_table([("a", "b")])
    progress.error("it broke")
    assert out.getvalue() == "╭───┬───╮\n│ a │ b │\n╰───┴───╯\n"
    assert capsys.readouterr() == ("", "it broke\n")


def test_a_terminal_gets_a_bar_that_vanishes_and_lines_that_stay(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    progress = Progress(file=out, clock=clock)
    with progress.phase("supervised", total=4) as bar:
        clock.now += 2
        bar.advance(text="loss [0.5]")
        progress.line("a line above")
        with progress.phase("evaluation", total=1):
            progress.line("another")
    shown = out.getvalue()
    assert "1/4 0:02, 0:06 left loss [0.5]" in shown
    assert "a line above\n" in shown and "evaluation" in shown
    assert shown.endswith("supervised: 1/4 done in 2.0 s, loss [0.5]\n")
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is hidden once and given back
