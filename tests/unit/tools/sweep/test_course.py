"""The course of a sweep, with runs that nobody trained: what is trained once, what is stopped, what is gone on with."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.kit.run_config import run_config
from torchtitan_rl.launch.liveness.restarts import Outcome
from torchtitan_rl.record import attempts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tools.sweep import course
from torchtitan_rl.tools.sweep.arm_table import table_text, write_table
from torchtitan_rl.tools.sweep.arms import Arm
from torchtitan_rl.tools.sweep.course import Interrupted, carry_out, log_file
from torchtitan_rl.tools.sweep.sweep_plan import Plan
from torchtitan_rl.train.run_record import begin_record, finish_record
from torchtitan_rl.weights import checkpoint

BASE, GOOD, BAD = (Arm(settings=(f"lr={value}",), is_base=value == "3") for value in ("3", "2", "1"))
ACCURACIES = {BASE: 0.5, GOOD: 0.6, BAD: 0.1}
NOISE = [0.0, 0.02, -0.01, 0.03, 0.01]
"""By seed, shared by all arms."""
KILLED = 137
"""The status of a run that had no time to say why it ends."""
BASE_NOISE = [0.1, -0.1, 0.05, 0.0, -0.05]


class Trainings:
    """Writes the directories of runs in place of training, and counts them."""

    def __init__(self, plan: Plan, asked: dict[str, int], **statuses: int) -> None:
        """`asked`: name of a training -> the signal that comes meanwhile; `statuses`: the status with which it
        fails."""
        self.plan, self.names, self.asked, self.statuses = plan, [], asked, statuses
        self.saved_at = 0
        """The step of the parents' checkpoint."""

    def parent(self, seed: int, whole: bool) -> Outcome:
        if not (self.plan.parent(seed) / "config.json").exists():
            self.begin(self.plan.parent(seed))
        return self.end(BASE, seed, f"parent_{seed}" + ("" if whole else "_short"), whole)

    def fork(self, arm: Arm, seed: int) -> Outcome:
        assert checkpoint.is_complete(self.plan.parent(seed) / "checkpoints" / "step-0")
        if not (self.plan.run(arm, seed) / "config.json").exists():
            self.begin(self.plan.run(arm, seed))
        return self.end(arm, seed, f"{arm.name}_{seed}", True)

    def begin(self, path: Path) -> None:
        run_dir = RunDir.create(path)
        run_dir.write_config({"name": "made"})
        attempts.begin(run_dir, None)
        begin_record(run_dir)

    def end(self, arm: Arm, seed: int, name: str, whole: bool) -> Outcome:
        self.names.append(name)
        assert attempts.reason_of_end(RunDir(self.plan.run(arm, seed))) == ""  # else `--resume auto` refuses the run
        log = log_file(self.plan.run(arm, seed))
        printed_from = log.stat().st_size if log.exists() else 0
        status = self.status(arm, seed, name, whole)
        return Outcome(status=status, asked_by=self.asked.get(name, 0), printed_from=printed_from)

    def status(self, arm: Arm, seed: int, name: str, whole: bool) -> int:
        run_dir = RunDir(self.plan.run(arm, seed))
        if status := self.statuses.get(name, 0):
            with log_file(self.plan.run(arm, seed)).open("a") as log:
                log.write("warning: hot\n" if status == KILLED else "warning: hot\nerror: a loss is not finite\n")
            if status == 1:
                attempts.end_for_good(run_dir, "a loss is not finite")
            return status
        if arm.is_base:
            saved = run_dir.checkpoint_path(self.saved_at)
            if not saved.exists():
                checkpoint.begin(checkpoint.beside(saved))
                checkpoint.commit(checkpoint.beside(saved), saved, {"step": 0}, {})
        if not whole:
            return 75
        noise = NOISE[seed] + (BASE_NOISE[seed] if arm == BASE else 0.0)
        for kind, split, accuracy in (
            ("sort", "validation", ACCURACIES[arm] + noise),
            ("harder", "validation", 0.0),  # one of `controller.eval_sets`, which does not count
            ("sort", "test", ACCURACIES[arm]),
        ):
            line = {"eval/name": kind, "eval/split": split, "eval/accuracy": accuracy, "eval/num_tasks": 100}
            run_dir.log_metrics({"step": 4, "phase": "evaluation", **line})
        finish_record(run_dir)
        return 0


@pytest.fixture
def plan(tmp_path):
    config = run_config()
    config.controller.eval_sets = {"harder": None}

    def make(arms=(BASE, GOOD, BAD), seeds=range(5), **arguments) -> Plan:
        (tmp_path / "sweep").mkdir(exist_ok=True)
        return Plan(directory=tmp_path / "sweep", config=config, arms=list(arms), seeds=list(seeds), at=0, **arguments)

    return make


def carried_out(
    plan: Plan, *seeds: int, asked: dict[str, int] | None = None, **statuses: int
) -> tuple[list, list[str]]:
    """`seeds`: those of one process of several; none: all."""
    trainings = Trainings(plan, asked or {}, **statuses)
    return carry_out(plan, seeds or plan.seeds, trainings.parent, trainings.fork), trainings.names


def test_a_parent_is_the_base_arms_run_and_a_bad_arm_is_stopped_after_three_seeds(plan):
    table, names = carried_out(plan())
    assert [name for name in names if name.startswith("parent")] == [f"parent_{seed}" for seed in range(5)]
    assert names[:3] == ["parent_0", "lr=2_0", "lr=1_0"] and "lr=1_2" in names and len(names) == 13
    base, good, bad = table
    assert (base.seeds, good.seeds, bad.seeds) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2])
    assert base.difference is None and base.is_base and (base.state, good.state) == ("done", "done")
    assert bad.state.startswith("stopped after seed 2: worse than lr=2 by 0.500, at least 0.4")
    assert base.validation.mean == pytest.approx(0.51) and base.test.mean == 0.5
    assert good.difference.mean == pytest.approx(0.1) and -0.1 < good.difference.low < 0.1  # by chance, perhaps
    text = table_text(table, 5, keep_all=False)
    assert text.endswith("the arm that is truly best is stopped in 5% of sweeps at most.")
    assert text.splitlines()[2].startswith("| lr=3 (base) | 5 of 5 | 0.510      | 0.422 to 0.598 | 0.500 |")
    written = json.loads((plan().directory / "table.json").read_text())
    assert [row["arm"] for row in written["arms"]] == ["lr=3", "lr=2", "lr=1"] and written["seeds"] == 5
    assert (plan().directory / "table.md").read_text() == text + "\n"
    again, names = carried_out(plan())
    assert again == table and names == []


@pytest.mark.parametrize("order", [(4, 3, 2, 1, 0), (2, 0, 4, 1, 3), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("statuses", [{}, {"lr=2_3": 1}, {"parent_1": 1}, {"lr=1_1": 1, "lr=2_4": 1}])
def test_processes_that_share_a_sweep_end_with_the_table_of_one(plan, order, statuses, tmp_path):
    alone, names = carried_out(plan(), **statuses)
    (tmp_path / "sweep").rename(tmp_path / "alone")
    trained = []
    for seed in order:
        table, of_seed = carried_out(plan(), seed, **statuses)
        assert [name for name in of_seed if not name.removesuffix("_short").endswith(f"_{seed}")] == []
        trained += of_seed
    assert table == alone
    assert (tmp_path / "sweep" / "table.md").read_text() == (tmp_path / "alone" / "table.md").read_text()
    # A later seed that comes before those that stop an arm has more, such as a parent that goes beyond the fork point.
    assert {name.removesuffix("_short") for name in names} <= {name.removesuffix("_short") for name in trained}


def test_a_run_that_ends_while_the_table_is_written_is_in_it(plan, monkeypatch):
    carried_out(plan(seeds=[0, 1]), 0)
    written = []

    def write(directory, table, num_seeds, **named):
        write_table(directory, table, num_seeds, **named)
        written.append(table)
        if len(written) == 1:  # another process ends its seed here, and has written its table before this one
            trainings = Trainings(plan(seeds=[0, 1]), {})
            trainings.parent(1, True)
            for arm in (GOOD, BAD):
                trainings.fork(arm, 1)

    monkeypatch.setattr(course, "write_table", write)
    table, names = carried_out(plan(seeds=[0, 1]), 0)
    assert names == [] and [row.seeds for row in written[0]] == [[0]] * 3
    assert [row.seeds for row in table] == [[0, 1]] * 3 and written[1] == table


def test_all_arms_are_kept_where_that_is_asked_for(plan):
    table, names = carried_out(plan(keep_all=True))
    assert len(names) == 15 and {row.state for row in table} == {"done"}
    assert "stopped" not in (plan().directory / "table.md").read_text()


def test_a_base_arm_that_is_stopped_still_has_parents_up_to_the_fork_point(plan, monkeypatch):
    monkeypatch.setitem(ACCURACIES, BASE, -1.0)
    table, names = carried_out(plan())
    assert "parent_2" in names and [name for name in names if "short" in name] == ["parent_3_short", "parent_4_short"]
    assert table[0].state.startswith("stopped after seed 2") and table[1].seeds == [0, 1, 2, 3, 4]


def test_without_the_configs_own_value_parents_are_short_and_the_first_arm_is_the_base(plan):
    table, names = carried_out(plan(arms=(GOOD, BAD), seeds=[0, 1]))
    assert names == ["parent_0_short", "lr=2_0", "lr=1_0", "parent_1_short", "lr=2_1", "lr=1_1"]
    assert [row.is_base for row in table] == [True, False] and table[1].difference.mean == pytest.approx(-0.5)


def test_an_arm_that_fails_is_reported_and_the_others_go_on(plan):
    table, names = carried_out(plan(seeds=[0, 1]), **{"lr=2_0": 1})
    assert names == ["parent_0", "lr=2_0", "lr=1_0", "parent_1", "lr=1_1"]
    log = log_file(plan().run(GOOD, 0))
    assert table[1].state == f"failed at seed 0: a loss is not finite ({log})" and table[1].validation is None
    assert (table[0].state, table[2].state) == ("done", "done")
    table, names = carried_out(plan(seeds=[0, 1]))  # started again, it is tried again
    assert names == ["lr=2_0", "lr=2_1"] and [row.state for row in table] == ["done"] * 3


def test_the_reason_of_a_failure_is_that_of_the_last_attempt(plan):
    carried_out(plan(seeds=[0]), **{"lr=2_0": 1})
    table, _ = carried_out(plan(seeds=[0]), **{"lr=2_0": KILLED})
    log = log_file(plan().run(GOOD, 0))
    assert table[1].state == f"failed at seed 0: it ended with status {KILLED}; see {log}"


def test_a_parent_that_fails_before_the_fork_point_costs_its_seed(plan):
    table, names = carried_out(plan(arms=(GOOD, BAD), seeds=[0, 1]), parent_0_short=1)
    assert names == ["parent_0_short", "parent_1_short", "lr=2_1", "lr=1_1"]
    log = log_file(plan().parent(0))
    assert table[0].state == f"seeds missing; no parent for seed 0: a loss is not finite ({log})"


@pytest.mark.parametrize("arms", [(GOOD, BAD), (BASE, GOOD)])
def test_a_parent_that_went_past_the_fork_point_costs_its_seed_and_is_not_trained_again(plan, arms):
    one_seed, trainings = plan(arms=arms, seeds=[0]), Trainings(plan(), {})
    trainings.saved_at = 2  # as where the batch that reached the fork point had more steps
    table = carry_out(one_seed, one_seed.seeds, trainings.parent, trainings.fork)
    assert trainings.names == ["parent_0" if BASE in arms else "parent_0_short"]
    reason = "has no checkpoint after step 0 and will write none, it has those after 2; begin a sweep in another"
    assert table[1].state.startswith(f"seeds missing; no parent for seed 0: {one_seed.parent(0)} {reason}")
    assert table[0].state == ("done" if BASE in arms else table[1].state)
    assert carried_out(one_seed) == (table, [])
    shutil.rmtree(one_seed.parent(0))
    table, _ = carried_out(one_seed)
    assert {row.state for row in table} == {"done"}


def test_nothing_more_is_trained_once_every_arm_has_failed(plan):
    table, names = carried_out(plan(arms=(GOOD, BAD), seeds=[0, 1]), **{"lr=2_0": 1, "lr=1_0": 1})
    assert names == ["parent_0_short", "lr=2_0", "lr=1_0"] and all(row.state.startswith("failed") for row in table)


def test_a_sweep_ends_with_the_run_that_was_asked_to_end_and_goes_on_from_there(plan):
    with pytest.raises(Interrupted) as end:
        carried_out(plan(seeds=[0, 1]), **{"lr=1_0": 130})
    assert end.value.args == (130,)
    table, names = carried_out(plan(seeds=[0, 1]))
    assert names == ["lr=1_0", "parent_1", "lr=2_1", "lr=1_1"] and {row.state for row in table} == {"done"}


@pytest.mark.parametrize(
    ("number", "status", "expected"),
    [
        (signal.SIGTERM, 0, 75),  # after the last step of the run
        (signal.SIGINT, 0, 130),
        (signal.SIGTERM, 1, 75),
        (signal.SIGTERM, 143, 143),  # during the start of the run
        (signal.SIGHUP, 129, 129),
        (signal.SIGQUIT, 131, 131),
    ],
)
@pytest.mark.parametrize("name", ["parent_0", "lr=2_0"])
def test_a_signal_ends_the_sweep_after_its_run_and_is_no_failure_of_an_arm(plan, name, number, status, expected):
    with pytest.raises(Interrupted) as end:
        carried_out(plan(seeds=[0]), asked={name: number}, **({name: status} if status else {}))
    assert end.value.args == (expected,) and list(plan().directory.rglob("*.failed")) == []
    table, names = carried_out(plan(seeds=[0]))
    assert (name in names) == (status != 0) and {row.state for row in table} == {"done"}
