"""The backend of a remote service beyond the contract of `test_backends.py`: the same training as by actors,
resumption, a lag, and what is refused at the start. The service is a server of this package."""

import json

import pytest
import torch

from tests.integration.conftest import small_config
from tests.integration.helpers import random_datums
from tests.integration.tinker_server import tinker_server
from torchtitan_rl.algorithm import losses
from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.launch import tinker
from torchtitan_rl.train.controller import Controller
from torchtitan_rl.types import OptimParams

pytest.importorskip("tinker")
pytestmark = pytest.mark.slow  # a second server; test_backends.py asks the contract of a remote service
START_S = 240


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with (
        tinker_server(tmp_path_factory.mktemp("service"), "--lora-rank", "0", start_s=START_S) as (url, _),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TINKER_BASE_URL", url)
        patch.setenv("TINKER_API_KEY", "tml-any")
        yield url


def opened(loop, config, backend="tinker", **options):
    return loop.run_until_complete(Controller.launch(config, backend=backend, **options))


async def _trained(trainer):
    """The log-probabilities after a few steps, with losses that are sent by name and losses that are not."""
    steps = []
    for seed, loss_fn in enumerate((losses.cross_entropy, losses.importance_sampling, losses.gspo, losses.dro)):
        output = trainer.forward_backward(random_datums(8, seed=seed), loss_fn, loss_weight=0.5)
        step = await trainer.optim_step(OptimParams(lr=1e-3, weight_decay=0.1, max_grad_norm=0.2))
        steps.append(((await output).loss, step.grad_norm, step.policy_version))
    await trainer.reset_optimizer()
    await trainer.forward_backward(random_datums(8, seed=9), losses.cross_entropy)
    steps.append((0.0, (await trainer.optim_step(OptimParams(lr=1e-3))).grad_norm, 5))
    return steps, (await trainer.forward(random_datums(8, seed=10))).policy_logprobs


def test_a_service_trains_as_actors_do(loop, service, tmp_path):
    results = []
    for backend in ("actors", "tinker"):
        controller = opened(loop, small_config(tmp_path / backend), backend)
        results.append(loop.run_until_complete(_trained(controller.trainer)))
        loop.run_until_complete(controller.close())
    (steps, rows), (remote_steps, remote_rows) = results
    for one, other in zip(steps, remote_steps, strict=True):
        assert other == pytest.approx(one, rel=1e-3)
    for row, expected in zip(remote_rows, rows, strict=True):
        assert torch.allclose(row, expected, atol=1e-3)


def test_a_run_goes_on_from_its_checkpoint_in_another_session(loop, service, tmp_path):
    data = random_datums(6, seed=1)

    async def stepped(controller):
        await controller.trainer.forward_backward(data, losses.cross_entropy)
        return await controller.trainer.optim_step(OptimParams(lr=1e-2))

    async def first(controller):
        controller.state.policy_version = (await stepped(controller)).policy_version
        path = await controller.save_checkpoint()
        await stepped(controller)
        return path, (await controller.trainer.forward(data)).policy_logprobs

    async def second(controller):
        served = controller.policy_version
        step = await stepped(controller)
        await controller.trainer.remove_checkpoint(path)
        return served, step.policy_version, (await controller.trainer.forward(data)).policy_logprobs

    controller = opened(loop, small_config(tmp_path / "run"))
    path, expected = loop.run_until_complete(first(controller))
    loop.run_until_complete(controller.close())
    assert json.loads((path / "remote.json").read_text())["path"].startswith("tinker://")
    assert not (path / "hf").exists(), "a service exports nothing"

    controller = opened(loop, small_config(tmp_path / "run"), resume_from="latest")
    served, version, rows = loop.run_until_complete(second(controller))
    loop.run_until_complete(controller.close())
    assert (served, version) == (1, 2) and not path.exists()
    assert all(torch.equal(row, other) for row, other in zip(rows, expected, strict=True))


def test_rollouts_overlap_training_with_a_lag(loop, service, tmp_path):
    config = small_config(tmp_path / "run", algorithm__max_policy_lag=1, controller__num_steps=3)
    config.algorithm.loss_fn, config.algorithm.loss_config = losses.ppo, {}
    controller = opened(loop, config)
    report = loop.run_until_complete(controller.train())
    loop.run_until_complete(controller.close())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line.get("phase") == "reinforcement"]
    assert [line["step"] for line in steps] == [1, 2, 3] and "test" in report
    assert max(line["policy/lag_max"] for line in steps) == 1


def test_a_model_that_the_service_does_not_train_is_refused(loop, service, tmp_path):
    config = small_config(tmp_path / "lora")
    config.trainer.lora = LoRAConfig()
    with pytest.raises(ValueError, match=r"trainer\.lora=LoRAConfig.*: asks for adapters, and the service trains all"):
        opened(loop, config)
    config = small_config(tmp_path / "other")
    (tmp_path / "letters").symlink_to(config_assets(config))
    config.model.assets = str(tmp_path / "letters")
    with pytest.raises(ValueError, match=r"model\.assets='.*letters': the service does not train it; its models are"):
        opened(loop, config)


def config_assets(config):
    from torchtitan_rl.model.files import assets_dir

    return assets_dir(config.model).absolute()


def test_a_service_that_does_not_answer_is_named(loop, monkeypatch, tmp_path):
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("TINKER_API_KEY", "tml-any")
    monkeypatch.setattr(tinker, "_CONNECT_S", 3.0)
    with pytest.raises(ValueError, match="backend='tinker': no answer within 3 s; look whether .*TINKER_BASE_URL"):
        opened(loop, small_config(tmp_path / "run"))
