"""A teacher role: each divergence brings the policy nearer to it, alone or beside rewards."""

import pytest

from tests.integration.conftest import small_config
from tests.integration.helpers import scored_by
from torchtitan_rl.algorithm.losses import importance_sampling, reverse_kl
from torchtitan_rl.config.algorithm import DistillConfig, ScheduleConfig
from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.config.run import RoleConfig
from torchtitan_rl.types import OptimParams

pytestmark = [pytest.mark.whole, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def running(loop, tmp_path_factory):
    """In one process: a teacher that has seen some demonstrations, and the directory with the policy's first
    weights."""
    from torchtitan_rl.train.controller import Controller

    config = small_config(
        tmp_path_factory.mktemp("teacher") / "run",
        algorithm__distill=DistillConfig(divergence="full"),
        algorithm__loss_fn=importance_sampling,
        algorithm__loss_config={},
        task__correct_demonstrations=1.0,
        algorithm__schedule=ScheduleConfig(),
    )
    config.supervised.num_steps, config.supervised.batch_size = 40, 32
    config.roles.teacher = RoleConfig(trainer=TrainerConfig(), model=config.model)
    config.roles.teacher.trainer.training.seq_len = 64

    async def start():
        controller = await Controller.launch(config, backend="local")
        first, taught = (controller.run_dir.path / name for name in ("first", "taught"))
        await controller.trainer.save_hf_model(first, eos=1, pad=0)
        await controller.supervise()
        await controller.trainer.save_hf_model(taught, eos=1, pad=0)
        await controller.role("teacher").init_model(taught)
        await controller.versions.copy_head(controller.role("teacher"), controller.trainer)
        return controller, first

    controller, first = loop.run_until_complete(start())
    yield controller, first
    loop.run_until_complete(controller.close())


async def full_kl(controller, groups) -> float:
    """KL(policy || teacher) on these rollouts, whatever the policy trains by."""
    algorithm = controller.config.algorithm
    trains_by, algorithm.distill = algorithm.distill, DistillConfig(divergence="full")
    data = await scored_by(controller, groups)
    algorithm.distill = trains_by
    output = await controller.trainer.forward_backward(data, reverse_kl, loss_weight=0.0)
    await controller.trainer.optim_step(OptimParams(lr=0.0))
    return output.metrics["distill/kl"]


@pytest.mark.parametrize(
    "distill",
    [
        DistillConfig(divergence="tokens"),
        DistillConfig(divergence="tokens", discount=0.5, rewards=True),
        DistillConfig(divergence="top_k", top_k=8),
        DistillConfig(divergence="top_k", top_k=8, rewards=True),
        DistillConfig(divergence="full"),
        DistillConfig(divergence="full", rewards=True),
    ],
    ids=lambda d: f"{d.divergence}-{'mixed' if d.rewards else 'alone'}",
)
def test_steps_bring_the_policy_nearer_to_the_teacher(loop, running, distill):
    controller, first = running
    controller.config.algorithm.distill = distill

    async def train():
        await controller.trainer.init_model(first)
        await controller.publish()
        held_out = await controller.rollouts(controller.draws.next(4))
        before, lines = await full_kl(controller, held_out), []
        for _ in range(8):
            groups = await controller.rollouts(controller.draws.next(8))
            lines.append(await controller.train_on(groups))
            await controller.publish()
        return before, await full_kl(controller, held_out), lines, groups

    before, after, lines, groups = loop.run_until_complete(train())
    assert after < 0.88 * before
    assert all(line["mismatch/kl"] < 1e-6 and line["optim/grad_norm"] > 0 for line in lines)
    assert all((group.advantages is not None) == distill.rewards for group in groups)
    if distill.divergence == "full" and not distill.rewards:
        assert lines[0]["loss/mean"] == pytest.approx(
            lines[0]["distill/kl"], rel=1e-5
        )  # a token mean, and nothing else
