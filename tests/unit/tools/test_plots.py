"""Several runs in one picture."""

import csv
import json
import shutil
import sys

import pytest
from PIL import Image

from tests.recorded import RECORDED
from torchtitan_rl.cli import main
from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.record.plot import COLORS
from torchtitan_rl.tools.plots import METRICS, plot_runs
from torchtitan_rl.tools.selection import curves, labels, matching

RUNS = [str(RECORDED / name) for name in ("quickstart-seed0", "quickstart-seed1", "groups-seed0", "groups-seed1")]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were written."""
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (figures.append(self), save(self, *args, **kw)))
    return figures


def test_the_command_draws_the_numbers_of_every_run(tmp_path, drawn, capsys):
    picture = tmp_path / "c.png"
    assert main.main(["plot", *RUNS, "-o", str(picture)]) == 0
    assert capsys.readouterr().out == f"{picture}\n"
    with Image.open(picture) as image:
        assert image.format == "PNG" and len(image.convert("RGB").getcolors(image.width * image.height)) > 10
    (figure,) = drawn
    panels = {axes.get_title().split(" (")[0]: axes for axes in figure.axes}
    assert list(panels) == [name for name in METRICS if not name.startswith("preference/")]  # no run has that phase
    for index, path in enumerate(RUNS):
        line = panels["reward/mean"].get_lines()[index]
        curve = curves(Run.open(path))["reward/mean"]
        assert dict(zip(line.get_xdata(), line.get_ydata())) == curve
        assert line.get_color() == COLORS[index]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [path.rsplit("/", 1)[1] for path in RUNS]
    assert panels["eval/accuracy"].get_title() == "eval/accuracy (● letter_sort validation, ■ letter_sort test)"
    assert len(panels["eval/accuracy"].get_lines()) == 8


def test_metrics_are_chosen_by_name_and_phases_stay_apart(tmp_path, drawn):
    runs = [Run.open(RUNS[0])]
    plot_runs(runs, tmp_path / "c.svg", ["supervised/loss/mean", "loss/mean"])
    assert (tmp_path / "c.svg").read_text().startswith("<?xml")
    supervised, reinforcement = drawn[0].axes
    assert list(supervised.get_lines()[0].get_xdata()) == list(range(1, 13))
    assert list(reinforcement.get_lines()[0].get_xdata()) == list(range(1, 9))
    assert supervised.get_xlabel() == "step of the supervised phase"


def test_more_runs_than_colours_differ_by_dashes_and_names_get_parents(tmp_path, drawn):
    paths = [tmp_path / f"{parent}/run" for parent in "abcdefg"]
    for path in paths:
        shutil.copytree(RUNS[0], path)
    runs = [Run.open(path) for path in paths]
    assert labels(runs) == [f"{parent}/run" for parent in "abcdefg"]
    plot_runs(runs, tmp_path / "c.png", ["reward/mean"])
    styles = {(line.get_color(), line.get_linestyle()) for line in drawn[0].axes[0].get_lines()}
    assert len(styles) == 7


def test_a_metric_of_evaluations_is_measured_on_several_sets():
    names = ["eval/sort/validation/accuracy", "eval/sort/test/accuracy", "eval/sort/test/reward_mean", "reward/mean"]
    assert matching("eval/accuracy", names) == names[:2]
    assert matching("eval/sort/test/accuracy", names) == names[1:2]
    assert matching("reward/mean", names) == names[3:] and matching("reward", names) == []


def fails(capsys, *arguments) -> str:
    assert main.main(["plot", *arguments]) == 1
    told = capsys.readouterr()
    assert told.out == "" and "Traceback" not in told.err
    return told.err


def test_mistakes_are_sentences(tmp_path, capsys, monkeypatch):
    picture = str(tmp_path / "c.png")
    assert "is no directory; give the directory of a run" in fails(capsys, "nowhere", "-o", picture)
    assert f"holds no metrics.jsonl; give a run in it, such as {RECORDED / 'groups-seed0'}" in fails(
        capsys, str(RECORDED), "-o", picture
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").write_text('{"step": 1, "ph')
    assert "runs: hold no metrics yet; plot them after some steps" in fails(capsys, str(empty), "-o", picture)
    unknown = fails(capsys, RUNS[0], "-o", picture, "--metrics", "reward/men")
    assert "metrics=reward/men: no run has them; these have some: reward/mean" in unknown
    assert "is no picture that can be written; end it in ." in fails(capsys, RUNS[0], "-o", str(tmp_path / "c.txt"))
    assert "cannot be written" in fails(capsys, RUNS[0], "-o", str(tmp_path / "no" / "c.png"))
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert "plot: matplotlib cannot be imported" in fails(capsys, RUNS[0], "-o", picture)


def test_a_run_that_is_half_written_or_not_finite_is_drawn(tmp_path, drawn):
    lines = (RECORDED / "quickstart-seed0" / "metrics.jsonl").read_text().splitlines(keepends=True)
    line = json.loads(lines[-6]) | {"reward/mean": "NaN", "policy/entropy": "Infinity"}
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:-6]) + json.dumps(line) + "\n" + lines[-5][:30])
    plot_runs([Run.open(tmp_path)], tmp_path / "c.png")
    assert drawn


def test_axes_have_units_the_legend_has_dashes_and_the_warm_start_is_a_panel(tmp_path, drawn):
    paths = [tmp_path / f"{parent}/run" for parent in "abcdef"]
    for path in paths:
        shutil.copytree(RUNS[0], path)
    plot_runs([Run.open(path) for path in paths], tmp_path / "c.png", ["time/step_s", "supervised/loss/mean"])
    (figure,) = drawn
    assert [axes.get_ylabel() for axes in figure.axes] == ["seconds", "loss per token"]
    keys = figure.legends[0].get_lines()
    assert [key.get_linestyle() for key in keys] == ["-"] * 5 + ["--"]
    assert {key.get_marker() for key in keys} == {"None"}  # a marker hides the dashes, and tells nothing about runs
    assert "supervised/loss/mean" in METRICS


def test_a_scale_is_logarithmic_on_request_and_says_what_it_leaves_out(tmp_path, drawn, capsys):
    run = tmp_path / "run"
    shutil.copytree(RUNS[0], run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    reinforced = [line for line in lines if line["phase"] == "reinforcement"]
    reinforced[0]["reward/mean"] = 0.0
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = [str(run), "-o", str(tmp_path / "c.png"), "--metrics", "reward/mean", "--scale"]
    for scale in ("auto", "linear", "log"):
        assert main.main(["plot", *arguments, scale]) == 0
    assert [figure.axes[0].get_yscale() for figure in drawn] == ["linear", "linear", "log"]
    assert drawn[-1].axes[0].get_title() == "reward/mean; 1 values are not above 0"


def test_histograms_are_of_the_newest_rollouts(tmp_path, drawn, capsys):
    assert main.main(["plot", RUNS[0], "-o", str(tmp_path / "c.png"), "--histograms", "reward,num_tokens"]) == 0
    rewards, tokens = drawn[0].axes[-2:]
    assert rewards.get_ylabel() == "share of rollouts" and tokens.get_xlabel() == "tokens"
    (outline,) = rewards.patches
    heights = outline.get_xy()[:, 1]
    assert heights.max() > 0.3
    capsys.readouterr()
    assert "histograms=text: is none of reward, advantage, num_tokens" in fails(
        capsys, RUNS[0], "-o", str(tmp_path / "c.png"), "--histograms", "text"
    )


def test_a_table_has_every_point(tmp_path, capsys):
    table = tmp_path / "c.csv"
    assert main.main(["plot", *RUNS[:2], "-o", str(table), "--metrics", "reward/mean,eval/accuracy"]) == 0
    rows = list(csv.DictReader(table.open()))
    curve = curves(Run.open(RUNS[1]))["reward/mean"]
    of_curve = [row for row in rows if (row["run"], row["curve"]) == ("quickstart-seed1", "reward/mean")]
    found = {int(row["step"]): float(row["value"]) for row in of_curve}
    assert found == curve and len(curve) == 8
    assert {r["curve"] for r in rows} >= {"eval/letter_sort/validation/accuracy", "eval/letter_sort/test/accuracy"}
    capsys.readouterr()
    assert "cannot be written" in fails(capsys, RUNS[0], "-o", str(tmp_path / "no" / "c.csv"))
