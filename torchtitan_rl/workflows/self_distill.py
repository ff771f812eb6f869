"""The policy as its own teacher: what it sampled, scored again under a prompt that knows more.

`self_distill` decorates a workflow and needs no reward; `distill_group` is an `algorithm.after_rewards`, for prompts made
of what judging has shown: feedback, or a sibling that succeeded. Which version of the policy teaches is the controller's
to say (`algorithm.refresh_teacher_every`); `Policy.teacher_version` has its number, and None in evaluations, where
nothing happens.

On-policy self-distillation: Zhao et al., "Self-Distilled Reasoner", arXiv:2601.18734. With feedback or siblings: Hübotter
et al., "Reinforcement Learning via Self-Distillation", arXiv:2601.20802.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Callable

import numpy as np

from torchtitan_rl.algorithm.distill import token_advantages
from torchtitan_rl.algorithm.grouping import fill_rewards
from torchtitan_rl.types import Rollout, RolloutGroup, Task
from torchtitan_rl.workflows.policy import Policy, Prompt
from torchtitan_rl.workflows.single_turn import single_turn

__all__ = ["self_distill", "postprocess_opsd", "distill_group"]


def self_distill(
    workflow: Callable = single_turn, *, prompt: Callable[[Rollout], Prompt | None], coef: float = 1.0,
    discount: float = 0.0, top_k: int = 0,
) -> Callable:
    """The workflow, with advantages for each sampled token: -coef x (student - teacher), see `token_advantages`.

    `prompt(rollout)` gives what the teacher reads in place of the first prompt: text, messages or tokens, with what the
    task's prompt does not say (its answer, say); None for a rollout from which nothing is to be learned. The teacher
    reads all that follows, observations included, as the policy did. With `top_k` the policy learns the teacher's
    likeliest tokens at each position instead, by cross-entropy, with weights coef x their probabilities.

    Use it as `workflow=self_distill(single_turn, prompt=hint)`. Raises ValueError at a temperature other than 1, at which
    scores are made, and when a turn does not go on from the first prompt.
    """
    _check(prompt, 1, coef, discount, top_k)

    @functools.wraps(workflow)
    async def distilled(task: Task, policy: Policy, *, rollout_id: str, seed: int) -> Rollout:
        rollout = await workflow(task, policy, rollout_id=rollout_id, seed=seed)
        if policy.teacher_version is not None:
            await _learn(rollout, prompt(rollout), policy, coef=coef, discount=discount, top_k=top_k)
        return rollout

    distilled.asks_teacher = True
    return distilled


postprocess_opsd = self_distill
"""The name some know it by."""


def distill_group(
    *, prompt: Callable[[Rollout, list[Rollout]], Prompt | None], coef: float = 1.0, discount: float = 0.0,
    top_k: int = 0, advantage_fn: Callable | None = None,
) -> Callable:
    """An `algorithm.after_rewards` like `self_distill`, whose `prompt(rollout, siblings)` sees the judged rollouts.

    `siblings` are the task's other rollouts. With `advantage_fn`, an estimator such as `grpo`, rewards count as well: what
    it says of the rollout is added to each of its tokens.
    """
    _check(prompt, 2, coef, discount, top_k)

    async def after_rewards(group: RolloutGroup, policy: Policy) -> None:
        fill_rewards(group)
        rollouts = [rollout for rollout in group.rollouts if rollout.turns]
        await asyncio.gather(*(
            _learn(rollout, prompt(rollout, [other for other in group.rollouts if other is not rollout]), policy,
                   coef=coef, discount=discount, top_k=top_k) for rollout in rollouts))
        if advantage_fn is not None and rollouts:
            estimated = advantage_fn(np.array([rollout.reward for rollout in rollouts], dtype=np.float64))
            for rollout, advantage in zip(rollouts, estimated, strict=True):
                for turn in rollout.turns:
                    turn.advantages = [float(advantage) + own for own in turn.advantages]

    after_rewards.asks_teacher = True
    return after_rewards


def _check(prompt: Callable, num_arguments: int, coef: float, discount: float, top_k: int) -> None:
    wanted = ("rollout", "siblings")[:num_arguments]
    try:
        inspect.signature(prompt).bind(*wanted)
    except TypeError as error:
        raise ValueError(f"prompt={prompt!r}: cannot be called as ({', '.join(wanted)}) ({error}); give it that "
                         "signature") from error
    if not 0 < coef < math.inf:
        raise ValueError(f"coef={coef}: must be positive and finite, or nothing would be learned; use 1")
    if not 0 <= discount <= 1:
        raise ValueError(f"discount={discount}: must be between 0 and 1; use 0 for none")
    if top_k < 0:
        raise ValueError(f"top_k={top_k}: must not be negative; use 0 to learn from the sampled tokens alone")
    if top_k and discount:
        raise ValueError(f"discount={discount}: has no effect with top_k={top_k}, which is of one position; use 0")


async def _learn(
    rollout: Rollout, prompt: Prompt | None, policy: Policy, *, coef: float, discount: float, top_k: int,
) -> None:
    """Fills `advantages` (and with top_k `soft_targets`) of the rollout's turns; one request scores all of them."""
    if policy.temperature != 1.0:
        raise ValueError(f"algorithm.temperature={policy.temperature}: the teacher scores at temperature 1 and the policy "
                         "must be compared at the same; use 1")
    for turn in rollout.turns:
        turn.advantages = [0.0] * len(turn.completion.tokens)
    if prompt is None or not rollout.turns:
        return
    sequence, starts = _as_teacher_reads(rollout, policy.encode(prompt))
    version = policy.teacher_version
    if top_k:
        tokens, logprobs = await policy.sampler.score_top(sequence, top_k, policy_version=version)
        for turn, start in zip(rollout.turns, starts):
            rows = slice(start - 1, start - 1 + len(turn.completion.tokens))  # row 0 is of the second token
            turn.soft_targets = tokens[rows], coef * logprobs[rows].exp()
        return
    scores = await policy.sampler.score(sequence, policy_version=version)
    teacher = [scores[start - 1 + i] for turn, start in zip(rollout.turns, starts)
               for i in range(len(turn.completion.tokens))]
    student = [logprob for turn in rollout.turns for logprob in turn.completion.logprobs]
    advantages = iter(token_advantages(student, teacher, coef=coef, discount=discount))
    for turn in rollout.turns:
        turn.advantages = [next(advantages) for _ in turn.completion.tokens]


def _as_teacher_reads(rollout: Rollout, prompt: list[int]) -> tuple[list[int], list[int]]:
    """The whole rollout after another first prompt, and where in it each turn's completion begins."""
    first, sequence, starts = rollout.turns[0].prompt_tokens, list(prompt), []
    so_far = list(first)
    for index, turn in enumerate(rollout.turns):
        if turn.prompt_tokens[:len(so_far)] != so_far:
            raise ValueError(f"self_distill: turn {index} of rollout {rollout.id} does not go on from the turn before, so "
                             "its teacher cannot read what came before; keep every prompt an extension of the last")
        sequence += turn.prompt_tokens[len(so_far):]
        starts.append(len(sequence))
        sequence += turn.completion.tokens
        so_far = [*turn.prompt_tokens, *turn.completion.tokens]
    return sequence, starts
