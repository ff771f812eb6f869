"""What a run that has ended says of its phases."""

import shlex
from pathlib import Path
from types import SimpleNamespace

from torchtitan_rl.cli.summary import next_command, summary_rows
from torchtitan_rl.config.run import ControllerConfig
from torchtitan_rl.train.evaluation import Evaluation


def evaluation(accuracy):
    return Evaluation(name="letter_sort", split="validation", num_tasks=256, accuracy=accuracy)


def accuracies(num_steps, report):
    config = SimpleNamespace(controller=ControllerConfig(num_steps=num_steps))
    run_dir = SimpleNamespace(path=Path("runs/x"), checkpoint_path=lambda step: Path(f"runs/x/step-{step}"))
    controller = SimpleNamespace(
        config=config, run_dir=run_dir, state=SimpleNamespace(step=num_steps), ended_early=None
    )
    rows = summary_rows(controller, report, Path("curve.png"))
    return {name: value for name, value in rows if "accuracy" in name}


def test_a_run_without_reinforcement_does_not_speak_of_it():
    before, after = evaluation(0.008), evaluation(0.953)
    report = {"before preference": before, "warm start": after, "validation": after, "test": evaluation(0.947)}
    assert accuracies(0, report) == {
        "greedy accuracy before the preference phase (validation)": "0.008",
        "greedy accuracy at the end (validation)": "0.953",
        "greedy accuracy at the end (test, looked at once)": "0.947",
    }


def test_a_run_with_reinforcement_says_what_that_changed():
    report = {"warm start": evaluation(0.008), "validation": evaluation(0.992), "test": evaluation(0.988)}
    assert accuracies(3, report) == {
        "greedy accuracy before reinforcement (validation)": "0.008",
        "greedy accuracy after reinforcement (validation)": "0.992",
        "greedy accuracy after reinforcement (test, looked at once)": "0.988",
    }


def test_a_command_can_be_pasted_whatever_the_directory_is_called():
    assert next_command("view", Path("runs/first")) == "torchtitan-rl view runs/first"
    for name in ("runs/it's", "runs/a b", "runs/`x`", "runs/$HOME", "runs/a*", "runs/a\\b"):
        assert shlex.split(next_command("diagnose", Path(name))) == ["torchtitan-rl", "diagnose", name]
