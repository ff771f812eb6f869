"""A curriculum draws tasks by what their rollouts earned: weights by hand, the order of draws, resumption, refusals."""

import json
from collections import Counter

import pytest

from tests.kit.family import Family
from torchtitan_rl.tasks.curriculum import Curriculum, CurriculumSource
from torchtitan_rl.tasks.dataset import Dataset
from torchtitan_rl.tasks.family import TaskSource
from torchtitan_rl.tasks.mixture import Mixture
from torchtitan_rl.types import Rollout, RolloutGroup


def source_of(num_tasks, seed=0, **knobs) -> CurriculumSource:
    return Curriculum.Config(task=Family(num_tasks), **knobs).build().source("train", seed)


def group(task, rewards, role="policy") -> RolloutGroup:
    return RolloutGroup(
        id=task.id,
        rollouts=[
            Rollout(id=f"{task.id}/{i}", task=task, turns=[], reward=reward, role=role)
            for i, reward in enumerate(rewards)
        ],
    )


def rewards_of(num_passed, num=4):
    return [1.0] * num_passed + [0.0] * (num - num_passed)


def batch(source, n, passed=lambda index: index % 5):
    """One batch: draws, counts. Returns the indices that were drawn."""
    tasks = source.next(n)
    source.count([group(task, rewards_of(passed(task.answer))) for task in tasks], 1.0)
    return [task.answer for task in tasks]


def test_weights_by_hand():
    source = source_of(6, min_pass_rate=0.25, max_pass_rate=0.75, explore=1.0)
    tasks = {task.answer: task for task in source.next(6)}
    metrics = source.count([group(tasks[i], rewards_of(i)) for i in range(5)], 1.0)
    # Beta(a + 1, b + 1) (a + 1) (b + 1) / (6 * 7). 0 of 4 and 4 of 4 lie outside the band; task 5 is unseen.
    assert source.weights() == pytest.approx([0, 2 * 4 / 42, 3 * 3 / 42, 4 * 2 / 42, 0, 1 / 6])
    assert metrics == pytest.approx(
        {"curriculum/in_band_frac": 3 / 6, "curriculum/unseen_frac": 1 / 6, "curriculum/pass_rate_mean": 0.5}
    )


def test_both_ends_of_the_band_belong_to_it():
    source = source_of(3, min_pass_rate=0.1, max_pass_rate=0.7, explore=1.0)
    tasks = {task.answer: task for task in source.next(3)}
    source.count([group(tasks[i], rewards_of(n, 10)) for i, n in enumerate([1, 7, 8])], 1.0)
    assert [weight > 0 for weight in source.weights()] == [True, True, False]


def test_counts_decay_by_hand():
    source = source_of(1, decay=0.5)
    for num_passed in (4, 1, 0):
        source.count([group(source.next(1)[0], rewards_of(num_passed))], 1.0)
    assert source.passed.tolist() == [(4 * 0.5 + 1) * 0.5 + 0]  # 1.5
    assert source.failed.tolist() == [(0 * 0.5 + 3) * 0.5 + 4]  # 5.5


@pytest.mark.parametrize(("decay", "counts"), [(0.0, (1, 3)), (1.0, (5, 3))])
def test_a_decay_of_0_keeps_the_newest_group_and_of_1_all(decay, counts):
    source = source_of(1, decay=decay)
    for num_passed in (4, 1):
        source.count([group(source.next(1)[0], rewards_of(num_passed))], 1.0)
    assert (source.passed[0], source.failed[0]) == counts


def test_what_counts():
    source = source_of(5, explore=1.0)
    a, b, c, d, _ = source.next(5)
    stray = Family(9, name="stray").task("train", 0)
    groups = [
        group(a, [0.5, 0.9, 1.0, 2.0]),  # a pass from the correct reward on
        group(b, [1.0]),
        group(b, [0.0]),  # a second group of the task: one measurement, which decays once
        group(c, [1.0], role="judge"),  # another role
        group(stray, [1.0]),  # a task that was not drawn
    ]
    groups[0].rollouts.append(Rollout(id="late", task=a, turns=[], reward=None))  # not judged
    source.count(groups, 1.0)  # d: its group failed
    assert [(source.passed[t.answer], source.failed[t.answer]) for t in (a, b, c, d)] == [
        (2, 2),
        (1, 1),
        (0, 0),
        (0, 0),
    ]
    source.count(groups, 1.0)  # nothing was drawn since
    assert source.passed.sum() == 3


def test_the_order_of_groups_does_not_matter():
    states = []
    for order in (1, -1):
        source = source_of(6)
        tasks = source.next(4)
        metrics = source.count([group(t, rewards_of(t.answer % 5)) for t in tasks][::order], 1.0)
        states.append((source.state_dict(), metrics, [t.id for t in source.next(6)]))
    assert states[0] == states[1]


def test_exploring_takes_what_was_drawn_longest_ago_and_begins_as_a_run_without_a_curriculum():
    source, plain = source_of(7, seed=3, explore=1.0), TaskSource(Family(7), "train", 3)
    first = batch(source, 4) + batch(source, 3)
    assert first == [task.answer for task in plain.next(7)]
    assert batch(source, 7) == first


def test_tasks_near_one_half_are_drawn_most_and_those_outside_the_band_by_exploring_only():
    source = source_of(10, explore=0.1)
    drawn = Counter(index for _ in range(2000) for index in batch(source, 1, lambda index: index % 5))
    # Passed 0..4 of 4, twice; the counts tend to the double of a group's (decay 0.5): weights (a+1)(b+1)/(10 11).
    inside = {1: 3 * 7, 2: 5 * 5, 3: 7 * 3}
    for passed, weight in inside.items():
        expected = 0.1 / 5 + 0.9 * weight / sum(inside.values())
        assert (drawn[passed] + drawn[passed + 5]) / 2000 == pytest.approx(expected, abs=0.06)
    assert max(drawn[index] for index in (0, 4, 5, 9)) < 2000 * 0.1


def test_equal_rewards_everywhere_leave_exploring_alone():
    source = source_of(6)
    while 0 in source.passed + source.failed:
        batch(source, 2, lambda index: 4)
    assert not source.weights().any()
    cycle = batch(source, 6, lambda index: 4)
    assert sorted(cycle) == list(range(6)) and batch(source, 6, lambda index: 4) == cycle


def test_no_task_comes_twice_in_a_batch_unless_it_has_to():
    source = source_of(8, explore=0.3)
    for _ in range(50):
        assert len(set(batch(source, 5, lambda index: 2))) >= 4  # exploring may repeat a task that was drawn by weight
    assert len(source.next(20)) == 20


def test_a_run_that_goes_on_from_any_batch_draws_the_same_tasks():
    whole = source_of(9)
    states, drawn = [], []
    for _ in range(12):
        states.append(json.loads(json.dumps(whole.state_dict())))
        drawn.append(batch(whole, 3) + [whole.replacement(1, 1).answer])
        whole.count([], 1.0)
    for start, state in enumerate(states):
        source = source_of(9)
        source.next(2)  # what an attempt drew after the checkpoint is forgotten
        source.load_state_dict(state)
        for expected in drawn[start:]:
            assert batch(source, 3) + [source.replacement(1, 1).answer] == expected
            source.count([], 1.0)
        assert source.state_dict() == whole.state_dict()
    assert drawn != [batch(source, 3) for _ in range(12)]


def test_another_number_of_tasks_is_refused():
    with pytest.raises(ValueError, match=r"num_tasks=4: the state to resume from counts 3 tasks; resume with the data"):
        source_of(4).load_state_dict(source_of(3).state_dict())


def test_a_data_set_is_drawn_from_and_other_rows_are_refused(tmp_path):
    rows = [{"prompt": f"{i}=", "answer": str(i)} for i in range(20)]

    def source(last_answer: str) -> CurriculumSource:
        rows[-1]["answer"] = last_answer
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data_set = Dataset.Config(train=str(tmp_path / "rows.jsonl"), chat=False)
        return Curriculum.Config(task=data_set).build().source("train", 0)

    first = source("19")
    tasks = first.next(4)
    assert len({task.answer for task in tasks}) == 4
    first.count([group(task, [1.0, 0.0]) for task in tasks], 1.0)
    again = source("19")
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [task.answer for task in again.next(4)] == [task.answer for task in first.next(4)]
    with pytest.raises(ValueError, match="rows are not those that the run started with"):
        source("other").load_state_dict(first.state_dict())


def test_other_splits_and_the_tasks_are_the_familys():
    family = Family(5, reward=lambda task, completions: [3.0])
    curriculum = Curriculum.Config(task=family).build()
    assert curriculum.task("train", 2) == family.task("train", 2) and curriculum.num_tasks("test") == 5
    assert curriculum.reward(family.task("train", 0), ["a"]) == [3.0]
    assert type(curriculum.source("validation", 0)) is TaskSource


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"min_pass_rate": 0.5}, "are no band around one half; choose 0 <= min_pass_rate < 0.5 < max_pass_rate <= 1"),
        ({"max_pass_rate": 1.1}, "max_pass_rate=1.1: are no band around one half"),
        ({"min_pass_rate": float("nan")}, "min_pass_rate=nan"),
        ({"explore": 0.0}, "explore=0.0: tasks outside the band would never be measured again; choose 0 < explore"),
        ({"decay": 1.5}, "decay=1.5: is no factor of counts; choose 0 <= decay <= 1"),
    ],
)
def test_knobs_out_of_range_are_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        Curriculum.Config(task=Family(3), **knobs)


def test_families_that_it_cannot_draw_from_are_refused():
    with pytest.raises(ValueError, match="curriculum.task=family: its train split has no end, .* PassRateFilter"):
        Curriculum.Config(task=Family(None)).build()
    with pytest.raises(ValueError, match="curriculum.task=mixture: draws its tasks in an order of its own"):
        Curriculum.Config(task=Mixture.Config(tasks={"a": Family(3)})).build()
    with pytest.raises(ValueError, match="0 tasks in family"):
        source_of(0)


def test_tasks_that_nothing_has_counted_yet_are_still_left_out_after_a_resume():
    """A supervised phase draws and counts nothing."""
    source, again = source_of(40, explore=0.2), source_of(40, explore=0.2)
    for _ in range(4):
        source.next(5)
    again.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert [task.answer for task in source.next(15)] == [task.answer for task in again.next(15)]
    state = source.state_dict()
    del state["uncounted"]  # of an earlier version
    again.load_state_dict(state)
