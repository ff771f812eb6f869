"""A run goes on from its checkpoints as if nothing had happened, and says so where it cannot."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.conftest import small_config
from torchtitan_rl.cli.export import export
from torchtitan_rl.config.algorithm import EntropyControlConfig
from torchtitan_rl.config.run import RoleConfig
from torchtitan_rl.record import attempts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tools.audit import audit
from torchtitan_rl.train.controller import Controller
from torchtitan_rl.train.resume import find
from torchtitan_rl.types.ends import Preempted
from torchtitan_rl.weights import checkpoint

ROOT = Path(__file__).parents[2]
COLUMNS = ("reward/", "loss/", "eval/", "optim/", "policy/", "mismatch/", "completion/")


def config(output_dir, **overrides):
    settings = {"supervised__num_steps": 3, "controller__num_steps": 4, "controller__checkpoint_every": 1}
    settings |= {"controller__keep_last": -1, "controller__eval_every": 2}
    return small_config(output_dir, **settings | overrides)


async def run(config, *, resume_from: str = "", ask_after: int | None = None) -> Controller:
    """Trains on the local backend; asks the run to stop once it has made so many steps of both phases, of which the
    last supervised one is over at step 0 of reinforcement."""
    controller = await Controller.launch(config, backend="local", resume_from=resume_from)
    take, seen = controller.stop.reason, []

    def reason(**arguments) -> str:
        if (place := (controller.state.phase, controller.state.phase_step)) not in seen:
            seen.append(place)
        if len(seen) == ask_after:
            controller.stop.ask("a test")
        return take(**arguments)

    controller.stop.reason = reason
    try:
        await controller.train()
    finally:
        await controller.close()
    return controller


def counted(path: Path) -> list[dict]:
    """What a resumed run must have in common with an undisturbed one."""
    return [
        {name: repr(value) for name, value in line.items() if name in ("step", "phase") or name.startswith(COLUMNS)}
        for line in RunDir(path).read_metrics()
        if line["phase"] != "checkpoint"
    ]


def audited(path: Path) -> dict[str, int]:
    """The counts of a run whose records agree."""
    counts, problems = audit(RunDir(path))
    assert problems == []
    return counts


def rollouts(path: Path) -> list[tuple]:
    return [(r["step"], r["rollout_id"], r["text"], r["reward"]) for r in attempts.read_rollouts(RunDir(path))]


@pytest.fixture(scope="module")
def undisturbed(loop, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    loop.run_until_complete(run(config(path)))
    return path


@pytest.fixture
def copied(undisturbed, tmp_path) -> Path:
    """A run of which only the first checkpoints are left, as if it had been killed."""
    path = tmp_path / "run"
    shutil.copytree(undisturbed, path)
    for name in ("step-3", "step-4"):
        shutil.rmtree(path / "checkpoints" / name)
    checkpoint.point_to(path / "checkpoints" / "step-2")
    return path


def test_checkpoints_are_written_in_both_phases_and_all_complete(undisturbed):
    names = ["supervised-1", "supervised-2", "step-0", "step-1", "step-2", "step-3", "step-4"]
    assert sorted(p.name for p in (undisturbed / "checkpoints").glob("*-*")) == sorted(names)
    assert all(checkpoint.problem(undisturbed / "checkpoints" / name) == "" for name in names)
    assert checkpoint.latest(undisturbed / "checkpoints").name == "step-4"
    assert [(undisturbed / "checkpoints" / name / "hf").is_dir() for name in names] == [False] * 6 + [True]
    saved = [line for line in RunDir(undisturbed).read_metrics() if line["phase"] == "checkpoint"]
    assert [line["checkpoint/name"] for line in saved] == names and not any(line["checkpoint/failed"] for line in saved)


@pytest.mark.parametrize(
    "stops",
    [pytest.param((1, 4), id="in both phases"), pytest.param((6,), id="in the second phase", marks=pytest.mark.slow)],
)
@pytest.mark.whole
def test_a_run_that_was_asked_to_stop_goes_on_to_the_same_bytes(stops, undisturbed, loop, tmp_path):
    path, resume_from = tmp_path / "run", ""
    for stop in stops:
        with pytest.raises(Preempted, match="a test"):
            loop.run_until_complete(run(config(path), resume_from=resume_from, ask_after=stop))
        resume_from = "auto"
    loop.run_until_complete(run(config(path), resume_from="auto"))
    assert counted(path) == counted(undisturbed)
    assert rollouts(path) == rollouts(undisturbed)
    counts = audited(path)
    assert counts.pop("attempts") == len(stops) + 1
    assert counts == {k: v for k, v in audited(undisturbed).items() if k != "attempts"}
    assert (counts["admitted"], counts["trained"], counts["cut_short"]) == (16, 16, 0)
    ended, expected = (path / "checkpoints" / "step-4", undisturbed / "checkpoints" / "step-4")
    assert (ended / "hf" / "model.safetensors").read_bytes() == (expected / "hf" / "model.safetensors").read_bytes()


@pytest.mark.whole
def test_adaptive_coefficients_go_on_to_the_last_digit(loop, tmp_path):
    def adaptive(path):
        settings = {"supervised__num_steps": 0, "algorithm__kl_coef": 0.1, "algorithm__kl_estimator": "k1"}
        settings |= {"algorithm__kl_in": "return", "algorithm__kl_target": 0.01, "algorithm__kl_horizon": 64}
        control = EntropyControlConfig(target=4.125, step=0.01, max_coef=0.025)  # it starts at 4.127 nats
        settings |= {"algorithm__entropy_coef": 0.005, "algorithm__entropy_control": control}
        made = config(path, **settings, algorithm__whiten_advantages=True)
        made.roles.reference = RoleConfig()
        return made

    loop.run_until_complete(run(adaptive(tmp_path / "whole")))
    with pytest.raises(Preempted, match="a test"):
        loop.run_until_complete(run(adaptive(tmp_path / "parts"), ask_after=3))
    loop.run_until_complete(run(adaptive(tmp_path / "parts"), resume_from="auto"))
    assert counted(tmp_path / "parts") == counted(tmp_path / "whole")
    lines = [line for line in RunDir(tmp_path / "whole").read_metrics() if line["phase"] == "reinforcement"]
    coefficients = [line["policy/kl_coef"] for line in lines]
    assert coefficients[0] == 0.1 and len(set(coefficients)) == 4
    assert lines[0]["policy/rollout_kl"] == pytest.approx(0, abs=1e-4)  # the reference is the policy as it starts
    coef, factor = 0.005, 0.005
    for line in lines:
        assert line["policy/entropy_coef"] == factor
        coef = min(coef + 0.01, 0.025) if line["policy/entropy"] <= 4.125 else max(coef - 0.01, 0.0)
        factor = coef if line["policy/entropy"] <= 4.125 else 0.0


def test_damaged_checkpoints_are_named_and_the_last_good_one_is_taken(copied, undisturbed, loop, capsys):
    damaged = next((copied / "checkpoints" / "step-2" / "model").glob("*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(bytes(content))
    truncated = copied / "checkpoints" / "step-1" / "state.json"
    truncated.write_text(truncated.read_text()[:40])
    (copied / "checkpoints" / "step-0" / "COMPLETE").unlink()  # killed between rename and marker: nothing is missing
    shutil.copytree(copied / "checkpoints" / "step-0", copied / "checkpoints" / "step-2.writing")
    found = find(config(copied), "auto")
    assert found.checkpoint.name == "step-0"
    assert [note.split(":")[0] for note in found.notes[:2]] == ["step-2 cannot be used", "step-1 cannot be used"]
    assert found.notes[2:] == [f"changed: output_dir: was {str(undisturbed)!r}, is {str(copied)!r}"]
    assert str(damaged) in found.notes[0] and str(truncated.parent) in found.notes[1]
    loop.run_until_complete(run(config(copied), resume_from="auto"))
    assert counted(copied) == counted(undisturbed) and rollouts(copied) == rollouts(undisturbed)


async def refused(config, resume_from: str) -> str:
    with pytest.raises(ValueError) as caught:
        await Controller.launch(config, backend="local", resume_from=resume_from)
    return str(caught.value)


async def test_nothing_is_overwritten_where_a_run_cannot_go_on(copied, tmp_path):
    before = {p: p.read_bytes() for p in copied.rglob("*") if p.is_file()}
    empty = tmp_path / "empty"
    assert "there is no checkpoint in" in await refused(config(empty), "latest") and not empty.exists()
    assert "needs the run's directory" in await refused(config(""), "auto")
    assert "there is no such directory" in await refused(config(""), str(tmp_path / "nowhere"))
    (tmp_path / "plain").mkdir()
    assert "is no run directory" in await refused(config(""), str(tmp_path / "plain"))
    assert "is resumed in its own directory" in await refused(config(tmp_path / "other"), str(copied))
    assert "already holds a run" in await refused(config(copied), "")
    message = await refused(config(copied, seed=1, sampling__max_tokens=11), "latest")
    assert "seed: was 0, is 1" in message and "sampling.max_tokens: was 12, is 11" in message
    message = await refused(config(copied, model__shape__n_layers=2), "auto")
    assert "model.shape.n_layers: was 4, is 2" in message and "--model.assets" in message
    with attempts.locked(RunDir(copied)):
        pass
    assert "a run is going on there (pid" in await refused(config(copied), "auto")
    attempts.unlock(RunDir(copied))
    after = {p: p.read_bytes() for p in copied.rglob("*") if p.is_file()}
    assert {p.name for p in after.keys() ^ before.keys()} <= {"run.lock"}
    assert all(after[p] == content for p, content in before.items() if p.name != "run.lock")


async def test_a_newer_format_and_no_usable_checkpoint_are_refused(copied):
    for path in (copied / "checkpoints").glob("*-*"):
        state = json.loads((path / "state.json").read_text()) | {"format": 99}
        (path / "state.json").write_text(json.dumps(state))
    assert "no checkpoint in" in await refused(config(copied), "auto")  # the checksums of state.json are wrong
    for path in (copied / "checkpoints").glob("*-*"):
        files = json.loads((path / "files.json").read_text())
        files |= checkpoint.checksums(path, [path / "state.json"])
        (path / "files.json").write_text(json.dumps(files))
    assert f"has format 99, and this version reads up to format {checkpoint.FORMAT}" in await refused(
        config(copied), "auto"
    )


async def test_an_end_that_a_restart_cannot_mend_is_not_begun_again(copied):
    attempts.end_for_good(RunDir(copied), "the filters left nothing")
    assert "a restart cannot mend why this run ended: the filters left nothing" in await refused(config(copied), "auto")


def test_a_run_killed_before_its_first_checkpoint_begins_again_in_its_directory(undisturbed, loop, tmp_path):
    path = tmp_path / "run"
    RunDir.create(path).log_metrics({"step": 1, "phase": "supervised", "loss/mean": 1.0})
    (path / "checkpoints" / "supervised-1.writing").mkdir()
    loop.run_until_complete(run(config(path), resume_from="auto"))
    assert counted(path) == counted(undisturbed)
    assert not (path / "checkpoints" / "supervised-1.writing").exists()


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(undisturbed, loop, tmp_path, caplog):
    full = tmp_path / "full"
    full.mkdir()
    size = sum(file.stat().st_size for file in (undisturbed / "checkpoints" / "step-2").rglob("*") if file.is_file())
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(1.5 * size)}", "tmpfs", str(full)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        path = tmp_path / "run"
        run_dir = RunDir.create(path)
        run_dir.checkpoints.rmdir()
        run_dir.checkpoints.symlink_to(full)
        with pytest.raises(RuntimeError, match="the last checkpoint could not be written: step-4"):
            loop.run_until_complete(run(config(path)))
        saved = [line for line in run_dir.read_metrics() if line["phase"] == "checkpoint"]
        assert [line["checkpoint/failed"] for line in saved] == [0] + [1] * 6
        assert [line for line in counted(path)] == counted(undisturbed)  # every step and evaluation was made
        assert [p.name for p in full.glob("*-*")] == ["supervised-1"]
        assert checkpoint.problem(full / "supervised-1") == ""
        assert "the run goes on without it (the newest complete one: supervised-1)" in caplog.text
    finally:
        subprocess.run(["umount", str(full)], check=True)


@pytest.mark.whole
@pytest.mark.usefixtures("forked")
def test_a_disk_that_fills_up_ends_the_run_once_with_its_path_and_bytes(tmp_path):
    """The records of a step have no room: no restart can mend that."""
    full, path = tmp_path / "full", tmp_path / "full" / "run"
    full.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(full)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        process = start(path, "--controller.num-steps", "400", "--max-restarts", "4")
        wait_for(lambda: checkpoint.latest(path / "checkpoints") is not None, process)
        with open(full / "filling", "wb", buffering=0) as file:
            deadline = time.monotonic() + 120
            while process.poll() is None and time.monotonic() < deadline:
                try:
                    file.write(bytes(4096))
                except OSError:
                    time.sleep(0.01)  # what a checkpoint that failed gives back is taken too
        _, stderr = process.communicate(timeout=10)
        assert process.returncode == 1, stderr
        sentence = f"error: {path}[^ ]*: its file system is full ([0-9]+ bytes are free); make room there, then go on"
        assert re.search(sentence.replace("(", r"\(").replace(")", r"\)"), stderr), stderr
        assert "restart" not in stderr and len(attempts.attempts(RunDir(path))) == 1
    finally:
        subprocess.run(["umount", str(full)], check=True)


def test_a_directory_that_becomes_read_only_costs_checkpoints_and_not_the_run(loop, tmp_path, caplog):
    place, path = tmp_path / "place", tmp_path / "run"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    path.mkdir()
    (path / "checkpoints").symlink_to(place)
    short = config(path, controller__num_steps=2, controller__checkpoint_every=2, controller__eval_every=0)

    async def go():
        async with await Controller.launch(short, backend="local") as controller:
            subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
            await controller.train()

    try:
        expected = "the last checkpoint could not be written: step-2: .*Read-only file system"
        with pytest.raises(RuntimeError, match=expected):
            loop.run_until_complete(go())
        lines = RunDir(path).read_metrics()
        saved = [line["checkpoint/failed"] for line in lines if line["phase"] == "checkpoint"]
        assert saved and all(saved) and list(place.iterdir()) == []
        assert [line["step"] for line in lines if line["phase"] == "reinforcement"] == [1, 2]
        assert "the run goes on without it (the newest complete one: none)" in caplog.text
    finally:
        subprocess.run(["umount", str(place)], check=True)


FLAGS = {
    "supervised.num-steps": 3,
    "supervised.batch-size": 8,
    "algorithm.tasks-per-step": 4,
    "algorithm.group-size": 4,
    "controller.num-steps": 4,
    "controller.eval-every": 2,
    "controller.eval-tasks": 8,
    "controller.test-tasks": 8,
    "controller.pass-at-k": 2,
    "controller.checkpoint-every": 1,
    "controller.keep-last": -1,
    "generator.max-num-seqs": 64,
}
"""`config()` as arguments of the command."""


def start(path: Path, *more: str) -> subprocess.Popen:
    flags = [text for name, value in FLAGS.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "torchtitan_rl.cli", "train", str(ROOT / "configs" / "quickstart.py"), *flags]
    command += ["--backend", "local", "--quiet", "--output-dir", str(path), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def wait_for(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.whole
@pytest.mark.usefixtures("forked")
def test_a_killed_controller_is_started_again_and_ends_with_the_same_bytes(undisturbed, tmp_path):
    path = tmp_path / "run"
    process = start(path, "--max-restarts", "1")
    wait_for(lambda: checkpoint.latest(path / "checkpoints") is not None, process)
    os.kill(attempts.attempts(RunDir(path))[-1]["pid"], signal.SIGKILL)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert audited(path)["attempts"] == 2
    assert counted(path) == counted(undisturbed) and rollouts(path) == rollouts(undisturbed)


@pytest.mark.whole
@pytest.mark.usefixtures("forked")
def test_sigterm_writes_a_checkpoint_and_has_a_status_of_its_own(undisturbed, tmp_path, loop):
    path = tmp_path / "run"
    process = start(path, "--controller.checkpoint-every", "0", "--max-restarts", "3")  # none of which is used
    wait_for(lambda: (path / "metrics.jsonl").exists() and (path / "metrics.jsonl").stat().st_size > 0, process)
    os.kill(attempts.attempts(RunDir(path))[-1]["pid"], signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75, stderr
    assert "with a checkpoint: SIGTERM; go on with --resume latest --output-dir" in stderr
    assert len(attempts.attempts(RunDir(path))) == 1
    loop.run_until_complete(run(config(path), resume_from="latest"))
    assert counted(path) == counted(undisturbed)


def test_export_needs_no_run_and_gives_the_bytes_that_the_run_exported(undisturbed, loop, tmp_path):
    (made,) = loop.run_until_complete(export(undisturbed / "checkpoints" / "step-4", tmp_path / "made"))
    expected = undisturbed / "checkpoints" / "step-4" / "hf"
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (made / name).read_bytes() == (expected / name).read_bytes(), name
    with pytest.raises(ValueError, match="is not empty; give a new one"):
        loop.run_until_complete(export(undisturbed / "checkpoints" / "step-4", tmp_path / "made"))


@pytest.mark.slow
@pytest.mark.parametrize("who", ["run", "controller,trainer"])
def test_a_run_that_is_killed_three_times_ends_with_the_same_bytes(who, tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "chaos.py"), "--kills", "3", "--steps", "8", "--who", who]
    done = subprocess.run([*command, "--output-dir", str(tmp_path)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["attempts"] == 4
