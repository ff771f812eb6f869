"""From draws to judged groups: a workflow plays each draw's task several times, rewards judge the rollouts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from torchtitan_rl.algorithm.grouping import form_groups
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.run.draws import Draw
from torchtitan_rl.run.failures import Failures
from torchtitan_rl.run.policy_weights import PolicyWeights
from torchtitan_rl.tasks.family import TaskFamily
from torchtitan_rl.types import RolloutGroup, Task
from torchtitan_rl.workflows.demonstrate import demonstrate
from torchtitan_rl.workflows.group import run_group, workflow_of
from torchtitan_rl.workflows.multi_turn import Limits
from torchtitan_rl.workflows.policy import Policy

__all__ = ["Rollouts"]


class Rollouts:
    """Plays tasks with the newest policy. `generator` samples; `weights` has the snapshot for self-distillation."""

    def __init__(
        self,
        config: RunConfig,
        family: TaskFamily,
        tokenizer,
        generator: SamplingClient,
        weights: PolicyWeights,
        counted: dict[str, int],
    ) -> None:
        """`counted` counts calls and failures, see `run.failures`."""
        self.config, self.family, self.tokenizer = config, family, tokenizer
        self.generator, self.weights = generator, weights
        self.failures = None if config.algorithm.on_rollout_failure == "fail" else Failures(config.algorithm, counted)

    async def play(self, draws: list[Draw], counts: Counter) -> list[RolloutGroup]:
        """`group_size` rollouts of each draw's task, with rewards, grouped as the algorithm says.

        Adds to `counts` the rollouts that grouping leaves out, and failures where they do not end the run.
        """
        config = self.config.algorithm
        policy, workflow = self.policy(config.temperature), self.workflow(self.family)
        policy.for_training = True
        extended = config.workflow is not None or config.after_rewards is not None
        if extended and config.asks_teacher:
            policy.teacher_version = await self.weights.teacher()
        played: list = await asyncio.gather(
            *(
                run_group(
                    workflow,
                    draw.task,
                    policy,
                    config.group_size,
                    group_id=draw.id,
                    seed=self.config.seed,
                    reward=self.family,
                    reward_timeout_s=self.config.controller.reward_timeout_s,
                    tried=None if self.failures is None else self.failures.tried,
                )
                for draw in draws
            ),
            return_exceptions=self.failures is not None,
        )
        if self.failures is not None:
            played = self.failures.complete(played, counts)
        for hook in config.hooks if extended else ():
            await asyncio.gather(*(hook(group, policy) for group in played))
        rollouts = [rollout for group in played for rollout in group.rollouts]
        return form_groups(rollouts, config, counts, policy_version=self.generator.policy_version)

    def policy(self, temperature: float) -> Policy:
        """The newest policy at a temperature, with the run's tokenizer and limits."""
        sampling = self.config.sampling
        return Policy(
            generator=self.generator,
            tokenizer=self.tokenizer,
            temperature=temperature,
            max_tokens=sampling.max_tokens,
            max_prompt_tokens=sampling.max_prompt_tokens,
            stop_token_ids=sampling.stop_token_ids,
            stop=sampling.stop,
        )

    def workflow(self, family: TaskFamily) -> Callable:
        """The workflow that plays the tasks of a family: the config's own, else the default for the family."""
        if self.config.algorithm.workflow is not None:
            return self.config.algorithm.workflow
        sampling = self.config.sampling
        limits = Limits(
            max_turns=sampling.max_turns,
            timeout_s=sampling.rollout_timeout_s,
            max_tokens=sampling.max_rollout_tokens or sampling.max_prompt_tokens + sampling.max_tokens,
            step_timeout_s=self.config.controller.reward_timeout_s,
        )
        return workflow_of(family, limits)

    async def demonstrations(self, tasks: list[Task], family: TaskFamily) -> list[tuple[list[int], list[int]]]:
        """(prompt tokens, completion tokens) of every turn of the tasks' demonstrations. Raises ValueError for a task
        without a demonstration."""
        policy, workflow = self.policy(1.0), self.workflow(family)
        pairs = await asyncio.gather(*(demonstrate(workflow, task, policy) for task in tasks))
        return [pair for turns in pairs for pair in turns]
