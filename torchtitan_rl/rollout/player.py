"""From draws to judged groups: a workflow plays each draw's task several times, rewards judge the rollouts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

from torchtitan_rl.algorithm.grouping import form_groups, set_baselines
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.policy_weights import PolicyWeights
from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.record.tracing import running
from torchtitan_rl.rollout.demonstrate import demonstrate
from torchtitan_rl.rollout.draws import Draw
from torchtitan_rl.rollout.failures import Failures
from torchtitan_rl.rollout.finished import FinishedGroups
from torchtitan_rl.rollout.group import raise_worst, run_group, workflow_of
from torchtitan_rl.rollout.multi_turn import Limits
from torchtitan_rl.rollout.pair_tokens import pair_tokens
from torchtitan_rl.rollout.policy import Policy, single_turn
from torchtitan_rl.rollout.reward_model import RewardModel
from torchtitan_rl.tasks.family import TaskFamily
from torchtitan_rl.types import RolloutGroup, Task

__all__ = ["RolloutPlayer"]


class RolloutPlayer:
    """Plays tasks with the newest policy. `generator` samples; `weights` has the snapshot for self-distillation."""

    def __init__(
        self,
        config: RunConfig,
        family: TaskFamily,
        tokenizer,
        generator: SamplingClient,
        weights: PolicyWeights,
        counts: dict[str, int],
        *,
        finished: FinishedGroups | None = None,
        score_early: Callable[[RolloutGroup], None] | None = None,
        reward_model: RewardModel | None = None,
    ) -> None:
        """`counts` counts calls and failures, see `rollout.failures`. With a lag `finished` keeps groups until they
        train; None: nothing trains later than it is played. `score_early(group)` is called for each group once it has
        been played; None: mismatch is not explained. `reward_model` scores rollouts that train; None: the run has
        none."""
        self.config, self.family, self.tokenizer = config, family, tokenizer
        self.generator, self.weights = generator, weights
        self.finished, self._score_early, self._reward_model = finished, score_early, reward_model
        self.failures = None if config.algorithm.on_rollout_failure == "fail" else Failures(config.algorithm, counts)

    async def play(self, draws: list[Draw], counts: Counter) -> list[RolloutGroup]:
        """`group_size` rollouts of each draw's task, with rewards, grouped as the algorithm says.

        Adds to `counts` the rollouts that grouping leaves out, and failures where they do not end the run.
        """
        policy = self.policy(self.config.algorithm.temperature)
        policy.for_training = True
        if not self.config.algorithm.asks_teacher:
            return await self._play(draws, policy, counts)
        async with self.weights.holding_teacher() as policy.teacher_version:
            return await self._play(draws, policy, counts)

    async def _play(self, draws: list[Draw], policy: Policy, counts: Counter) -> list[RolloutGroup]:
        config, workflow, failures = self.config.algorithm, self.workflow(self.family), self.failures
        newest, restored = self.generator.policy_version, list[RolloutGroup]()
        groups = (running("play rollouts", self._play_draw(draw, workflow, policy, restored)) for draw in draws)
        played: list = await asyncio.gather(*groups, return_exceptions=failures is not None)
        if failures is not None:
            played = failures.without_failed(played, counts)
        for hook in config.hooks:
            await asyncio.gather(*(hook(group, policy) for group in played))
        if config.trajectory_grouping_hook is None and all(map(_is_plain, played)):
            return played
        rollouts = [rollout for group in played for rollout in group.rollouts]
        # With a lag all may be older: a version serves before the generators have loaded it, and `check_lag` follows.
        older = restored if self.finished is None else played
        return form_groups(rollouts, config, counts, policy_version=_oldest_version(older, newest))

    async def _play_draw(
        self, draw: Draw, workflow: Callable, policy: Policy, restored: list[RolloutGroup]
    ) -> RolloutGroup:
        """The group of one draw, as played: before hooks and grouping. A restored group is not played again, and is
        added to `restored`."""
        group = None if self.finished is None else self.finished.take(draw.id, draw.task)
        if group is not None:
            restored.append(group)
        else:
            play = partial(
                run_group,
                workflow,
                draw.task,
                seed=self.config.seed,
                reward=self.family,
                reward_timeout_s=self.config.controller.reward_timeout_s,
                retrying=None if self.failures is None else self.failures.retrying,
                reward_model=self._reward_model,
            )
            attempts = play(policy=policy, n=self.config.algorithm.group_size, group_id=draw.id)
            if self.config.algorithm.greedy_baseline:
                greedy = play(policy=self.policy(0.0), n=1, group_id=f"{draw.id}/greedy")
                group = await _with_baseline(attempts, greedy, patient=self.failures is not None)
            else:
                group = await attempts
            if self.finished is not None:
                self.finished.keep(draw.id, draw.task, group)
        if self._score_early is not None:
            self._score_early(group)
        return group

    def policy(self, temperature: float) -> Policy:
        """The newest policy at a temperature, with the run's tokenizer and limits."""
        names = ("max_tokens", "max_prompt_tokens", "stop_token_ids", "stop")
        limits = {name: getattr(self.config.sampling, name) for name in names}
        return Policy(generator=self.generator, tokenizer=self.tokenizer, temperature=temperature, **limits)

    def workflow(self, family: TaskFamily) -> Callable:
        """The workflow that plays the tasks of a family: the config's own, else the default for the family."""
        if self.config.algorithm.workflow is not None:
            return self.config.algorithm.workflow
        return self._in_environments(family.environment) if hasattr(family, "environment") else single_turn

    def _in_environments(self, environment: Callable) -> Callable:
        sampling = self.config.sampling
        limits = Limits(
            max_turns=sampling.max_turns,
            timeout_s=sampling.rollout_timeout_s,
            max_tokens=sampling.max_rollout_tokens or sampling.max_prompt_tokens + sampling.max_tokens,
            step_timeout_s=self.config.controller.reward_timeout_s,
        )
        return workflow_of(environment, limits)

    async def demonstrations(self, tasks: list[Task], family: TaskFamily) -> list[tuple[list[int], list[int]]]:
        """(prompt tokens, completion tokens) of every turn of the tasks' demonstrations. Raises ValueError for a task
        without a demonstration."""
        policy, workflow = self.policy(1.0), self.workflow(family)
        pairs = await asyncio.gather(*(demonstrate(workflow, task, policy) for task in tasks))
        return [pair for turns in pairs for pair in turns]

    def pairs(self, tasks: list[Task]) -> list[tuple[list[int], list[int]]]:
        """(prompt tokens, completion tokens) of the chosen and of the rejected completion of each task in turn. Raises
        ValueError as `pair_tokens` does."""
        policy = self.policy(1.0)
        return [sequence for task in tasks for sequence in pair_tokens(task, policy)]


def _oldest_version(older: list[RolloutGroup], newest: int) -> int:
    """The oldest policy version that a token of a batch may have: `newest`, the one that served when its play began,
    or one of a token of the groups `older`."""
    turns = (turn for group in older for rollout in group.rollouts for turn in rollout.turns)
    return min([newest, *(version for turn in turns for version in turn.completion.policy_versions)])


async def _with_baseline(
    attempts: Awaitable[RolloutGroup], greedy: Awaitable[RolloutGroup], *, patient: bool
) -> RolloutGroup:
    """The group of `attempts` with the rewards of the greedy group beside it as baselines. Raises what either raises,
    with `patient` once both have ended."""
    played: list = list(await asyncio.gather(attempts, greedy, return_exceptions=patient))
    raise_worst(played)
    group, beside = played
    set_baselines(group, beside)
    return group


def _is_plain(group: RolloutGroup) -> bool:
    """Whether a draw's rollouts are a group as they stand: complete, of one role, with nothing precomputed."""
    for rollout in group.rollouts:
        carried = any(turn.advantages is not None or turn.soft_targets is not None for turn in rollout.turns)
        own = rollout.group == group.id and rollout.role == "policy"
        if carried or not (own and rollout.turns and rollout.reward is not None):
            return False
    return bool(group.rollouts)
