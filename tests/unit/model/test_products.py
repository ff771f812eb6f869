"""A trainer's linear layer and its products, by torch's own library and by oneDNN, against numpy in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.kit.view import VIEW
from torchtitan_rl import platform
from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.model.linear import TrainedLinear
from torchtitan_rl.model.lora import lora_spec
from torchtitan_rl.model.products import input_gradient, outputs, weight_gradient
from torchtitan_rl.model.spec import build_spec, training_spec

SHAPE = Qwen3Shape(
    vocab_size=11, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=24, max_seq_len=32
)
WITH_ONEDNN = pytest.param(
    True, marks=pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
)


@pytest.fixture(params=[False, WITH_ONEDNN], ids=["torch", "onednn"])
def library(request, monkeypatch):
    """Whether oneDNN multiplies, whatever this processor would choose."""
    monkeypatch.setattr(platform, "_MKL_LEAVES_AVX512", request.param)
    return request.param


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def close(actual, expected):
    scale = np.abs(expected).max(initial=1e-30)
    np.testing.assert_allclose(actual.detach().double().numpy(), expected, rtol=0, atol=2e-6 * scale)


@pytest.mark.parametrize("tokens, inputs, features", [(1, 8, 24), (37, 24, 8), (300, 64, 176), (64, 16, 16)])
def test_products_against_numpy(library, tokens, inputs, features):
    x, w, b, g = drawn(tokens, inputs), drawn(features, inputs), drawn(features), drawn(tokens, features)
    nx, nw, nb, ng = (tensor.double().numpy() for tensor in (x, w, b, g))
    close(outputs(x, w), nx @ nw.T)
    close(outputs(x, w, b), nx @ nw.T + nb)
    close(outputs(x[None], w), (nx @ nw.T)[None])
    close(input_gradient(g, w), ng @ nw)
    close(weight_gradient(g, x), ng.T @ nx)
    out = torch.full((tokens + 2, inputs), 7.0)
    input_gradient(g, w, out=out[1:-1])
    close(out[1:-1], ng @ nw)
    assert (out[0] == 7.0).all() and (out[-1] == 7.0).all()


def test_matrices_that_are_parts_of_others(library):
    """A microbatch's rows, and a weight in which a row is not behind the row before it."""
    x, w = drawn(40, 32)[5:37, :24], drawn(24, 50).t()[3:43]
    close(outputs(x, w), x.double().numpy() @ w.double().numpy().T)
    g = drawn(32, 80)[:, ::2]
    close(weight_gradient(g, x), g.double().numpy().T @ x.double().numpy())


def layer(bias):
    built = TrainedLinear.Config(in_features=24, out_features=40, bias=bias).build()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(drawn(*parameter.shape))
    return built


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_torchs_layer(library, bias):
    built, x, g = layer(bias), drawn(2, 9, 24).requires_grad_(), drawn(2, 9, 40)
    built(x).backward(g)
    ours = [x.grad, *(parameter.grad for parameter in built.parameters())]
    like = [x.detach().clone().requires_grad_(), *(p.detach().clone().requires_grad_() for p in built.parameters())]
    F.linear(*like).backward(g)
    for gradient, expected in zip(ours, like, strict=True):
        close(gradient, expected.grad.double().numpy())


def test_a_frozen_layer_has_no_gradient_and_passes_one_on(library):
    built, x = layer(bias=True).requires_grad_(False), drawn(9, 24).requires_grad_()
    built(x).sum().backward()
    assert built.weight.grad is None and built.bias.grad is None
    close(x.grad, np.broadcast_to(built.weight.double().numpy().sum(0), (9, 24)))


def test_no_tokens(library):
    built, x = layer(bias=False), torch.zeros(1, 0, 24, requires_grad=True)
    built(x).sum().backward()
    assert x.grad.shape == (1, 0, 24) and not built.weight.grad.any()


@pytest.mark.skipif(bool(platform.missing_compiler()), reason=platform.missing_compiler())
def test_a_compiled_layer_has_the_same_products(library):
    built, x, g = layer(bias=True), drawn(2, 9, 24), drawn(2, 9, 40)
    built(x).backward(g)
    expected = [built.weight.grad, built.bias.grad]
    built.zero_grad()
    torch.compiler.reset()
    compiled = torch.compile(built, fullgraph=True)
    close(compiled(x), built(x).detach().double().numpy())
    built.zero_grad()
    compiled(x).backward(g)
    for gradient, like in zip((built.weight.grad, built.bias.grad), expected, strict=True):
        close(gradient, like.double().numpy())


def test_equal_calls_give_equal_bits(library):
    built, x, g = layer(bias=False), drawn(1, 700, 24), drawn(1, 700, 40)
    answers = []
    for _ in range(3):
        built.zero_grad()
        out = built(x)
        out.backward(g)
        answers.append((out.detach(), built.weight.grad))
    assert all(torch.equal(a, b) for answer in answers[1:] for a, b in zip(answers[0], answer, strict=True))


def test_bfloat16_is_left_to_torch():
    assert not platform.multiplies_by_onednn(torch.zeros(2, 2, dtype=torch.bfloat16))
    built, x = layer(bias=False).bfloat16(), drawn(9, 24).bfloat16()
    assert torch.equal(built(x), F.linear(x, built.weight))


@pytest.mark.parametrize(
    "vendor, capability, chosen",
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        (None, "AVX512", False),
    ],
)
def test_which_processors_multiply_by_onednn(monkeypatch, tmp_path, vendor, capability, chosen):
    cpuinfo = tmp_path / "cpuinfo"
    if vendor is not None:
        cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: one\n")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    for library in (torch.backends.mkl, torch.backends.mkldnn):
        monkeypatch.setattr(library, "is_available", lambda: True)
    assert platform._mkl_leaves_avx512(cpuinfo) is chosen


def linears(spec):
    with torch.device("meta"):
        return {name: type(module) for name, module in spec.model.build().named_modules() if hasattr(module, "weight")}


def for_training(**options):
    return training_spec(build_spec(ModelConfig(shape=SHAPE)), VIEW, attention="sdpa", chunk_bytes=4096, **options)


def test_a_training_spec_has_such_layers_and_adapters_on_them():
    spec = for_training()
    layers = {name.rpartition(".")[2]: kind for name, kind in linears(spec).items()}
    assert {name for name, kind in layers.items() if kind is TrainedLinear} == {"wqkv", "wo", "w1", "w2", "w3"}
    assert TrainedLinear not in linears(for_training(chosen_products=False)).values()
    adapted = linears(lora_spec(spec, LoRAConfig(rank=2, target_modules=("o_proj", "up_proj"))))
    assert issubclass(adapted["layers.0.attention.wo"], TrainedLinear)
    assert issubclass(adapted["layers.1.feed_forward.w3"], TrainedLinear)
