"""Whether `replay --verify` names a difference that is put into a replay: its step and its place.

    .venv/bin/python -m benchmarks.planted_differences --output-dir DIR

One run of 52 small batches is replayed eleven times in one process: once as it is, five times with the lowest bit of a
weight flipped after step 50, four times with one reward of one batch changed by 0.125, and once on another number of
cores. Prints what `--verify` says of each; exit status 1 where it says something else than what was planted.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import torch

from benchmarks import planted_differences
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.tasks.family import source_of
from torchtitan_rl.tasks.letter_sort import partial_credit
from torchtitan_rl.types import Task

ROOT = Path(__file__).parents[1]
STEPS, TASKS, WARM_STEPS = 52, 4, 2
_TASK, _WEIGHT, _STEP = "PLANTED_TASK", "PLANTED_WEIGHT", "PLANTED_STEP"
"""Environment variables: the id of a task, or the place of a parameter among the trainer's and a step."""


def reward(task: Task, completions: list[str]) -> list[float]:
    """The quickstart's reward; the first completion of the planted task gets 0.125 more."""
    rewards = [partial_credit(completion, task.answer) for completion in completions]
    return [rewards[0] + 0.125, *rewards[1:]] if task.id == os.environ.get(_TASK) else rewards


def config(path: str) -> RunConfig:
    config = load_config(str(ROOT / "configs" / "quickstart.py"))
    config.output_dir, config.task.reward = path, planted_differences.reward
    config.supervised.num_steps, config.supervised.batch_size = WARM_STEPS, 8
    config.algorithm.tasks_per_step, config.algorithm.group_size = TASKS, 4
    config.controller.num_steps, config.controller.eval_every, config.controller.pass_at_k = STEPS, 0, 1
    config.controller.eval_tasks = config.controller.test_tasks = 8
    return config


def replay_with_a_flipped_bit(arguments: list[str]) -> int:
    """`torchtitan-rl replay` in this process, in which a trainer flips a bit after a step."""
    from torchtitan_rl.actors.trainer_rank import TrainerRank
    from torchtitan_rl.cli.main import main

    optim_step, name, step = TrainerRank.optim_step, os.environ.get(_WEIGHT), int(os.environ.get(_STEP, 0))

    @functools.wraps(optim_step)
    def flipping(self: TrainerRank, *args, **kwargs):
        output = optim_step(self, *args, **kwargs)
        if name and self.policy_version == WARM_STEPS + step:
            parameters = list(self.model.named_parameters())
            flipped, parameter = parameters[int(name) % len(parameters)]
            print(f"flipped a bit of {flipped}")
            parameter.data.view(torch.int32).view(-1)[0] ^= 1
        return output

    with mock.patch.object(TrainerRank, "optim_step", flipping):
        return main(["replay", *arguments])


def replay(run: Path, name: str, *before: str, **planted: str) -> str:
    """What `--verify` says of a replay with something planted, on one line."""
    arguments = [str(run), "--verify", "--quiet", "--backend", "local", "--output-dir", str(run.parent / name)]
    command = [*before, sys.executable, "-m", "benchmarks.planted_differences", "--replay", *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | planted, capture_output=True, text=True)
    lines = (ended.stdout + ended.stderr).splitlines()
    verdict = [line for line in lines if line.startswith(("flipped", "differs", "the same", "error", "torchtitan-rl:"))]
    return "; ".join(verdict) or "\n".join(lines[-5:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    args = parser.parse_args()
    root = args.output_dir.absolute()
    root.mkdir(parents=True, exist_ok=True)
    run, file = root / "run", root / "config.py"
    file.write_text(
        f"from benchmarks import planted_differences\n\n\ndef config():\n"
        f"    return planted_differences.config({str(run)!r})\n"
    )
    if not run.exists():
        command = [sys.executable, "-m", "torchtitan_rl.cli", "train", str(file), "--quiet"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    tasks = source_of(config("").task.build(), "train", 0).next(STEPS * TASKS)
    cases = [("as it was", "the same", replay(run, "unchanged"))]
    for place in (0, 7, 19, 31, -1):
        verdict = replay(run, f"weight-{place}", **{_WEIGHT: str(place), _STEP: "50"})
        cases.append((f"a bit of parameter {place} after step 50", f"weights of version {WARM_STEPS + 50}", verdict))
    for step in (1, 17, 50, 51):
        task = tasks[(step - 1) * TASKS + step % TASKS].id
        verdict = replay(run, f"reward-{step}", **{_TASK: task})
        slot = (step - 1) * TASKS + step % TASKS
        cases.append((f"a reward of {task}", f"differs: step {step}, rollout {slot}/0/0, reward", verdict))
    verdict = replay(run, "cores", "taskset", "--cpu-list", "0")
    cases.append(("one core", "cores ", verdict))
    wrong = 0
    for planted, expected, verdict in cases:
        wrong += expected not in verdict
        print(f"{'ok   ' if expected in verdict else 'WRONG'} {planted}: {verdict}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(replay_with_a_flipped_bit(sys.argv[2:]) if sys.argv[1:2] == ["--replay"] else main())
