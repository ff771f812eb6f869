"""One GPU: a generator's layers by the kernels that CUDA has, against the same layers by torch's operators."""

import pytest
import torch

from torchtitan_rl import adapters, platform

adapters.prepare_vllm(eager=True)

from torchtitan.models.common.feed_forward import FeedForward  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402

from torchtitan_rl.engine.fused_heads import fused_heads  # noqa: E402
from torchtitan_rl.engine.kernels import with_kernels  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has no kernels: tests/unit/engine interprets them"),
]
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Of the largest number: one rounding, and in bfloat16 and float16 a second one of a norm."""


def difference(actual, expected):
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


def plain_heads(product, table, positions, head_dim, queries_per_key, halves, norms):
    """Query, key and value in float64 from float64 norms, rounded as training rounds: after the norm and at the end."""
    groups = product.unflatten(-1, (-1, queries_per_key + 2, head_dim))
    parts = [part.flatten(1, 2) for part in groups.split([queries_per_key, 1, 1], dim=2)]
    cosine, sine = (part[:, None].double() for part in table[positions].chunk(2, dim=-1))
    for i in range(2):
        x = parts[i].double()
        if norms is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norms[2]) * norms[i].double()
            x = x.to(product.dtype).double()
        first, second = x.chunk(2, dim=-1) if halves else (x[..., ::2], x[..., 1::2])
        pair = first * cosine - second * sine, second * cosine + first * sine
        x = torch.cat(pair, dim=-1) if halves else torch.stack(pair, dim=-1).flatten(-2)
        parts[i] = x.to(product.dtype)
    return [part.flatten(1) for part in parts]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 77, 16_384])
@pytest.mark.parametrize("queries_per_key, num_keys, head_dim", [(2, 8, 128), (4, 8, 128), (7, 2, 64), (1, 3, 80)])
def test_heads(dtype, halves, has_norms, num_tokens, queries_per_key, num_keys, head_dim):
    draw = torch.Generator("cuda").manual_seed(num_tokens + head_dim)

    def normal(*shape):
        return torch.randn(shape, generator=draw, device="cuda")

    product = normal(num_tokens, (queries_per_key + 2) * num_keys * head_dim).to(dtype)
    angles = torch.outer(torch.arange(4096, device="cuda"), normal(head_dim // 2))
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.randint(4096, (num_tokens,), generator=draw, device="cuda")
    norms = (normal(head_dim).to(dtype), normal(head_dim).to(dtype), 1e-6) if has_norms else None
    arguments = dict(head_dim=head_dim, queries_per_key=queries_per_key, halves=halves, norms=norms)
    actual = fused_heads(product, table, positions, **arguments)
    expected = plain_heads(product, table, positions, **arguments)
    for one, other in zip(actual, expected, strict=True):
        assert difference(one, other) <= BOUNDS[dtype]
    assert torch.equal(actual[2], expected[2])
    if num_tokens > 1:  # a token's heads have the same bits in any company
        alone = fused_heads(product[-1:], table, positions[-1:], **arguments)
        assert all(torch.equal(one[-1:], other) for one, other in zip(actual, alone, strict=True))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("num_tokens", [1, 77, 16_384])
def test_a_feed_forward(dtype, num_tokens, monkeypatch):
    inner, outer = (Linear.Config(in_features=a, out_features=b, bias=False) for a, b in ((1024, 3072), (3072, 1024)))
    layer = with_kernels(FeedForward.Config(w1=inner, w2=outer, w3=inner)).build().requires_grad_(False)
    layer.w2 = torch.nn.Identity()
    layer.to("cuda", dtype)
    draw = torch.Generator("cuda").manual_seed(num_tokens)
    for linear in (layer.w1, layer.w3):
        linear.weight.copy_(torch.randn(3072, 1024, generator=draw, device="cuda") / 32)
    rows = torch.randn(1, num_tokens, 1024, generator=draw, device="cuda").to(dtype)
    with torch.inference_mode():
        actual = layer(rows)
        monkeypatch.setattr(platform, "has_fused_layers", lambda hidden: False)
        assert difference(actual, layer(rows)) <= max(BOUNDS[dtype], 1e-5)


def test_side_by_side_products_are_written_without_copies():
    inner, outer = (Linear.Config(in_features=a, out_features=b, bias=False) for a, b in ((1024, 3072), (3072, 1024)))
    layer = with_kernels(FeedForward.Config(w1=inner, w2=outer, w3=inner)).build().requires_grad_(False)
    layer.to("cuda", torch.bfloat16)
    rows = torch.ones(1, 64, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        layer(rows)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            layer(rows)
            torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages() if event.self_device_time_total > 0]
    assert names and not [name for name in names if "copy" in name.lower()], names
