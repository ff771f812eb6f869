"""What `serve` refuses before it starts anything."""

import json
import shutil
from pathlib import Path

import pytest

import torchtitan_rl
from torchtitan_rl.cli.openai_server import serve
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import Qwen3Shape
from torchtitan_rl.serve.run_gateway import Address

BYTES = Path(torchtitan_rl.__file__).parent / "assets" / "bytes"
SHAPE = Qwen3Shape(
    vocab_size=264, dim=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, hidden_dim=64, max_seq_len=64
)


@pytest.fixture
def directory(tmp_path):
    """A Hugging Face directory, as far as its names go."""
    made = tmp_path / "model"
    shutil.copytree(BYTES, made)
    (made / "config.json").write_text(json.dumps(SHAPE.to_hf(1, 0)))
    (made / "model.safetensors").write_bytes(b"")
    return made


def another_model(directory):
    (directory / "config.json").write_text(json.dumps(SHAPE.to_hf(1, 0) | {"model_type": "gpt2"}))


def no_length(directory):
    config = SHAPE.to_hf(1, 0)
    del config["max_position_embeddings"]
    (directory / "config.json").write_text(json.dumps(config))


FAULTS = {
    "is not there": (shutil.rmtree, "is not there; give a run's checkpoints/step-N, or a Hugging Face directory"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), r"without \*.safetensors"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "holds no tokenizer that can be read"),
    "another model": (another_model, "model_type='gpt2', which is of no family"),
    "no length": (no_length, "has no max_position_embeddings"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_directory_that_cannot_be_served_is_refused_in_a_sentence(directory, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    fault, message = FAULTS[name]
    fault(directory)
    with pytest.raises(ValueError, match=message):
        await serve(directory, Address(port=0), GeneratorConfig())
    assert not (tmp_path / "runs").exists()
