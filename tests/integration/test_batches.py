"""Grouping hook, precomputed advantages, filters and the stall guard in the loop of a real run."""

import contextlib
import math
from statistics import mean

import pytest

from torchtitan_rl.config.algorithm import FilterConfig
from torchtitan_rl.rollout.policy import single_turn
from torchtitan_rl.tasks.limited import Limited
from torchtitan_rl.tasks.rewards import Rewards
from torchtitan_rl.types import RolloutGroup


@contextlib.contextmanager
def algorithm(controller, **settings):
    """Other settings for a while."""
    config = controller.config.algorithm
    before = {name: getattr(config, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


@contextlib.contextmanager
def rewards(controller, reward):
    before, controller.family.reward = controller.family.reward, reward
    try:
        yield
    finally:
        controller.family.reward = before


def one_batch(loop, controller):
    """One batch by the loop itself. Returns its metrics line."""
    controller.config.controller.num_steps = controller.state.step + 1
    loop.run_until_complete(controller.reinforce())
    return controller.run_dir.read_metrics()[-1]


def records(controller, step):
    return [record for record in controller.run_dir.tables["rollouts"].read() if record["step"] == step]


def varied(task, completions):
    return [float(i) for i in range(len(completions))]


def test_without_settings_a_line_has_no_filter_and_no_grouping_in_it(loop, controller):
    line = one_batch(loop, controller)
    assert not [name for name in line if name.startswith("filter/")]
    last = controller.draws.next_slot
    assert {record["group_id"] for record in records(controller, controller.state.step)} == {
        f"{slot}/0" for slot in range(last - 4, last)
    }


def test_the_grouping_hook_is_honoured(loop, controller):
    def everyone(rollouts, config):
        for rollout in rollouts:
            rollout.reward = float(rollout.id.endswith("/0"))
        return [RolloutGroup(id="everyone", rollouts=rollouts)]

    with algorithm(controller, trajectory_grouping_hook=everyone):
        line = one_batch(loop, controller)
    assert line["reward/mean"] == 0.25 and line["optim/grad_norm"] > 0
    held = records(controller, controller.state.step)
    assert {record["group_id"] for record in held} == {"everyone"}
    # GRPO by hand: a quarter of the rewards is 1, so their mean is 1/4 and their standard deviation sqrt(3)/4.
    assert [record["advantage"] for record in held] == pytest.approx(
        [(record["reward"] - 0.25) / (math.sqrt(3) / 4) for record in held]
    )


def test_precomputed_advantages_reach_the_trainer_and_nan_does_not(loop, controller, caplog):
    def brought(value):
        def hook(rollouts, config):
            for rollout in rollouts:
                rollout.turns[0].advantages = value
            return [RolloutGroup(id="all", rollouts=rollouts)]

        return hook

    with algorithm(controller, trajectory_grouping_hook=brought(0.5)):
        line = one_batch(loop, controller)
    assert line["advantage/mean"] == line["advantage/abs_max"] == 0.5
    with algorithm(controller, trajectory_grouping_hook=brought(math.nan)), rewards(controller, varied):
        line = one_batch(loop, controller)
    assert "NOT_FINITE: of 16 turns 16 carry advantages, 16 are not finite" in caplog.text
    assert math.isfinite(line["optim/grad_norm"]) and line["optim/skipped"] == 0 and line["advantage/abs_max"] > 0.5


def test_a_batch_is_filled_with_other_tasks(loop, controller):
    seen = []

    def every_second_task(task, completions):
        seen.append(task.id)
        return varied(task, completions) if len(seen) % 2 else [1.0] * len(completions)

    filters = FilterConfig(zero_variance=True, max_resamples=8)
    with algorithm(controller, filters=filters), rewards(controller, every_second_task):
        line = one_batch(loop, controller)
    assert line["filter/missing_tasks"] == 0 and line["filter/resampled_tasks"] == len(seen) - 4 > 0
    assert line["filter/zero_variance_groups"] == len(seen) - 4
    held = records(controller, controller.state.step)
    assert len({record["rollout_id"] for record in held}) == len(held) == 4 * len(seen) == 4 * len(set(seen))
    assert sum(record["advantage"] is not None for record in held) == 16


def test_a_run_with_nothing_to_train_on_ends_with_an_explanation(loop, controller):
    step, version = controller.state.step, controller.policy_version
    filters = FilterConfig(zero_variance=True, max_stalled_rounds=2)
    message = r"2 rounds with 8 groups left nothing to train on \(.*; rewards from 0.5 to 0.5\)"
    with (
        algorithm(controller, filters=filters),
        rewards(controller, lambda task, completions: [0.5] * len(completions)),
    ):
        with pytest.raises(RuntimeError, match=message):
            one_batch(loop, controller)
    assert (controller.state.step, controller.policy_version) == (step, version)
    assert (controller.run_dir.checkpoint_path(step) / "hf").is_dir()


def test_the_parts_of_a_reward_are_in_lines_records_and_evaluations(loop, controller):
    calls = []

    async def flaky(task, completions):
        calls.append(task.id)
        if len(calls) % 3 == 0:
            raise OSError("the service is away")
        return [float(len(completion)) for completion in completions]

    order, limited = controller.family.reward, Limited(flaky, concurrency=2, wait_s=0.01)
    reward = Rewards({"order": (order, 1.0), "length": (limited, -0.125), "place": (varied, 0.0)})
    with rewards(controller, reward):
        line = one_batch(loop, controller)
        loop.run_until_complete(controller.evaluate_all())
    held = records(controller, controller.state.step)
    assert len(held) == 16 and len(calls) > 12  # four groups, eight evaluated tasks, and what was tried again
    for record in held:
        parts = record["reward_parts"]
        assert parts["length"] == len(record["text"])
        assert record["reward"] == pytest.approx(parts["order"] - 0.125 * parts["length"])
    assert {record["reward_parts"]["place"] for record in held} == {0.0, 1.0, 2.0, 3.0}
    for name in ("order", "length", "place"):
        assert line[f"reward/part_{name}_mean"] == pytest.approx(mean(r["reward_parts"][name] for r in held))
    assert 0.01 < line["time/reward_s"] < line["time/generate_s"]
    evaluated = controller.run_dir.read_metrics()[-1]
    assert evaluated["eval/reward_mean"] == pytest.approx(
        evaluated["eval/reward_part_order_mean"] - 0.125 * evaluated["eval/reward_part_length_mean"]
    )


def test_groups_without_a_turn_are_refused_before_the_trainer(loop, controller):
    with pytest.raises(ValueError, match="^groups: 0 of them hold no turn to train on"):
        loop.run_until_complete(controller.train_on([]))


def test_a_batch_that_a_script_trains_on_has_the_line_of_a_step(loop, controller):
    async def run():
        sampled = await controller.rollouts(controller.draws.next(4))
        for group, reward in zip(sampled, (0.0, 0.0, 1.0, 1.0)):
            for rollout in group.rollouts:
                rollout.reward = reward
        controller.state.phase = "supervised"  # as a script's warm start leaves it
        line = await controller.train_on(sampled[2:], sampled)
        assert controller.state.phase == "reinforcement"  # whose checkpoint it would be
        await controller.publish()
        return line

    of_step = one_batch(loop, controller)
    line = loop.run_until_complete(run())
    assert set(of_step) - set(line) == {
        *("time/step_s", "time/generate_s", "time/sync_s"),
        *("tokens/trained_per_s", "tokens/generated_per_s"),
    }
    assert set(line) <= set(of_step)
    assert line["phase"] == "reinforcement" and line["step"] == of_step["step"] + 1
    assert line["reward/mean"] == 0.5 and line["reward/zero_std_frac"] == 1.0  # of all four groups, not of two
    assert line["tokens/generated"] > line["tokens/trained"] > 0
    controller.run_dir.log_metrics(line)
    assert controller.run_dir.read_metrics()[-1] == line


async def in_two_roles(task, policy, *, rollout_id, seed):
    """A solver, and a checker who answers the same task."""
    solver = await single_turn(task, policy, rollout_id=rollout_id, seed=seed)
    checker = await single_turn(task, policy, rollout_id=f"{rollout_id}.checker", seed=seed + 1)
    solver.role, checker.role = "solver", "checker"
    return [solver, checker]


def test_with_two_roles_a_batch_takes_as_many_steps_as_the_schedule_counts(loop, controller):
    changes = dict(workflow=in_two_roles, tasks_per_minibatch=2)
    with algorithm(controller, **changes), rewards(controller, varied):
        per_batch, first = controller.config.algorithm.steps_per_batch, controller.state.step
        groups = loop.run_until_complete(controller.rollouts(controller.draws.next(4)))
        assert len(groups) == 8 and per_batch == 2
        line = loop.run_until_complete(controller.train_on(groups))
        loop.run_until_complete(controller.publish())
    assert line["optim/num_steps"] == controller.state.step - first == per_batch
