"""A run as a job of a scheduler: what is submitted, and what is refused before."""

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchtitan_rl.cli import controller_run
from torchtitan_rl.launch import jobs, torchrun
from torchtitan_rl.launch.slurm import SlurmJob, array_script, join_script, script
from torchtitan_rl.types.ends import PREEMPTED_STATUS, SAME_REQUEST_S, Preempted

QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.py")


def job(**changes) -> SlurmJob:
    settings = {"name": "a run", "num_hosts": 2, "directory": Path("/shared/100% mine"), "stop_before_s": 90}
    return SlurmJob(**settings | changes)


def test_the_batch_script_asks_for_what_was_asked_and_leaves_the_rest_to_slurm():
    text = script(job(), ["configs/a b.py", "--seed", "1"])
    assert text.startswith("#!/bin/bash\n")
    assert [line for line in text.splitlines() if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name='a run'",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --output='/shared/100%% mine/slurm-%j.txt'",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=B:USR1@90",
        "#SBATCH --exclusive",
        "#SBATCH --requeue",
    ]
    assert f"{sys.executable} -m torchtitan_rl.launch.torchrun 'configs/a b.py' --seed 1 &\n" in text
    more = script(
        job(gpus_per_host=8, time_limit="01:00:00", partition="p", account="a", requeue=False), ["configs/a.py"]
    ).splitlines()
    for line in ("gpus-per-node=8", "time=01:00:00", "partition=p", "account=a", "no-requeue"):
        assert f"#SBATCH --{line}" in more
    assert not any("scontrol requeue" in line for line in more)


def test_a_job_of_hosts_that_join_runs_one_process_a_node_and_passes_the_warning_on():
    text = join_script(job(gpus_per_host=8, time_limit="01:00:00"))
    for line in ("nodes=2", "gpus-per-node=8", "time=01:00:00", "signal=B:USR1@90", "no-kill", "requeue"):
        assert f"#SBATCH --{line}\n" in text
    assert f"{sys.executable} -m torchtitan_rl.launch.join '/shared/100% mine' --leave-within 60 &\n" in text
    assert """scancel --signal=USR1 "$SLURM_JOB_ID.0"' USR1\n""" in text
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["runs/none"], "run='runs/none': is no directory of a run; name one, such as runs/first"),
        (["runs/none", "--seed", "1"], "--seed 1: is for a job with a run of its own; a host that joins has the run's"),
        (["runs/none", "--max-restarts", "1"], "--max-restarts=1: is not for scheduler=slurm-join; leave it out"),
        (["runs/none", "--resume", "auto"], "--resume=auto: is not for scheduler=slurm-join; leave it out"),
        (["runs/none", "--num-hosts", "0"], "--num-hosts=0: must be at least 1"),
    ],
)
def test_hosts_that_cannot_join_are_not_submitted(arguments, expected, capsys):
    assert jobs.main(["slurm-join", "--dry-run", *arguments]) == 1
    assert f"error: {expected}" in capsys.readouterr().err


@pytest.mark.parametrize("requeue", [True, False])
def test_bash_reads_the_batch_script(requeue):
    done = subprocess.run(["bash", "-n"], input=script(job(requeue=requeue), ["a.py"]), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "status, restarts, known, again",
    [
        (75, 0, "", True),  # a checkpoint was written: the time limit, or a preemption with a grace time
        (75, 9, "late=1", True),
        (75, 0, "slurm_ends_it=1", False),  # a requeue, which needs no other, or scancel
        (143, 9, "", True),  # preempted during the start
        (143, 9, "late=1", False),  # the start takes longer than the time limit
        (143, 0, "slurm_ends_it=1", False),
        (1, 0, "", True),
        (1, 1, "", True),
        (1, 2, "", False),  # --max-restarts are used up
        (1, 0, "slurm_ends_it=1", False),
        (0, 0, "", False),
    ],
)
def test_which_ends_are_queued_again(status, restarts, known, again):
    (_, end) = script(job(max_restarts=2), ["a.py"]).split("  # a trap ends `wait` before the run has ended\n")
    said = f"scontrol() {{ echo $*; }}\nstatus={status} late=0 slurm_ends_it=0\n{known}\n{end}"
    environment = os.environ | {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": str(restarts)}
    done = subprocess.run(["bash"], input=said, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (status, "requeue 12\n" if again else "", "")


def test_a_run_that_ended_for_good_is_not_queued_again(tmp_path):
    run = tmp_path / "a run"
    run.mkdir()
    text = script(job(max_restarts=2, directory=run), ["a.py"])
    _, end = text.split("# a trap ends `wait` before the run has ended\n")
    said = f"scontrol() {{ echo $*; }}\nstatus=1 late=0 slurm_ends_it=0\n{end}"
    environment = os.environ | {"SLURM_JOB_ID": "12"}
    for output in ("requeue 12\n", ""):
        done = subprocess.run(["bash"], input=said, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (1, output, "")
        (run / "ended.json").touch()


def test_a_task_of_an_array_signals_and_queues_itself_and_not_the_array():
    text = array_script(job(num_hosts=1, num_tasks=3), ["a.py"], [0, 7, 3])
    said = """
srun() { kill -USR1 $$; sleep 0.5; return 75; }
scancel() { echo scancel $*; }
scontrol() { echo scontrol $*; }
"""
    variables = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "1"}  # as one task has them
    done = subprocess.run(["bash"], input=said + text, env=os.environ | variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (75, "")
    assert done.stdout.splitlines() == ["scancel --signal=TERM 12_1.0", "scontrol requeue 12_1"]


def submitted(arguments: list[str], capsys) -> tuple[int, str]:
    status = jobs.main(["slurm", QUICKSTART, *arguments])
    return status, capsys.readouterr().err


def test_without_slurm_nothing_is_made_and_the_error_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    status, error = submitted(["--output-dir", str(tmp_path / "run")], capsys)
    assert status == 1 and error.startswith("error: scheduler=slurm: sbatch, srun, scontrol, scancel not on PATH; ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--resume", "runs/mine"], "--resume=runs/mine: a job that is started again would begin there each time"),
        (["--max-restarts", "1", "--no-requeue"], "--max-restarts=1: a job with --no-requeue is never started again"),
        (["--stop-before", "70000"], "--stop-before=70000: sbatch takes 0 to 65535 seconds"),
        (["--num-hosts", "3"], "hosts=3: the config's meshes use"),
        (["--num-hosts", "0"], "--num-hosts=0: must be at least 1; give another number"),
        (["--gpus-per-host", "-2"], "--gpus-per-host=-2: must be at least 0; give another number"),
        (["--max-restarts", "-1"], "--max-restarts=-1: must be at least 0; give another number"),
    ],
)
def test_what_cannot_be_submitted_is_refused(arguments, expected, capsys):
    status, error = submitted(["--dry-run", *arguments], capsys)
    assert status == 1 and f"error: {expected}" in error


@pytest.mark.parametrize(
    "scheduler, arguments, option",
    [
        ("slurm", ["--image", "mine"], "--image=mine"),
        ("kubernetes", ["--time-limit", "01:00:00"], "--time-limit=01:00:00"),
        ("kubernetes", ["--stop-before", "60"], "--stop-before=60"),
        ("kubernetes", ["--max-restarts", "1"], "--max-restarts=1"),
        ("kubernetes", ["--no-requeue"], "--no-requeue"),
    ],
)
def test_an_option_of_another_scheduler_is_not_ignored(scheduler, arguments, option, capsys):
    assert jobs.main([scheduler, QUICKSTART, "--dry-run", *arguments]) == 1
    assert capsys.readouterr().err == f"error: {option}: is not for scheduler={scheduler}; leave it out\n"


def test_a_job_that_goes_on_by_itself_goes_on_in_one_directory(capsys):
    assert jobs.main(["slurm", QUICKSTART, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert " --output-dir runs/quickstart-" in text and text.count("--resume auto") == 1
    assert jobs.main(["slurm", QUICKSTART, "--dry-run", "--no-requeue", "--output-dir", "here"]) == 0
    text = capsys.readouterr().out
    assert text.count("--output-dir here") == 1 and "--resume" not in text


def test_signals_that_come_together_are_one_request():
    watch = SimpleNamespace(asked_at=0.0)
    for _ in range(2):
        torchrun._ask(watch, signal.SIGTERM, None)
    watch.asked_at = time.monotonic() - SAME_REQUEST_S - 0.1
    with pytest.raises(torchrun._Interrupted):
        torchrun._ask(watch, signal.SIGTERM, None)


async def test_a_controller_ends_at_once_at_a_later_signal_only(monkeypatch):
    from torchtitan_rl.types import ends

    monkeypatch.setattr(ends, "SAME_REQUEST_S", 0.2)
    asked = []

    with pytest.raises(asyncio.CancelledError):
        task, stop = asyncio.current_task(), SimpleNamespace(ask=asked.append)
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGTERM, controller_run._sigterm, SimpleNamespace(stop=stop), task
        )
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
        assert asked == ["SIGTERM"]
        await asyncio.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(5)


async def test_the_option_that_a_run_goes_on_with_can_be_pasted(monkeypatch, capsys):
    async def start(**_):
        return SimpleNamespace(
            run_dir=SimpleNamespace(path=Path("runs/it's")),
            state=SimpleNamespace(phase="reinforcement", phase_step=3),
            config=SimpleNamespace(record=SimpleNamespace(timeline=False)),
            launcher=SimpleNamespace(kill=lambda: None),
            recorder=SimpleNamespace(close=lambda: None),
        )

    async def body(_):
        raise Preempted("SIGTERM")

    monkeypatch.setattr(controller_run, "let_garbage_wait", lambda: None)
    monkeypatch.setattr(controller_run, "note_end", lambda *_: None)
    args = SimpleNamespace(hosts=(), backend="local", verb="eval", debug=False)
    assert await controller_run.run_controller(args, start, body, "") == PREEMPTED_STATUS
    assert shlex.split(capsys.readouterr().err)[-2:] == ["--output-dir", "runs/it's"]
