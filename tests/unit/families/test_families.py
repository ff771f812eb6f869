"""Every family beside Hugging Face's own model: log-probabilities, gradients, parameters and config.json."""

import copy
import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.kit.view import VIEW
from tests.unit.families.shapes import SHAPES, SIZES
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.families import Llama3Shape, Qwen2Shape, shape_of_hf
from torchtitan_rl.model.attention import PackedDocuments
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.model.spec import build_spec, training_spec
from torchtitan_rl.weights.hf import write_hf_dir

LENGTH = 100  # beyond the original context of every scaled rotary embedding


def perturbed(model, seed=0):
    """Weights with which every parameter matters: norms and biases off their initial values, too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # states that last: of a fast one an output is one product, perhaps all rounding
                parameter.sub_(5.0)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias_E"):
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.3)
    return model


@pytest.fixture(params=SHAPES, scope="module")
def both(request, tmp_path_factory):
    """(shape, torchtitan's model, its adapter, transformers' model with the same weights)."""
    shape = SHAPES[request.param]
    return shape, *models_of(shape, tmp_path_factory.mktemp("hf"))


def models_of(shape, directory):
    """(torchtitan's model, its adapter, transformers' model with the same weights), which travel through an empty
    directory."""
    spec = build_spec(ModelConfig(shape=shape))
    spec = training_spec(spec, VIEW, attention="sdpa", chunk_bytes=2**20)
    torch.manual_seed(0)
    ours = spec.model.build()
    ours.init_weights()
    perturbed(ours)
    adapter = spec.state_dict_adapter(spec.model, None)
    # transformers gives the embedding of a padding token no gradient.
    (directory / "config.json").write_text(json.dumps(shape.to_hf(1, 0) | {"pad_token_id": None}))
    write_hf_dir(ours.state_dict(), adapter, directory)
    theirs, loading = AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    return ours, adapter, theirs.eval()


def logprobs(model, tokens):
    """(1, T - 1) log-probabilities of torchtitan's model."""
    length = tokens.shape[1]
    hidden = model.tok_embeddings(tokens)
    for layer in model.layers.values():
        hidden = layer(hidden, PackedDocuments.build([length]), torch.arange(length)[None])
    logits = torch.nn.functional.linear(model.norm(hidden), model.lm_head.weight)
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def reference_logprobs(model, tokens):
    return model(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def test_log_probabilities_and_gradients_are_those_of_transformers(both):
    shape, ours, adapter, theirs = both
    check_logprobs_and_gradients(shape, ours, adapter, theirs)


def check_logprobs_and_gradients(shape, ours, adapter, theirs):
    tokens = torch.randint(0, shape.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    for model in (ours, theirs):
        model.zero_grad()
    here, there = logprobs(ours, tokens), reference_logprobs(theirs, tokens)
    torch.testing.assert_close(here, there, atol=2e-5, rtol=0)
    weights = torch.linspace(-1, 1, LENGTH - 1)
    (here * weights).sum().backward()
    (there * weights).sum().backward()
    gradients = adapter.to_hf(gradient_state(ours))
    gradients = {name: gradient for name, gradient in gradients.items() if "e_score_correction_bias" not in name}
    compared = 0
    for name, parameter in theirs.named_parameters():
        parts = [(name, parameter.grad)] if name in gradients else _experts(name, parameter.grad)
        for key, gradient in parts:
            difference = (gradients[key] - gradient).abs().max() / gradient.abs().max().clamp_min(1e-6)
            assert difference < 1e-4, f"{key}: {difference}"
            compared += 1
    assert compared == len(gradients)


def gradient_state(model):
    """The gradients under the names of the model's state, with those of fused weights in parts."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, original in zip(copied.parameters(), model.parameters(), strict=True):
            parameter.copy_(original.grad)
    return copied.state_dict()


def _experts(name, gradient):
    """transformers keeps the experts of a layer as two tensors: (E, 2 F, D) of gate and up, (E, D, F) of down."""
    layer, kind = name.rsplit(".", 1)
    for index, of_expert in enumerate(gradient):
        if kind == "gate_up_proj":
            gate, up = of_expert.chunk(2)
            yield f"{layer}.{index}.gate_proj.weight", gate
            yield f"{layer}.{index}.up_proj.weight", up
        else:
            yield f"{layer}.{index}.down_proj.weight", of_expert


def test_parameters_are_counted_as_they_are(both):
    shape, ours, _, theirs = both
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    assert sum(p.numel() for p in ours.parameters()) == shape.num_parameters


def test_a_shape_survives_the_config_of_transformers(both):
    shape, _, _, theirs = both
    assert shape_of_hf(shape.to_hf(1, 0), "m") == shape
    scaled = shape.to_hf(1, 0).get("rope_scaling")  # transformers 4 reads no rope_parameters
    assert (scaled is not None) == (getattr(shape, "rope_scaling", None) is not None)
    assert shape_of_hf(theirs.config.to_dict(), "m") == shape


def test_weights_survive_the_way_to_hugging_face_and_back(both):
    _, ours, adapter, _ = both
    state = ours.state_dict()
    back = adapter.from_hf(adapter.to_hf(dict(state)))
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items() if name in back)
    assert state.keys() - back.keys() <= {"lm_head.weight"}


def test_a_low_rank_factor_is_permuted_as_the_rows_of_its_weight():
    shape = Llama3Shape(vocab_size=11, dim=16, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=24)
    spec = build_spec(ModelConfig(shape=shape))
    adapter = spec.state_dict_adapter(spec.model, None)
    for part, rows in (("wq", 32), ("wk", 16), ("wv", 16)):
        name = f"layers.0.attention.qkv_linear.{part}.weight"
        a, b = torch.randn(3, 16), torch.randn(rows, 3)
        ((theirs, of_b),) = adapter.to_hf({name: b}).items()
        torch.testing.assert_close(of_b @ a, adapter.to_hf({name: b @ a})[theirs])


@dataclass(kw_only=True, slots=True)
class Renamed(Qwen2Shape):
    """A family of a user's own."""

    name: ClassVar[str] = "renamed"
    model_types: ClassVar[tuple[str, ...]] = ("my_qwen",)

    def _hf_kind(self):
        return {"architectures": ["Mine"], "model_type": "my_qwen", "use_sliding_window": False}


def test_a_family_of_ones_own_reads_a_directory(tmp_path):
    shape = Renamed(**SIZES)
    (tmp_path / "config.json").write_text(json.dumps(shape.to_hf(1, 0)))
    assert resolve_shape(ModelConfig(assets=str(tmp_path), family=Renamed)) == shape
    with pytest.raises(ValueError, match="model_type='my_qwen', which is of no family of this package: qwen3"):
        resolve_shape(ModelConfig(assets=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama3"].to_hf(1, 0)))
    with pytest.raises(ValueError, match="model_type='llama', and the family renamed has 'my_qwen'"):
        resolve_shape(ModelConfig(assets=str(tmp_path), family=Renamed))
