"""Weights of another model than the config's are refused by name before they are read."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.families.shapes import SHAPES
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.families.rope import Llama3Scaling
from torchtitan_rl.launch.choice import backend_of
from torchtitan_rl.model.spec import build_spec
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.weights import hf
from torchtitan_rl.weights.hf import load_hf_weights, weights_misfit, write_hf_dir


@pytest.fixture
def qwen2(tmp_path):
    """(model, adapter, shape, a directory of its weights)."""
    shape = SHAPES["qwen2-yarn"]
    spec = build_spec(ModelConfig(shape=shape))
    model = spec.model.build()
    model.init_weights()
    adapter = spec.state_dict_adapter(spec.model, None)
    write_hf_dir(model.state_dict(), adapter, tmp_path)
    return model, adapter, shape, tmp_path


def altered(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def test_weights_of_the_model_are_read_with_a_tied_head_and_old_tables(qwen2):
    model, adapter, shape, directory = qwen2
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    more = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8), "lm_head.weight": torch.zeros(61, 64)}
    altered(directory, lambda tensors: tensors.update(more))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_hf_weights(model, adapter, directory, shape)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda t: t.pop("model.layers.0.self_attn.q_proj.bias"),
            "1 tensors do not fit the model: model.layers.0.self_attn.q_proj.bias is missing",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(97, 64)}),
            "1 tensors do not fit the model: model.layers.1.mlp.up_proj.weight is [97, 64], not [96, 64]",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}),
            "1 tensors do not fit the model: model.layers.0.self_attn.o_proj.bias is of no part of the model",
        ),
        (lambda t: [t.pop(name) for name in list(t) if "proj" in name], "20 tensors do not fit the model: "),
    ],
    ids=["missing", "size", "unknown", "many"],
)
def test_weights_of_another_model_are_refused_by_name(change, message, qwen2):
    model, adapter, shape, directory = qwen2
    altered(directory, change)
    with pytest.raises(ValueError) as caught:
        load_hf_weights(model, adapter, directory, shape)
    text = str(caught.value)
    assert text.startswith(f"weights={str(directory)!r}: {message}") and text.endswith("of these sizes")
    assert ("and 15 more" in text) == message.startswith("20")
    assert weights_misfit(ModelConfig(assets=str(directory), shape=shape)) == text  # before anything is built


def directory_of(shape, directory, **config):
    """A directory with weights drawn for a shape, and a config.json with some keys changed."""
    spec = build_spec(ModelConfig(shape=shape))
    model = spec.model.build()
    model.init_weights()
    write_hf_dir(model.state_dict(), spec.state_dict_adapter(spec.model, None), directory)
    (directory / "config.json").write_text(json.dumps(shape.to_hf(1, 0) | config))
    return spec, model


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("qwen3", {"rope_theta": 5e5}, "says rope_theta=1000000.0, and model.shape says 500000.0"),
        ("qwen3", {"norm_eps": 1e-5}, "says norm_eps=1e-06, and model.shape says 1e-05"),
        ("qwen3", {"head_dim": 64, "n_heads": 2, "n_kv_heads": 1}, "says n_heads=4, and model.shape says 2"),
        ("llama3-scaled", {"rope_scaling": None}, "says rope_scaling=Llama3Scaling(factor=8.0, "),
        (
            "llama3-scaled",
            {"rope_scaling": Llama3Scaling(factor=4.0, original_max_seq_len=16)},
            "rope_scaling.factor=8",
        ),
        ("qwen3-untied", {"tie_embeddings": True}, "says tie_embeddings=False, and model.shape says True"),
    ],
)
def test_a_shape_that_the_config_json_contradicts_is_refused(name, given, message, tmp_path):
    """Tensors of these sizes fit, and another model would train without a word."""
    shape = SHAPES[name]
    spec, model = directory_of(shape, tmp_path)
    other = dataclasses.replace(shape, **given)
    text = weights_misfit(ModelConfig(assets=str(tmp_path), shape=other))
    assert text.startswith(f"weights={str(tmp_path)!r}: its config.json says ") and message in text
    with pytest.raises(ValueError, match="leave model.shape out"):
        load_hf_weights(model, spec.state_dict_adapter(spec.model, None), tmp_path, other)
    assert weights_misfit(ModelConfig(assets=str(tmp_path), shape=shape)) == ""


def test_a_shape_may_ask_for_more_positions_and_for_the_scaling_that_they_need(tmp_path):
    shape = SHAPES["qwen3"]
    directory_of(shape, tmp_path)
    longer = dataclasses.replace(shape, max_seq_len=512, rope_scaling=SHAPES["qwen3-yarn"].rope_scaling)
    assert weights_misfit(ModelConfig(assets=str(tmp_path), shape=longer)) == ""


@pytest.mark.parametrize("name", SHAPES)
def test_the_directory_of_every_family_fits_its_shape(name, tmp_path):
    directory_of(SHAPES[name], tmp_path)
    assert weights_misfit(ModelConfig(assets=str(tmp_path), shape=SHAPES[name])) == ""


def test_files_beside_the_model_are_not_read(tmp_path):
    """Mistral's directories have the same weights for another program in `consolidated.safetensors`."""
    shape = SHAPES["llama3"]
    spec, model = directory_of(shape, tmp_path)
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    assert weights_misfit(ModelConfig(assets=str(tmp_path), shape=shape)) == ""
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    names = load_file(tmp_path / "model-00001-of-00001.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.init_weights()
    load_hf_weights(model, spec.state_dict_adapter(spec.model, None), tmp_path, shape)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-00002-of-00002.safetensors")}))
    assert weights_misfit(ModelConfig(assets=str(tmp_path), shape=shape)) == (
        f"weights={str(tmp_path)!r}: model-00002-of-00002.safetensors is missing, which "
        "model.safetensors.index.json names; finish the download"
    )


def test_a_load_balancing_bias_that_no_released_model_has_begins_at_zero(tmp_path):
    shape = SHAPES["qwen3-moe"]
    directory_of(shape, tmp_path)
    balanced = dataclasses.replace(shape, experts=dataclasses.replace(shape.experts, load_balance_coeff=0.01))
    assert weights_misfit(ModelConfig(assets=str(tmp_path), shape=balanced)) == ""
    spec = build_spec(ModelConfig(shape=balanced))
    model = spec.model.build()
    model.init_weights()
    load_hf_weights(model, spec.state_dict_adapter(spec.model, None), tmp_path, balanced)
    biases = [tensor for name, tensor in model.state_dict().items() if name.endswith("expert_bias_E")]
    assert len(biases) == 2 and not any(bias.any() for bias in biases)


def test_only_a_second_name_of_a_tensor_costs_memory_to_write(tmp_path, monkeypatch):
    """A whole model in host memory is as much as many hosts have."""
    embedding, norm = torch.ones(3, 2), torch.arange(4.0)
    state = {"embedding": embedding, "head": embedding, "norm": norm, "turned": torch.arange(6.0).view(3, 2).T}
    written = {}

    def noted(tensors, *args, **named):
        written.update(tensors)
        save_file(tensors, *args, **named)

    monkeypatch.setattr(hf, "save_file", noted)
    write_hf_dir(state, SimpleNamespace(to_hf=dict), tmp_path)
    shared = {name for name, tensor in written.items() if tensor.data_ptr() == state[name].data_ptr()}
    assert shared == {"embedding", "norm"}
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == state.keys() and all(torch.equal(read[name], tensor) for name, tensor in state.items())


def test_a_file_that_is_lost_after_its_header_was_read_is_an_error_that_an_actor_survives(qwen2, monkeypatch):
    """torch's own is a `BaseException`, for which Monarch ends the actor's process."""
    model, adapter, shape, directory = qwen2
    read_data = hf.HuggingFaceStorageReader.read_data

    def lost(self, plan, planner):
        (directory / "model.safetensors").unlink()
        return read_data(self, plan, planner)

    monkeypatch.setattr(hf.HuggingFaceStorageReader, "read_data", lost)
    with pytest.raises(RuntimeError, match=f"^checkpoint='{directory}': rank 0 cannot load it: No such file.*; give a"):
        load_hf_weights(model, adapter, directory, shape)


def test_a_run_is_refused_before_its_processes_start(qwen2):
    _, _, shape, directory = qwen2
    run = RunConfig(name="", task=LetterSort.Config(), model=ModelConfig(assets=str(directory), shape=shape))
    assert backend_of("actors").missing_weights(run) == ""
    (directory / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    assert "has no header" in backend_of("local").missing_weights(run)
