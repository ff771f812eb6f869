"""What people see, on a terminal and in a file."""

import io
import json
import re
import subprocess
import sys
from datetime import datetime

import pytest
from rich.console import Console

from tests.kit.clock import Clock
from torchtitan_rl.record.console.display import Display
from torchtitan_rl.record.console.json_progress import JsonProgress
from torchtitan_rl.record.console.progress import Bar, Progress, _times
from torchtitan_rl.record.console.step_numbers import LiveTable
from torchtitan_rl.record.recorder import Metrics, Note, Recorder


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
    assert bar.left_s == 12.0  # the fourth is late: nobody knows for how long, and 6 come after it
    bar.advance(6)
    pace = 57 / 9
    assert bar.left_s == pytest.approx(pace)
    clock.now += 2 * pace
    assert bar.left_s is None
    bar.advance()
    assert bar.left_s is None and bar.count == "10/10"


def test_time_left_of_a_wait(clock):
    bar = Bar("start", 20, clock, lambda bar: None, counts=False)
    clock.now += 5
    assert (bar.left_s, bar.fraction, bar.count) == (15.0, 0.25, "")
    clock.now += 20
    assert (bar.left_s, bar.fraction) == (None, 1.0)
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


def test_pieces_that_were_done_before_say_nothing_of_the_pace(clock):
    out = io.StringIO()
    progress = Progress(file=out, clock=clock)
    with progress.phase("reinforcement", total=8, done=5) as bar:
        assert bar.left_s is None
        for _ in range(3):
            clock.now += 10
            bar.advance(text="reward 0.5")
    assert out.getvalue().splitlines() == [
        "reinforcement 6/8, 0:10, 0:20 left, reward 0.5",
        "reinforcement 7/8, 0:20, 0:10 left, reward 0.5",
        "reinforcement: 8/8 (from 5) done in 30.0 s, reward 0.5",
    ]


@pytest.mark.parametrize("seconds", [0.05, 0.4, 1.0, 7.0])
def test_time_left_is_never_nothing_while_something_goes_on(clock, seconds):
    """A phase whose last piece is long, as with an evaluation in it, and a wait that is longer than expected."""
    out = Terminal()
    bar, wait = Bar("phase", 3, clock, lambda bar: None), Bar("wait", seconds, clock, lambda bar: None, counts=False)
    for tick in range(40):
        if tick in (5, 10):
            bar.advance()
        for one in (bar, wait):
            text = _times(one)
            assert "0:00 left" not in text, (tick, text)
            print(text, file=out)
        clock.now += seconds / 7
    assert out.getvalue().count("left") > 10


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


def test_quiet_prints_the_final_table_alone(clock):
    out = io.StringIO()
    progress = Progress(quiet=True, file=out, clock=clock)
    with progress.waiting("starting"):
        progress.line("hello")
    with progress.phase("supervised", total=1) as bar:
        clock.now += 60
        bar.advance(text="loss 1")
    progress.final_table([("a", "b")])
    assert out.getvalue() == "╭───┬───╮\n│ a │ b │\n╰───┴───╯\n"


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


def line(step, phase="reinforcement", **metrics):
    return {"step": step, "phase": phase, **{name.replace("_0_", "/"): value for name, value in metrics.items()}}


def shown(table) -> list[list[str]]:
    """The table's lines, word by word."""
    out = io.StringIO()
    Console(file=out, width=120).print(table)
    return [row.split() for row in out.getvalue().splitlines()]


def test_the_live_table_has_first_recent_and_latest_numbers():
    table = LiveTable()
    assert not table
    for step in range(1, 5):
        table.add(line(step, "supervised", loss_0_mean=4.0 / step, time_0_step_s=1.0))
    assert shown(table)[0] == ["loss", "s/step"] and shown(table)[3] == ["now", "1.000", "1.00"]
    table.add(line(0, "evaluation", eval_0_name="sort", eval_0_split="validation", eval_0_accuracy=0.25))
    table.add(line(0, "evaluation", eval_0_name="sort", eval_0_split="test", eval_0_accuracy=0.75))
    for step in range(1, 21):
        table.add(
            line(step, loss_0_mean=-1.0, reward_0_mean=step / 100, mismatch_0_kl=1e-13, time_0_step_s=float("nan"))
        )
        table.add(line(step, "checkpoint", checkpoint_0_failed=0))
    assert shown(table) == [
        ["reward", "accuracy", "kl", "s/step"],
        ["first", "0.010", "0.250", "1.0e-13", "nan"],
        ["last", "10", "0.155", "0.250", "1.0e-13", "nan"],  # of steps 11 to 20
        ["now", "0.200", "0.250", "1.0e-13", "nan"],
    ]


def test_a_terminal_shows_the_latest_numbers_above_the_bars(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    progress = Progress(file=out, clock=clock)
    with progress.phase("reinforcement", total=4) as bar:
        progress.metrics(line(1, reward_0_mean=0.125), "step 1  reward 0.125")
        bar.advance(text="reward 0.125")
    assert "now" in out.getvalue() and "0.125" in out.getvalue() and "step 1  reward 0.125\n" in out.getvalue()
    assert out.getvalue().endswith("reinforcement: 1/4 done in 0.0 s, reward 0.125\n")


def test_a_file_gets_lines_of_metrics_and_no_table(clock):
    out = io.StringIO()
    progress = Progress(file=out, clock=clock)
    progress.metrics(line(1, "supervised", loss_0_mean=1.0), "")
    progress.metrics(line(1, reward_0_mean=0.125), "step 1  reward 0.125")
    assert out.getvalue() == "step 1  reward 0.125\n"


def objects(text) -> list[tuple[str, str, dict]]:
    entries = [json.loads(line) for line in text.splitlines()]
    assert all(datetime.fromisoformat(entry.pop("time")).tzinfo is not None for entry in entries)
    return [(entry["event"], entry["level"], entry["fields"]) for entry in entries]


def test_a_json_console_has_an_object_per_line():
    out = io.StringIO()
    recorder = Recorder([Display(JsonProgress(file=out))])
    with pytest.raises(KeyError), recorder.span("reinforcement", total=2) as phase:
        with recorder.span("step"):
            recorder.record(Metrics(line=line(1, reward_0_mean=float("nan")), text="step 1\nreward"))
        recorder.advance(phase, text="reward 0.5")
        recorder.record(Note(text="\x1b[31mred\u2028"))
        raise KeyError
    JsonProgress(file=out, quiet=True).line("nothing")
    JsonProgress(file=out, quiet=True).final_table([("run", "runs/a")])
    *told, (_, _, end), summary = objects(out.getvalue())
    assert told == [
        ("begin", "info", {"name": "reinforcement", "total": 2}),
        ("metrics", "info", {"step": 1, "phase": "reinforcement", "reward/mean": "NaN"}),
        ("note", "info", {"message": "\x1b[31mred\u2028"}),
    ]
    assert (end["name"], end["outcome"]) == ("reinforcement", "stopped") and end["seconds"] >= 0
    assert summary == ("summary", "info", {"run": "runs/a"})
    assert out.getvalue().isascii()


def test_warnings_and_errors_are_json_where_that_is_wanted(capfd, tmp_path):
    code = (
        "import logging, sys, warnings; from torchtitan_rl.record.console.notices import say;"
        "from torchtitan_rl.record.console.log_records import use_json; use_json(True);"
        "from torchtitan_rl.record.logs import setup_rank_logging;"
        f"setup_rank_logging({str(tmp_path)!r}, 'policy', 0, 1, device='cpu');"
        "logging.getLogger('torchtitan_rl.x').warning('careful %d', 1); logging.getLogger('vllm').warning('noise');"
        "say('error: it broke', event='error', level='error'); warnings.warn('old');"
        "use_json(False); say('plain', event='x')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    *entries, plain = capfd.readouterr().err.splitlines()
    assert plain == "plain"
    careful, error, old = objects("\n".join(entries))
    assert careful[:2] == ("log", "warning") and careful[2]["message"] == "careful 1"
    assert error == ("error", "error", {"message": "error: it broke"}) and "old" in old[2]["message"]
