"""Saved states are exact, can be listed, expire and are deleted; what a server says of its models is true."""

from datetime import UTC, datetime

import numpy as np
import pytest
import tinker
from kit import Kit, moved, near, refused, weighted
from tinker import types

ADAM = {"lr": 1e-2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.1}


def lesson(kit: Kit, count: int) -> list[types.Datum]:
    return [weighted(kit.sequence(18, 500 + count))]


def listed(kit: Kit, path: str) -> types.Checkpoint | None:
    """The checkpoint's row in its run's list."""
    run = types.ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id
    rows = kit.wait(kit.rest().list_checkpoints(run)).checkpoints
    return next((row for row in rows if row.tinker_path == path), None)


@pytest.fixture(scope="module")
def trained(kit: Kit, keeper: tinker.ServiceClient) -> tinker.TrainingClient:
    """A model after two steps, whose optimizer has a past. Tests may save it but not step it."""
    client = kit.fresh(keeper, seed=21)
    for count in range(2):
        kit.step(client, lesson(kit, count), **ADAM)
    return client


@pytest.fixture(scope="module")
def saved(kit: Kit, trained: tinker.TrainingClient) -> str:
    return kit.wait(trained.save_state("two-steps", user_metadata={"steps": "2"})).path


def test_path_names_run_kind_and_checkpoint(trained, saved) -> None:
    parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(saved)
    assert (parsed.training_run_id, parsed.checkpoint_type) == (trained.model_id, "training")
    assert saved.endswith("/weights/two-steps")


def test_next_step_after_loading_is_bitwise_equal(kit: Kit, service) -> None:
    """With the optimizer's state, three more steps of the saving and of the loading model: equal numbers."""
    original = kit.fresh(service, seed=22)
    for count in range(2):
        kit.step(original, lesson(kit, count), **ADAM)
    path = kit.wait(original.save_state("resume")).path
    resumed = kit.load(service, path, optimizer=True)
    before = kit.probe(original)
    assert np.array_equal(kit.probe(resumed), before)
    for count in range(3):
        for client in (original, resumed):
            kit.step(client, lesson(kit, 5 + count), **ADAM)
        assert np.array_equal(kit.probe(resumed), kit.probe(original)), f"differs after step {count + 1}"
    moved(kit.probe(original), before)


def test_loading_without_optimizer_starts_a_new_one(kit: Kit, service, saved) -> None:
    """Equal weights, and a next step like the first of a new optimizer: bias correction takes its betas out."""
    with_state, without = kit.load(service, saved, optimizer=True), [kit.load(service, saved) for _ in range(2)]
    before = kit.probe(with_state)
    assert np.array_equal(kit.probe(without[0]), before)
    kit.step(with_state, lesson(kit, 9), **ADAM)
    kit.step(without[0], lesson(kit, 9), **ADAM)
    kit.step(without[1], lesson(kit, 9), **{**ADAM, "beta1": 0.2, "beta2": 0.5})
    moved(kit.probe(without[0]), before)
    near(kit.probe(without[1]), kit.probe(without[0]), 1e-5)
    moved(kit.probe(with_state), kit.probe(without[0]))


def test_saving_does_not_disturb_the_gradient(kit: Kit, service, saved) -> None:
    """A state saved between gradient and step: the step is the same, and the saved state has not made it."""
    plain, saving = kit.load(service, saved), kit.load(service, saved)
    before = kit.probe(plain)
    kit.step(plain, lesson(kit, 3), **ADAM)
    kit.wait(saving.forward_backward(lesson(kit, 3), "cross_entropy"))
    path = kit.wait(saving.save_state("between")).path
    settings = {"learning_rate" if name == "lr" else name: value for name, value in ADAM.items()}
    kit.wait(saving.optim_step(types.AdamParams(**settings)))
    moved(kit.probe(plain), before)
    near(kit.probe(saving), kit.probe(plain), 1e-6)
    assert np.array_equal(kit.probe(kit.load(service, path)), before)


def test_checkpoint_is_of_its_moment(kit: Kit, service, saved) -> None:
    """Steps after saving, sent without waiting, are not in it."""
    client = kit.load(service, saved)
    before = kit.probe(client)
    future = client.save_state("moment")
    kit.step(client, lesson(kit, 4), **ADAM)
    moved(kit.probe(client), before)
    assert np.array_equal(kit.probe(kit.load(service, kit.wait(future).path)), before)


def test_a_name_is_taken_unless_overwritten(kit: Kit, service, saved) -> None:
    client = kit.load(service, saved)
    path = kit.wait(client.save_state("taken")).path
    kit.step(client, lesson(kit, 6), **ADAM)
    refused(kit, lambda: client.save_state("taken"))
    old = kit.probe(kit.load(service, path))
    assert kit.wait(client.save_state("taken", overwrite=True)).path == path
    moved(kit.probe(client), old)
    assert np.array_equal(kit.probe(kit.load(service, path)), kit.probe(client))


def test_list_has_both_kinds(kit: Kit, trained, saved) -> None:
    sampler = kit.wait(trained.save_weights_for_sampler("for-sampler")).path
    assert sampler == f"tinker://{trained.model_id}/sampler_weights/for-sampler"
    for path, kind, checkpoint in ((saved, "training", "weights/two-steps"),
                                   (sampler, "sampler", "sampler_weights/for-sampler")):  # fmt: skip
        row = listed(kit, path)
        assert row is not None, f"{path} is not in the list"
        assert (row.checkpoint_type, row.checkpoint_id, row.expires_at) == (kind, checkpoint, None)
        age = (datetime.now(UTC) - row.time.astimezone(UTC)).total_seconds()
        assert -300 < age < 86400, f"time={row.time}: the checkpoint is of this hour"
    assert listed(kit, saved).user_metadata == {"steps": "2"}
    everything = kit.wait(kit.rest().list_user_checkpoints(limit=1000)).checkpoints
    assert {saved, sampler} <= {row.tinker_path for row in everything}


def test_time_to_live(kit: Kit, trained) -> None:
    """Set when saving, set and taken away later; less than an hour is refused."""
    path = kit.wait(trained.save_state("mortal", ttl_seconds=7200)).path
    rest = kit.rest()

    def left() -> float:
        return (listed(kit, path).expires_at.astimezone(UTC) - datetime.now(UTC)).total_seconds()

    assert 7000 < left() <= 7260
    kit.wait(rest.set_checkpoint_ttl_from_tinker_path(path, 86400))
    assert 86000 < left() <= 86460
    kit.wait(rest.set_checkpoint_ttl_from_tinker_path(path, None))
    assert listed(kit, path).expires_at is None
    for seconds in (0, -5, 60, 11 * 366 * 86400):
        refused(kit, lambda seconds=seconds: rest.set_checkpoint_ttl_from_tinker_path(path, seconds))
    refused(kit, lambda: trained.save_state("too-mortal", ttl_seconds=10))
    refused(kit, lambda: rest.set_checkpoint_ttl_from_tinker_path(path + "-not", 7200))


def test_deleted_checkpoint_is_gone(kit: Kit, service, trained) -> None:
    rest = kit.rest()
    for path in (
        kit.wait(trained.save_state("short-lived")).path,
        kit.wait(trained.save_weights_for_sampler("short-lived")).path,
    ):
        assert listed(kit, path) is not None
        kit.wait(rest.delete_checkpoint_from_tinker_path(path))
        assert listed(kit, path) is None
        refused(kit, lambda path=path: rest.delete_checkpoint_from_tinker_path(path))
        refused(kit, lambda path=path: service.create_sampling_client(model_path=path))
        refused(kit, lambda path=path: service.create_training_client_from_state(path))
    assert kit.wait(trained.save_state("short-lived")).path, "the name is free again"


def test_weights_info(kit: Kit, trained, saved) -> None:
    said, info = kit.wait(kit.rest().get_weights_info_by_tinker_path(saved)), trained.get_info()
    assert said.base_model == kit.base_model
    assert (said.is_lora, said.lora_rank) == (info.is_lora, info.lora_rank)
    if said.is_lora:
        assert said.lora_rank == 8


def test_get_info(kit: Kit, service, trained, saved) -> None:
    for client in (trained, kit.load(service, saved)):
        info = client.get_info()
        assert info.model_id == client.model_id
        assert info.model_data.model_name == kit.base_model
        assert info.optimizer_config.type == "adamw"


def test_training_runs(kit: Kit, keeper, trained, saved) -> None:
    rest = kit.rest()
    run = kit.wait(rest.get_training_run(trained.model_id))
    assert (run.training_run_id, run.base_model) == (trained.model_id, kit.base_model)
    assert run.is_lora == trained.get_info().is_lora
    assert run.last_checkpoint is not None and run.last_checkpoint.checkpoint_type == "training"
    assert kit.wait(rest.get_training_run_by_tinker_path(saved)).training_run_id == trained.model_id
    assert trained.model_id in kit.wait(rest.get_session(keeper.holder.get_session_id())).training_run_ids


def test_training_runs_in_pages(kit: Kit, trained) -> None:
    """Four pages or five, whatever the server has seen before."""
    rest, seen = kit.rest(), []
    total = kit.wait(rest.list_training_runs(limit=1)).cursor.total_count
    limit = total // 4 + 1
    for offset in range(0, total, limit):
        page = kit.wait(rest.list_training_runs(limit=limit, offset=offset))
        assert len(page.training_runs) <= limit and page.cursor.offset == offset
        seen += [run.training_run_id for run in page.training_runs]
    assert len(seen) == len(set(seen)) == total
    assert trained.model_id in seen


def test_metadata_of_a_run(kit: Kit, service) -> None:
    client = kit.wait(service.create_lora_training_client(kit.base_model, rank=4, user_metadata={"who": "kit"}))
    run = kit.wait(kit.rest().get_training_run(client.model_id))
    assert run.user_metadata == {"who": "kit"}
    if run.is_lora:
        assert run.lora_rank == client.get_info().lora_rank == 4
