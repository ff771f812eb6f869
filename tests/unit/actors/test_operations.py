"""The one table of operations, checked where a rank checks it, against the classes that do what it names."""

import pytest

from torchtitan_rl.actors.operations import ENTRIES, NEEDS, TRAINER_NEEDS, TRAINER_PARTS, parts_of
from torchtitan_rl.actors.trainer_steps import require
from torchtitan_rl.model.residency import Part


def parts(*gone):
    held = {name: Part() for name in TRAINER_PARTS}
    for name in gone:
        held[name].offload([])
    return held


def test_an_operation_names_all_that_it_misses_and_nothing_else():
    require("forward", "policy", parts("gradients", "optimizer"))
    require("discard_weights", "policy", parts(*TRAINER_PARTS))
    with pytest.raises(RuntimeError) as caught:
        require("optim_step", "policy", parts(*TRAINER_PARTS))
    assert str(caught.value) == (
        "policy.optim_step: model and optimizer and gradients offloaded; call it through a TrainingClient, which "
        "brings back what an operation needs"
    )
    with pytest.raises(RuntimeError, match="^critic.push_copy: model offloaded; "):
        require("push_copy", "critic", parts("model"))


@pytest.mark.parametrize("operation", ["forward_backward", "optim_step", "load_checkpoint"])
def test_a_role_that_is_only_scored_does_not_train(operation):
    with pytest.raises(ValueError) as caught:
        require(operation, "reference", parts())
    assert str(caught.value) == f"role='reference': is only scored; {operation} needs one of policy, critic"
    require("stage_checkpoint", "reference", parts())
    require("load_weights", "teacher", parts())


def test_every_part_that_is_needed_is_one_that_some_role_holds():
    held = {part for role in ("policy", "generator") for part in parts_of(role)}
    assert {part for needed in NEEDS.values() for part in needed} == held
    assert parts_of("teacher") == ("model",) and parts_of("critic") == TRAINER_PARTS


def test_a_trainers_operations_have_one_entry_and_what_it_is_told_besides_has_its_own():
    assert ENTRIES["forward"] == ("run", ("forward",))
    assert not ENTRIES.keys() & {"offload", "where", "sample"}


def test_each_operation_is_done_by_one_class():
    from torchtitan_rl.actors.adapter_slots import AdapterSlots
    from torchtitan_rl.actors.trainer_files import TrainerFiles
    from torchtitan_rl.actors.trainer_rank import TrainerRank
    from torchtitan_rl.weights.exchange import WeightExchange
    from torchtitan_rl.weights.role_copies import RoleCopies

    classes = (TrainerRank, WeightExchange, RoleCopies, TrainerFiles, AdapterSlots)
    doers = {name: [c for c in classes if hasattr(c, name)] for name in TRAINER_NEEDS}
    assert {name: len(found) for name, found in doers.items()} == dict.fromkeys(TRAINER_NEEDS, 1)
