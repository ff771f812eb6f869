"""Runs for tests of what looks at runs: written by the run's own writer, from rollouts that nobody sampled."""

from __future__ import annotations

from pathlib import Path

import torch

from torchtitan_rl.record import attempts
from torchtitan_rl.record.recorder import EvaluatedAttempts, Metrics, RolloutsEnded, TrainedOn
from torchtitan_rl.record.records import evaluation_record
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.run_dir_writer import RunDirWriter
from torchtitan_rl.types import Completion, Datum, Rollout, RolloutGroup, Task, Turn

__all__ = ["HOSTILE", "branching", "completion", "decode", "group", "made_run", "write_evaluation", "write_step"]

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\x00\u202eevil\u202c\u2066"
"""What a page must show as text."""
_CONFIG = {
    "name": "made",
    "model": {"assets": "chars"},
    "algorithm": {
        "group_size": 2,
        "loss_fn": {"function": "torchtitan_rl.algorithm.surrogate:ppo", "source_sha256": ""},
        "loss_config": {"clip_low": 0.2, "clip_high": 0.2},
    },
    "trainer": {"optimizer": {"lr": 0.001}},
}


def decode(tokens: list[int]) -> str:
    return "".join(chr(97 + token % 26) for token in tokens)


def group(slot: int, texts: list[str], rewards: list[float], *, left_out: str = "") -> tuple[RolloutGroup, list]:
    """A group with a rollout of two turns for each text, and what trained."""
    rollouts, trained = [], []
    task = Task(id=f"sort/train/{slot}", prompt=f"prompt {slot}", answer="abc")
    for i, (text, reward) in enumerate(zip(texts, rewards)):
        turns = [
            Turn(prompt_tokens=[1, 2], completion=_completion([3, 4], [5, 5]), reward=0.0, seconds=(0.0, 0.2, 0.3)),
            Turn(
                prompt_tokens=[1, 2, 3, 4, 9], completion=_completion([6], [6]), reward=reward, seconds=(0.3, 0.4, 0.5)
            ),
        ]
        played = Rollout(id=f"{slot}/0/{i}", task=task, turns=turns, reward=reward, text=text, group=f"{slot}/0")
        played.seconds, played.reward_parts = {"play": 0.5, "reward": 0.1}, {"exact": reward, "format": 1.0}
        rollouts.append(played)
        if not left_out:
            trained.append((_datum(reward - 0.5, rollout=i), torch.tensor([-2.0, -1.1, -0.5, -3.0, -1.0])))
    advantages = None if left_out else [reward - 0.5 for reward in rewards]
    return RolloutGroup(id=f"{slot}/0", rollouts=rollouts, advantages=advantages, left_out=left_out), trained


def branching(slot: int) -> tuple[RolloutGroup, list]:
    """A group with one rollout: a turn, two branches from it, of which the second learns, and a conversation of its
    own; and what trained."""
    task = Task(id=f"sort/train/{slot}", prompt=f"prompt {slot}", answer="abc")
    said = [([1, 2], [3, 4]), ([1, 2, 3, 4, 9], [6]), ([1, 2, 3, 4, 8], [5]), ([7], [6])]
    turns = [Turn(prompt_tokens=prompt, completion=_completion(tokens, [5] * len(tokens))) for prompt, tokens in said]
    played = Rollout(id=f"{slot}/0/0", task=task, turns=turns, reward=1.0, text="tree", group=f"{slot}/0")
    first, second = _datum(0.5, rollout=0), _datum(0.5, rollout=0)
    for datum, mask, places in (
        (first, [0.0, 1.0, 1.0, 0.0, 0.0], [(0, 1, 2), (1, 4, 1)]),
        (second, [0.0, 0.0, 0.0, 0.0, 1.0], [(2, 4, 1)]),
    ):
        mask_T = torch.tensor(mask)
        datum.loss_inputs = {"token_weights": mask_T / 3, "loss_mask": mask_T, "advantages": mask_T * 0.5}
        datum.turns = places
    second.tokens, second.target_tokens = torch.tensor([1, 2, 3, 4, 8]), torch.tensor([2, 3, 4, 8, 5])
    trained = [(datum, torch.full((5,), -1.0)) for datum in (first, second)]
    return RolloutGroup(id=f"{slot}/0", rollouts=[played], advantages=[0.5]), trained


def _completion(tokens: list[int], versions: list[int]) -> Completion:
    return Completion(tokens=tokens, logprobs=[-1.0] * len(tokens), policy_versions=versions, finish_reason="stop")


def _datum(advantage: float, rollout: int) -> Datum:
    mask = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    return Datum(
        tokens=torch.tensor([1, 2, 3, 4, 9]),
        target_tokens=torch.tensor([2, 3, 4, 9, 6]),
        loss_inputs={"token_weights": mask / 3, "loss_mask": mask, "advantages": mask * advantage},
        rollout=rollout,
        turns=[(0, 1, 2), (1, 4, 1)],
    )


def write_step(run_dir: RunDir, step: int, groups: list[tuple[RolloutGroup, list]]) -> None:
    """What the loop tells of a step."""
    writer, trained = RunDirWriter(run_dir, decode), []
    for number, (_, of_group) in enumerate(groups):
        for datum, logprobs in of_group:
            datum.rollout += sum(len(g.rollouts) for g, _ in groups[:number])
            trained.append((datum, logprobs))
    line = {
        "step": step,
        "phase": "reinforcement",
        "reward/mean": 0.1 * step,
        "time/step_s": 1.0,
        "policy/entropy": 2.0,
    }
    writer.metrics(Metrics(line=line))
    writer.trained(TrainedOn(sequences=trained))
    writer.rollouts(RolloutsEnded(step=step, groups=[played for played, _ in groups]))


def completion(index: int, text: str, reward: float | None, *, sample: int = 0, failed: str = "") -> dict:
    """The record of an attempt at task `index` of the validation split; right from a reward of 1 on."""
    task = Task(id=f"sort/validation/{index}", prompt=f"question {index}", answer="abc")
    rollout = Rollout(id="e", task=task, turns=[], reward=reward, text=text)
    record = evaluation_record(task, rollout, correct=reward is not None and reward >= 1.0, failed=failed)
    return {"name": "sort", "split": "validation", "task_index": index, "sample": sample} | record


def write_evaluation(run_dir: RunDir, step: int, records: list[dict]) -> None:
    """What the loop tells of an evaluation."""
    RunDirWriter(run_dir).evaluated(EvaluatedAttempts(step=step, records=records))


def made_run(path: Path, steps: int = 3, *, seal_after: int = 2, lr: float = 0.001) -> RunDir:
    """A run of some steps with two groups each; the first `seal_after` steps are Parquet. A completion is hostile."""
    run_dir = RunDir.create(path)
    attempts.begin(run_dir, None)
    run_dir.write_config(_CONFIG | {"trainer": {"optimizer": {"lr": lr}}})
    evaluation = {"eval/name": "sort", "eval/split": "validation", "eval/accuracy": 0.25, "eval/num_tasks": 8}
    run_dir.log_metrics({"step": 0, "phase": "evaluation", **evaluation})
    for step in range(1, steps + 1):
        first = group(2 * step, [f"answer {step} is Right", HOSTILE], [1.0, 0.0])
        write_step(run_dir, step, [first, group(2 * step + 1, ["even", "even"], [0.5, 0.5], left_out="zero_variance")])
        if step == seal_after:
            for table in run_dir.tables.values():
                table.rotate()
                table.seal()
    return run_dir
