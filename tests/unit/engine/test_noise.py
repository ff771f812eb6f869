"""The noise of a token depends on its stream and its number alone, and draws from the softmax of the logits."""

import numpy as np
import pytest
import torch
from scipy import stats

from torchtitan_rl import adapters

adapters.prepare_vllm(eager=True)

from vllm import SamplingParams  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch  # noqa: E402

from torchtitan_rl.engine import gumbel, noise  # noqa: E402
from torchtitan_rl.engine.gumbel import gumbel_argmax  # noqa: E402
from torchtitan_rl.engine.noise import splitmix64  # noqa: E402

current_platform.import_kernels()
NEG_INF = float("-inf")


def kernel(logits, keys):
    return torch.ops._C.fused_gumbel_argmax(logits, keys)


DRAWS = pytest.mark.parametrize("draw", [kernel, gumbel_argmax])


def keys(seeds, outputs):
    seeds, outputs = np.broadcast_arrays(np.asarray(seeds, dtype=np.uint64), np.asarray(outputs))
    return torch.from_numpy(splitmix64(seeds, outputs))


def unsigned(keys):
    return keys.numpy().view(np.uint64).tolist()


@pytest.mark.parametrize(
    ("seed", "outputs"),
    [  # of https://prng.di.unimi.it/splitmix64.c: at Rosetta Code, and in the tests of other implementations
        (
            1234567,
            [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821],
        ),
        (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B]),
        (2**64 - 1, [0xE4D971771B652C20, 0xE99FF867DBF682C9]),
    ],
)
def test_splitmix64_gives_the_published_outputs(seed, outputs):
    assert unsigned(keys(seed, range(len(outputs)))) == outputs
    for number, output in enumerate(outputs):  # an output needs none before it
        assert unsigned(keys([seed], [number])) == [output]


@pytest.mark.parametrize("vocab_size", [1, 7, 64, 5000])
def test_the_kernel_and_torchs_operators_draw_the_same(vocab_size):
    """vLLM's kernel is no promise of vLLM's: another kernel is another noise."""
    assert Batch().forward.__self__._argmax is torch.ops._C.fused_gumbel_argmax
    logits = torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    logits[:, 1::5] = NEG_INF
    of_kernel = kernel(logits, keys(range(64), 3))
    assert of_kernel.dtype == torch.int64 and torch.equal(of_kernel, gumbel_argmax(logits, keys(range(64), 3)))
    if vocab_size > 1:
        assert len(of_kernel.unique()) > 1


def test_chunks_of_rows_draw_as_one(monkeypatch):
    logits = torch.randn(9, 11, generator=torch.Generator().manual_seed(0))
    whole = gumbel_argmax(logits, keys(5, range(9)))
    monkeypatch.setattr(gumbel, "_CHUNK", 25)
    assert torch.equal(whole, gumbel_argmax(logits, keys(5, range(9))))


def p_of_chi_square(counts, expected):
    """The probability of a fit at least this bad, by chance; entries that are too small are taken together."""
    counts, expected = np.asarray(counts, dtype=float).ravel(), np.asarray(expected, dtype=float).ravel()
    small = expected < 10
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    kept = expected > 0
    return stats.chisquare(counts[kept], expected[kept]).pvalue


STREAMS = {
    "neighbouring seeds": (np.arange(40_000), 0),
    "seeds of a run": (np.random.default_rng(0).integers(2**63, size=40_000), 17),
    "tokens of a stream": (3, np.arange(40_000)),
    "seeds apart by SplitMix64's step": (np.arange(40_000, dtype=np.uint64) * 0x9E3779B97F4A7C15, 0),
}


@DRAWS
@pytest.mark.parametrize("which", STREAMS)
def test_draws_have_the_probabilities_of_the_softmax(draw, which):
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2
    logits[::7] = NEG_INF
    drawn = draw(logits.expand(40_000, -1).contiguous(), keys(*STREAMS[which]))
    assert p_of_chi_square(np.bincount(drawn, minlength=40), logits.double().softmax(0).numpy() * 40_000) > 1e-3


@DRAWS
@pytest.mark.parametrize(("seed_step", "token_step"), [(1, 0), (0, 1), (1, 1), (2**32, 0)])
def test_neighbouring_draws_are_independent(draw, seed_step, token_step):
    logits = torch.tensor([0.5, 0.0, -0.5, 1.0, 0.2, -1.0])
    p_V, num = logits.double().softmax(0).numpy(), 40_000
    seeds, tokens = np.arange(num) * (3 if seed_step == 1 else 1), np.arange(num) % 2 * 5
    rows = logits.expand(num, -1).contiguous()
    one = draw(rows, keys(seeds, tokens)).numpy()
    other = draw(rows, keys(seeds + seed_step, tokens + token_step)).numpy()
    pairs = np.zeros((6, 6))
    np.add.at(pairs, (one, other), 1)
    assert p_of_chi_square(pairs, np.outer(p_V, p_V) * num) > 1e-3


@DRAWS
def test_what_has_no_probability_is_never_drawn(draw):
    one = torch.full((5_000, 50), NEG_INF)
    one[:, 31] = -80.0
    assert (draw(one, keys(7, range(5_000))) == 31).all()
    for masked in (slice(0, 10), slice(40, 50), slice(0, 50, 2)):  # at both ends and between
        logits = torch.zeros(5_000, 50)
        logits[:, masked] = NEG_INF
        drawn = draw(logits, keys(range(5_000), 0))
        assert not logits[0, drawn.unique()].isinf().any() and len(drawn.unique()) == (logits[0] == 0).sum()
    unlikely = torch.tensor([0.0, -60.0]).repeat(5_000, 1)  # 1e-26: a float32 draw of 24 bits may not choose it either
    assert not draw(unlikely, keys(range(5_000), 1)).any()


@DRAWS
def test_the_extremes_of_the_noise_draw_what_has_a_probability(draw):
    """Keys whose first token gets the smallest u and the largest, found by running SplitMix64 backwards."""
    for u in (0, 2**64 - 1):
        key = unmixed((unmixed(u) - 0x9E3779B97F4A7C15) % 2**64)
        logits = torch.tensor([[NEG_INF, 0.0, 0.0], [0.0, NEG_INF, NEG_INF]])
        drawn = draw(logits, torch.tensor([signed(key)] * 2)).tolist()
        assert drawn[0] in (1, 2) and drawn[1] == 0
        (only,) = draw(torch.zeros(1, 3), torch.tensor([signed(key)])).tolist()
        assert (only == 0) is (u > 0)


def signed(key):
    return key - 2**64 if key >= 2**63 else key


def unmixed(z):
    """The number that SplitMix64's mix turns into `z`."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, None)):
        undone = z
        for _ in range(64 // shift + 1):
            undone = z ^ undone >> shift
        z = undone if factor is None else undone * pow(factor, -1, 2**64) % 2**64
    return z


@pytest.mark.parametrize("vocab_size", [6, 500])
def test_logits_that_differ_by_rounding_rarely_draw_another_token(vocab_size):
    """Two draws by one key differ only where the two largest sums are closer than twice the difference d of the logits:
    with probability at most 2 d, whatever the vocabulary."""
    generator, num, d = torch.Generator().manual_seed(2), 4_000, 0.01
    logits = torch.zeros(num, vocab_size)
    moved = logits + d * torch.randint(2, logits.shape, generator=generator).mul(2).sub(1)
    of = keys(range(num), 0)
    differ = (kernel(logits, of) != kernel(moved, of)).double().mean().item()
    kept = np.exp(-2 * d) / vocab_size
    closer = 1 - vocab_size * kept / (kept + 1 - 1 / vocab_size)  # the probability of a lead below 2 d
    assert 0 < differ <= closer + 3 * (closer / num) ** 0.5 and closer <= 2 * d


class Batch:
    """A V1 batch of vLLM's own, with the draw installed as in an engine."""

    def __init__(self, rows=8, seed=0):
        self.requests = {}
        self.held = InputBatch(
            max_num_reqs=rows,
            max_model_len=64,
            max_num_batched_tokens=64,
            device=torch.device("cpu"),
            vocab_size=32,
            block_sizes=[16],
            max_num_blocks_per_req=[4],
        )
        self.topk_topp_sampler = self.sampler = self
        self.input_batch = self.held
        noise.install(self, seed)

    def add(self, name, seed, prompt_len=3):
        """A new request, or one that was interrupted."""
        state = self.requests.setdefault(
            name,
            CachedRequestState(
                req_id=name,
                prompt_token_ids=[1] * prompt_len,
                mm_features=[],
                sampling_params=SamplingParams(seed=seed, temperature=1.0),
                generator=None if seed is None else torch.Generator().manual_seed(seed),
                block_ids=([0],),
                num_computed_tokens=0,
                output_token_ids=[],
            ),
        )
        self.held.add_request(state)

    def step(self, discard=()):
        """An iteration as the runner takes it; returns the tokens by request. Rows of requests in `discard` are cut
        prompts, whose token the runner throws away."""
        self.held.condense()
        self.held.refresh_metadata()
        logits = torch.linspace(-1, 1, 32).repeat(self.held.num_reqs, 1)
        tokens, logprobs = self.forward(logits, self.held.generators, None, None)
        assert torch.equal(logprobs, logits.log_softmax(-1)) and logprobs.dtype == torch.float32
        drawn = {}
        for row, (name, token) in enumerate(zip(self.held.req_ids, tokens.tolist(), strict=True)):
            if name not in discard:
                self.requests[name].output_token_ids.append(token)
                self.held.num_tokens_no_spec[row] += 1
                drawn[name] = token
        return drawn

    def tokens(self, name):
        return self.requests[name].output_token_ids


def alone(seed, num):
    batch = Batch()
    batch.add("a", seed)
    for _ in range(num):
        batch.step()
    return batch.tokens("a")


def test_a_request_draws_the_same_tokens_in_any_row_and_company_and_after_an_interruption():
    batch = Batch()
    for i in range(6):
        batch.add(f"r{i}", seed=10 + i, prompt_len=1 + i)
    batch.step(discard=["r4"])  # a prompt that was cut
    batch.step()
    batch.held.remove_request("r0"), batch.held.remove_request("r2")  # r5 and r4 move down
    batch.step()
    batch.add("r0", seed=10)  # goes on after it was preempted
    batch.add("r6", seed=16)
    batch.held.swap_states(1, 4)
    batch.step(discard=["r0"])  # its recomputed tokens were cut
    batch.step()
    batch.held.remove_request("r1")
    batch.add("r2", seed=12)  # takes the row that r1 leaves
    batch.step()
    lengths = {f"r{i}": length for i, length in enumerate([4, 5, 3, 6, 5, 6, 3])}
    assert {name: len(batch.tokens(name)) for name in lengths} == lengths
    for i in range(7):
        assert batch.tokens(f"r{i}") == alone(10 + i, len(batch.tokens(f"r{i}")))


def test_requests_without_a_seed_draw_apart_and_as_the_engines_seed_says():
    def drawn(seed):
        batch = Batch(seed=seed)
        batch.add("a", None), batch.add("b", None)
        for _ in range(12):
            batch.step()
        return batch.tokens("a"), batch.tokens("b")

    assert drawn(0) == drawn(0) != drawn(1)
    assert drawn(0)[0] != drawn(0)[1]


@pytest.mark.parametrize("seed", [-5, 0, 2**63 - 1])
def test_every_seed_that_vllm_takes_names_a_stream(seed):
    assert alone(seed, 8) == alone(seed, 8) != alone(seed + 1 if seed < 5 else 1, 8)
