"""Names of metrics, means and their intervals."""

import json
import math
import random
import re
from pathlib import Path

import pytest

from tests.recorded import RECORDED
from torchtitan_rl import metrics
from torchtitan_rl.run import intervals, lines
from torchtitan_rl.run.lines import StepMetrics
from torchtitan_rl.types import Completion, ForwardBackwardOutput, OptimStepOutput, Rollout, RolloutGroup, Task, Turn


def test_reinforcement_has_what_supervised_has_and_no_name_twice():
    assert metrics.REINFORCEMENT[:7] == metrics.SUPERVISED
    every = metrics.REINFORCEMENT + metrics.EVALUATION
    assert len(set(every)) == len(every) == 27


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
    assert lines.mean_std([0, 0, 1, 1]) == (0.5, 0.5)
    assert lines.mean_std([2.0, 4.0, 9.0]) == (5.0, math.sqrt(26 / 3))  # squares 9 + 1 + 16
    assert lines.mean_std(iter([0.1])) == (0.1, 0.0)


def test_mean_std_shows_what_is_not_finite():
    assert all(math.isnan(value) for value in lines.mean_std([1.0, math.nan]))


def test_mean_std_of_nothing():
    with pytest.raises(ValueError, match=r"values=\[\]: have no mean"):
        lines.mean_std([])


def test_mean_interval_is_of_the_mean_over_tasks():
    # s^2 = 8 * 0.25 / 7, so 1.96 * sqrt(s^2 / 8) = 1.96 * 0.188982
    assert intervals.mean_interval([0, 1] * 4) == pytest.approx((0.5 - 0.370405, 0.5 + 0.370405), abs=1e-6)
    assert intervals.mean_interval([0.25, 0.75], z=1.0) == pytest.approx((0.25, 0.75))  # s = 0.3536, s / sqrt(2) = 0.25


def test_mean_interval_is_cut_off_at_0_and_1_and_needs_two_tasks():
    assert intervals.mean_interval([0, 1]) == (0.0, 1.0)
    assert intervals.mean_interval([1, 1, 1]) == (1.0, 1.0)
    assert intervals.mean_interval([0.5]) is None
    with pytest.raises(ValueError, match=r"values=\[\]: have no mean"):
        intervals.mean_interval([])


def test_about_95_of_100_intervals_hold_the_true_mean():
    rng = random.Random(0)
    held = 0
    for _ in range(2000):
        low, high = intervals.mean_interval([rng.random() < 0.6 for _ in range(200)])
        held += low <= 0.6 <= high
    assert 0.93 < held / 2000 < 0.97


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
    assert intervals.pass_at_k(n, c, k) == expected


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
        intervals.pass_at_k(n, c, k)


def output(num_tokens, loss=0.5, **sums):
    return ForwardBackwardOutput(
        policy_logprobs=[], values=[], loss=loss, num_tokens=num_tokens, metrics=sums, interval=(0.0, 1.0)
    )


def test_the_steps_of_a_batch_become_one_line():
    line = StepMetrics()
    for num_tokens, norm, entropy, largest, kl in ((1, 2.0, 4.0, 0.25, 1e-9), (3, 4.0, 0.0, 0.75, 9.0)):
        line.add(
            output(num_tokens, **{"policy/entropy": entropy, "advantage/abs_max": largest, "mismatch/kl": kl}),
            OptimStepOutput(grad_norm=norm, lr=norm, policy_version=1, skipped=norm > 3),
        )
        line.mean("time/optim_s", 0.5)
    line = line.line()
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
    line = lines.of_batch(groups, 0, {})
    assert line["time/reward_s"] == 0.5
    assert (line["reward/part_exact_mean"], line["reward/part_format_mean"]) == (0.5, -2.0)  # of those that have it
    line = lines.of_batch([group(2, 0.0, {})], 0, {})  # an environment's own reward: nobody waited for it
    assert line["time/reward_s"] == 0.0 and not [name for name in line if "part" in name]
