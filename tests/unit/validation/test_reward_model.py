"""Reward models that are refused before a process starts."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import torchtitan_rl
from tests.kit.refusal import refusal
from tests.kit.run_config import run_config
from torchtitan_rl.config.load import apply_overrides
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RewardModelConfig
from torchtitan_rl.launch.choice import BACKENDS
from torchtitan_rl.model.files import write_model_dir
from torchtitan_rl.tasks.curriculum import Curriculum
from torchtitan_rl.validation.remote import check_remote
from torchtitan_rl.validation.run import check_local, validate

CHARS = Path(torchtitan_rl.__file__).parent / "assets" / "chars"


def config(**fields):
    made = run_config()
    made.roles.reward_model = RewardModelConfig(**fields)
    return made


def refused(made):
    return refusal(validate, made)


@pytest.fixture
def classifier(tmp_path):
    """A directory with the config and tokenizer of the policy's classifier, and a head of one label alone."""
    write_model_dir(tmp_path, run_config().model.shape, CHARS, eos=1, pad=0, classifier=True)
    save_file({"score.weight": torch.zeros(1, 16)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_classifier_with_the_policys_tokenizer_is_admitted(classifier):
    made = config(model=ModelConfig(assets=str(classifier)))
    validate(made)
    assert list(made.trainers()) == ["policy", "reward_model"]
    assert json.loads((classifier / "config.json").read_text())["architectures"] == ["Qwen3ForSequenceClassification"]


def test_no_classifier_is_named_or_none_is_there(tmp_path):
    assert refused(config()).startswith("roles.reward_model.model=None: names no classifier")
    assert refused(config(model=ModelConfig(assets=str(tmp_path / "no")))).startswith("model.assets=")
    untrained = ModelConfig(assets="chars", shape=run_config().model.shape)
    assert "does not start from random weights" in refused(config(model=untrained))
    named = config(model=dataclasses.replace(untrained, pretrained=True))
    validate(named)
    assert "roles.reward_model.model.assets='chars': has no safetensors" in BACKENDS["local"].missing_weights(named)


def test_a_checkpoint_that_is_none_or_is_incomplete(tmp_path):
    def checkpoint(path):
        return refused(config(checkpoint=str(path)))

    assert "is no checkpoint of a role; give a critic's part" in checkpoint(tmp_path / "critic")
    (tmp_path / "critic" / "model").mkdir(parents=True)
    (tmp_path / "critic" / "model" / ".metadata").touch()
    assert "is incomplete (no COMPLETE marker" in checkpoint(tmp_path / "critic")
    (tmp_path / "COMPLETE").touch()
    (tmp_path / "critic" / "lora.json").write_text("{}")
    assert "holds LoRA adapters only" in checkpoint(tmp_path / "critic")
    (tmp_path / "critic" / "lora.json").unlink()
    validate(config(checkpoint=str(tmp_path / "critic")))


def test_other_tokens_than_the_policys(classifier):
    made = config(model=ModelConfig(assets=str(classifier)))
    tokenizer = json.loads((classifier / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (classifier / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "has another tokenizer than the policy: 'a' is 21, not 20" in refused(made)
    (classifier / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1")
    assert f"model.assets={str(classifier)!r}: its tokenizer.json is no tokenizer" in refused(made)
    (classifier / "tokenizer.json").unlink()
    validate(made)  # nothing says otherwise, and the sizes are equal
    sizes = json.loads((classifier / "config.json").read_text())
    (classifier / "config.json").write_text(json.dumps(sizes | {"vocab_size": 80}))
    assert "has a vocabulary of 80 tokens, the policy has 64" in refused(made)
    shutil.copy(CHARS / "tokenizer.json", classifier)
    validate(made)  # rows that no token has
    (classifier / "config.json").write_text(json.dumps(sizes | {"vocab_size": 60}))
    assert "has a vocabulary of 60 tokens, and its tokenizer 64" in refused(made)


def test_weights_that_leave_no_reward_and_rewards_that_are_no_pass(classifier):
    model = ModelConfig(assets=str(classifier))
    assert "every reward would be 0" in refused(config(model=model, weight=0.0, task_weight=0.0))
    assert "is not finite" in refused(config(model=model, weight=float("nan")))
    counted = config(model=model)
    counted.task = Curriculum.Config(task=counted.task)
    assert "by which task=Curriculum counts who passes" in refused(counted)
    counted.roles.reward_model.weight = 0.0
    validate(counted)


def test_a_head_of_other_labels_or_of_none(classifier):
    made = config(model=ModelConfig(assets=str(classifier)))
    assert "is missing" in BACKENDS["local"].missing_weights(made)  # the layers are
    save_file({"score.weight": torch.zeros(2, 16)}, classifier / "model.safetensors")
    assert "score.weight is [2, 16], a head of 2 labels; give" in BACKENDS["local"].missing_weights(made)
    save_file({"lm_head.weight": torch.zeros(64, 16)}, classifier / "model.safetensors")
    assert "has no score.weight, the head of a sequence classifier" in BACKENDS["actors"].missing_weights(made)


def test_backends_without_room(classifier):
    made = config(model=ModelConfig(assets=str(classifier)))
    assert "roles.reward_model: backend='tinker' trains the policy alone" in refusal(check_remote, made)
    apply_overrides(made, ["--roles.reward-model.trainer.parallelism.data-parallel-shard-degree", "2"])
    assert refusal(check_local, made).startswith("roles.reward_model.trainer.parallelism: replicate x shard x tensor")
