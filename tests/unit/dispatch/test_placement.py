"""Which parts move, in which order, before which operation. Meshes only record what they are told here; that the
real ones do it is in tests/integration/test_roles.py."""

import asyncio

import pytest

from tests.kit.mesh import Mesh
from torchtitan_rl.actors.operations import GeneratorOperations, TrainerOperations
from torchtitan_rl.dispatch.mesh_training_client import MeshTrainingClient
from torchtitan_rl.dispatch.placement import Placement
from torchtitan_rl.dispatch.role_mesh import ProcessDied


def operation_of(role, name):
    return getattr(GeneratorOperations if role == "generator" else TrainerOperations, name)


def placement(colocation, log):
    built = Placement(colocation)
    for role in ("policy", "reference", "critic", "generator"):
        built.add(role, [Mesh(role, log)])
    return built


async def moves(colocation, operations):
    """What meshes were told, with the operations themselves in between."""
    log = []

    async def run():
        built = placement(colocation, log)
        for role in ("policy", "reference", "critic", "generator"):
            if built.shares(role):
                await built.evict(role)
        log.clear()
        for role, operation in operations:
            async with built.turn(role, operation_of(role, operation)):
                log.append(f"{role}.{operation}")
        return built

    return log, await run()


STEP = [
    ("policy", "forward"),
    ("reference", "forward"),
    ("policy", "forward_backward"),
    ("policy", "optim_step"),
    ("policy", "push_weights"),
    ("generator", "load"),
    ("generator", "sample"),
]


async def test_nothing_moves_where_nothing_is_shared():
    log, _ = await moves("none", STEP)
    assert log == [f"{role}.{operation}" for role, operation in STEP]


async def test_policy_and_reference_take_turns_and_only_what_is_missing_is_loaded():
    log, _ = await moves("policy_reference", STEP)
    assert log == [
        ("policy", "onload", "model"),
        "policy.forward",
        ("policy", "offload", "model"),
        ("reference", "onload", "model"),
        "reference.forward",
        ("reference", "offload", "model"),
        ("policy", "onload", "model", "gradients"),
        "policy.forward_backward",
        ("policy", "onload", "optimizer"),
        "policy.optim_step",
        "policy.push_weights",
        "generator.load",
        "generator.sample",
    ]


async def test_a_push_in_a_fully_shared_run_wakes_weights_then_pulls_then_wakes_the_cache():
    log, _ = await moves("all", [*STEP, ("policy", "forward_backward")])
    assert log == [
        ("policy", "onload", "model"),
        "policy.forward",
        ("policy", "offload", "model"),
        ("reference", "onload", "model"),
        "reference.forward",
        ("reference", "offload", "model"),
        ("policy", "onload", "model", "gradients"),
        "policy.forward_backward",
        ("policy", "onload", "optimizer"),
        "policy.optim_step",
        ("policy", "offload", "gradients", "optimizer"),
        "policy.push_weights",  # model on, optimizer off
        ("generator", "wake", "weights"),
        "generator.load",
        ("policy", "offload", "model"),
        ("generator", "wake", "kv_cache"),
        "generator.sample",
        ("generator", "sleep"),
        ("policy", "onload", "model", "gradients"),
        "policy.forward_backward",
    ]


async def test_gradients_that_were_evicted_are_back_for_the_optimizer_step():
    log, _ = await moves(
        "policy_reference", [("policy", "forward_backward"), ("reference", "forward"), ("policy", "optim_step")]
    )
    assert log == [
        ("policy", "onload", "model", "gradients"),
        "policy.forward_backward",
        ("policy", "offload", "model", "gradients"),
        ("reference", "onload", "model"),
        "reference.forward",
        ("reference", "offload", "model"),
        ("policy", "onload", "model", "gradients", "optimizer"),
        "policy.optim_step",
    ]


async def test_loading_the_model_does_not_count_as_loading_the_optimizer():
    _, built = await moves("all", [("policy", "forward")])
    assert built.on_device["policy"] == {"model"}
    assert built.on_device["generator"] == set()


async def test_a_critic_makes_room_for_the_policy_only_when_all_is_shared():
    steps = [("critic", "optim_step"), ("policy", "forward_backward")]
    assert ("critic", "offload", "model", "gradients", "optimizer") in (await moves("all", steps))[0]
    apart, _ = await moves("policy_reference", steps)
    assert not any("critic" == entry[0] for entry in apart if isinstance(entry, tuple))


async def test_shared_operations_run_one_at_a_time_in_the_order_they_were_submitted():
    built, order = placement("all", []), []

    def operation(name, seconds):
        async def body():
            order.append(f"{name} begins")
            await asyncio.sleep(seconds)
            order.append(f"{name} ends")

        return lambda: asyncio.ensure_future(body())

    await asyncio.gather(
        built.run("critic", TrainerOperations.forward_backward, operation("critic", 0.02)),
        built.run("policy", TrainerOperations.forward_backward, operation("policy", 0.01)),
        built.run("policy", TrainerOperations.optim_step, operation("step", 0.0)),
    )

    assert order == ["critic begins", "critic ends", "policy begins", "policy ends", "step begins", "step ends"]


async def test_generator_requests_share_the_device_with_each_other_and_keep_trainers_waiting():
    built, order = placement("all", []), []
    both_in = asyncio.Barrier(2)

    async def sample():
        async with built.turn("generator", GeneratorOperations.sample):
            await asyncio.wait_for(both_in.wait(), 5)
            order.append("sample")

    async def train():
        async with built.turn("policy", TrainerOperations.forward_backward):
            order.append("train")

    await asyncio.gather(sample(), sample(), train())

    assert order == ["sample", "sample", "train"]


async def test_a_call_that_fails_or_is_cancelled_lets_the_next_one_in():
    built = placement("all", [])

    async def fail():
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        await built.run("policy", TrainerOperations.forward, lambda: asyncio.ensure_future(fail()))
    cancelled = built.run("policy", TrainerOperations.forward, lambda: asyncio.ensure_future(asyncio.sleep(60)))
    cancelled.cancel()  # before it has begun to wait
    async with asyncio.timeout(5):
        async with built.turn("reference", TrainerOperations.forward):
            pass


async def test_a_generator_that_died_takes_no_more_turns_and_the_last_one_is_an_error():
    log = []
    built = Placement("all")
    replicas = [Mesh("generator-0", log), Mesh("generator-1", log)]
    built.add("policy", [Mesh("policy", log)])
    built.add("generator", replicas)
    replicas[0].answers["sleep"] = ProcessDied("generator-0 died")
    await built.evict("generator")
    assert log == [("generator-1", "sleep")]
    replicas[1].answers["wake"] = ProcessDied("generator-1 died")
    with pytest.raises(ProcessDied, match="generator-1 died"):
        async with built.turn("generator", GeneratorOperations.sample):
            pass


def test_an_unknown_colocation_is_refused():
    with pytest.raises(ValueError, match="colocation='some': is not known; use one of none, policy_reference, all"):
        Placement("some")


async def test_a_call_cancelled_while_others_make_room_leaves_the_books_right():
    built, moving = placement("all", []), asyncio.Event()

    async def slow(operation, parts):
        moving.set()
        await asyncio.sleep(60)

    built._meshes["critic"][0].call_all = slow
    first = built.run("policy", TrainerOperations.forward, lambda: asyncio.ensure_future(asyncio.sleep(0)))
    second = built.run("policy", TrainerOperations.optim_step, lambda: asyncio.ensure_future(asyncio.sleep(0)))
    await moving.wait()
    first.cancel()
    second.cancel()
    built._meshes["critic"][0].call_all = Mesh("critic", []).call_all
    async with asyncio.timeout(5):
        async with built.turn("reference", TrainerOperations.forward):
            assert built._active == ["reference"] and not built._queue


async def test_a_look_for_a_checkpoint_and_its_deletion_move_nothing_and_wait_for_no_turn(tmp_path):
    log = []
    shared = placement("all", log)
    mesh = shared._meshes["policy"][0]
    mesh.answers, mesh.timeout_s = {"checkpoint_written": [{}]}, 5.0
    client = MeshTrainingClient(
        mesh, max_tokens_per_microbatch=8, max_datum_tokens=8, temperature=1.0, vocab_size=8, placement=shared
    )
    async with shared.turn("generator", GeneratorOperations.sample):
        log.clear()
        async with asyncio.timeout(5):
            await client.checkpoint_written()
            await client.remove_checkpoint(tmp_path)
    assert [name for _, name, *_ in log] == ["checkpoint_written", "remove_checkpoint"]
