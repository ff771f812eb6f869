"""What `serve` refuses before it starts anything, and the cache of `sample`."""

import asyncio
import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

import torchtitan_rl
from torchtitan_rl.cli import exit_status
from torchtitan_rl.cli.main import main
from torchtitan_rl.cli.openai_server import serve
from torchtitan_rl.cli.sample import sample
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import Qwen3Shape
from torchtitan_rl.launch.actors import ActorLauncher
from torchtitan_rl.serve.run_gateway import Address
from torchtitan_rl.types import SamplingParams
from torchtitan_rl.validation.generator import cache_bytes

BYTES = Path(torchtitan_rl.__file__).parent / "assets" / "bytes"
SHAPE = Qwen3Shape(
    vocab_size=264, dim=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=32, hidden_dim=64, max_seq_len=64
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


REFUSED = {
    "no length": (["--max-model-len", "-5"], r"--max-model-len=-5: the model reads 64 tokens; use 1 to 64"),
    "no cache": (["--kv-cache-gib", "0"], r"--kv-cache-gib=0: holds 0 tokens .* or lower --max-model-len"),
    "a cache of no size": (["--kv-cache-gib", "nan"], r"--kv-cache-gib=nan: holds 0 tokens"),
    "a cache without end": (["--kv-cache-gib", "inf"], r"--kv-cache-gib=inf: must be finite"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_flag_with_which_no_engine_works_is_refused_by_its_name(directory, tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(exit_status, "end_with", asyncio.run)
    flags, message = REFUSED[name]
    assert main(["serve", str(directory), "--port", "0", *flags]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "runs").exists()


def test_the_cache_of_a_sample_holds_its_tokens(directory, tmp_path, monkeypatch):
    shape = dataclasses.replace(SHAPE, max_seq_len=40000, n_layers=32)
    (directory / "config.json").write_text(json.dumps(shape.to_hf(1, 0)))
    started = []

    async def start_generator(self, config, *args, **keywords):
        started.append(config)
        raise RuntimeError("no engine here")

    monkeypatch.setattr(ActorLauncher, "start_generator", start_generator)
    longest = GeneratorConfig(dtype="float32", max_model_len=39991)
    for max_tokens, gib in ((8, 0.25), (39990, cache_bytes(longest, shape) / 2**30)):
        with pytest.raises(RuntimeError, match="no engine here"):
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0)
            asyncio.run(sample(directory, "a", params, output_dir=str(tmp_path / f"run-{max_tokens}"), quiet=True))
        assert started[-1].kv_cache_gib == gib
    assert started[-1].kv_cache_gib > 0.25
