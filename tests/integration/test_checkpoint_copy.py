"""A checkpoint holds the state of the moment when it was begun, and older checkpoints can still be read."""

import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.integration.helpers import random_datums
from tests.integration.layouts import MODEL, trainer_config
from torchtitan_rl.actors import checkpoint_writer
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.dispatch.mesh_training_client import MeshTrainingClient
from torchtitan_rl.launch.local import LocalLauncher
from torchtitan_rl.model import lora
from torchtitan_rl.model.module_state import fused_state
from torchtitan_rl.types import OptimParams
from torchtitan_rl.weights import checkpoint

pytestmark = pytest.mark.whole


@pytest.fixture
async def launcher(tmp_path):
    launcher = LocalLauncher(log_dir=str(tmp_path / "logs"), start_timeout_s=240, call_timeout_s=240)
    yield launcher
    await launcher.stop()


async def a_trainer(launcher, **changes) -> MeshTrainingClient:
    mesh = await launcher.start_trainer(trainer_config(**changes), MODEL, role="policy", seed=0)
    return MeshTrainingClient(mesh, max_tokens_per_microbatch=64, max_datum_tokens=64, temperature=1.0, vocab_size=67)


async def step(client) -> None:
    await client.forward_backward(random_datums(4), importance_sampling)
    await client.optim_step(OptimParams(lr=1e-2))


def state_of(launcher) -> dict[str, torch.Tensor]:
    """Copies of parameters and optimizer state."""
    rank = launcher._trainers[0]
    state = {**rank.model.state_dict(), **rank.optimizers.state_dict()}
    return {n: checkpoint_writer.local_part(t).clone() for n, t in state.items() if isinstance(t, torch.Tensor)}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


async def test_steps_that_follow_do_not_reach_what_is_written(launcher, tmp_path, monkeypatch):
    may_write, save = threading.Event(), dcp.save

    def save_later(*args, **kwargs):
        assert may_write.wait(100)
        return save(*args, **kwargs)

    monkeypatch.setattr(checkpoint_writer.dcp, "save", save_later)
    client = await a_trainer(launcher)
    saved = []
    for number in range(2):  # the second checkpoint uses the memory of the first one
        await step(client)
        saved.append(state_of(launcher))
        may_write.clear()
        await client.stage_checkpoint(tmp_path / f"step-{number}")
        await step(client)
        may_write.set()
        await client.checkpoint_written()
    later = state_of(launcher)
    for number, expected in enumerate(saved):
        await client.load_checkpoint(tmp_path / f"step-{number}")
        assert same(state_of(launcher), expected) and not same(expected, later)
    await step(client)  # and a checkpoint after a load
    expected = state_of(launcher)
    await client.save_checkpoint(tmp_path / "loaded")
    await step(client)
    await client.load_checkpoint(tmp_path / "loaded")
    assert same(state_of(launcher), expected)


async def test_a_checkpoint_of_format_1_is_read(launcher, tmp_path):
    client = await a_trainer(launcher)
    await step(client)
    expected, rank = state_of(launcher), launcher._trainers[0]
    state = {"model": rank.model.state_dict(), "optimizer": rank.optimizers.state_dict()}
    assert any(name.endswith(".wq.weight") for name in state["model"])
    dcp.save(state, checkpoint_id=str(checkpoint.model_dir(tmp_path / "old")), no_dist=True)
    await step(client)
    assert not same(state_of(launcher), expected)
    await client.load_checkpoint(tmp_path / "old")
    assert same(state_of(launcher), expected)


async def test_a_save_between_gradient_and_first_step_changes_nothing_and_has_moments(launcher, tmp_path):
    plain, saving = await a_trainer(launcher), await a_trainer(launcher)
    for client in (plain, saving):
        await client.forward_backward(random_datums(4), importance_sampling)
    before = await saving.gradients()
    await saving.save_checkpoint(tmp_path / "saved")
    after = await saving.gradients()
    assert all(torch.equal(after[name], before[name]) for name in before)
    for client in (plain, saving):
        await client.optim_step(OptimParams(lr=1e-2))
    stepped = await plain.parameters()
    assert all(torch.equal(tensor, stepped[name]) for name, tensor in (await saving.parameters()).items())
    await saving.load_checkpoint(tmp_path / "saved")  # as it was before the step: moments and step count are zero
    assert all(float(first.abs().max()) == 0 for first, _ in (await saving.moments()).values())
    await step(saving)
    assert all(torch.equal(tensor, stepped[name]) for name, tensor in (await saving.parameters()).items())


@pytest.mark.parametrize("optimizer", [True, False])
async def test_a_load_drops_the_gradient_and_loads_the_moments(optimizer, launcher, tmp_path):
    client, fresh = await a_trainer(launcher), await a_trainer(launcher)
    await step(client)
    await client.save_checkpoint(tmp_path / "saved")
    saved = await client.moments()
    await fresh.forward_backward(random_datums(4, seed=1), importance_sampling)
    await fresh.load_checkpoint(tmp_path / "saved", optimizer=optimizer)
    assert set((await fresh.gradients()).values()) == {None}
    loaded = await fresh.moments()
    assert loaded.keys() == (saved.keys() if optimizer else set())
    assert all(torch.equal(loaded[name][i], saved[name][i]) for name in loaded for i in range(2))
    if optimizer:
        await step(client)
        await step(fresh)
        stepped = await client.parameters()
        assert all(torch.equal(tensor, stepped[name]) for name, tensor in (await fresh.parameters()).items())


@pytest.mark.parametrize("writer", ["this version", "an earlier one"])
async def test_adapters_that_do_not_train_leave_the_others_their_moments(writer, launcher, tmp_path):
    """Frozen adapters have no moments: earlier versions wrote none of them, and asked for them when they read."""
    client = await a_trainer(launcher, lora=LoRAConfig(rank=4))
    rank, path = launcher._trainers[0], tmp_path / "saved"

    async def train():
        await client.forward_backward(random_datums(4), importance_sampling)
        await client.freeze_untrained()
        await client.optim_step(OptimParams(lr=1e-2))

    def of_mlp():
        return {name: tensor for name, tensor in state_of(launcher).items() if ".attention." not in name}

    await client.add_adapter("one", lora_rank=4, seed=1, parts=("mlp",), policy_version=0)
    await train()
    if writer == "this version":
        await client.save_checkpoint(path)
    else:
        state = {"model": lora.adapter_state(fused_state(rank.model)), "optimizer": rank.optimizers.state_dict()}
        dcp.save(state, checkpoint_id=str(checkpoint.model_dir(path)), no_dist=True)
        checkpoint.write_lora(path, rank.files._lora_record())
    expected = of_mlp()
    assert any(name.endswith(".exp_avg") for name in expected)
    await train()
    continued = of_mlp()
    for parts in (("mlp",), ("attention", "mlp")):  # the second one has moments of all adapters when it loads
        await client.add_adapter("-".join(parts), lora_rank=4, seed=2, parts=parts, policy_version=0)
        await train()
        await client.load_checkpoint(path)
        assert same(of_mlp(), expected)
        steps = {n: float(t) for n, t in state_of(launcher).items() if ".attention." in n and n.endswith(".step")}
        assert set(steps.values()) == ({0.0} if writer == "this version" else set())
    await client.use_adapter("mlp")
    await train()
    assert same(of_mlp(), continued)
