"""What a head says for distillation, against NumPy in double precision: several targets, the likeliest tokens, KL."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.model.logprob_head import LogprobHead
from torchtitan_rl.model.logprobs import chunked_logprobs
from torchtitan_rl.model.logprobs_distillation import chunked_kl, chunked_top_k
from torchtitan_rl.model.residency import Part, device_bytes, model_tensors
from torchtitan_rl.model.sharding import vocabulary_cut

ragged = dict(
    num_tokens=st.integers(1, 12),
    chunk_tokens=st.integers(1, 14),
    temperature=st.floats(0.25, 4.0),
    seed=st.integers(0, 2**32),
)


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_softmax(hidden_TD, weight_VD, temperature):
    """In NumPy, of whole logits."""
    logits_TV = hidden_TD.detach().numpy() @ weight_VD.detach().numpy().T / temperature
    logits_TV = logits_TV - logits_TV.max(-1, keepdims=True)
    return logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))


def backpropagated(grad_logits_TV, hidden_TD, weight_VD, temperature):
    """Gradients of hidden states and head, given that of the scaled logits."""
    grad_TV = grad_logits_TV / temperature
    return grad_TV @ weight_VD.detach().numpy(), grad_TV.T @ hidden_TD.detach().numpy()


def assert_equal(ours, reference):
    for one, other in zip(ours, reference, strict=True):
        np.testing.assert_allclose(one.detach().numpy(), other, rtol=1e-10, atol=1e-12)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(num_targets=st.integers(1, 5), **ragged)
def test_several_targets_have_the_values_and_gradients_of_the_formula(
    num_tokens, chunk_tokens, temperature, seed, num_targets
):
    hidden_TD = drawn(num_tokens, 6, seed=seed).requires_grad_()
    weight_VD = drawn(11, 6, seed=seed + 1).requires_grad_()
    # With repetitions: nothing says that a position's targets differ.
    targets_TK = torch.randint(11, (num_tokens, num_targets), generator=torch.Generator().manual_seed(seed))
    upstream_TK, upstream_T = drawn(num_tokens, num_targets, seed=seed + 2), drawn(num_tokens, seed=seed + 3)
    logprobs_TK, entropy_T = chunked_logprobs(
        hidden_TD, weight_VD, targets_TK, temperature=temperature, chunk_tokens=chunk_tokens
    )
    logp_TV = log_softmax(hidden_TD, weight_VD, temperature)
    p_TV, expected_T = np.exp(logp_TV), -(np.exp(logp_TV) * logp_TV).sum(-1)
    assert_equal([logprobs_TK, entropy_T], [np.take_along_axis(logp_TV, targets_TK.numpy(), 1), expected_T])
    # d logp[y_k] / dz = onehot(y_k) - p, dH / dz = -p (log p + H)
    grad_TV = -upstream_TK.numpy().sum(-1, keepdims=True) * p_TV
    for token in range(num_tokens):
        for target, upstream in zip(targets_TK[token].tolist(), upstream_TK[token].tolist(), strict=True):
            grad_TV[token, target] += upstream
    of_entropy_TV = -upstream_T.numpy()[:, None] * p_TV * (logp_TV + expected_T[:, None])
    for outputs, upstream, expected_TV in (
        ([logprobs_TK], [upstream_TK], grad_TV),
        ([entropy_T], [upstream_T], of_entropy_TV),
        ([logprobs_TK, entropy_T], [upstream_TK, upstream_T], grad_TV + of_entropy_TV),
    ):
        ours = torch.autograd.grad(outputs, [hidden_TD, weight_VD], upstream, retain_graph=True)
        assert_equal(ours, backpropagated(expected_TV, hidden_TD, weight_VD, temperature))


def test_one_target_in_a_row_of_its_own_is_the_same_as_one_target():
    hidden_TD, weight_VD = drawn(7, 6, seed=0).requires_grad_(), drawn(11, 6, seed=1).requires_grad_()
    targets_T = torch.arange(7)
    one, _ = chunked_logprobs(hidden_TD, weight_VD, targets_T, chunk_tokens=3)
    row, _ = chunked_logprobs(hidden_TD, weight_VD, targets_T[:, None], chunk_tokens=3)
    assert one.shape == (7,) and row.shape == (7, 1) and torch.equal(one, row[:, 0])
    grads = [torch.autograd.grad(x.sum(), [hidden_TD, weight_VD]) for x in (one, row)]
    assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.parametrize("chunk_tokens", [2, 100])
def test_gradients_by_finite_differences(chunk_tokens):
    hidden_TD, weight_VD = drawn(5, 3, seed=0).requires_grad_(), drawn(4, 3, seed=1).requires_grad_()
    teacher_hidden_TD, teacher_weight_VD = drawn(5, 2, seed=2), drawn(4, 2, seed=3)
    targets_TK = torch.tensor([[0, 3], [1, 1], [2, 0], [3, 1], [0, 2]])

    def results(hidden_TD, weight_VD):
        softmax = {"temperature": 0.7, "chunk_tokens": chunk_tokens}
        return (
            chunked_logprobs(hidden_TD, weight_VD, targets_TK, **softmax)[0],
            chunked_kl(hidden_TD, weight_VD, teacher_hidden_TD, teacher_weight_VD, **softmax),
        )

    assert torch.autograd.gradcheck(results, (hidden_TD, weight_VD))


@settings(deadline=None, derandomize=True, max_examples=30)
@given(teacher_dim=st.integers(1, 9), **ragged)
def test_the_kl_has_the_value_and_gradient_of_the_formula(num_tokens, chunk_tokens, temperature, seed, teacher_dim):
    hidden_TD = drawn(num_tokens, 6, seed=seed).requires_grad_()
    weight_VD = drawn(11, 6, seed=seed + 1).requires_grad_()
    teacher = drawn(num_tokens, teacher_dim, seed=seed + 2), drawn(11, teacher_dim, seed=seed + 3)
    upstream_T = drawn(num_tokens, seed=seed + 4)
    kl_T = chunked_kl(hidden_TD, weight_VD, *teacher, temperature=temperature, chunk_tokens=chunk_tokens)
    logp_TV, logq_TV = log_softmax(hidden_TD, weight_VD, temperature), log_softmax(*teacher, temperature)
    expected_T = (np.exp(logp_TV) * (logp_TV - logq_TV)).sum(-1)
    assert_equal([kl_T], [expected_T])
    # dKL / dz = p (log p - log q - KL)
    grad_TV = upstream_T.numpy()[:, None] * np.exp(logp_TV) * (logp_TV - logq_TV - expected_T[:, None])
    ours = torch.autograd.grad(kl_T, [hidden_TD, weight_VD], upstream_T)
    assert_equal(ours, backpropagated(grad_TV, hidden_TD, weight_VD, temperature))


def test_a_kl_by_hand():
    # p = (1/4, 3/4) against q = (1/2, 1/2): 1/4 log 1/2 + 3/4 log 3/2.
    policy, teacher = torch.tensor([[1.0], [3.0]]).log(), torch.tensor([[2.0], [2.0]]).log()
    kl_T = chunked_kl(torch.ones(1, 1), policy, torch.ones(1, 1), teacher, chunk_tokens=1)
    assert kl_T.item() == pytest.approx(math.log(1 / 2) / 4 + 3 * math.log(3 / 2) / 4)


def test_the_kl_to_a_teacher_that_is_the_policy_is_zero_and_so_is_its_gradient():
    hidden_TD, weight_VD = drawn(5, 6, seed=0).requires_grad_(), drawn(11, 6, seed=1).requires_grad_()
    kl_T = chunked_kl(hidden_TD, weight_VD, hidden_TD.detach(), weight_VD.detach(), chunk_tokens=2)
    grads = torch.autograd.grad(kl_T.sum(), [hidden_TD, weight_VD])
    assert kl_T.abs().max() < 1e-14 and max(grad.abs().max() for grad in grads) < 1e-13


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_the_kl_gives_a_gradient_only_to_what_requires_one(trained):
    leaves = {"hidden": drawn(5, 6, seed=0), "weight": drawn(11, 6, seed=1)}
    leaves[trained].requires_grad_()
    teacher = drawn(5, 3, seed=2).requires_grad_(), drawn(11, 3, seed=3).requires_grad_()
    chunked_kl(leaves["hidden"], leaves["weight"], *teacher, chunk_tokens=2).sum().backward()
    assert [name for name, leaf in leaves.items() if leaf.grad is not None] == [trained]
    assert leaves[trained].grad.norm() > 0 and teacher[0].grad is teacher[1].grad is None


def test_bfloat16_gives_a_float32_kl_and_bfloat16_gradients():
    hidden_TD, weight_VD = (drawn(n, 6, seed=n).bfloat16().requires_grad_() for n in (4, 11))
    teacher = drawn(4, 6, seed=2).bfloat16(), drawn(11, 6, seed=3).bfloat16()
    kl_T = chunked_kl(hidden_TD, weight_VD, *teacher, chunk_tokens=3)
    assert kl_T.dtype == torch.float32
    assert [g.dtype for g in torch.autograd.grad(kl_T.sum(), [hidden_TD, weight_VD])] == [torch.bfloat16] * 2
    logp_TV, logq_TV = (log_softmax(h.double(), w.double(), 1.0) for h, w in ((hidden_TD, weight_VD), teacher))
    np.testing.assert_allclose(kl_T.detach(), (np.exp(logp_TV) * (logp_TV - logq_TV)).sum(-1), rtol=0.03, atol=0.03)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(top_k=st.integers(1, 11), **ragged)
def test_the_likeliest_tokens_are_those_of_a_sort(num_tokens, chunk_tokens, temperature, seed, top_k):
    # Few different rows in the head, so that many logits are equal, some negative and some zero.
    hidden_TD, rows = drawn(num_tokens, 2, seed=seed).round().float(), torch.tensor([[0.0, 0], [1, 0], [0, -1], [1, 1]])
    weight_VD = rows[torch.randint(4, (11,), generator=torch.Generator().manual_seed(seed))]
    targets_T = torch.zeros(num_tokens, dtype=torch.int64)
    softmax = {"temperature": temperature, "chunk_tokens": chunk_tokens}
    logprobs_T, entropy_T, tokens_TK, top_TK = chunked_top_k(hidden_TD, weight_VD, targets_T, top_k=top_k, **softmax)
    logp_TV = log_softmax(hidden_TD.double(), weight_VD.double(), temperature)
    logits_TV = (hidden_TD @ weight_VD.T).numpy()
    expected_TK = np.lexsort((np.broadcast_to(np.arange(11), logits_TV.shape), -logits_TV))[:, :top_k]
    assert tokens_TK.dtype == torch.int64 and top_TK.dtype == torch.float32
    assert tokens_TK.tolist() == expected_TK.tolist()
    np.testing.assert_allclose(top_TK, np.take_along_axis(logp_TV, expected_TK, 1), rtol=1e-5, atol=1e-5)
    plain = chunked_logprobs(hidden_TD, weight_VD, targets_T, **softmax)
    assert torch.equal(logprobs_T, plain[0]) and torch.equal(entropy_T, plain[1])


def test_minus_zero_is_zero_and_infinities_have_their_place():
    weight_VD = torch.tensor([[-0.0], [0.0], [-math.inf], [-1.0], [2.0]])
    _, _, tokens_TK, top_TK = chunked_top_k(torch.ones(1, 1), weight_VD, torch.tensor([0]), top_k=5, chunk_tokens=1)
    assert tokens_TK.tolist() == [[4, 0, 1, 3, 2]]
    assert top_TK[0, 0] - top_TK[0, 3] == pytest.approx(3.0) and top_TK[0, 4] == -math.inf


def head_with_teacher(vocab_size=11, dim=6, teacher_dim=3):
    head = LogprobHead(
        LogprobHead.Config(in_features=dim, out_features=vocab_size, chunk_bytes=2 * 4 * vocab_size, bias=False)
    )
    with torch.no_grad():
        head.weight.copy_(drawn(vocab_size, dim, seed=1))
    head.hold_teacher(drawn(vocab_size, teacher_dim, seed=2).float(), 0, 1)
    return head


def test_a_head_says_what_it_was_asked_for_and_no_more():
    head, input = head_with_teacher(), drawn(1, 5, 6, seed=0).float()
    targets_T, teacher_hidden_TD = torch.arange(5), drawn(5, 3, seed=3).float()
    head.target(targets_T, 0.7)
    assert head(input).keys() == {"policy_logprobs", "entropy"}
    head.ask(targets_T, 0.7, teacher_hidden_TD=teacher_hidden_TD)
    said = head(input)
    assert said.keys() == {"policy_logprobs", "entropy", "teacher_kl"} and said["teacher_kl"].requires_grad
    torch.testing.assert_close(
        said["teacher_kl"][0],
        chunked_kl(input[0], head.weight, teacher_hidden_TD, head.teacher_weight_VD, temperature=0.7, chunk_tokens=5),
    )
    head.ask(targets_T, 0.7, top_k=4, hidden=True)
    with torch.no_grad():
        said = head(input)
    assert {name: tuple(rows.shape) for name, rows in said.items()} == {
        "policy_logprobs": (1, 5),
        "entropy": (1, 5),
        "top_tokens": (1, 5, 4),
        "top_logprobs": (1, 5, 4),
        "hidden": (1, 5, 6),
    }
    assert torch.equal(said["hidden"], input)


def test_a_teachers_head_is_no_parameter_and_leaves_the_device_with_the_model():
    head = head_with_teacher()
    assert list(head.state_dict()) == ["weight"] == [name for name, _ in head.named_parameters()]
    model = torch.nn.Module()
    model.lm_head = head
    part, held = Part(), head.teacher_weight_VD.clone()
    assert device_bytes(model_tensors(model)) == 4 * 11 * (6 + 3)
    part.offload(model_tensors(model))
    assert device_bytes(model_tensors(model)) == 0
    part.onload()
    assert torch.equal(head.teacher_weight_VD, held)


def test_slices_of_the_vocabulary_are_dtensors():
    assert [vocabulary_cut(11, rank, 3) for rank in range(3)] == [(0, 4), (4, 4), (8, 3)]
    whole = drawn(11, 3, seed=2).bfloat16()
    head = head_with_teacher()
    head.hold_teacher(whole, 2, 3)
    assert torch.equal(head.teacher_weight_VD, whole[8:])
    assert head.teacher_weight_VD.untyped_storage().nbytes() == 2 * 3 * 3  # and not the whole


def test_a_teacher_that_is_missing_or_another_is_refused():
    head = LogprobHead(LogprobHead.Config(in_features=6, out_features=11, bias=False))
    with pytest.raises(RuntimeError, match="teacher_hidden: 3 numbers per token, but no teacher's head is held; copy"):
        head.ask(torch.arange(5), 1.0, teacher_hidden_TD=torch.ones(5, 3))
    head.hold_teacher(torch.ones(11, 4), 0, 1)
    with pytest.raises(RuntimeError, match="teacher_hidden: 3 numbers per token, but the teacher's head held has 4; "):
        head.ask(torch.arange(5), 1.0, teacher_hidden_TD=torch.ones(5, 3))
    with pytest.raises(RuntimeError, match="teacher: has a vocabulary of 12 where this model has 11; use a teacher"):
        head.hold_teacher(torch.ones(12, 4), 0, 1)
