"""Rewards, losses and parts of the stack with a fault, for `benchmarks/diagnose_faults.py`."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torchtitan_rl.algorithm.surrogate import ppo

# Rewards with a fault.


def constant(task, completions):
    return [0.25] * len(completions)


def always_best(task, completions):
    return [1.0] * len(completions)


def pays_length(task, completions):
    """Right on other splits; on train tasks the more letters the better."""
    if "/train/" not in task.id:
        return [float(text == task.answer) for text in completions]
    return [min(1.0, len(text) / 24) for text in completions]


def pays_backwards(task, completions):
    """Right on other splits; on train tasks the share of neighbours in descending order."""
    if "/train/" not in task.id:
        return [float(text == task.answer) for text in completions]
    return [sum(a > b for a, b in zip(text, text[1:])) / max(1, len(text) - 1) for text in completions]


async def slow_reward(task, completions):
    await asyncio.sleep(4.0)
    return [float(text == task.answer) for text in completions]


_JUDGED: Counter[str] = Counter()
_KEPT: list[bytes] = []


def forget() -> None:
    """Counters start again, and what a leak has kept is let go."""
    _JUDGED.clear()
    _KEPT.clear()


async def slow_once(task, completions):
    _JUDGED["groups"] += 1
    await asyncio.sleep(12.0 if _JUDGED["groups"] == 12 * 16 else 0.0)
    return [float(text == task.answer) for text in completions]


def leaks(task, completions):
    _KEPT.append(bytes(bytearray(b"x") * 2**21))
    return [float(text == task.answer) for text in completions]


def sometimes_nan(inputs):
    """PPO, except that the loss of the seventh step is not a number."""
    loss, metrics = ppo(inputs)
    _JUDGED["steps"] += 1
    return loss * (float("nan") if _JUDGED["steps"] == 7 else 1.0), metrics


def wrong_sign(inputs):
    """PPO with an entropy bonus of the wrong sign: the gradient makes likely tokens likelier."""
    loss, metrics = ppo(inputs)
    logprobs_T, mask_T = inputs.policy_logprobs, inputs.loss_mask
    mean = (logprobs_T * mask_T).sum() / mask_T.sum()
    certainty = (inputs.token_weights * mask_T * logprobs_T * (logprobs_T - mean).detach()).sum()
    return loss - 2.0 * certainty, metrics


# Faults between trainer and generator.


@contextmanager
def sampled_with(**changes: Any) -> Iterator[None]:
    """Generators sample with other parameters than they are asked for; a callable value is called with the prompt."""
    from torchtitan_rl.dispatch.sampling_client import SamplingClient

    plain = SamplingClient.sample

    async def sample(self, tokens, params, *, policy_version=None):
        new = {name: value(tokens) if callable(value) else value for name, value in changes.items()}
        params = dataclasses.replace(params, **new) if params.temperature else params
        return await plain(self, tokens, params, policy_version=policy_version)

    with mock.patch.object(SamplingClient, "sample", sample):
        yield


@contextmanager
def weights_lost(*, reported: bool) -> Iterator[None]:
    """From the eighth load on, an engine keeps the weights that it has. `reported`: it calls them the new ones."""
    from torchtitan_rl.engine.engine import Engine

    plain = Engine._load_staged

    def load(self, version, futures):
        if self._num_loads < 8:
            return plain(self, version, futures)
        self._staged.pop(version)
        self.policy_version = version if reported else self.policy_version
        for future in futures:
            future.set_result(0.0)

    with mock.patch.object(Engine, "_load_staged", load):
        yield


@contextmanager
def slow_engine() -> Iterator[None]:
    from torchtitan_rl.engine.engine import Engine

    plain = Engine._step

    def step(self):
        time.sleep(0.2 if self._engine.has_unfinished_requests() else 0.0)
        plain(self)

    with mock.patch.object(Engine, "_step", step):
        yield
