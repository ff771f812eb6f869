"""What an audit finds in records made by hand."""

import json

import pytest

from torchtitan_rl.record import attempts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tools.audit import audit


class Made:
    """A run directory written record by record: two slots a step."""

    def __init__(self, path):
        self.run_dir = RunDir.create(path)
        attempts.begin(self.run_dir, None)

    def admit(self, step, *draws):
        self.run_dir.record("ledger", step, [{"draw": draw, "event": "admitted", "task_id": "t"} for draw in draws])

    def end(self, step, event, *draws):
        self.run_dir.record("ledger", step, [{"draw": draw, "event": event} for draw in draws])
        if event != "failed":
            self.run_dir.record("rollouts", step, [{"draw": draw} for draw in draws])
            self.run_dir.tables["rollouts"].rotate()

    def line(self, step):
        self.run_dir.log_metrics({"step": step, "phase": "reinforcement", "reward/mean": 0.0})

    def step(self, number, first):
        self.admit(number - 1, f"{first}/0", f"{first + 1}/0")
        self.end(number, "trained", f"{first}/0", f"{first + 1}/0")
        self.line(number)


@pytest.fixture
def made(tmp_path) -> Made:
    return Made(tmp_path / "run")


def test_a_run_with_filtered_replaced_and_failed_draws_is_clean(made):
    made.step(1, 0)
    made.admit(1, "2/0", "3/0")
    made.admit(1, "2/1")
    made.end(2, "filtered", "2/0")
    made.end(2, "failed", "3/0")
    made.end(2, "trained", "2/1")
    made.line(2)
    made.admit(2, "4/0", "5/0")  # killed here
    counts, problems = audit(made.run_dir)
    assert problems == []
    assert counts == {
        "attempts": 1,
        "steps": 2,
        "rollouts": 4,
        "admitted": 7,
        "trained": 3,
        "filtered": 1,
        "failed": 1,
        "cut_short": 2,
    }


def test_draws_that_were_taken_again_after_a_crash_count_once(made):
    made.step(1, 0)
    made.step(2, 2)
    made.admit(2, "4/0", "5/0")
    (made.run_dir.path / "metrics.jsonl").write_text("")
    attempts.begin(made.run_dir, "step-1", "reinforcement", 1)
    made.line(1)
    made.step(2, 2)
    counts, problems = audit(made.run_dir)
    assert problems == [] and (counts["attempts"], counts["trained"], counts["cut_short"]) == (2, 4, 0)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda made: made.end(2, "filtered", "1/0"), "draw 1/0: ended 2 times"),
        (lambda made: made.admit(1, "1/0"), "draw 1/0: was admitted 2 times"),
        (lambda made: made.end(2, "trained", "9/0"), "draw 9/0: ended without having been admitted"),
        (lambda made: made.admit(1, "5/0"), "slots: 5 were filled, and they are not 0 to 4"),
        (lambda made: made.line(3), "step 3: has a line of metrics, and no draw was trained"),
        (lambda made: made.line(2), "metrics: step 2 has 2 lines"),
        (
            lambda made: (made.run_dir.path / "rollouts" / "000002.jsonl").unlink(),
            "draw 2/0: ended at step 2, its rollouts are recorded at []",
        ),
    ],
)
def test_what_does_not_fit_is_named(spoil, expected, made):
    made.step(1, 0)
    made.step(2, 2)
    spoil(made)
    _, problems = audit(made.run_dir)
    assert expected in problems


def test_a_draw_that_never_ended_although_the_run_went_on_is_lost(made):
    made.admit(0, "0/0", "1/0")
    made.end(1, "trained", "0/0")
    made.line(1)
    assert audit(made.run_dir)[1] == [
        "draw 1/0: was admitted after step 0 and never ended, though step 1 was reached"
    ]  # fmt: skip


def test_a_checkpoint_goes_on_with_the_slot_that_is_next(made):
    made.step(1, 0)
    made.step(2, 2)
    path = made.run_dir.checkpoints / "step-1"
    path.mkdir()
    (path / "COMPLETE").touch()
    (path / "state.json").write_text(json.dumps({"step": 1, "draws": {"next_slot": 2}}))
    assert audit(made.run_dir)[1] == []
    (path / "state.json").write_text(json.dumps({"step": 1, "draws": {"next_slot": 3}}))
    assert audit(made.run_dir)[1] == ["step-1: goes on with slot 3, 2 were filled before"]
    # The first finished first: of four slots that were admitted two are in flight, the first of them slot 1.
    draws = {"next_slot": 1, "in_flight": [[1, 0], [2, 2]], "admitted": 4}
    (path / "state.json").write_text(json.dumps({"step": 1, "draws": draws}))
    assert audit(made.run_dir)[1] == []


def test_draws_admitted_ahead_count_by_the_step_at_which_they_ended(made):
    made.admit(0, "0/0", "1/0")
    made.admit(2, "2/0", "3/0")  # ahead of a batch that was to have two steps, and had one: a group was dropped
    for step, (trained, failed) in enumerate([("0/0", "1/0"), ("2/0", "3/0")], 1):
        made.end(step, "trained", trained)
        made.end(step, "failed", failed)
        made.line(step)
    path = made.run_dir.checkpoints / "step-2"
    path.mkdir()
    (path / "COMPLETE").touch()
    (path / "state.json").write_text(json.dumps({"step": 2, "draws": {"next_slot": 4}}))
    attempts.begin(made.run_dir, "step-2", "reinforcement", 2)
    counts, problems = audit(made.run_dir)
    assert problems == [] and counts["admitted"] == 4


def test_what_a_run_wrote_after_its_ledger_was_read_is_not_judged(made):
    made.step(1, 0)
    made.step(2, 2)
    made.run_dir.record("rollouts", 3, [{"draw": "4/0"}])  # of a batch whose ends came after the ledger was read
    made.line(3)
    assert audit(made.run_dir, goes_on=True)[1] == []
    assert set(audit(made.run_dir)[1]) == {
        "step 3: has a line of metrics, and no draw was trained",
        "draw 4/0: has rollouts, and no end",
    }


def test_rollouts_of_the_newest_step_may_come_later_and_other_faults_are_told(made):
    made.step(1, 0)
    made.admit(1, "2/0", "3/0")
    made.run_dir.record("ledger", 2, [{"draw": draw, "event": "trained"} for draw in ("2/0", "3/0")])
    made.line(2)
    made.line(1)
    assert audit(made.run_dir, goes_on=True)[1] == ["metrics: step 1 has 2 lines"]
