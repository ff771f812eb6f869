"""Rollouts of a few tokens, for the tests of what the algorithm does with them."""

from torchtitan_rl.types import Completion, Rollout, RolloutGroup, Task, Turn


def turn(prompt_tokens, tokens, logprobs=None, *, version=0, truncated=False, **fields):
    completion = Completion(
        tokens=tokens,
        logprobs=logprobs or [-1.0] * len(tokens),
        policy_versions=[version] * len(tokens),
        finish_reason="length" if truncated else "stop",
    )
    return Turn(prompt_tokens=prompt_tokens, completion=completion, **fields)


def rollout(id, *turns, task="t", reward=0.0, **fields):
    return Rollout(id=id, task=Task(id=task, prompt=""), turns=list(turns), reward=reward, **fields)


def attempts(task, rewards, *, first=0):
    """One rollout of one turn of two tokens for each reward, named as the controller names them."""
    return [
        rollout(f"0/{task}/{i}", turn([1], [2, 3]), task=f"task-{task}", reward=reward)
        for i, reward in enumerate(rewards, start=first)
    ]


def group(*rollouts, id="0/0"):
    return RolloutGroup(id=id, rollouts=list(rollouts))
