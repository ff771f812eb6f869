"""Metrics of a step: the optimizer steps of a batch in one line, statistics of a batch's rollouts.

A new name also needs an entry in `torchtitan_rl/metrics.py` and a row in docs/metrics.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import correlation, mean

from torchtitan_rl.algorithm.advantages import all_equal
from torchtitan_rl.tasks.reward_parts import part_means
from torchtitan_rl.train.trainer_speed import TrainerSpeed
from torchtitan_rl.types import Rollout, RolloutGroup
from torchtitan_rl.types.score_parts import SCORE, TASK_REWARD

__all__ = ["StepMetrics", "batch_metrics", "time_metrics", "mean_std", "repeated_share"]

_TRAINING_TIMES = ("time/forward_backward_s", "time/optim_s")


class StepMetrics:
    """Gathers the optimizer steps of one batch into one line: means over tokens or steps, maxima, sums of seconds."""

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[float, float]]] = {}
        self._lengths: list[int] = []
        """Tokens of every sequence that a step trained on."""
        self._steps = 0

    @property
    def num_steps(self) -> int:
        """The policy's optimizer steps so far."""
        return self._steps

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Adds a value. `compute` makes of a name's values their weighted mean; the largest where the name ends in
        `_max`; the sum where it begins with `time/` or `tokens/`, or ends in `/skipped`."""
        self._values.setdefault(name, []).append((value, weight))

    def add_step(self, output, optim=None) -> None:
        """Adds the outputs of `forward_backward` and, for the policy, of `optim_step`. `mismatch/*` count before the
        policy's first step only: later steps follow training on other parts of the batch."""
        is_first = self._steps == 0
        for name, value in output.metrics.items():
            if is_first or not name.startswith("mismatch/"):
                self.add(name, value, max(1, output.num_tokens))
        if optim is not None:
            self._steps += 1
            self._lengths += map(len, output.policy_logprobs)
            self.add("loss/mean", output.loss)
            self.add("optim/grad_norm", optim.grad_norm)
            self.add("optim/skipped", optim.skipped)
            self.add("tokens/trained", output.num_tokens)
            self._values["optim/lr"] = [(optim.lr, 1.0)]

    def compute(self) -> dict[str, float]:
        """The metrics of all steps so far. Sums of whole numbers are whole numbers."""
        metrics = {"policy/clip_frac": 0.0}  # for a loss that does not clip
        for name, values in self._values.items():
            if name.endswith("_max"):
                metrics[name] = max(value for value, _ in values)
            elif name.startswith(("time/", "tokens/")) or name.endswith("/skipped"):
                metrics[name] = sum(value for value, _ in values)
            elif len(values) == 1:
                metrics[name] = values[0][0]
            else:
                metrics[name] = sum(value * weight for value, weight in values) / sum(weight for _, weight in values)
        return metrics | {"optim/num_steps": self._steps}

    def speed(self, trainer: TrainerSpeed | None) -> dict[str, float]:
        """The metrics `perf/*` of the steps; {} where nothing is known of the trainer."""
        if trainer is None:
            return {}
        seconds = sum(value for name in _TRAINING_TIMES for value, _ in self._values[name])
        return trainer.metrics(self._lengths, seconds)


def batch_metrics(groups: list[RolloutGroup], health: dict[str, str]) -> dict[str, float | str]:
    """Statistics of a batch's rollouts. `health` is that of the generator's replicas."""
    rewards = [reward for group in groups for reward in group.rewards]
    completions = [turn.completion for group in groups for rollout in group.rollouts for turn in rollout.turns]
    reward_mean, reward_std = mean_std(rewards)
    line: dict[str, float | str] = {
        "phase": "reinforcement",
        "reward/mean": reward_mean,
        "reward/std": reward_std,
        "reward/zero_std_frac": mean(all_equal(group.rewards) for group in groups),
        "completion/length_mean": mean(len(c.tokens) for c in completions),
        "completion/truncated_frac": mean(c.truncated for c in completions),
        "tokens/generated": sum(len(c.tokens) for c in completions),
        "prompt/repeated_frac": repeated_share(groups),
    }
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    line["time/reward_s"] = max(rollout.seconds.get("reward", 0.0) for rollout in rollouts)
    if any(SCORE in rollout.reward_parts for rollout in rollouts):
        line |= _reward_model_metrics(rollouts)
    if any(rollout.role != "policy" or rollout.end_reason or rollout.reward_parts for rollout in rollouts):
        line |= _workflow_metrics(rollouts)
    if len(health) > 1:
        line["generator/healthy_replicas"] = list(health.values()).count("healthy")
    return line


def _reward_model_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Statistics of the reward model's scores over the rollouts that have one. The correlation is left out where the
    scores, or the tasks' own rewards, are all equal."""
    scored = [rollout for rollout in rollouts if SCORE in rollout.reward_parts]
    scores = [rollout.reward_parts[SCORE] for rollout in scored]
    rewards = [rollout.reward_parts[TASK_REWARD] for rollout in scored]
    line: dict[str, float] = dict(zip(("reward_model/score_mean", "reward_model/score_std"), mean_std(scores)))
    if not all_equal(scores) and not all_equal(rewards):
        line["reward_model/task_correlation"] = correlation(scores, rewards)
    return line | {"time/reward_model_s": max(rollout.seconds.get("reward_model", 0.0) for rollout in scored)}


def repeated_share(groups: list[RolloutGroup]) -> float:
    """The share of the first prompts' tokens that belong to a prompt which an earlier rollout of the group has too."""
    total = repeated = 0
    for group in groups:
        prompts = [tuple(rollout.turns[0].prompt_tokens) for rollout in group.rollouts if rollout.turns]
        tokens = sum(map(len, prompts))
        total, repeated = total + tokens, repeated + tokens - sum(map(len, set(prompts)))
    return repeated / max(1, total)


def _workflow_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Means of the reward by its parts and by role, of turns, and of the share of episodes that a limit ended."""
    line, by_role = part_means(rollouts, "reward/part_{}_mean"), {}
    for rollout in rollouts:
        by_role.setdefault(rollout.role, []).append(rollout.reward)
    if len(by_role) > 1:
        line |= {f"reward/{role}_mean": mean(rewards) for role, rewards in by_role.items()}
    played = [rollout for rollout in rollouts if rollout.end_reason]
    if played:
        line["rollout/turns_mean"] = mean(len(rollout.turns) for rollout in played)
        line["rollout/limit_frac"] = mean(rollout.end_reason != "done" for rollout in played)
        for name in sorted({name for rollout in played for name in rollout.counts}):
            line[f"rollout/{name}_mean"] = mean(rollout.counts.get(name, 0.0) for rollout in played)
    return line


def time_metrics(line: dict, step_s: float, generate_s: float, sync_s: float, *, overlap: bool) -> dict[str, float]:
    """Seconds of a step and of its parts, and tokens per second. Tokens are generated during the whole step with
    `overlap`, else during `generate_s`."""
    return {
        "time/step_s": step_s,
        "time/generate_s": generate_s,
        "time/sync_s": sync_s,
        "tokens/trained_per_s": line["tokens/trained"] / step_s,
        "tokens/generated_per_s": line["tokens/generated"] / (step_s if overlap else generate_s),
    }


def mean_std(values: Iterable[float]) -> tuple[float, float]:
    """Mean and population standard deviation (divided by n: 0 for one value). Raises ValueError on no values."""
    values = [float(value) for value in values]
    if not values:
        raise ValueError("values=[]: have no mean; give at least one")
    average = math.fsum(values) / len(values)
    return average, math.sqrt(math.fsum((value - average) ** 2 for value in values) / len(values))
