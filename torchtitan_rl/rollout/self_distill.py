"""Self-distillation: a snapshot of the policy scores the sampled tokens again, under a prompt that says more.

`self_distill` decorates a workflow and needs no reward. `distill_group` is an `algorithm.after_rewards`, for prompts
made from judged rollouts: from feedback, or from a sibling that succeeded. The controller chooses the version of the
snapshot (`algorithm.refresh_teacher_every`, `Policy.teacher_version`). Docstrings here call the snapshot under its
prompt the teacher. In evaluations (`Policy.for_training=False`) neither function does anything.

On-policy self-distillation: Zhao et al., "Self-Distilled Reasoner", arXiv:2601.18734. With feedback or siblings:
Hübotter et al., "Reinforcement Learning via Self-Distillation", arXiv:2601.20802.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from torchtitan_rl.algorithm.advantages import sees_batch, sees_group
from torchtitan_rl.algorithm.distill import token_advantages
from torchtitan_rl.algorithm.grouping import by_task_and_role, fill_rewards
from torchtitan_rl.rollout.policy import Policy, Prompt
from torchtitan_rl.types import Rollout, RolloutGroup, Task

__all__ = ["self_distill", "postprocess_opsd", "distill_group", "SelfDistill", "DistillGroup"]


@dataclass(kw_only=True)
class SelfDistill:
    """A workflow that plays another workflow, then gives its turns advantages; made by `self_distill`."""

    asks_teacher: ClassVar[bool] = True

    workflow: Callable
    prompt: Callable[[Rollout], Prompt | None]
    coef: float = 1.0
    discount: float = 0.0
    top_k: int = 0

    def __post_init__(self) -> None:
        _check(self, "rollout")

    async def __call__(self, task: Task, policy: Policy, *, rollout_id: str, seed: int) -> Rollout | list[Rollout]:
        if policy.for_training:
            _teacher_version(policy)  # raises early: without a version nobody calls `after_rewards`
        return await self.workflow(task, policy, rollout_id=rollout_id, seed=seed)

    async def after_rewards(self, group: RolloutGroup, policy: Policy) -> None:
        """Has the teacher score the rollouts of a task. The controller calls this after every rollout of the batch is
        played, so the generators change to the teacher's weights and back once."""
        if policy.for_training:
            await asyncio.gather(
                *(_learn(rollout, self.prompt(rollout), policy, self) for rollout in group.rollouts if rollout.turns)
            )


def self_distill(
    workflow: Callable | None = None,
    *,
    prompt: Callable[[Rollout], Prompt | None],
    coef: float = 1.0,
    discount: float = 0.0,
    top_k: int = 0,
) -> SelfDistill | Callable[[Callable], SelfDistill]:
    """The workflow, with advantages for each sampled token: -coef x (student - teacher), see `token_advantages`.

    `prompt(rollout)` returns the teacher's first prompt (text, messages or tokens), which adds what the task's prompt
    lacks, such as the answer; None: every advantage of the rollout is 0. After the first prompt the teacher reads the
    same tokens as the policy, observations included. With `top_k` > 0 the policy learns the teacher's `top_k` likeliest
    tokens at each position instead, by cross-entropy, with weights coef x their probabilities.

    Write `workflow=self_distill(single_turn, prompt=hint)`, or `@self_distill(prompt=hint)` over a workflow of your
    own. Raises ValueError at a temperature other than 1, because scores are made at 1, and when a turn does not extend
    the turn before.
    """

    def decorate(workflow: Callable) -> SelfDistill:
        return SelfDistill(workflow=workflow, prompt=prompt, coef=coef, discount=discount, top_k=top_k)

    decorated = decorate(_undecorated if workflow is None else workflow)  # refuses wrong arguments now
    return decorate if workflow is None else decorated


async def _undecorated(task: Task, policy: Policy, *, rollout_id: str, seed: int) -> Rollout:
    raise ValueError("self_distill: decorates no workflow; write self_distill(single_turn, ...)")


postprocess_opsd = self_distill
"""Another name of `self_distill`."""


@dataclass(kw_only=True)
class DistillGroup:
    """Gives the turns of judged rollouts advantages; made by `distill_group`."""

    asks_teacher: ClassVar[bool] = True

    prompt: Callable[[Rollout, list[Rollout]], Prompt | None]
    coef: float = 1.0
    discount: float = 0.0
    top_k: int = 0
    advantage_fn: Callable | None = None

    def __post_init__(self) -> None:
        _check(self, "rollout", "siblings")
        fn = self.advantage_fn
        if fn is not None and (not callable(fn) or sees_batch(fn) or sees_group(fn)):
            raise ValueError(
                f"advantage_fn={fn!r}: is not an estimator of one group's rewards; give one such as grpo or rloo, or "
                "None"
            )

    async def __call__(self, group: RolloutGroup, policy: Policy) -> None:
        # Siblings are the rollouts that grouping will compare: of one role, and with turns.
        await asyncio.gather(
            *(self._learn(part, policy) for part in by_task_and_role([r for r in group.rollouts if r.turns]))
        )

    async def _learn(self, group: RolloutGroup, policy: Policy) -> None:
        fill_rewards(group)
        await asyncio.gather(
            *(
                _learn(
                    rollout,
                    self.prompt(rollout, [other for other in group.rollouts if other is not rollout]),
                    policy,
                    self,
                )
                for rollout in group.rollouts
            )
        )
        if self.advantage_fn is None:
            return
        estimated = self.advantage_fn(torch.tensor(group.rewards, dtype=torch.float64)).tolist()
        for rollout, advantage in zip(group.rollouts, estimated, strict=True):
            for turn in rollout.turns:
                own: Any = turn.advantages  # a list, set above
                turn.advantages = [advantage + token_advantage for token_advantage in own]


def distill_group(
    *,
    prompt: Callable[[Rollout, list[Rollout]], Prompt | None],
    coef: float = 1.0,
    discount: float = 0.0,
    top_k: int = 0,
    advantage_fn: Callable | None = None,
) -> DistillGroup:
    """An `algorithm.after_rewards` like `self_distill`, whose `prompt(rollout, siblings)` sees the judged rollouts.

    `siblings` are the task's other rollouts of the same role. With `advantage_fn`, an estimator of one group such as
    `grpo`, rewards count as well: the rollout's advantage from rewards is added to the advantage of each token.
    """
    return DistillGroup(prompt=prompt, coef=coef, discount=discount, top_k=top_k, advantage_fn=advantage_fn)


def _check(settings: SelfDistill | DistillGroup, *arguments: str) -> None:
    """Raises ValueError for settings without meaning; `arguments` names the arguments of `settings.prompt`."""
    prompt, coef, discount, top_k = settings.prompt, settings.coef, settings.discount, settings.top_k
    try:
        inspect.signature(prompt).bind(*arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"prompt={prompt!r}: cannot be called as ({', '.join(arguments)}) ({error}); give it that signature"
        ) from error
    if inspect.iscoroutinefunction(prompt):
        raise ValueError(f"prompt={prompt!r}: is async; give a plain function, what it needs belongs into the workflow")
    if not 0 < coef < math.inf:
        raise ValueError(f"coef={coef}: must be positive and finite, or nothing would be learned; use 1")
    if not 0 <= discount <= 1:
        raise ValueError(f"discount={discount}: must be between 0 and 1; use 0 for none")
    if top_k < 0:
        raise ValueError(f"top_k={top_k}: must not be negative; use 0 to learn from the sampled tokens alone")
    if top_k and discount:
        raise ValueError(f"discount={discount}: has no effect with top_k={top_k}, which is of one position; use 0")


async def _learn(rollout: Rollout, prompt: Prompt | None, policy: Policy, settings: SelfDistill | DistillGroup) -> None:
    """Fills `advantages` (and with top_k `soft_targets`) of the rollout's turns; one request scores all turns."""
    version = _teacher_version(policy)
    if policy.temperature != 1.0:
        raise ValueError(
            f"algorithm.temperature={policy.temperature}: the teacher scores at temperature 1 and the policy "
            "must be compared at the same; use 1"
        )
    for turn in rollout.turns:
        turn.advantages = [0.0] * len(turn.completion.tokens)
    if prompt is None:
        return
    tokens = policy.encode(prompt)
    if not tokens:
        raise ValueError(f"prompt={prompt!r}: of rollout {rollout.id} has no tokens; give some, or None for no teacher")
    sequence, starts = _as_teacher_reads(rollout, tokens)
    if settings.top_k:
        likeliest, logprobs = await policy.generator.score_top(sequence, settings.top_k, policy_version=version)
        for turn, start in zip(rollout.turns, starts):
            rows = slice(start - 1, start - 1 + len(turn.completion.tokens))  # row 0 scores the second token
            turn.soft_targets = likeliest[rows], settings.coef * logprobs[rows].exp()
        return
    scores = await policy.generator.score(sequence, policy_version=version)
    teacher = [
        scores[start - 1 + i] for turn, start in zip(rollout.turns, starts) for i in range(len(turn.completion.tokens))
    ]
    student = [logprob for turn in rollout.turns for logprob in turn.completion.logprobs]
    advantages = iter(token_advantages(student, teacher, coef=settings.coef, discount=settings.discount))
    for turn in rollout.turns:
        turn.advantages = [next(advantages) for _ in turn.completion.tokens]


def _teacher_version(policy: Policy) -> int:
    if policy.teacher_version is None:
        raise RuntimeError(
            "policy.teacher_version=None: nobody has said which policy version teaches; the controller does "
            "where algorithm.workflow or after_rewards is what self_distill or distill_group has made, or "
            "wraps it with functools.wraps"
        )
    return policy.teacher_version


def _as_teacher_reads(rollout: Rollout, prompt: list[int]) -> tuple[list[int], list[int]]:
    """(the whole rollout's tokens after the teacher's first prompt, where each turn's completion begins in them)."""
    sequence, starts, so_far = list(prompt), [], list(rollout.turns[0].prompt_tokens)
    for index, turn in enumerate(rollout.turns):
        if turn.prompt_tokens[: len(so_far)] != so_far:
            raise ValueError(
                f"self_distill: turn {index} of rollout {rollout.id} does not go on from the turn before, so "
                "its teacher cannot read what came before; keep every prompt an extension of the last"
            )
        sequence += turn.prompt_tokens[len(so_far) :]
        starts.append(len(sequence))
        sequence += turn.completion.tokens
        so_far = [*turn.prompt_tokens, *turn.completion.tokens]
    return sequence, starts
