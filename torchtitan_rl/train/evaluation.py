"""How good a policy is on a set of tasks: greedy accuracy, avg@n and pass@k, with confidence intervals."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING, Any

from torchtitan_rl import html
from torchtitan_rl.algorithm.grouping import fill_rewards
from torchtitan_rl.config.run import ControllerConfig, EvalSetConfig, RunConfig, Split
from torchtitan_rl.record.recorder import EvaluatedAttempts, Metrics, Recorder
from torchtitan_rl.record.records import evaluation_record
from torchtitan_rl.record.tracing import running
from torchtitan_rl.rollout.failures import Failures
from torchtitan_rl.rollout.group import AttemptFailed, run_attempts
from torchtitan_rl.rollout.policy import Policy, single_turn
from torchtitan_rl.tasks.family import TaskFamily, source_of
from torchtitan_rl.tasks.offline import unread_data, without_download
from torchtitan_rl.tasks.pass_rate_filter import PassRate, prompt_hash
from torchtitan_rl.tasks.reward_parts import part_means
from torchtitan_rl.train.intervals import chance_of_one, score_interval
from torchtitan_rl.types import Rollout, RolloutGroup, Task
from torchtitan_rl.types.completions import changes

if TYPE_CHECKING:  # it imports Monarch, which a dry run does without
    from torchtitan_rl.rollout.player import RolloutPlayer

__all__ = ["Evaluation", "Evaluations", "eval_families", "evaluate", "look_at_data"]


@dataclass(kw_only=True, slots=True)
class Evaluation:
    """The result of one evaluation."""

    name: str
    """The name of the task family, or of the evaluation set."""
    split: str
    num_tasks: int
    accuracy: float
    """Share of tasks whose greedy completion is correct."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Means over greedy completions: `eval/reward_mean`, and `eval/reward_part_NAME_mean` of each part of a reward in
    parts. Attempts that failed do not count; empty where all did."""
    num_samples: int = 0
    """Samples per task, besides the greedy completion."""
    avg_at_n: float | None = None
    """Share of samples that are correct."""
    k: int = 0
    pass_at_k: float | None = None
    """Chance that at least one of k samples is correct."""
    intervals: dict[str, tuple[float, float] | None] = field(default_factory=dict)
    """Name of a metric -> its 95% confidence interval over tasks; None with a single task."""
    failures: dict[str, int] = field(default_factory=dict)
    """The attempts that failed to the last, each of which counts as wrong (`failure/attempts`), and the calls that
    failed, by cause; see `rollout.failures`."""
    pass_rates: list[PassRate] = field(default_factory=list)
    """The pass rate of each task: over its samples if `num_samples` > 0, else of the greedy completion."""
    completions: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """Records of the attempts at the first tasks, without step and attempt; see the table `evaluations` in
    docs/run_directory.md."""

    def metrics(self) -> dict:
        line = {
            "eval/name": self.name,
            "eval/split": self.split,
            "eval/accuracy": self.accuracy,
            "eval/num_tasks": self.num_tasks,
            **self.rewards,
        }
        line |= {name: number for name, number in self.failures.items() if number}
        if self.num_samples:
            line[f"eval/avg_at_{self.num_samples}"] = self.avg_at_n
        if self.k:
            line[f"eval/pass_at_{self.k}"] = self.pass_at_k
        for name, interval in self.intervals.items():
            if interval is not None:
                line[f"eval/{name}_ci95_low"], line[f"eval/{name}_ci95_high"] = interval
        return line

    def _repr_html_(self) -> str:
        facts = {name: f"{x:.4g}" if isinstance(x, float) else x for name, x in self.metrics().items()}
        return html.facts(f"{self.name}, {self.split}", facts)

    def summary_data(self) -> dict:
        """The fields of an equal evaluation without pass rates and completions, as plain data."""
        plain = dict(self.failures)  # `asdict` would count the items of a Counter, with keys that JSON refuses
        return dataclasses.asdict(dataclasses.replace(self, pass_rates=[], completions=[], failures=plain))

    def summary(self) -> str:
        text = f"{self.split} accuracy {self.accuracy:.3f}"
        if self.num_samples > self.k:
            text += f", avg@{self.num_samples} {self.avg_at_n:.3f}"
        return text + (f", pass@{self.k} {self.pass_at_k:.3f}" if self.k else "") + self.failed_text()

    def failed_text(self) -> str:
        """The attempts that failed and count as wrong, as a text that follows a number; "" without one."""
        failed = self.failures.get("failure/attempts", 0)
        return f", {failed} of {self.num_tasks * (1 + self.num_samples)} attempts failed" if failed else ""


def eval_families(config: RunConfig, family: TaskFamily) -> dict[str, TaskFamily]:
    """The task family of each of `controller.eval_sets`; a set without a `task` uses the run's own family.

    Raises ValueError for an empty split, and for a set with the name of the run's own family.
    """
    families = {}
    for name, eval_set in config.controller.eval_sets.items():
        if name == family.name:
            raise ValueError(
                f"controller.eval_sets.{name}: is the name of the run's own evaluations in the metrics; use another"
            )
        families[name] = family if eval_set.task is None else eval_set.task.build()
        source_of(families[name], eval_set.split, config.seed)  # refuses an empty split now, not in the run
    return families


def look_at_data(config: RunConfig) -> tuple[TaskFamily, str]:
    """The run's own task family, and why the run's data cannot be read on this machine without a download; "" when they
    can. Raises ValueError for a split without tasks and for a file that is not there."""
    family = config.task.build()

    def read_other_families() -> None:
        eval_families(config, family)
        if config.supervised.task is not None:
            source_of(config.supervised.task.build(), "train", config.seed)
        if config.preference is not None and config.preference.task is not None:
            source_of(config.preference.task.build(), "train", config.seed)

    return family, unread_data(family, config.seed) or without_download(read_other_families)


async def evaluate(
    policy: Callable[[float], Policy],
    family: TaskFamily,
    eval_set: EvalSetConfig,
    *,
    name: str,
    label: str,
    seed: int,
    config: ControllerConfig,
    workflow: Callable = single_turn,
    failures: Failures | None = None,
    tasks_recorded: int = 0,
) -> Evaluation:
    """Attempts the tasks of a set greedily, and then `num_samples` times each. The tasks are of `family`.

    `policy(temperature)` returns the policy. `label` keeps the sampling streams of evaluations apart. `workflow` makes
    an attempt; when an attempt is several rollouts, the first counts. With `failures` an attempt that fails to the last
    counts as wrong, and its siblings count as they are: no number of attempts shrinks. `Evaluation.completions` has the
    attempts at the first `tasks_recorded` tasks.
    """
    split, num_samples, pass_at_k = eval_set.split, eval_set.num_samples, eval_set.pass_at_k
    altered = changes(eval_set.sampling or config.eval_sampling)
    correct_reward = config.correct_reward if eval_set.correct_reward is None else eval_set.correct_reward
    size = family.num_tasks(split)
    num_tasks = eval_set.num_tasks if size is None else min(eval_set.num_tasks, size)
    tasks = [family.task(split, i) for i in range(num_tasks)]
    failed = Counter[str]()

    async def attempt_all(n: int, temperature: float) -> list[_TaskAttempts]:
        """Attempts each task n times."""
        calls = (
            run_attempts(
                workflow,
                task,
                dataclasses.replace(policy(temperature), altered=altered),
                n,
                group_id=f"{label}/{task.id}",
                seed=seed,
                reward=family,
                reward_timeout_s=config.reward_timeout_s,
                retrying=None if failures is None else partial(failures.retrying, counts=failed),
            )
            for task in tasks
        )
        try:
            async with asyncio.TaskGroup() as group:
                playing = [group.create_task(running("play rollouts", call)) for call in calls]
        except ExceptionGroup as failure:
            raise failure.exceptions[0] from None  # the run reports one error, and the siblings have ended
        all_attempts = [_TaskAttempts(task, played.result()) for task, played in zip(tasks, playing, strict=True)]
        for attempts in all_attempts:
            _fill_rewards(f"{label}/{attempts.task.id}", attempts.rollouts)
            failed["failure/attempts"] += n - len(attempts.rollouts)
        return all_attempts

    greedy = await attempt_all(1, 0.0)
    sampled = await attempt_all(num_samples, eval_set.temperature) if num_samples else []

    correct = [attempts.num_correct(correct_reward) for attempts in greedy]
    result = Evaluation(name=name, split=split, num_tasks=len(tasks), accuracy=mean(correct), failures=failed)
    result.intervals["accuracy"] = score_interval(correct)
    if rollouts := [rollout for attempts in greedy for rollout in attempts.rollouts]:
        result.rewards["eval/reward_mean"] = mean(rollout.reward for rollout in rollouts)
        result.rewards |= part_means(rollouts, "eval/reward_part_{}_mean")
    n = 1
    if num_samples:
        n, correct = num_samples, [attempts.num_correct(correct_reward) for attempts in sampled]
        averages = [count / n for count in correct]
        result.num_samples, result.avg_at_n = n, mean(averages)
        result.intervals[f"avg_at_{n}"] = score_interval(averages, draws_per_task=n)
    if pass_at_k:
        chances = [chance_of_one(n, count, pass_at_k) for count in correct]
        result.k, result.pass_at_k = pass_at_k, mean(chances)
        result.intervals[f"pass_at_{pass_at_k}"] = score_interval(chances, draws_per_task=n // pass_at_k)
    result.pass_rates = [
        PassRate(split=split, index=i, num_samples=n, num_correct=count, prompt_hash=prompt_hash(task))
        for i, (task, count) in enumerate(zip(tasks, correct, strict=True))
    ]
    for all_attempts, first_sample in ((greedy, 0), (sampled, 1)):
        for index, attempts in enumerate(all_attempts[:tasks_recorded]):
            for sample, record in enumerate(attempts.records(correct_reward), first_sample):
                place = {"name": name, "split": split, "task_index": index, "sample": sample}
                result.completions.append(place | record)
    return result


@dataclass(slots=True)
class _TaskAttempts:
    """The attempts at a task, of which some may have failed."""

    task: Task
    results: list[Rollout | AttemptFailed]

    @property
    def rollouts(self) -> list[Rollout]:
        """Of the attempts that did not fail."""
        return [result for result in self.results if isinstance(result, Rollout)]

    def num_correct(self, correct_reward: float) -> int:
        return sum(bool(rollout.reward >= correct_reward) for rollout in self.rollouts)

    def records(self, correct_reward: float) -> list[dict[str, Any]]:
        """The row of each attempt."""
        return [
            evaluation_record(self.task, result.rollout, correct=False, failed=str(result))
            if isinstance(result, AttemptFailed)
            else evaluation_record(self.task, result, correct=result.reward >= correct_reward, failed="")
            for result in self.results
        ]


def _fill_rewards(name: str, rollouts: list[Rollout]) -> None:
    """Sets the rewards that a workflow has given to turns. An attempt without turns and without a reward is wrong."""
    fill_rewards(RolloutGroup(id=name, rollouts=[rollout for rollout in rollouts if rollout.turns]))
    for rollout in rollouts:
        if rollout.reward is None:
            rollout.reward = 0.0


class Evaluations:
    """The evaluations of a run: on its own task family and on `controller.eval_sets`. Each result is recorded."""

    def __init__(
        self,
        config: RunConfig,
        family: TaskFamily,
        families: dict[str, TaskFamily],
        player: RolloutPlayer,
        recorder: Recorder,
    ) -> None:
        """`families` has the task family of each of `controller.eval_sets`, by name."""
        self.config, self.family, self.families = config, family, families
        self.player, self.recorder = player, recorder

    async def evaluate_named(self, name: str, step: int, *, version: int | None = None) -> Evaluation:
        """The evaluation of one of `controller.evaluation_names`. `version` samples; None: the newest."""
        if name == "validation":
            return await self.evaluate_split("validation", step, version=version)
        return await self.evaluate_set(name, step, version=version)

    async def evaluate_split(
        self, split: Split, step: int, *, num_tasks: int | None = None, pass_at_k: int = 0, version: int | None = None
    ) -> Evaluation:
        """Greedy accuracy on a split of the run's family after `step` steps, and with `pass_at_k` the chance that one
        of k samples is correct. `version` samples; None: the newest."""
        config = self.config.controller
        if num_tasks is None:
            num_tasks = config.test_tasks if split == "test" else config.eval_tasks
        eval_set = EvalSetConfig(
            split=split,
            num_tasks=num_tasks,
            num_samples=pass_at_k,
            pass_at_k=pass_at_k,
            temperature=self.config.algorithm.temperature,
        )
        return await self._evaluate(self.family, self.family.name, eval_set, step, f"eval/{step}", version)

    async def evaluate_sets(self, step: int) -> dict[str, Evaluation]:
        """The evaluations of `controller.eval_sets`, by name."""
        return {name: await self.evaluate_set(name, step) for name in self.config.controller.eval_sets}

    async def evaluate_set(self, name: str, step: int, *, version: int | None = None) -> Evaluation:
        """The evaluation of one of `controller.eval_sets`. `version` samples; None: the newest."""
        eval_set = self.config.controller.eval_sets[name]
        return await self._evaluate(self.families[name], name, eval_set, step, f"eval/{step}/{name}", version)

    async def _evaluate(
        self, family: TaskFamily, name: str, eval_set: EvalSetConfig, step: int, label: str, version: int | None
    ) -> Evaluation:
        shown = f"{name} " if name in self.families else ""

        def policy(temperature: float) -> Policy:
            return dataclasses.replace(self.player.policy(temperature), policy_version=version)

        with self.recorder.span(f"evaluating on {shown}{eval_set.split} tasks", shown=True) as span:
            result = await evaluate(
                policy,
                family,
                eval_set,
                name=name,
                label=label,
                seed=self.config.seed,
                config=self.config.controller,
                workflow=self.player.workflow(family),
                failures=self.player.failures,
                tasks_recorded=self.config.record.eval_completions,
            )
        if result.completions:
            self.recorder.record(EvaluatedAttempts(step=step, records=result.completions))
        line = {"step": step, "phase": "evaluation", **result.metrics(), "time/step_s": span.seconds}
        self.recorder.record(Metrics(line=line, text=f"step {step}: {shown}{result.summary()}"))
        return result
