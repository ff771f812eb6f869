"""Names of metrics, means and their intervals."""

import json
import math
import random
import re
from pathlib import Path

import pytest
from scipy.stats import binom, binomtest

from tests.recorded import RECORDED
from torchtitan_rl import metrics
from torchtitan_rl.train import intervals, step_metrics
from torchtitan_rl.train.step_metrics import StepMetrics
from torchtitan_rl.types import Completion, ForwardBackwardOutput, OptimStepOutput, Rollout, RolloutGroup, Task, Turn


def test_reinforcement_has_what_supervised_has_and_no_name_twice():
    assert metrics.REINFORCEMENT[:7] == metrics.SUPERVISED
    every = metrics.REINFORCEMENT + metrics.EVALUATION
    assert len(set(every)) == len(every) == 28


NAMES = [*metrics.REINFORCEMENT, *metrics.EVALUATION, *(name for names in metrics.FEATURES.values() for name in names)]


def definitions() -> list[list[str]]:
    """The rows of the page's tables of definitions, cell by cell."""
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    tables = re.findall(r"^\| name \| unit .*\n\|---.*\n((?:\|.*\n)*)", page, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for table in tables for row in table.splitlines()]


def test_the_page_defines_every_name_once_and_no_other():
    assert sorted(row[0].strip("`") for row in definitions()) == sorted(NAMES)


def test_a_definition_says_unit_reduction_and_meaning():
    for name, unit, reduction, meaning, worry in definitions():
        assert unit and meaning and (reduction or unit in ("text", "0 or 1")), name
        assert worry or unit in ("text", "tokens", "fraction", "as NAME", "reward"), name


_ON_AN_AXIS = {
    "s": ("seconds",),
    "tokens/s": ("per second", "tokens per second"),
    "tokens": ("tokens",),
    "fraction": ("share", "share of the peak"),
    "nats/token": ("nats per token",),
    "nats": ("nats per token",),
    "nats/rollout": ("nats per rollout",),
    "loss per pair": ("loss per pair",),
}
"""Unit of the page -> what the axis of a curve says."""


def test_the_axis_of_a_curve_has_the_unit_of_the_page():
    every_text = {text for texts in _ON_AN_AXIS.values() for text in texts}
    for cell, unit, *_ in definitions():
        name = cell.strip("`")
        text = metrics.unit(name)
        if unit != "as NAME" and text != name.split("/")[0]:  # the area: what it is a number of
            assert text in _ON_AN_AXIS.get(unit, ()) or text not in every_text, name


def test_a_run_repeats_every_metric_but_those_that_time_or_the_machine_decides():
    every = {*NAMES, *metrics.PREFERENCE}
    not_repeated = {name for name in every if not metrics.is_repeated(name)}
    assert {name for name in not_repeated if not re.fullmatch("time/.*_s|.*_per_s", name)} == {
        "perf/tokens_per_second_per_device",
        "perf/mfu",
        "generator/healthy_replicas",
        "generator/idle_frac",
        "generator/in_flight_mean",
        "generator/stall_s",
        "trainer/idle_frac",
        "batches/ready",
        "completion/long_played_frac",
        "checkpoint/failed",
    }
    units = {cell.strip("`"): unit for cell, unit, *_ in definitions()}
    assert {name for name in every if units[name] in ("s", "tokens/s")} <= not_repeated
    assert metrics.repeatable({"step": 1, "phase": "x", "mine/gap": 0.5, "time/step_s": 2.0}) == {"mine/gap": "0.5"}


def test_every_name_in_a_recorded_run_is_defined():
    lines = [json.loads(line) for file in RECORDED.glob("*/metrics.jsonl") for line in file.read_text().splitlines()]
    names = {name for line in lines for name in line} - {"step", "phase"}
    assert len(names) > 40 and {name for name in names if metrics.entry(name) is None} == set()


@pytest.mark.parametrize(
    "name, known",
    [
        ("reward/mean", "reward/mean"),
        ("policy/ratio_lag12_mean", "policy/ratio_lagA_mean"),
        ("eval/pass_at_8", "eval/pass_at_K"),
        ("eval/avg_at_8_ci95_low", "eval/NAME_ci95_low"),
        ("reward/part_exact_mean", "reward/part_NAME_mean"),
        ("reward/seller_mean", "reward/ROLE_mean"),
        ("mine/gap", None),
        ("eval/pass_at_k", None),
    ],
)
def test_the_definition_that_a_name_falls_under(name, known):
    assert metrics.entry(name) == known


def test_mean_std_divides_by_n():
    assert step_metrics.mean_std([0, 0, 1, 1]) == (0.5, 0.5)
    assert step_metrics.mean_std([2.0, 4.0, 9.0]) == (5.0, math.sqrt(26 / 3))  # squares 9 + 1 + 16
    assert step_metrics.mean_std(iter([0.1])) == (0.1, 0.0)


def test_mean_std_shows_what_is_not_finite():
    assert all(math.isnan(value) for value in step_metrics.mean_std([1.0, math.nan]))


def test_mean_std_of_nothing():
    with pytest.raises(ValueError, match=r"values=\[\]: have no mean"):
        step_metrics.mean_std([])


@pytest.mark.parametrize("right, tasks", [(0, 30), (1, 30), (15, 30), (30, 30), (0, 2), (3, 4), (612, 1319)])
def test_the_interval_of_a_share_of_tasks_is_wilsons(right, tasks):
    wilson = binomtest(right, tasks).proportion_ci(0.95, method="wilson")
    interval = intervals.score_interval([1] * right + [0] * (tasks - right))
    assert interval == pytest.approx((wilson.low, wilson.high), abs=1e-12)
    at_80 = binomtest(right, tasks).proportion_ci(0.8, method="wilson")
    interval = intervals.score_interval([1] * right + [0] * (tasks - right), confidence=0.8)
    assert interval == pytest.approx((at_80.low, at_80.high), abs=1e-12)


def test_tasks_are_the_clusters_of_samples():
    # z^2 = 3.841459. Four tasks with scores 0, 1/4, 1/2, 1: sum 1.75, sum of x (1 - x) 0.4375. With z^2 / 2 zeros and
    # as many ones: mean q = 3.670729 / 7.841459 = 0.468118, d = 1 - (0.4375 / 7.841459) / (q (1 - q)) = 0.775916, and
    # 4 / d = 5.155196 tasks: z^2 / M = 0.745162, center (0.4375 + 0.372581) / 1.745162, half
    # sqrt(0.745162 (0.246094 + 0.186291)) / 1.745162.
    interval = intervals.score_interval([0, 0.25, 0.5, 1], draws_per_task=4)
    assert interval == pytest.approx((0.464187 - 0.325255, 0.464187 + 0.325255), abs=1e-5)
    # All samples of a task equal: 16 samples say what 1 says.
    assert intervals.score_interval([0, 1] * 8, draws_per_task=16) == intervals.score_interval([0, 1] * 8)
    # Scores that happen to be equal: no narrower than all 64 samples drawn independently.
    low, high = intervals.score_interval([0.5] * 4, draws_per_task=16)
    independent = binomtest(32, 64).proportion_ci(0.95, method="wilson")
    assert low < independent.low and independent.high < high
    pairs = intervals.score_interval([0.5] * 100, draws_per_task=2)
    independent = binomtest(100, 200).proportion_ci(0.95, method="wilson")
    assert pairs == pytest.approx((independent.low, independent.high), abs=1e-12)


def test_an_interval_changes_little_with_one_sample_and_needs_two_tasks():
    low, _ = intervals.score_interval([1.0] * 30, draws_per_task=16)
    lower, _ = intervals.score_interval([1.0] * 29 + [15 / 16], draws_per_task=16)
    assert low - 0.01 < lower < low < 0.89
    assert intervals.score_interval([0.5]) is None
    with pytest.raises(ValueError, match=r"scores=\[\]: have no mean"):
        intervals.score_interval([])
    with pytest.raises(ValueError, match=r"scores=1.5: lies outside \[0, 1\]"):
        intervals.score_interval([0.5, 1.5])


_TASKS = {
    "equally hard": lambda rng, mean: mean,
    "certain or hopeless": lambda rng, mean: float(rng.random() < mean),
    "of every kind": lambda rng, mean: rng.betavariate(mean / 2, (1 - mean) / 2),
}


@pytest.mark.parametrize("kind", _TASKS)
@pytest.mark.parametrize("num_samples", [1, 4, 16])
@pytest.mark.parametrize("num_tasks", [10, 30, 100])
def test_about_95_of_100_intervals_hold_the_true_mean(kind, num_samples, num_tasks):
    rng = random.Random(0)
    for mean in (0.02, 0.3, 0.97):
        contained = 0
        for _ in range(400):
            rates = [_TASKS[kind](rng, mean) for _ in range(num_tasks)]
            scores = [sum(rng.random() < rate for _ in range(num_samples)) / num_samples for rate in rates]
            low, high = intervals.score_interval(scores, draws_per_task=num_samples)
            contained += low <= mean <= high
        # Wilson's interval of a proportion contains .3 in 92.4% of the cases for 10 tasks, by exact sums.
        wilson = [binomtest(right, num_tasks).proportion_ci(0.95, method="wilson") for right in range(num_tasks + 1)]
        exact = sum(binom.pmf(i, num_tasks, mean) for i, ci in enumerate(wilson) if ci.low <= mean <= ci.high)
        assert contained / 400 > min(0.95, exact) - 3 * math.sqrt(0.95 * 0.05 / 400), mean


@pytest.mark.parametrize(
    "n, c, k, expected",
    [
        (8, 2, 1, 0.25),  # k=1 is the fraction of correct samples
        (4, 1, 2, 0.5),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (5, 2, 3, 0.9),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (8, 0, 8, 0.0),
        (8, 1, 8, 1.0),  # with all samples looked at, one correct is enough
        (5, 3, 3, 1.0),  # only two are wrong, so three hold a correct one
    ],
)
def test_pass_at_k(n, c, k, expected):
    assert intervals.chance_of_one(n, c, k) == expected


@pytest.mark.parametrize(
    "n, c, k, message",
    [
        (4, 1, 5, "k=5: must be between 1 and num_samples=4"),
        (4, 1, 0, "k=0: must be"),
        (4, 5, 1, "num_correct=5: must be between 0 and num_samples=4"),
        (4, -1, 1, "num_correct=-1"),
    ],
)
def test_pass_at_k_refuses_impossible_counts(n, c, k, message):
    with pytest.raises(ValueError, match=message):
        intervals.chance_of_one(n, c, k)


def output(num_tokens, loss=0.5, **sums):
    return ForwardBackwardOutput(
        policy_logprobs=[], values=[], loss=loss, num_tokens=num_tokens, metrics=sums, interval=(0.0, 1.0)
    )


def test_the_steps_of_a_batch_become_one_line():
    metrics = StepMetrics()
    for num_tokens, norm, entropy, largest, kl in ((1, 2.0, 4.0, 0.25, 1e-9), (3, 4.0, 0.0, 0.75, 9.0)):
        metrics.add_step(
            output(num_tokens, **{"policy/entropy": entropy, "advantage/abs_max": largest, "mismatch/kl": kl}),
            OptimStepOutput(grad_norm=norm, lr=norm, policy_version=1, skipped=norm > 3),
        )
        metrics.add("time/optim_s", 0.5)
    line = metrics.compute()
    assert line["policy/entropy"] == 1.0  # per token
    assert line["advantage/abs_max"] == 0.75
    assert line["mismatch/kl"] == 1e-9  # of the first step, which saw the policy that sampled
    assert (line["optim/grad_norm"], line["optim/lr"], line["optim/skipped"], line["optim/num_steps"]) == (
        3.0,
        4.0,
        1,
        2,
    )
    assert (line["tokens/trained"], line["time/optim_s"], line["policy/clip_frac"]) == (4, 1.0, 0.0)


def test_parts_of_rewards_and_the_longest_wait_for_rewards_are_in_the_line_of_a_batch():
    completion = Completion(tokens=[1], logprobs=[0.0], policy_versions=[0], finish_reason="stop")

    def group(i, waited, *parts):
        turn = Turn(prompt_tokens=[1], completion=completion)
        rollouts = [
            Rollout(
                id=f"{i}/{j}",
                task=Task(id="t", prompt=""),
                turns=[turn],
                reward=1.0,
                reward_parts=of_rollout,
                seconds={"play": 9.0} | ({"reward": waited} if waited else {}),
            )
            for j, of_rollout in enumerate(parts)
        ]
        return RolloutGroup(id=str(i), rollouts=rollouts)

    groups = [group(0, 0.25, {"exact": 1.0}, {"exact": 0.0}), group(1, 0.5, {"exact": 0.5, "format": -2.0}, {})]
    line = step_metrics.batch_metrics(groups, {})
    assert line["time/reward_s"] == 0.5
    assert (line["reward/part_exact_mean"], line["reward/part_format_mean"]) == (0.5, -2.0)  # of those that have it
    line = step_metrics.batch_metrics([group(2, 0.0, {})], {})  # an environment's own reward: nobody waited for it
    assert line["time/reward_s"] == 0.0 and not [name for name in line if "part" in name]


def test_the_share_of_prompt_tokens_that_a_sibling_has_too():
    def group(*prompts):
        turns = [
            Turn(
                prompt_tokens=prompt,
                completion=Completion(tokens=[1], logprobs=[0.0], policy_versions=[0], finish_reason="stop"),
            )
            for prompt in prompts
        ]
        task = Task(id="t", prompt="")
        return RolloutGroup(id="g", rollouts=[Rollout(id="r", task=task, turns=[turn]) for turn in turns])

    # Of 3 + 3 + 2 tokens the second prompt's 3 are the first's; another group's prompt is not a sibling's.
    assert step_metrics.repeated_share([group([4, 5, 6], [4, 5, 6], [4, 5]), group([4, 5])]) == 3 / 10
    assert step_metrics.repeated_share([RolloutGroup(id="g", rollouts=[])]) == 0.0
