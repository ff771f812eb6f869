"""Arms and seeds of a sweep, and what is refused before anything starts."""

import os
import shlex
import subprocess

import pytest

from tests.kit.run_config import run_config
from torchtitan_rl.cli import main
from torchtitan_rl.tools.sweep import course
from torchtitan_rl.tools.sweep.arms import Arm, arms_of, read_seeds
from torchtitan_rl.tools.sweep.sweep_plan import Plan, checkpoint_cadence, locked
from torchtitan_rl.validation.run import check_local


@pytest.mark.parametrize(
    ("text", "seeds"), [("0..4", [0, 1, 2, 3, 4]), ("7", [7]), ("3,0,9", [3, 0, 9]), ("0..1,5", [0, 1, 5])]
)
def test_seeds_are_ranges_and_lists(text, seeds):
    assert read_seeds(text) == seeds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no list of seeds; write 0..4"),
        ("0-4", "is no list of seeds"),
        ("4..0", "has no seed, it ends before it begins"),
        ("0,5..3", "5..3 has no seed, it ends before it begins"),
        ("0..2,1", "has a seed twice"),
    ],
)
def test_what_is_no_list_of_seeds(text, message):
    with pytest.raises(ValueError, match=message):
        read_seeds(text)


def test_arms_are_every_combination_and_the_config_as_it_is_is_one_of_them():
    arms = arms_of(run_config(), ["trainer.optimizer.lr=0.001,5e-4", "algorithm.loss_config.clip_high=0.2,0.28"])
    assert [(arm.name, arm.is_base) for arm in arms] == [
        ("trainer.optimizer.lr=0.001 algorithm.loss_config.clip_high=0.2", False),
        ("trainer.optimizer.lr=0.001 algorithm.loss_config.clip_high=0.28", True),
        ("trainer.optimizer.lr=5e-4 algorithm.loss_config.clip_high=0.2", False),
        ("trainer.optimizer.lr=5e-4 algorithm.loss_config.clip_high=0.28", False),
    ]
    assert [arm.directory for arm in arms[:2]] == [
        "trainer.optimizer.lr=0.001,algorithm.loss_config.clip_high=0.2".replace(",", "_"),
        "parent",
    ]
    (first, second) = arms_of(run_config(), ["--trainer.optimizer.lr=1e-4, 1e-5"])
    assert (first.settings, second.settings) == (("trainer.optimizer.lr=1e-4",), ("trainer.optimizer.lr=1e-5",))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (["trainer.optimizer.lr=1e-4"], "is one arm, which has nothing beside it"),
        (["trainer.optimizer.lr"], "is no choice of values; write PATH=VALUE,VALUE"),
        (["trainer.optimizer.lr=1e-4,,1e-5"], "is no choice of values"),
        (["trainer.optimizer.lr=1e-4,0.0001"], "trainer.optimizer.lr=0.0001: is the same arm as trainer.optimizer.lr="),
        (["trainer.lr=1e-4,1e-5"], "there is no such field; did you mean --trainer.optimizer.lr"),
        (["trainer.optimizer.lr=fast,1e-5"], "is not of type float"),
        (["trainer.optimizer.lr=-1,1e-5"], "trainer.optimizer.lr=-1"),
        (["seed=0,1"], "--set seed: decides what the arms share"),
        (["task.max_letters=5,6"], "--set task.max_letters: decides what the arms share"),
        (["algorithm.tasks_per_step=4,8"], "--set algorithm.tasks_per_step: decides what the arms share"),
        (["model.shape.dim=16,32"], "--set model.shape.dim: decides what the arms share"),
        (
            [f"trainer.optimizer.lr=1e-4,0.{'0' * 200}1"],
            "a directory of an arm would have a name of 224 bytes, 200 are possible; sweep fewer fields at once",
        ),
    ],
)
def test_what_is_no_arm(choices, message):
    with pytest.raises(ValueError, match=message):
        arms_of(run_config(), choices)


def test_an_arm_that_its_backend_cannot_run_is_none():
    with pytest.raises(ValueError, match="generator.num_replicas=2: backend='local' has one engine"):
        arms_of(run_config(), ["generator.num_replicas=1,2"], check=check_local)


def test_a_parent_writes_the_checkpoint_of_the_fork_point_and_keeps_it():
    config = run_config()
    config.controller.num_steps, config.supervised.num_steps = 100, 300
    assert checkpoint_cadence(config, 0) == (301, 301)  # at the end of each phase, and `step-0` is kept
    assert checkpoint_cadence(config, 40) == (40, 40)
    config.controller.checkpoint_every = 10
    assert checkpoint_cadence(config, 0) == (10, 110) and checkpoint_cadence(config, 40) == (10, 40)
    with pytest.raises(ValueError, match="--at=45: controller.checkpoint_every=10 writes no checkpoint after this"):
        checkpoint_cadence(config, 45)
    with pytest.raises(ValueError, match="--at=100: must be from 0 .* to below controller.num_steps=100; use"):
        checkpoint_cadence(config, 100)
    config.algorithm.num_epochs = 2
    with pytest.raises(ValueError, match="--at=5: .* and a multiple of the 2 steps of a batch"):
        checkpoint_cadence(config, 5)


def plan(directory, *, seeds=(0, 1), lr=0.001) -> Plan:
    config = run_config()
    config.trainer.optimizer.lr = lr
    arms = [Arm(settings=("algorithm.group_size=4",), is_base=False), Arm(settings=("x=8",), is_base=True)]
    return Plan(directory=directory, config=config, arms=arms, seeds=list(seeds), at=0)


def test_a_directory_belongs_to_one_sweep(tmp_path):
    first = plan(tmp_path / "sweep")
    first.require_own()
    first.directory.mkdir()
    first.write()
    plan(tmp_path / "sweep").require_own()
    with pytest.raises(ValueError, match=r"holds another sweep, whose seeds is \[0, 1\] and not \[0\]; give another"):
        plan(tmp_path / "sweep", seeds=[0]).require_own()
    with pytest.raises(ValueError, match="whose config trainer.optimizer.lr is 0.001 and not 0.01"):
        plan(tmp_path / "sweep", lr=0.01).require_own()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(ValueError, match="holds files that belong to no sweep"):
        plan(tmp_path / "other").require_own()
    with pytest.raises(ValueError, match="notes.txt': is a file; give a directory"):
        plan(tmp_path / "other" / "notes.txt").require_own()
    with locked(first.directory, [0]), locked(first.directory, [1]):  # two processes with a seed each
        with pytest.raises(ValueError, match="a sweep is at work there, on seed 1"), locked(first.directory, [1]):
            pass
    with locked(first.directory, [0, 1]):
        pass
    (first.directory / "sweep.json").write_text("{")
    with pytest.raises(ValueError, match="sweep.json: is damaged"):
        first.require_own()


def test_processes_that_begin_a_sweep_at_the_same_moment_do_not_refuse_each_other(tmp_path):
    first, second, other = (plan(tmp_path, lr=lr) for lr in (0.001, 0.001, 0.01))
    (tmp_path / "sweep.0a1b").write_text("{")  # half of the file that another process writes
    for process in (first, second, other):
        process.require_own()
    first.write()
    second.write()
    with pytest.raises(ValueError, match="whose config trainer.optimizer.lr is 0.001 and not 0.01"):
        other.write()
    first.require_own()


SWEEP = ["--seeds", "0..2", "--set", "trainer.optimizer.lr=1e-3,1e-4"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "", "--set", "trainer.optimizer.lr=1e-3,1e-4"], "--seeds=: is no list of seeds"),
        (["--seeds", "0..2", "--set", "trainer.optimizer.lr=1e-3"], "is one arm"),
        (["--seeds", "0..2", "--set", "a=1,2", "--seed", "4"], "--seed: a sweep has a parent for each of its seeds"),
        (["--seeds", "0..2", "--set", "a=1,2", "--at", "500"], "--at=500: must be from 0"),
        ([*SWEEP, "--only-seeds", "1..3"], "--only-seeds=1..3: 3 is no seed of --seeds=0..2; use some of them"),
        ([*SWEEP, "--only-seeds", "x"], "--only-seeds=x: is no list of seeds"),
        ([*SWEEP, "--slurm", "--only-seeds", "1"], "--only-seeds=1: is chosen for each job of the array"),
        ([*SWEEP, "--slurm", "--hosts", "tcp://a:1"], "--hosts=tcp://a:1: is chosen for each job of the array"),
        ([*SWEEP, "--at-once", "2"], "--at-once=2: is for jobs of Slurm; add --slurm, or leave it out"),
        ([*SWEEP, "--time-limit", "01:00:00"], "--time-limit=01:00:00: is for jobs of Slurm"),
        ([*SWEEP, "--stop-before", "60"], "--stop-before=60: is for jobs of Slurm; add --slurm, or leave it out"),
        ([*SWEEP, "--slurm", "--at-once", "-1"], "--at-once=-1: must not be negative"),
        ([*SWEEP, "--slurm", "--stop-before", "70000"], "--stop-before=70000: sbatch takes 0 to 65535 seconds"),
        ([*SWEEP, "--slurm", "--trainer.num-hosts", "2"], "trainer.num_hosts=2 (policy): the launch has 1 host"),
    ],
)
def test_the_command_refuses_before_it_writes(words, message, tmp_path, capsys):
    directory = tmp_path / "sweep"
    assert main.main(["sweep", str(main.QUICKSTART), "--output-dir", str(directory), *words]) == 1
    assert message in capsys.readouterr().err and not directory.exists()


def test_without_slurm_nothing_is_made_and_the_error_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main.main(["sweep", str(main.QUICKSTART), "--output-dir", str(tmp_path / "sweep"), *SWEEP, "--slurm"]) == 1
    assert "sbatch, srun, scontrol, scancel not on PATH" in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


def test_an_array_has_a_task_for_each_seed_with_the_same_sweep(tmp_path, capsys):
    words = ["--seeds", "0,7,3", "--set", "trainer.optimizer.lr=1e-3,1e-4", "--keep-all", "--slurm", "--at-once", "2"]
    words += ["--gpus-per-host", "2", "--time-limit", "01:00:00", "--controller.num-steps", "4", "--dry-run"]
    assert main.main(["sweep", str(main.QUICKSTART), "--output-dir", str(tmp_path / "a sweep"), *words]) == 0
    text = capsys.readouterr().out
    for option in ("array=0-2%2", "nodes=1", "gpus-per-node=2", "time=01:00:00", "requeue", "job-name='a sweep'"):
        assert f"#SBATCH --{option}\n" in text
    assert f"--output='{tmp_path}/a sweep/slurm-%A_%a.txt'\n" in text
    said = text.replace("srun", "echo").replace("--ntasks-per-node=1 --cpu-bind=none", "")  # what a task would start
    environment = os.environ | {"SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "12"}
    done = subprocess.run(["bash"], input=said, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    arguments = done.stdout.split("torchtitan_rl.cli ")[1].strip()
    assert arguments.startswith(f"sweep {main.QUICKSTART} --controller.num-steps 4 --seeds 0,7,3 --at 0 --set ")
    assert arguments.endswith("a sweep --backend actors --max-restarts 0 --keep-all --only-seeds 7")
    assert not (tmp_path / "a sweep").exists()


def test_the_option_that_a_sweep_goes_on_with_can_be_pasted(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise course.Interrupted(75)

    monkeypatch.setattr(course, "carry_out", interrupted)
    directory = tmp_path / "it's"
    assert main.main(["sweep", str(main.QUICKSTART), "--output-dir", str(directory), *SWEEP]) == 75
    assert shlex.split(capsys.readouterr().err)[-2:] == ["--output-dir", str(directory)]


def test_a_dry_run_says_what_would_run(tmp_path, capsys):
    words = ["--seeds", "0..2", "--set", "trainer.optimizer.lr=1e-3,1e-4", "--dry-run"]
    assert main.main(["sweep", str(main.QUICKSTART), "--output-dir", str(tmp_path / "sweep"), *words]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/sweep: 2 arms, 3 seeds, forked at step 0",
        "  trainer.optimizer.lr=1e-3 (the config as it is: the parents)",
        "  trainer.optimizer.lr=1e-4",
    ]
    assert not (tmp_path / "sweep").exists()
