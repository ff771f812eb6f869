"""Which checkpoints stay."""

import pytest

from torchtitan_rl.train.retention import complete, position, superfluous

NAMES = ["supervised-10", "supervised-20", "preference-10", "step-0", "step-10", "step-20", "step-30", "step-40"]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "accuracies", "kept"),
    [
        (1, 0, {}, ["step-40"]),
        (3, 0, {}, ["step-20", "step-30", "step-40"]),
        (99, 0, {}, NAMES),
        (-1, 0, {}, NAMES),
        (1, 20, {}, ["step-0", "step-20", "step-40"]),
        (1, 15, {}, ["step-0", "step-20", "step-30", "step-40"]),  # the first after 15, and 30 itself
        (1, 0, {"10": 0.9, "20": 0.5, "40": 0.8}, ["step-10", "step-40"]),
        (1, 0, {"10": 0.9, "30": 0.9}, ["step-30", "step-40"]),  # of two equals the later one
        (1, 0, {"35": 0.9}, ["step-40"]),  # evaluated where no checkpoint was written
    ],
)
def test_the_newest_the_regular_and_the_best_stay(keep_last, keep_every, accuracies, kept):
    gone = superfluous(NAMES, keep_last=keep_last, keep_every=keep_every, accuracies=accuracies)
    assert [name for name in NAMES if name not in gone] == kept


def test_batches_of_several_steps_pass_the_multiples_and_keep_a_checkpoint_for_each():
    written, names = ["step-27", "step-52", "step-76", "step-100", "step-127", "step-151", "step-203"], []
    for name in written:  # as a run writes and deletes them
        names.append(name)
        gone = superfluous(names, keep_last=1, keep_every=50, accuracies={})
        names = [name for name in names if name not in gone]
    assert names == ["step-52", "step-100", "step-151", "step-203"]


def test_the_newest_stays_whatever_else_is_kept():
    for keep_last in range(1, 9):
        assert "step-40" not in superfluous(NAMES, keep_last=keep_last, keep_every=0, accuracies={"0": 1.0})
    assert superfluous([], keep_last=1, keep_every=0, accuracies={}) == []


def test_positions_order_the_phases():
    assert sorted(NAMES, key=position) == NAMES
    assert sorted(["step-0", "preference-5", "supervised-99"], key=position)[1] == "preference-5"
    assert position("step-80.writing") is position("latest") is position("step-x") is None


def test_only_complete_checkpoints_count(tmp_path):
    for name in ("step-20", "step-100", "supervised-5", "step-40.writing", "step-60"):
        (tmp_path / name).mkdir()
        if name != "step-60":
            (tmp_path / name / "COMPLETE").touch()
    assert [path.name for path in complete(tmp_path)] == ["supervised-5", "step-20", "step-100"]
