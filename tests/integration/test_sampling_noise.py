"""The tokens of a seeded request depend on nothing else that an engine does: in one process, two engines in turn."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from scripts.gpu_checks.engines import random_weights, started, untrained_dir
from tests.integration.conftest import ROOT
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.types import Request, SamplingParams

pytestmark = pytest.mark.whole

SHORT = [20, 31, 27, 44]
PROMPT = SHORT * 25
BLOCKS = 12  # of 128 tokens: 11 at a time have room for their prompts, and not for their completions
VOCAB_SIZE = 64


def request(seed=7, prompt=PROMPT, max_tokens=60, **params):
    return Request(prompt, SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, **params))


OTHERS = [request(100 + i, [5 + i, *PROMPT[: 98 + i]], 60 - 2 * i) for i in range(20)]


def config(kv_cache_gib):
    return GeneratorConfig(dtype="float32", max_model_len=192, max_num_seqs=64, kv_cache_gib=kv_cache_gib)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Completions by what else the engine did, and how often the second engine interrupted a request."""
    model = load_config(str(ROOT / "configs" / "quickstart.py")).model
    directory, weights = untrained_dir(tmp_path_factory.mktemp("model"), model), random_weights(model, "float32")
    weights["norm.weight"] *= 6  # random weights alone draw all tokens nearly alike

    def completions(engine, requests):
        return [future.result(timeout=120) for future in engine.submit(requests)]

    held = SimpleNamespace(interruptions=0)
    with started(config(0.25), directory) as engine:
        engine.stage(0, weights)
        engine.load(0).result(timeout=120)
        (held.alone,) = completions(engine, [request()])
        held.company = completions(engine, [*OTHERS[:10], request(), *OTHERS[10:]])
        before = engine.submit(OTHERS)
        time.sleep(0.1)
        (held.later,) = completions(engine, [request()])
        held.others = [future.result(timeout=120) for future in before]
        held.greedy = completions(engine, [request(seed, max_tokens=30, temperature=0.0) for seed in (1, 2)])
        narrow = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}]
        held.narrowed = completions(engine, [request(max_tokens=30, **settings) for settings in narrow])
        held.penalised = completions(engine, [request(max_tokens=30, repetition_penalty=1e6)] * 2)
        held.first = completions(engine, [request(seed, SHORT, 1) for seed in range(3000)])
        held.second = completions(engine, [request(seed, SHORT, 2) for seed in range(500)])
        held.unnamed = completions(engine, [request(None, max_tokens=30)] * 2)
        (held.likeliest,) = completions(engine, [Request([*SHORT, 0], None, VOCAB_SIZE)])
    shape = model.shape
    block_bytes = 2 * shape.n_layers * shape.n_kv_heads * shape.head_dim * 4 * 128
    with started(config(BLOCKS * block_bytes / 2**30), directory) as engine:
        scheduler = engine._engine.engine_core.engine_core.scheduler
        interrupt = scheduler._preempt_request

        def counted(*args, **kwargs):
            held.interruptions += 1
            return interrupt(*args, **kwargs)

        scheduler._preempt_request = counted
        engine.stage(0, weights)
        engine.load(0).result(timeout=120)
        held.interrupted = completions(engine, [*OTHERS[:10], request(), *OTHERS[10:]])
    return held


def same(one, other):
    """The same tokens, and log-probabilities that differ by rounding at most."""
    assert one.tokens == other.tokens
    assert torch.allclose(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-5)


def test_a_request_gets_the_same_tokens_alone_in_company_and_after_others(results):
    assert len(results.alone.tokens) == 60 and len(set(results.alone.tokens)) > 5
    same(results.alone, results.company[10])
    same(results.alone, results.later)
    for one, other in zip(results.others, results.company[:10] + results.company[11:], strict=True):
        same(one, other)
    assert results.company[0].tokens[:30] != results.alone.tokens[:30]


def test_another_engine_that_interrupts_requests_gives_the_same_tokens(results):
    assert results.interruptions >= 5
    for one, other in zip(results.interrupted, results.company, strict=True):
        same(one, other)


def test_greedy_requests_get_the_likeliest_tokens_and_narrow_distributions_leave_no_other(results):
    assert results.greedy[0].tokens == results.greedy[1].tokens != results.alone.tokens[:30]
    for completion in results.narrowed:
        assert completion.tokens == results.greedy[0].tokens and completion.logprobs == [0.0] * 30


def test_penalties_act_before_the_draw(results):
    one, other = results.penalised
    assert one.tokens == other.tokens != results.alone.tokens[:30]
    assert len(set(one.tokens)) > len(set(results.alone.tokens[:30]))


def test_the_draws_of_many_streams_have_the_models_probabilities(results):
    tokens_TK, logprobs_TK = results.likeliest
    p_V = torch.zeros(VOCAB_SIZE, dtype=torch.float64)
    p_V[tokens_TK[-1]] = logprobs_TK[-1].double().exp()
    assert p_V.sum() == pytest.approx(1, abs=1e-5) and p_V.max() < 0.9
    drawn = np.array([completion.tokens[0] for completion in results.first])
    often = p_V.numpy() * len(drawn) >= 10
    assert 5 < often.sum() < VOCAB_SIZE
    expected, counts = p_V.numpy() * len(drawn), np.bincount(drawn, minlength=VOCAB_SIZE)
    expected, counts = ([*of[often], of[~often].sum()] for of in (expected / expected.sum() * len(drawn), counts))
    assert stats.chisquare(counts, expected).pvalue > 1e-3
    assert [completion.logprobs[0] for completion in results.first] == pytest.approx(
        p_V[drawn].log().tolist(), abs=1e-5
    )
    assert [completion.tokens[0] for completion in results.second] == drawn[:500].tolist()


def test_requests_without_a_seed_draw_apart(results):
    assert results.unnamed[0].tokens != results.unnamed[1].tokens
