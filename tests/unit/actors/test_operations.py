"""What a worker can be asked: the parts that an operation needs, checked where a rank checks them; who does it."""

import inspect

import pytest

from torchtitan_rl.actors.generator import Generator
from torchtitan_rl.actors.operations import (
    TRAINER_PARTS,
    GeneratorOperations,
    TrainerOperations,
    WorkerProcess,
    device_parts,
    needed_parts,
)
from torchtitan_rl.actors.trainer import PolicyTrainer
from torchtitan_rl.model.residency import Part


def parts(*offloaded):
    by_name = {name: Part() for name in TRAINER_PARTS}
    for name in offloaded:
        by_name[name].offload([])
    return by_name


def operations(protocol):
    return {name: value for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_"}


def arguments(function):
    names = list(inspect.signature(function).parameters)[1:]
    return [name for name in names if not name.startswith("_monarch")]


@pytest.fixture(scope="module")
def trainer_rank():
    from torchtitan_rl.actors import trainer_rank

    return trainer_rank


def test_an_operation_names_all_that_it_misses_and_nothing_else(trainer_rank):
    require = trainer_rank.require
    require(TrainerOperations.forward, "policy", parts("gradients", "optimizer"))
    require(TrainerOperations.discard_weights, "policy", parts(*TRAINER_PARTS))
    with pytest.raises(RuntimeError) as caught:
        require(TrainerOperations.optim_step, "policy", parts(*TRAINER_PARTS))
    assert str(caught.value) == (
        "policy.optim_step: model and optimizer and gradients offloaded; call it through a TrainingClient, which "
        "brings back what an operation needs"
    )
    with pytest.raises(RuntimeError, match="^critic.push_copy: model offloaded; "):
        require(TrainerOperations.push_copy, "critic", parts("model"))


@pytest.mark.parametrize("name", ["forward_backward", "optim_step", "load_checkpoint"])
def test_a_role_that_is_only_scored_does_not_train(trainer_rank, name):
    with pytest.raises(ValueError) as caught:
        trainer_rank.require(getattr(TrainerOperations, name), "reference", parts())
    assert str(caught.value) == f"role='reference': is only scored; {name} needs one of policy, critic"
    trainer_rank.require(TrainerOperations.stage_checkpoint, "reference", parts())
    trainer_rank.require(TrainerOperations.load_weights, "teacher", parts())


async def test_a_method_of_the_rank_checks_its_own_operation(trainer_rank):
    """Called on a rank that has nothing but its role and parts: only the check can speak."""
    rank = object.__new__(trainer_rank.TrainerRank)
    rank.role, rank.parts = "policy", parts(*TRAINER_PARTS)
    for name, operation in operations(TrainerOperations).items():
        if needed_parts(operation):
            with pytest.raises(RuntimeError, match=f"^policy.{name}: .*offloaded"):
                answer = getattr(rank, name)(*arguments(operation))
                if inspect.isawaitable(answer):
                    await answer


def test_every_part_that_is_needed_is_one_that_some_role_holds():
    held = {part for role in ("policy", "generator") for part in device_parts(role)}
    every = operations(TrainerOperations) | operations(GeneratorOperations)
    assert {part for operation in every.values() for part in needed_parts(operation)} == held
    assert device_parts("teacher") == ("model",) and device_parts("critic") == TRAINER_PARTS


def test_rank_and_actor_take_what_the_operation_says(trainer_rank):
    from torchtitan_rl.actors.generator_rank import GeneratorRank

    pairs = [
        (TrainerOperations, trainer_rank.TrainerRank, PolicyTrainer),
        (GeneratorOperations, GeneratorRank, Generator),
    ]
    for protocol, rank, actor in pairs:
        for name, operation in operations(protocol).items():
            endpoint = getattr(actor, name)._method
            assert arguments(getattr(rank, name)) == arguments(operation) == arguments(endpoint), name
    for name in operations(WorkerProcess):
        assert hasattr(PolicyTrainer, name) and hasattr(Generator, name)
