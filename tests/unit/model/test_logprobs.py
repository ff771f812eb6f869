"""Chunked log-probabilities and entropies against the whole matrix of logits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.model.logprob_head import LogprobHead
from torchtitan_rl.model.logprobs import chunked_logprobs


def full_logprobs(hidden_TD, weight_VD, targets_T, temperature=1.0):
    """(log-probabilities, entropies) with all logits in memory."""
    logp_TV = (hidden_TD @ weight_VD.T / temperature).log_softmax(-1)
    return logp_TV.gather(1, targets_T[:, None])[:, 0], -(logp_TV.exp() * logp_TV).sum(-1)


def random_inputs(num_tokens, seed=0, dim=6, vocab_size=11, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden_TD = torch.randn(num_tokens, dim, generator=generator, dtype=dtype).requires_grad_()
    weight_VD = torch.randn(vocab_size, dim, generator=generator, dtype=dtype).requires_grad_()
    return hidden_TD, weight_VD, torch.randint(vocab_size, (num_tokens,), generator=generator)


def test_two_tokens_of_three_by_hand():
    # Hidden states pick a column of the head: logits log(1, 2, 1) and log(1, 1, 6).
    head = torch.tensor([[1.0, 2.0, 1.0], [1.0, 1.0, 6.0]]).log().T.contiguous()
    logprobs, entropy = chunked_logprobs(torch.eye(2), head, torch.tensor([1, 0]), chunk_tokens=1)
    assert logprobs.tolist() == pytest.approx([math.log(1 / 2), math.log(1 / 8)])
    assert entropy.tolist() == pytest.approx(
        [math.log(2) / 2 + math.log(4) / 2, 2 / 8 * math.log(8) + 6 / 8 * math.log(8 / 6)]
    )


def test_temperature_divides_the_logits():
    # At temperature 1/2 logits double: log(1, 2, 1) becomes log(1, 4, 1).
    head = torch.tensor([[1.0, 2.0, 1.0]]).log().T.contiguous()
    logprobs, _ = chunked_logprobs(torch.ones(1, 1), head, torch.tensor([1]), temperature=0.5, chunk_tokens=1)
    assert logprobs.item() == pytest.approx(math.log(4 / 6))


@settings(deadline=None, derandomize=True, max_examples=50)
@given(
    num_tokens=st.integers(1, 12),
    chunk_tokens=st.integers(1, 14),
    temperature=st.floats(0.25, 4.0),
    seed=st.integers(0, 2**32),
)
def test_values_and_gradients_equal_those_of_full_logits(num_tokens, chunk_tokens, temperature, seed):
    hidden_TD, weight_VD, targets_T = random_inputs(num_tokens, seed)
    upstream = torch.randn(2, num_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ours = chunked_logprobs(hidden_TD, weight_VD, targets_T, temperature=temperature, chunk_tokens=chunk_tokens)
    full = full_logprobs(hidden_TD, weight_VD, targets_T, temperature)
    for one, other in zip(ours, full, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    for which in ([0], [1], [0, 1]):  # the log-probabilities' gradient, the entropies', and both
        grads = [
            torch.autograd.grad(
                [results[i] for i in which], [hidden_TD, weight_VD], [upstream[i] for i in which], retain_graph=True
            )
            for results in (ours, full)
        ]
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk_tokens", [2, 5, 100])
def test_gradients_by_finite_differences(chunk_tokens):
    hidden_TD, weight_VD, targets_T = random_inputs(5, dim=3, vocab_size=4)

    def results(hidden_TD, weight_VD):
        return chunked_logprobs(hidden_TD, weight_VD, targets_T, temperature=0.7, chunk_tokens=chunk_tokens)

    assert torch.autograd.gradcheck(results, (hidden_TD, weight_VD))


def test_tokens_whose_loss_is_masked_get_exactly_no_gradient():
    hidden_TD, weight_VD, targets_T = random_inputs(6)
    mask_T = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    logprobs, entropy = chunked_logprobs(hidden_TD, weight_VD, targets_T, chunk_tokens=2)
    grad_hidden, grad_weight = torch.autograd.grad((mask_T * (logprobs + 0.1 * entropy)).sum(), [hidden_TD, weight_VD])
    assert (grad_hidden[mask_T == 0] == 0).all() and (grad_hidden[mask_T == 1] != 0).any(-1).all()
    # The head learns what it would have learned from the other tokens alone.
    kept = mask_T == 1
    logprobs, entropy = full_logprobs(hidden_TD[kept], weight_VD, targets_T[kept])
    (alone,) = torch.autograd.grad((logprobs + 0.1 * entropy).sum(), weight_VD)
    torch.testing.assert_close(grad_weight, alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_only_what_requires_a_gradient_gets_one(trained):
    hidden_TD, weight_VD, targets_T = random_inputs(4)
    leaves = {"hidden": hidden_TD, "weight": weight_VD}
    frozen = leaves["weight" if trained == "hidden" else "hidden"].requires_grad_(False)
    logprobs, entropy = chunked_logprobs(hidden_TD, weight_VD, targets_T, chunk_tokens=3)
    (logprobs.sum() + entropy.sum()).backward()
    assert frozen.grad is None
    expected = torch.autograd.grad(
        sum(x.sum() for x in full_logprobs(hidden_TD, weight_VD, targets_T)), leaves[trained]
    )[0]
    torch.testing.assert_close(leaves[trained].grad, expected, rtol=1e-10, atol=1e-12)


def test_without_gradients_nothing_is_recorded():
    hidden_TD, weight_VD, targets_T = random_inputs(4)
    with torch.no_grad():
        logprobs, entropy = chunked_logprobs(hidden_TD, weight_VD, targets_T, chunk_tokens=3)
    assert not logprobs.requires_grad and not entropy.requires_grad


def test_large_logits_do_not_overflow():
    hidden = torch.tensor([[1000.0], [-1000.0]])
    logprobs, entropy = chunked_logprobs(hidden, torch.tensor([[1.0], [0.0]]), torch.tensor([0, 0]), chunk_tokens=2)
    assert logprobs.tolist() == [0.0, -1000.0] and entropy.tolist() == [0.0, 0.0]


def test_bfloat16_results_are_float32_and_gradients_are_bfloat16():
    hidden_TD, weight_VD, targets_T = random_inputs(4, dtype=torch.bfloat16)
    logprobs, entropy = chunked_logprobs(hidden_TD, weight_VD, targets_T, chunk_tokens=3)
    assert logprobs.dtype == entropy.dtype == torch.float32
    grads = torch.autograd.grad(logprobs.sum(), [hidden_TD, weight_VD])
    assert [grad.dtype for grad in grads] == [torch.bfloat16] * 2
    reference, _ = full_logprobs(hidden_TD.double(), weight_VD.double(), targets_T)
    torch.testing.assert_close(logprobs.double(), reference, rtol=0.02, atol=0.02)  # logits are rounded to bfloat16


def test_the_head_scores_the_targets_it_was_told_once():
    head = LogprobHead(LogprobHead.Config(in_features=6, out_features=11, chunk_bytes=2 * 4 * 11, bias=False)).double()
    hidden_TD, weight_VD, targets_T = random_inputs(5)
    with torch.no_grad():
        head.weight.copy_(weight_VD)
    head.target(targets_T, 0.5)
    said = head(hidden_TD[None])
    expected = dict(zip(("policy_logprobs", "entropy"), full_logprobs(hidden_TD, weight_VD, targets_T, 0.5)))
    torch.testing.assert_close({name: rows[0] for name, rows in said.items()}, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(AssertionError, match="target"):
        head(hidden_TD[None])  # stale targets must not be scored again


def test_a_head_in_float32_rounds_no_logit():
    """Hidden states and head stay in bfloat16, as do their gradients. Logits of some 30 have steps of 1/8 there."""
    hidden_TD, weight_VD, targets_T = random_inputs(64, dim=128, vocab_size=50, dtype=torch.float32)
    hidden_TD, weight_VD = (tensor.detach().bfloat16().requires_grad_() for tensor in (hidden_TD, weight_VD))
    with torch.no_grad():
        exact = full_logprobs(hidden_TD.double(), weight_VD.double(), targets_T)
    errors = []
    for float32_head in (False, True):
        results = chunked_logprobs(hidden_TD, weight_VD, targets_T, chunk_tokens=24, float32_head=float32_head)
        assert all(result.dtype == torch.float32 for result in results)
        errors.append(max(float((one - other).detach().abs().max()) for one, other in zip(results, exact, strict=True)))
    assert errors[1] < 1e-4 < 1e-2 < errors[0], errors
    precise = [tensor.detach().double().requires_grad_() for tensor in (hidden_TD, weight_VD)]
    expected = torch.autograd.grad(full_logprobs(*precise, targets_T)[0].sum(), precise)
    actual = torch.autograd.grad(results[0].sum(), [hidden_TD, weight_VD])
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).norm() < 2**-8 * other.norm()
