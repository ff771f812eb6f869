"""A run with a reward model of its own, in this process and (slow) as actors; its directory is read by transformers."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.conftest import small_config
from tests.kit.sampler import CHARS
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RewardModelConfig
from torchtitan_rl.launch.choice import BACKENDS
from torchtitan_rl.launch.local import LocalLauncher
from torchtitan_rl.record import attempts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tools.audit import audit
from torchtitan_rl.train.controller import Controller
from torchtitan_rl.types.ends import Preempted

pytestmark = pytest.mark.whole
ACTORS = pytest.param("actors", marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def classifier(loop, tmp_path_factory):
    """A critic's weights, its head made up, as a Hugging Face directory `hf` and as a checkpoint's part `critic`."""
    from torchtitan_rl.dispatch.mesh_training_client import MeshTrainingClient

    path = tmp_path_factory.mktemp("classifier")
    config = small_config(path)

    async def write(model: ModelConfig, *, checkpoint: bool) -> None:
        launcher = LocalLauncher(log_dir=str(path), start_timeout_s=120, call_timeout_s=120)
        try:
            mesh = await launcher.start_trainer(config.trainer, model, role="critic", seed=5)
            sizes = {"max_tokens_per_microbatch": 64, "max_datum_tokens": 64, "vocab_size": 64}
            client = MeshTrainingClient(mesh, temperature=1.0, **sizes)
            if checkpoint:
                await client.save_checkpoint(path / "critic")
                (path / "COMPLETE").touch()
            else:
                (path / "hf").mkdir()
                await client.save_hf_model(path / "hf", eos=1, pad=0)
        finally:
            await launcher.stop()

    loop.run_until_complete(write(config.model, checkpoint=False))
    weights = load_file(path / "hf" / "model.safetensors")
    weights["score.weight"] = torch.randn(1, 128, generator=torch.Generator().manual_seed(0))
    save_file(weights, path / "hf" / "model.safetensors", metadata={"format": "pt"})
    loop.run_until_complete(write(ModelConfig(assets=str(path / "hf")), checkpoint=True))
    return path


def config(path, role, **overrides):
    made = small_config(path, **{"supervised__num_steps": 0, "controller__eval_tasks": 8} | overrides)
    made.roles.reward_model = role
    return made


async def trained(made, backend, *, resume_from=""):
    controller = await Controller.launch(made, backend=backend, resume_from=resume_from)
    try:
        await controller.train()
    finally:
        await controller.close()
    return RunDir(made.output_dir)


def expected(directory, tokens):
    """What transformers' classifier says of a sequence."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits.item()


@pytest.mark.parametrize("backend", ["local", ACTORS])
def test_scores_are_those_of_transformers_and_make_the_reward(loop, tmp_path, classifier, backend):
    role = RewardModelConfig(model=ModelConfig(assets=str(classifier / "hf")), weight=0.5, task_weight=0.25)
    run_dir = loop.run_until_complete(trained(config(tmp_path / "run", role), backend))
    records = list(attempts.read_rollouts(run_dir))
    for record in records:
        parts = record["reward_parts"]
        assert record["reward"] == pytest.approx(0.5 * parts["reward_model"] + 0.25 * parts["task_reward"])
    for record in records[:3]:
        (turn,) = record["turns"]
        tokens = [*CHARS.encode(record["prompt"], add_special_tokens=False), *turn["tokens"]]
        assert record["reward_parts"]["reward_model"] == pytest.approx(expected(classifier / "hf", tokens), abs=1e-4)
    (line, *_) = [line for line in run_dir.read_metrics() if line["phase"] == "reinforcement"]
    assert line["reward_model/score_std"] > 0 and line["time/reward_model_s"] > 0
    assert audit(run_dir)[1] == []


def test_a_checkpoint_is_read_and_a_run_with_a_lag_goes_on(loop, tmp_path, classifier):
    """The role has no state: a run that was stopped after its first batch reads the classifier again."""
    settings = {"algorithm__max_policy_lag": 1, "controller__checkpoint_every": 1, "controller__num_steps": 3}
    role = RewardModelConfig(checkpoint=str(classifier / "critic"), task_weight=0.0)
    narrower = ModelConfig(assets="chars", shape=dataclasses.replace(small_config(tmp_path).model.shape, dim=64))
    misfit = BACKENDS["local"].missing_weights(config(tmp_path, dataclasses.replace(role, model=narrower)))
    assert "lm_head.weight is [1, 128], not [1, 64]; give the checkpoint of a model" in misfit

    async def stopped_and_resumed():
        made = config(tmp_path / "run", role, **settings)
        controller = await Controller.launch(made, backend="local")
        scores = await controller.reward_model.scores([[30, 31, 16, 31, 30, 1]])
        controller.stop.ask("a test")
        try:
            with pytest.raises(Preempted, match="a test"):
                await controller.train()
        finally:
            await controller.close()
        return scores, await trained(config(tmp_path / "run", role, **settings), "local", resume_from="latest")

    (score,), run_dir = loop.run_until_complete(stopped_and_resumed())
    assert score == pytest.approx(expected(classifier / "hf", [30, 31, 16, 31, 30, 1]), abs=1e-4)
    assert audit(run_dir)[1] == []
    lines = [line for line in run_dir.read_metrics() if line["phase"] == "reinforcement"]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for record in attempts.read_rollouts(run_dir):
        assert record["reward"] == record["reward_parts"]["reward_model"]
