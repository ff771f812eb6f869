"""Where a run goes on, and what a kill in the middle of a checkpoint or of a resume leaves."""

import dataclasses
from pathlib import Path

import pytest

from tests.kit.refusal import refusal
from torchtitan_rl.config.derive import settled
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.resolve import resolved
from torchtitan_rl.record import attempts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.train import resume
from torchtitan_rl.weights import checkpoint

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.py"


@pytest.fixture
def config(tmp_path):
    config = load_config(str(QUICKSTART))
    config.output_dir = str(tmp_path / "run")
    return config


def attempt(config, mode="", last=0, every=20):
    """An attempt at a run, which logs a line a step up to `last` and saves every `every` steps."""
    run_dir, resumption = resume.open_run(config, mode, absolute=False)
    first = resumption.state.get("step", 0) if resumption is not None else 0
    for step in range(first + 1, last + 1):
        run_dir.log_metrics({"step": step, "phase": "reinforcement", "reward/mean": 1.0 / step})
        if step % every == 0:
            save(config, run_dir, step)
    attempts.unlock(run_dir)
    return run_dir, resumption


def save(config, run_dir, step, content=b"weights"):
    path = run_dir.checkpoint_path(step)
    written = checkpoint.beside(path)
    checkpoint.begin(written)
    (written / "weights").write_bytes(content)
    checkpoint.write_json(written / checkpoint.RUN_CONFIG, resolved(settled(config)))
    state = {"step": step, "phase": "reinforcement", "phase_step": step, "metrics_bytes": run_dir.metrics_size()}
    checkpoint.commit(written, path, state, {})
    checkpoint.point_to(path)


def names(run_dir):
    return sorted(path.name for path in run_dir.checkpoints.iterdir() if path.is_dir())


class Killed(BaseException):
    pass


@pytest.mark.parametrize("calls_before", [0, 1])
def test_a_kill_while_a_checkpoint_is_written_anew_leaves_one_to_go_on_from(config, monkeypatch, calls_before):
    run_dir, _ = attempt(config, last=20)
    rename, renamed = Path.rename, []

    def killed(path, target):
        if len(renamed) == calls_before:
            raise Killed
        renamed.append(target)
        return rename(path, target)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Path, "rename", killed)
        save(config, run_dir, 20, b"the same step again")
    for mode in ("latest", "auto"):
        assert resume.find(config, mode).state["step"] == 20
    _, resumption = attempt(config, "latest")
    assert resumption.checkpoint.name == "step-20" and (resumption.checkpoint / "weights").read_bytes() == b"weights"
    assert names(run_dir) == ["step-20"]


def test_a_kill_once_the_new_checkpoint_has_its_name_leaves_the_new_one(config, monkeypatch):
    run_dir, _ = attempt(config, last=20)

    def killed(path):
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(checkpoint, "mark", killed)
        save(config, run_dir, 20, b"the same step again")
    assert names(run_dir) == ["step-20", "step-20.replaced"]
    _, resumption = attempt(config, "latest")
    assert (resumption.checkpoint / "weights").read_bytes() == b"the same step again"
    assert names(run_dir) == ["step-20"]


def test_checkpoints_after_the_one_to_go_on_from_are_put_aside(config):
    run_dir, _ = attempt(config, last=80)
    saved = run_dir.checkpoint_path(40)
    _, resumption = attempt(dataclasses.replace(config, output_dir=""), str(saved), last=60)
    assert "step-60.before-attempt-2, step-80.before-attempt-2" in resumption.notes[-1]
    assert names(run_dir) == [
        "step-20", "step-40", "step-60", "step-60.before-attempt-2", "step-80.before-attempt-2"
    ]  # fmt: skip
    assert checkpoint.latest(run_dir.checkpoints).name == "step-60"
    assert resume.find(config, "latest").state["step"] == 60


def test_a_run_that_ended_for_good_before_its_first_checkpoint_is_not_begun_again(config):
    run_dir, _ = attempt(config, last=5)
    attempts.end_for_good(run_dir, "loss/mean is nan")
    assert refusal(resume.find, config, "auto") == (
        "--resume=auto: a restart cannot mend why this run ended: loss/mean is nan; mend that, then start a new run "
        "elsewhere: this one has no checkpoint"
    )


def test_a_run_without_a_checkpoint_is_begun_again_by_auto_and_the_messages_say_so(config):
    attempt(config, last=5)
    assert "use --resume auto to begin it again there" in refusal(resume.find, config, "latest")
    assert "--resume auto --output-dir" in refusal(resume.open_run, config, "", absolute=False)
    run_dir, resumption = attempt(config, "auto")
    assert resumption.checkpoint is None and run_dir.metrics_size() == 0


@pytest.mark.parametrize("keep, fault", [(0.5, "the checkpoint was written after"), (1.0, "no line ends after")])
def test_a_resume_that_is_refused_changes_nothing(config, keep, fault):
    run_dir, _ = attempt(config, last=25)
    attempts.end_for_good(run_dir, "diverged")
    lines = run_dir.metrics_file.read_bytes()
    changed = lines[: int(len(lines) * keep)] if keep < 1 else lines.replace(b"\n", b" \n", 3)
    run_dir.metrics_file.write_bytes(changed)
    assert fault in refusal(attempt, config, "latest")
    assert attempts.reason_of_end(run_dir) == "diverged"
    assert len(attempts.attempts(RunDir(run_dir.path))) == 1 and run_dir.metrics_file.read_bytes() == changed


def test_an_end_that_was_cut_off_is_still_an_end(config):
    run_dir, _ = attempt(config, last=20)
    (run_dir.path / "ended.json").write_text("")
    assert "ended.json does not say" in refusal(resume.find, config, "auto")
