"""Batches ahead of training, in the loop of a real run: the age of every trained token, and what the ledger says."""

import contextlib

import pytest

from tests.integration.test_batches import algorithm
from torchtitan_rl.record.attempts import read_ledger, read_rollouts
from torchtitan_rl.rollout.batch_sources import lagged_batches
from torchtitan_rl.rollout.finished import FinishedGroups
from torchtitan_rl.train.lag_metrics import LagMetrics
from torchtitan_rl.train.overlapped_evaluations import OverlappedEvaluations

pytestmark = pytest.mark.whole

LAG, STEPS = 2, 6


@contextlib.contextmanager
def ahead(controller, lag, order="slots"):
    """The controller's loop with batches ahead."""
    before, config, publications = controller.batches, controller.config, controller.versions.publications
    with algorithm(controller, max_policy_lag=lag, batch_order=order):
        finished = controller.player.finished = FinishedGroups()
        batches = lagged_batches(
            config,
            controller.player,
            controller.draws,
            controller.state,
            controller._record_admitted,
            publications=publications,
            finished=finished,
        )
        controller.batches, controller.lag_metrics = batches, LagMetrics(batches, controller.generator, publications)
        controller.overlapped_evaluations = OverlappedEvaluations(
            config.controller, controller.evaluations, controller.versions, controller.state, controller.recorder
        )
        try:
            yield
        finally:
            controller.batches, controller.player.finished = before, None
            controller.lag_metrics = controller.overlapped_evaluations = None


def test_no_trained_token_is_older_than_the_bound_and_no_rollout_is_missing(loop, controller):
    first, slot = controller.state.step, controller.draws.next_slot
    published = len(controller.versions.publications)
    with ahead(controller, LAG):
        controller.config.controller.num_steps = first + STEPS
        loop.run_until_complete(controller.reinforce())
    lines = [line for line in controller.run_dir.read_metrics() if line["phase"] == "reinforcement"][-STEPS:]
    assert [line["step"] for line in lines] == list(range(first + 1, first + STEPS + 1))
    assert max(line["policy/lag_max"] for line in lines) == LAG and lines[0]["policy/lag_max"] == 0

    for line in lines:
        by_age = {age: line.get(f"tokens/trained_lag{age}", 0) for age in range(LAG + 1)}
        assert sum(by_age.values()) == line["tokens/trained"]
        assert line["policy/lag_max"] == max(age for age, tokens in by_age.items() if tokens)
        for age in filter(by_age.get, by_age):
            assert 0.5 < line[f"policy/ratio_lag{age}_mean"] < 2 and 0 <= line[f"policy/far_lag{age}_frac"] <= 1
        assert 0 <= line["generator/idle_frac"] <= 1 and 0 <= line["trainer/idle_frac"] < 1
        assert line["generator/stall_s"] > 0 and line["batches/ready"] in range(LAG + 1)

    order = {version: i for i, version in enumerate(controller.versions.publications)}
    tokens = 0
    for record in read_rollouts(controller.run_dir):
        if record["step"] > first:
            starts = published - 1 + record["step"] - first - 1  # the publication that was served as its batch started
            ages = [starts - order[version] for turn in record["turns"] for version in turn["policy_versions"]]
            assert 0 <= min(ages) and max(ages) <= LAG
            tokens += len(ages)
    assert tokens == sum(line["tokens/generated"] for line in lines)

    trained = [record for record in read_ledger(controller.run_dir) if record["step"] > first]
    per_batch = controller.config.algorithm.tasks_per_step
    assert [record["draw"] for record in trained if record["event"] == "trained"] == [
        f"{s}/0" for s in range(slot, slot + STEPS * per_batch)
    ]
    assert controller.draws.next_slot == slot + STEPS * per_batch  # nothing was played for no step


def test_a_loop_of_ones_own_trains_under_a_lag(loop, controller):
    async def step():
        groups = await controller.rollouts(controller.draws.next(4))
        line = await controller.train_on(groups)
        await controller.publish()
        return line

    with ahead(controller, LAG):
        assert loop.run_until_complete(step())["policy/lag_max"] == 0


def test_every_slot_trains_once_and_in_time_in_the_order_of_their_ends(loop, controller):
    first, slot = controller.state.step, controller.draws.next_slot
    with ahead(controller, LAG, "finished"):
        controller.config.controller.num_steps = first + STEPS
        loop.run_until_complete(controller.reinforce())
    lines = [line for line in controller.run_dir.read_metrics() if line["phase"] == "reinforcement"][-STEPS:]
    assert [line["step"] for line in lines] == list(range(first + 1, first + STEPS + 1))
    assert max(line["policy/lag_max"] for line in lines) <= LAG
    assert all(0 <= line[f"completion/{name}"] <= 1 for line in lines for name in ("long_frac", "long_played_frac"))
    ended = [record for record in read_ledger(controller.run_dir) if record["step"] > first]
    trained = sorted(int(record["draw"].split("/")[0]) for record in ended if record["event"] == "trained")
    assert trained == list(range(slot, slot + STEPS * controller.config.algorithm.tasks_per_step))
    assert controller.draws.next_slot == slot + len(trained)
