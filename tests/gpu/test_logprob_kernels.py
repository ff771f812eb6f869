"""One GPU: the head's Triton kernels against torch's operators at Qwen3's vocabulary, and the time and memory that
they save."""

import statistics
import time

import pytest
import torch

from torchtitan_rl.model.logprobs import chunked_logprobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has no kernels: tests/unit/model interprets them"),
]

VOCABULARY, DIM, TEMPERATURE = 151_936, 1024, 0.7


def random_inputs(num_tokens, dtype, num_targets=1, vocab_size=VOCABULARY):
    """Hidden states, head, targets, and gradients of log-probabilities and entropies. Logits have a deviation of 3."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    hidden_TD = normal(num_tokens, DIM).to(dtype).requires_grad_()
    weight_VD = normal(vocab_size, DIM).mul_(3 / DIM**0.5).to(dtype).requires_grad_()
    targets_TK = torch.randint(vocab_size, (num_tokens, num_targets), generator=generator, device="cuda")
    targets_TK[-1, -1] = vocab_size - 1
    return hidden_TD, weight_VD, targets_TK, (normal(num_tokens, num_targets), normal(num_tokens))


def results(hidden_TD, weight_VD, targets_TK, upstream, *, kernels, chunk_tokens, entropy=True):
    outputs = chunked_logprobs(
        hidden_TD, weight_VD, targets_TK, temperature=TEMPERATURE, chunk_tokens=chunk_tokens, kernels=kernels
    )
    count = 2 if entropy else 1
    return *outputs, *torch.autograd.grad(outputs[:count], [hidden_TD, weight_VD], upstream[:count])


def test_a_head_in_float32_rounds_no_logit():
    """Both ways, from hidden states and head in bfloat16; the product's operands are not copied to float32."""
    hidden_TD, weight_VD, targets_TK, _ = random_inputs(100, torch.bfloat16)
    logits = (hidden_TD.detach().double() @ weight_VD.detach().double().T) / TEMPERATURE
    exact = logits.log_softmax(-1).gather(1, targets_TK)
    for kernels in (True, False):
        errors = []
        for float32_head in (False, True):
            logprobs, _ = chunked_logprobs(
                hidden_TD, weight_VD, targets_TK, temperature=TEMPERATURE, chunk_tokens=37, kernels=kernels,
                float32_head=float32_head,
            )  # fmt: skip
            errors.append(float((logprobs.detach() - exact).abs().max()))
        assert errors[1] < 1e-4 < 1e-3 < errors[0], (kernels, errors)


def relative(one, other) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("num_targets", [1, 3])
@pytest.mark.parametrize("vocab_size", [VOCABULARY, 5003])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
def test_kernels_agree_with_torchs_operators(dtype, bound, vocab_size, num_targets, entropy):
    # 37 tokens a chunk: 0.1 MiB to 21 MiB of logits, and a last chunk with fewer tokens.
    *inputs, upstream = random_inputs(100, dtype, num_targets, vocab_size)
    ours = results(*inputs, upstream, kernels=True, chunk_tokens=37, entropy=entropy)
    plain = results(*inputs, upstream, kernels=False, chunk_tokens=37, entropy=entropy)
    # Both compute in float32 from the same logits; a GPU's exponential is exact to two units in the last place.
    for one, other in zip(ours[:2], plain[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    # In bfloat16 a number of the gradient of logits may be rounded the other way, which changes it by 0.4%.
    for one, other in zip(ours[2:], plain[2:], strict=True):
        assert one.dtype == other.dtype == dtype
        assert relative(one, other) <= bound


def test_a_chunk_may_have_more_than_two_to_the_31_logits():
    num_tokens = 2**31 // VOCABULARY + 8  # 4.0 GiB in bfloat16
    *inputs, upstream = random_inputs(num_tokens, torch.bfloat16)
    whole = results(*inputs, upstream, kernels=True, chunk_tokens=num_tokens)
    cut = results(*inputs, upstream, kernels=True, chunk_tokens=1000)
    for one, other in zip(whole[:3], cut[:3], strict=True):
        # The last rows lie past the 2^31st logit.
        assert relative(one[-8:], other[-8:]) <= 1e-2 and torch.isfinite(one).all()
    assert relative(whole[3], cut[3]) <= 1e-2


def test_kernels_take_less_time_and_memory():
    *inputs, upstream = random_inputs(4096, torch.bfloat16)
    seconds, peaks = {}, {}
    for kernels in (True, False):
        runs = []
        for _ in range(4):  # the first compiles
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            start = time.perf_counter()
            results(*inputs, upstream, kernels=kernels, chunk_tokens=883)
            torch.cuda.synchronize()
            runs.append(time.perf_counter() - start)
        seconds[kernels], peaks[kernels] = statistics.median(runs[1:]), torch.cuda.max_memory_allocated()
    assert seconds[True] < seconds[False], seconds
    assert peaks[True] < peaks[False], peaks
