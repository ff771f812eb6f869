"""Packed attention against attention written out for one document at a time, in double precision."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.model import attention
from torchtitan_rl.model.attention import PackedDocuments, PackedSDPA

NAMES = ("output", "query gradient", "key gradient", "value gradient")


def naive_attention(q_TNH, k_TMH, v_TMH, lengths):
    """Softmax over the tokens of the same document that are not later; query heads share key heads in order."""
    num_shared = q_TNH.shape[1] // k_TMH.shape[1]
    outputs, start = [], 0
    for length in lengths:
        rows = slice(start, start + length)
        start += length
        q = q_TNH[rows]
        k, v = (x[rows].repeat_interleave(num_shared, 1) for x in (k_TMH, v_TMH))
        scores = torch.einsum("inh,jnh->nij", q, k) / q.shape[-1] ** 0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        outputs.append(torch.einsum("nij,jnh->inh", scores.masked_fill(later, -torch.inf).softmax(-1), v))
    return torch.cat(outputs)


def packed_attention(q_TNH, k_TMH, v_TMH, lengths):
    attention = PackedSDPA(PackedSDPA.Config())
    return attention(
        q_TNH[None],
        k_TMH[None],
        v_TMH[None],
        attention_masks=PackedDocuments.build(lengths),
        enable_gqa=q_TNH.shape[1] != k_TMH.shape[1],
    )[0]


def random_inputs(lengths, seed, n_heads=4, n_kv_heads=2, head_dim=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(sum(lengths), heads, head_dim, generator=generator, dtype=dtype).requires_grad_()
        for heads in (n_heads, n_kv_heads, n_kv_heads)
    ]


def output_and_gradients(attention, inputs, lengths):
    output = attention(*inputs, lengths)
    # Drawn in double precision whatever the output's: torch draws other numbers for other dtypes.
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return output.detach(), *torch.autograd.grad(output, inputs, upstream.to(output.dtype))


def test_a_document_of_one_token_attends_to_itself():
    q, k, v = random_inputs([1], seed=0, n_kv_heads=4)
    assert torch.equal(packed_attention(q, k, v, [1]), v)


def test_two_tokens_by_hand():
    # One head of size 1: the second query sees scores 0 and log 3, so weights 1/4 and 3/4.
    q = torch.tensor([5.0, 1.0]).view(2, 1, 1)
    k = torch.tensor([0.0, 3.0]).log().clamp(min=0).view(2, 1, 1)
    v = torch.tensor([8.0, 4.0]).view(2, 1, 1)
    assert packed_attention(q, k, v, [2]).flatten().tolist() == pytest.approx([8.0, 5.0])


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(2, 2), (4, 2), (4, 1)])
@settings(deadline=None, derandomize=True, max_examples=15)
@given(lengths=st.lists(st.integers(1, 24), min_size=1, max_size=8), seed=st.integers(0, 2**32))
def test_values_and_gradients_equal_attention_one_document_at_a_time(n_heads, n_kv_heads, lengths, seed):
    inputs = random_inputs(lengths, seed, n_heads, n_kv_heads)
    packed = output_and_gradients(packed_attention, inputs, lengths)
    naive = output_and_gradients(naive_attention, inputs, lengths)
    for name, ours, reference in zip(NAMES, packed, naive, strict=True):
        assert torch.allclose(ours, reference, rtol=1e-10, atol=1e-12), name


def test_single_precision_is_as_close_as_single_precision_allows():
    lengths = [1, 17, 9, 64, 1, 30]
    inputs = random_inputs(lengths, seed=1, dtype=torch.float32)
    packed = output_and_gradients(packed_attention, inputs, lengths)
    naive = output_and_gradients(naive_attention, [x.detach().double().requires_grad_() for x in inputs], lengths)
    for name, ours, reference in zip(NAMES, packed, naive, strict=True):
        assert torch.allclose(ours.double(), reference, rtol=1e-5, atol=1e-5), name


def test_bfloat16_is_rounded_where_it_goes_in_and_comes_out():
    """On a CPU products and softmax of bfloat16 are in float32: what comes out is the float32 answer, rounded once."""
    lengths = [1, 17, 9, 64, 1, 30]
    inputs = random_inputs(lengths, seed=1, dtype=torch.bfloat16)
    packed = output_and_gradients(packed_attention, inputs, lengths)
    assert {x.dtype for x in packed} == {torch.bfloat16}
    exact = output_and_gradients(naive_attention, [x.detach().double().requires_grad_() for x in inputs], lengths)
    torch.testing.assert_close(packed[0].double(), exact[0], rtol=2**-8, atol=1e-6)
    for name, ours, reference in zip(NAMES[1:], packed[1:], exact[1:], strict=True):  # of a rounded upstream gradient
        assert torch.allclose(ours.double(), reference, rtol=2**-6, atol=2**-6), name


def test_a_scale_of_ones_own():
    q, k, v = random_inputs([5, 3], seed=2, n_kv_heads=4)
    attention = PackedSDPA(PackedSDPA.Config())
    output = attention(q[None], k[None], v[None], attention_masks=PackedDocuments.build([5, 3]), scale=0.125)[0]
    # Dividing queries by sqrt(8) is built in; the rest of 1/8 goes into the queries of the reference.
    torch.testing.assert_close(output, naive_attention(q * 0.125 * 8**0.5, k, v, [5, 3]))


@settings(deadline=None, derandomize=True, max_examples=15)
@given(lengths=st.lists(st.integers(1, 20), min_size=2, max_size=6), data=st.data())
def test_a_document_never_sees_another(lengths, data):
    """Changing every number of one document changes no bit of the others, nor do gradients cross."""
    changed = data.draw(st.integers(0, len(lengths) - 1))
    start = sum(lengths[:changed])
    inside = slice(start, start + lengths[changed])
    outside = torch.ones(sum(lengths), dtype=torch.bool)
    outside[inside] = False
    inputs = random_inputs(lengths, seed=3)
    before = packed_attention(*inputs, lengths)
    other = [x.detach().clone() for x in inputs]
    for x in other:
        x[inside] = 1e3 * x[inside].flip(-1) + 5
    assert torch.equal(before[outside], packed_attention(*other, lengths)[outside])
    for gradient in torch.autograd.grad(before[inside].square().sum(), inputs):
        assert (gradient[outside] == 0).all()


def test_later_tokens_do_not_change_earlier_ones():
    inputs = random_inputs([12], seed=4)
    before = packed_attention(*inputs, [12])
    other = [x.detach().clone() for x in inputs]
    for x in other:
        x[7:] = -x[7:]
    after = packed_attention(*other, [12])
    assert torch.equal(before[:7], after[:7]) and not torch.equal(before[7:], after[7:])


def test_documents_of_one_bucket_are_padded_to_the_longest():
    # The shortest has 2 tokens, so one of up to int(2 * 1.25) + 8 = 10 shares its bucket; 11 starts another.
    layout = PackedDocuments.build([11, 2, 10])
    assert layout.buckets == ((2, 10), (1, 11))
    # Document 1 is tokens 11 and 12, document 2 tokens 13 to 22, document 0 tokens 0 to 10.
    assert layout.to_dense_P.tolist() == [11, 12] + [0] * 8 + list(range(13, 23)) + list(range(11))
    assert layout.to_packed_T.tolist() == list(range(20, 31)) + [0, 1] + list(range(10, 20))


@settings(deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=20))
def test_every_token_has_a_slot_of_its_own_and_little_is_padding(lengths):
    layout = PackedDocuments.build(lengths)
    assert torch.equal(layout.to_dense_P[layout.to_packed_T], torch.arange(sum(lengths)))
    assert sum(num for num, _ in layout.buckets) == len(lengths)
    assert sum(num * padded for num, padded in layout.buckets) == len(layout.to_dense_P)
    assert len(layout.to_dense_P) <= sum(1.25 * length + 8 for length in lengths)


def test_heads_repeated_for_a_kernel_that_cannot_share_them_change_nothing(monkeypatch):
    """As float32 on CUDA: what reaches the kernel has as many key heads as query heads."""
    lengths, reached = [3, 9, 1], []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, **kwargs):
        reached.append((query.shape[1], key.shape[1], value.shape[1], kwargs["enable_gqa"]))
        return kernel(query, key, value, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    results = []
    for whole_heads in (False, True):
        monkeypatch.setattr(attention, "needs_whole_heads", lambda query, whole_heads=whole_heads: whole_heads)
        inputs = random_inputs(lengths, seed=5)
        output = packed_attention(*inputs, lengths)
        output.square().sum().backward()
        results.append([output.detach(), *(x.grad for x in inputs)])
    assert set(reached) == {(4, 2, 2, True), (4, 4, 4, False)}
    for name, shared, repeated in zip(NAMES, *results, strict=True):
        torch.testing.assert_close(repeated, shared, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_float32_on_cuda_needs_them(cuda, dtype):
    assert attention.needs_whole_heads(SimpleNamespace(is_cuda=cuda, dtype=dtype)) is (cuda and dtype == torch.float32)
