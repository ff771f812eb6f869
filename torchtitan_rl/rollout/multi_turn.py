"""A task played in an environment, turn by turn, within limits."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass

from torchtitan_rl.rollout.chat import Dialogue
from torchtitan_rl.rollout.episode import Episode
from torchtitan_rl.rollout.policy import Policy
from torchtitan_rl.tasks.env import Env
from torchtitan_rl.tasks.family import stream
from torchtitan_rl.types import Rollout, Task, Turn

__all__ = ["Limits", "multi_turn"]


@dataclass(kw_only=True, slots=True, frozen=True)
class Limits:
    """How long one rollout may last. A rollout that reaches a limit ends without error and keeps its reward so far."""

    max_turns: int
    """Most completions."""
    max_tokens: int
    """Most tokens of first prompt, completions and observations together."""
    timeout_s: float
    """Seconds for the whole rollout. At the deadline the completion in progress is dropped, so runs in which a rollout
    reaches the deadline are not reproducible."""
    step_timeout_s: float
    """Seconds for one answer of the environment; a later answer is an error."""


async def multi_turn(task: Task, policy: Policy, *, rollout_id: str, seed: int, env: Env, limits: Limits) -> Rollout:
    """Plays `env` once. The environment rewards each turn; the rollout's reward is the sum.

    `end_reason` is `"done"` if the environment ended the rollout, or the limit that did: `"turns"`, `"tokens"` or
    `"time"`. Turn i samples from the stream (seed, i). Raises RuntimeError for what `Episode` refuses.
    """
    rollout = Rollout(id=rollout_id, task=task, turns=[])
    episode = Episode(env, task, limits.step_timeout_s)
    async with episode.closing():
        try:
            async with asyncio.timeout(limits.timeout_s) as scope:
                rollout.end_reason = await _play(rollout, episode, policy, seed, limits)
        except TimeoutError:
            if not scope.expired():  # not this deadline
                raise
            rollout.end_reason = "time"
    if rollout.turns:
        first, last = rollout.turns[0], rollout.turns[-1]
        episode_tokens = [*last.prompt_tokens, *last.completion.tokens][len(first.prompt_tokens) :]
        rollout.text = policy.tokenizer.decode(episode_tokens, skip_special_tokens=True)
    rollout.reward = math.fsum(turn.reward for turn in rollout.turns)
    episode.check_sums(rollout.reward, rollout.reward_parts)
    return rollout


async def _play(rollout: Rollout, episode: Episode, policy: Policy, seed: int, limits: Limits) -> str:
    env, began = episode.env, time.perf_counter()
    dialogue = Dialogue(policy.tokenizer, await episode.reset(), env.tools)
    policy.check_prompt(rollout.task, dialogue.tokens)
    for turn in range(limits.max_turns):
        room = limits.max_tokens - len(dialogue.tokens)
        if room < 1:
            return "tokens"
        asked_s = time.perf_counter() - began
        completion = await policy.complete(
            dialogue.tokens,
            seed=stream(seed, turn),
            max_tokens=min(policy.max_tokens, room),
            stop=env.stop,
            stop_token_ids=dialogue.stop_token_ids,
        )
        rollout.turns.append(Turn(prompt_tokens=dialogue.tokens, completion=completion, reward=0.0))
        sampled_s = time.perf_counter() - began
        step = await episode.step(policy.text(completion))
        rollout.turns[-1].reward = float(step.reward)
        rollout.turns[-1].seconds = asked_s, sampled_s, time.perf_counter() - began
        for name, number in step.reward_parts.items():
            rollout.reward_parts[name] = rollout.reward_parts.get(name, 0.0) + float(number)
        if step.done:
            return "done"
        dialogue.extend(completion, step.observation)
    return "turns"
