"""The gated delta rule and its convolution beside plain loops, and documents that do not see each other."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torchtitan.protocols.module import Module

from tests.kit.view import VIEW
from tests.unit.families.shapes import SHAPES
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.families.delta_net import Chunks, causal_conv, gated_delta_rule
from torchtitan_rl.model.attention import PackedDocuments
from torchtitan_rl.model.spec import build_spec, training_spec

LENGTHS = (5, 130, 1, 64, 65, 3)  # below, at and beyond a chunk of 64
CPU = torch.device("cpu")


def drawn(lengths=LENGTHS, rate=0.3, dtype=torch.float64):
    """(queries, keys, values, log-decays, rates) of packed documents, and a state before each."""
    draw = torch.Generator().manual_seed(0)
    tokens, heads, keys, values = sum(lengths), 3, 4, 6

    def normal(*size):
        return torch.randn(*size, generator=draw, dtype=torch.float64).to(dtype)

    inputs = [normal(tokens, heads, keys), normal(tokens, heads, keys), normal(tokens, heads, values)]
    return (
        [*inputs, -rate * normal(tokens, heads).abs(), normal(tokens, heads).sigmoid()],
        normal(len(lengths), heads, keys, values),
    )


def loop(q, k, v, g, beta, lengths, states):
    """The definition, token by token."""
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    outputs, last = [], []
    for document, start in enumerate(torch.tensor((0, *lengths[:-1])).cumsum(0).tolist()):
        state = states[document]
        for t in range(start, start + lengths[document]):
            state = state * g[t].exp()[:, None, None]
            error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
            outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) * q.shape[-1] ** -0.5)
        last.append(state)
    return torch.stack(outputs), torch.stack(last)


@pytest.mark.parametrize("lengths", [LENGTHS, (7,), (1, 1, 1)], ids=str)
def test_chunks_compute_the_recurrence_and_its_gradient(lengths):
    inputs, states = drawn(lengths)
    leaves = [x.requires_grad_() for x in (*inputs, states)]
    results = []
    for rule in (
        lambda: gated_delta_rule(*inputs, Chunks.build(lengths, CPU), states),
        lambda: loop(*inputs, lengths, states),
    ):
        out, last = rule()
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        gradients = torch.autograd.grad((out * weights).sum() + last.pow(2).sum(), leaves)
        results.append((out, last, *gradients))
    for chunked, plain in zip(*results, strict=True):
        torch.testing.assert_close(chunked, plain, atol=1e-11, rtol=1e-10)


def test_heads_that_forget_fast_stay_exact_in_float32():
    inputs, _ = drawn(rate=20.0)
    exact = loop(*inputs, LENGTHS, torch.zeros(len(LENGTHS), 3, 4, 6, dtype=torch.float64))[0]
    out, _ = gated_delta_rule(*[x.float() for x in inputs], Chunks.build(LENGTHS, CPU))
    torch.testing.assert_close(out.double(), exact, atol=2e-6, rtol=0)


def test_a_state_goes_on_where_a_document_was_cut():
    inputs, states = drawn((130, 40))
    whole, last = gated_delta_rule(*inputs, Chunks.build((130, 40), CPU), states)
    parts = [torch.cat([x[:97], x[130:131]]) for x in inputs], [torch.cat([x[97:130], x[131:]]) for x in inputs]
    first, between = gated_delta_rule(*parts[0], Chunks.build((97, 1), CPU), states)
    second, after = gated_delta_rule(*parts[1], Chunks.build((33, 39), CPU), between)
    torch.testing.assert_close(torch.cat([first[:97], second[:33], first[97:], second[33:]]), whole)
    torch.testing.assert_close(after, last)


def test_the_convolution_begins_anew_in_every_document_after_its_history():
    x, weight = drawn()[0][0].flatten(1), torch.randn(12, 4, dtype=torch.float64)
    history = torch.randn(len(LENGTHS), 3, 12, dtype=torch.float64)
    expected, last = [], []
    for document, before in zip(x.split(LENGTHS), history, strict=True):
        stream = torch.cat([before, document])
        expected.append(F.silu(F.conv1d(stream.T[None], weight[:, None], groups=12))[0].T)
        last.append(stream[-3:])
    chunks = Chunks.build(LENGTHS, CPU)
    torch.testing.assert_close(causal_conv(x, weight, chunks, history), (torch.cat(expected), torch.stack(last)))
    zeros = torch.zeros_like(history)
    torch.testing.assert_close(causal_conv(x, weight, chunks), causal_conv(x, weight, chunks, zeros))


def hidden(model, embeddings, lengths):
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    x = embeddings[None]
    for layer in model.layers.values():
        x = layer(x, PackedDocuments.build(list(lengths)), positions)
    return model.norm(x)[0]


def test_packed_documents_do_not_see_each_other():
    torch.manual_seed(0)
    spec = training_spec(build_spec(ModelConfig(shape=SHAPES["qwen3_5"])), VIEW, attention="sdpa", chunk_bytes=2**20)
    model = spec.model.build()
    model.init_weights()
    lengths = (9, 70, 2, 30)
    embeddings = torch.randn(sum(lengths), 64, requires_grad=True)
    together = hidden(model, embeddings, lengths)
    alone = [hidden(model, document, (len(document),)) for document in embeddings.split(lengths)]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)
    assert (together - hidden(model, embeddings, (sum(lengths),))).abs().max() > 0.01  # as one document they would
    third = slice(79, 81)
    (gradient,) = torch.autograd.grad(together[third].pow(2).sum(), embeddings)
    assert gradient[third].abs().min() > 0
    gradient[third] = 0
    assert not gradient.any()


class Places(Module):
    """The states of two sequences, of which a call may compute one."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        sizes: tuple[tuple[int, ...], ...]

    def __init__(self, config):
        super().__init__()
        self.kept = [torch.zeros(2, *size) for size in config.sizes]
        self.lengths, self.places = (), []

    def begin(self):
        return self.lengths

    def read(self, kind, columns=slice(None)):
        return self.kept[kind][..., columns][self.places]

    def keep(self, kind, values, columns=slice(None)):
        self.kept[kind][..., columns][self.places] = values


def test_a_layer_goes_on_where_its_states_were_kept():
    """Two sequences of 70 and 9 tokens: alone, together, and token by token."""
    shape = SHAPES["qwen3_5"]
    config = (
        training_spec(build_spec(ModelConfig(shape=shape)), VIEW, attention="sdpa", chunk_bytes=2**20)
        .model.layers[0]
        .delta_net
    )
    torch.manual_seed(0)
    whole = config.build()
    whole.init_states(buffer_device=None)
    layer = dataclasses.replace(config, states=Places.Config(sizes=shape.state_sizes)).build()
    layer.load_state_dict(whole.state_dict())
    x = torch.randn(2, 70, shape.dim)
    expected = whole(torch.cat([x[0], x[1, :9]])[None], PackedDocuments.build([70, 9]))[0]
    steps = [([0], (66,)), ([0, 1], (1, 5)), ([1, 0], (1, 3)), ([1], (1,)), ([1], (2,))]
    outputs, done = {0: [], 1: []}, [0, 0]
    with torch.no_grad():
        for places, lengths in steps:
            layer.states.places, layer.states.lengths = places, lengths
            parts = [x[place, done[place] : done[place] + length] for place, length in zip(places, lengths)]
            for place, out in zip(places, layer(torch.cat(parts)[None])[0].split(lengths)):
                outputs[place].append(out)
                done[place] += len(out)
    torch.testing.assert_close(torch.cat(outputs[0] + outputs[1]), expected, atol=1e-5, rtol=1e-5)
