"""The picture of a run."""

import math
import subprocess
import sys

import pytest
from PIL import Image

from torchtitan_rl.record.plot import _accuracies, plot_curve

SUPERVISED = [{"step": step, "phase": "supervised", "loss/mean": 1.0} for step in range(3)]
REINFORCEMENT = [{"step": step, "phase": "reinforcement", "reward/mean": step / 10} for step in range(1, 6)]


def evaluation(step, accuracy, split="validation", name="sort"):
    return {"step": step, "phase": "evaluation", "eval/name": name, "eval/split": split, "eval/accuracy": accuracy}


def check(path):
    with Image.open(path) as image:
        image.load()
        assert (image.format, image.size) == ("PNG", (960, 720))
        return len(image.convert("RGB").getcolors(960 * 720))


def test_a_whole_run(tmp_path):
    lines = [*SUPERVISED, evaluation(0, 0.3), *REINFORCEMENT, evaluation(5, 0.9), evaluation(5, 0.8, "test")]
    path = plot_curve(lines, tmp_path / "curve.png")
    assert path == tmp_path / "curve.png"
    assert check(path) > 10  # it is not blank


@pytest.mark.parametrize(
    "lines",
    [
        REINFORCEMENT,
        [evaluation(0, 0.3)],
        [*SUPERVISED, evaluation(0, math.nan)],
        REINFORCEMENT[:1],
        [evaluation(0, 0.1, name=f"set {index}") for index in range(7)],
    ],
)
def test_parts_of_a_run(tmp_path, lines):
    check(plot_curve(lines, tmp_path / "curve.png"))


def test_the_last_evaluation_of_a_step_counts_and_names_tell_sets_apart():
    assert _accuracies([evaluation(0, 0.1), evaluation(0, 0.3), evaluation(5, 0.5)]) == {"validation": {0: 0.3, 5: 0.5}}
    two_sets = [evaluation(0, 0.1), evaluation(0, 0.2, name="gsm8k")]
    assert list(_accuracies(two_sets)) == ["sort validation", "gsm8k validation"]


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match="metrics=3 lines: hold neither eval/accuracy nor reward/mean"):
        plot_curve(SUPERVISED, tmp_path / "curve.png")


def test_importing_the_module_imports_nothing_heavy():
    code = (
        "import sys; from torchtitan_rl import metrics; "
        "from torchtitan_rl.record import logs, plot, progress, run_dir; "
        "print([m for m in ('torch', 'vllm', 'monarch', 'matplotlib') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_warm_starts_loss_has_a_panel_of_its_own(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (figures.append(self), save(self, *args, **kw)))
    check(plot_curve([*SUPERVISED, *REINFORCEMENT], tmp_path / "curve.png"))
    loss = figures[0].axes[2]
    assert list(loss.get_lines()[0].get_ydata()) == [1.0, 1.0, 1.0]
    assert (loss.get_xlabel(), loss.get_ylabel()) == ("step of the supervised phase", "loss per token")
    plot_curve(REINFORCEMENT, tmp_path / "curve.png")
    assert len(figures[1].axes) == 2
