"""Metrics of a lag, with numbers worked out by hand."""

import asyncio
import math

import pytest
import torch

from torchtitan_rl.train.lag_metrics import LagMetrics, ratios_by_age
from torchtitan_rl.types import Completion, Datum, Rollout, RolloutGroup, Task, Turn


def completion(versions, logprobs):
    return Completion(tokens=[7] * len(versions), logprobs=logprobs, policy_versions=versions, finish_reason="stop")


def rollout_of(*completions):
    turns = [Turn(prompt_tokens=[1], completion=each) for each in completions]
    return Rollout(id="0/0/0", task=Task(id="0", prompt=""), turns=turns)


def datum(rollout, turns, mask, sampling):
    columns = {"loss_mask": torch.tensor(mask), "sampling_logprobs": torch.tensor(sampling)}
    tokens = torch.zeros(len(mask), dtype=torch.long)
    return Datum(tokens=tokens, target_tokens=tokens, loss_inputs=columns, group=0, rollout=rollout, turns=turns)


def test_ratios_are_sorted_by_the_age_of_their_tokens():
    groups = [
        RolloutGroup(id="0/0", rollouts=[rollout_of(completion([4, 6], [-1.0, -1.0]), completion([6], [-2.0]))]),
        RolloutGroup(id="1/0", rollouts=[rollout_of(completion([4, 4], [-1.0, -1.0]))]),
    ]
    # One prompt token between the turns; the last token of the second rollout does not train.
    first = datum(0, [(0, 0, 2), (1, 3, 1)], [1.0, 1.0, 0.0, 1.0], [-1.0, -1.0, 0.0, -2.0])
    second = datum(1, [(0, 0, 2)], [1.0, 0.0], [-1.0, -1.0])
    trained = [
        (first, torch.tensor([-1.0 + math.log(1.5), -1.0, 5.0, -2.0 + math.log(0.9)])),
        (second, torch.tensor([-1.0 + math.log(0.5), 9.0])),
    ]
    assert ratios_by_age(trained, groups, [4, 5, 6]) == pytest.approx(
        {
            "policy/ratio_lag0_mean": (1.0 + 0.9) / 2,
            "policy/far_lag0_frac": 0.0,
            "tokens/trained_lag0": 2,
            "policy/ratio_lag2_mean": (1.5 + 0.5) / 2,
            "policy/far_lag2_frac": 1.0,
            "tokens/trained_lag2": 2,
        }
    )


async def test_shares_of_idle_time_count_what_was_seen_since_the_last_line():
    class Batches:
        groups = []

        def num_ready(self):
            return 1

    class Generators:
        def in_flight(self):
            return [3, 0]

        def stalls(self):
            return [0.1, 0.2]

    lag_metrics, lines, expected = LagMetrics(Batches(), Generators(), [0]), [], []
    lag_metrics.start()
    for waited_s in (0.05, 0.0):
        lag_metrics.begin_step()
        await asyncio.sleep(0.2)
        line = {"time/step_s": 0.4, "time/sync_s": 0.07}
        lines.append(line | lag_metrics.metrics(line, training_s=0.1, evaluation_wait_s=waited_s))
        expected.append((0.75, waited_s, 0.07 - waited_s))
    lag_metrics.stop()
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1  # nobody looks any more
    for line, (idle, waited_s, sync_s) in zip(lines, expected, strict=True):
        assert line["trainer/idle_frac"] == pytest.approx(idle, abs=0.01) and 0 < idle < 1
        assert line["time/eval_wait_s"] == pytest.approx(waited_s, abs=0.01)
        assert line["time/sync_s"] == pytest.approx(sync_s, abs=0.01) and sync_s >= 0.02
        assert line["generator/idle_frac"] == 0.5 and line["generator/in_flight_mean"] == 3
        assert line["generator/stall_s"] == 0.2 and line["batches/ready"] == 1


async def test_the_next_line_raises_what_ended_the_watch():
    class Batches:
        groups = []

        def num_ready(self):
            return 0

    class Generators:
        def in_flight(self):
            raise RuntimeError("no replica")

        def stalls(self):
            return [0.0]

    lag_metrics = LagMetrics(Batches(), Generators(), [0])
    lag_metrics.start()
    await asyncio.sleep(0.2)
    with pytest.raises(RuntimeError, match="no replica"):
        lag_metrics.metrics({"time/step_s": 0.4, "time/sync_s": 0.0}, training_s=0.1, evaluation_wait_s=0.0)
