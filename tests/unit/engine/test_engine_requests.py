"""Between our requests and vLLM's: parameters one way, completions and scores the other."""

import pickle
from types import SimpleNamespace

import pytest
import torch

from torchtitan_rl import adapters
from torchtitan_rl.types import Request, SamplingParams

adapters.prepare_vllm(eager=True)

from vllm.logprobs import FlatLogprobs, Logprob  # noqa: E402

from torchtitan_rl.engine.engine_requests import completion, engine_params, has_nan, scores  # noqa: E402


def scored(logprob, rank):
    return SimpleNamespace(logprob=logprob, rank=rank)


def flat(*logprobs):
    """vLLM's container of the sampled tokens' log-probabilities."""
    container = FlatLogprobs()
    for logprob in logprobs:
        container.append({7: Logprob(logprob=logprob)})
    return container


def scoring_request(top_k, *version_starts):
    return SimpleNamespace(top_k=top_k, version_starts=list(version_starts or [(0, 3)]))


def test_each_token_carries_the_version_that_held_when_it_was_drawn():
    sampled = SimpleNamespace(token_ids=(5, 6, 7, 8), logprobs=flat(-5.0, -6.0, -7.0, -8.0), finish_reason="length")
    answer = completion(SimpleNamespace(outputs=[sampled]), [(0, 3), (1, 4), (1, 5), (3, 6)])
    assert answer.tokens == [5, 6, 7, 8] and answer.logprobs == [-5.0, -6.0, -7.0, -8.0]
    assert answer.policy_versions == [3, 5, 5, 6] and answer.finish_reason == "length"


def test_scores_are_of_every_token_but_the_first():
    output = SimpleNamespace(
        prompt_token_ids=[9, 2, 4],
        prompt_logprobs=[None, {2: scored(-0.5, 1)}, {4: scored(-2.0, 7), 1: scored(-0.1, 1)}],
        num_cached_tokens=None,
    )
    assert scores(output, scoring_request(0)) == [-0.5, -2.0]


def test_scores_name_their_version_unless_new_weights_came_while_they_waited():
    output = SimpleNamespace(prompt_token_ids=[9, 2], prompt_logprobs=[None, {2: scored(-0.5, 1)}], num_cached_tokens=0)
    answer = pickle.loads(pickle.dumps(scores(output, scoring_request(0))))  # as it travels between processes
    assert answer == [-0.5] and answer.policy_version == 3
    assert scores(output, scoring_request(0, (0, 3), (0, 4))).policy_version is None


def test_tokens_that_the_prefix_cache_covers_have_no_score():
    garbage = {77: scored(-9.0, 1)}
    output = SimpleNamespace(
        prompt_token_ids=[9, 2, 4, 5],
        prompt_logprobs=[None, garbage, garbage, {5: scored(-2.0, 1)}],
        num_cached_tokens=2,
    )
    assert str(scores(output, scoring_request(0))) == "[nan, nan, -2.0]"


def test_the_likeliest_leave_the_prompts_own_token_out_unless_it_is_one_of_them():
    first = {2: scored(-3.0, 5), 8: scored(-0.5, 1), 6: scored(-0.5, 2)}
    second = {4: scored(-0.25, 1), 1: scored(-1.5, 2)}
    output = SimpleNamespace(prompt_token_ids=[9, 2, 4], prompt_logprobs=[None, first, second], num_cached_tokens=0)
    tokens, logprobs = scores(output, scoring_request(2))
    assert tokens.tolist() == [[6, 8], [4, 1]] and tokens.dtype == torch.int64
    assert logprobs.tolist() == [[-0.5, -0.5], [-0.25, -1.5]]


def test_a_request_without_parameters_scores_its_prompt():
    scoring = engine_params(Request([1, 2], None, 3))
    assert (scoring.prompt_logprobs, scoring.max_tokens, scoring.temperature) == (3, 1, 0.0)
    sampling = engine_params(Request([1, 2], SamplingParams(max_tokens=4, temperature=0.5, seed=7, stop=["x"])))
    assert (sampling.max_tokens, sampling.temperature, sampling.seed, sampling.stop) == (4, 0.5, 7, ["x"])
    assert (
        sampling.prompt_logprobs is None and sampling.logprobs == 0 and sampling.detokenize and sampling.flat_logprobs
    )


def test_a_temperature_that_vllm_would_raise_is_refused():
    for least in (0.0, 0.01):
        params = engine_params(Request([1, 2], SamplingParams(max_tokens=4, temperature=least)))
        assert params.temperature == least
    with pytest.raises(ValueError, match=r"temperature=0\.005: is below the smallest .* use 0 for greedy, or 0\.01 or"):
        engine_params(Request([1, 2], SamplingParams(max_tokens=4, temperature=0.005)))


def test_what_alters_the_distribution_reaches_the_engine():
    altered = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2}
    altered |= {"presence_penalty": 0.3, "frequency_penalty": 0.4}
    params = engine_params(Request([1, 2], SamplingParams(max_tokens=4, **altered)))
    assert {name: getattr(params, name) for name in altered} == altered


def test_a_nan_is_seen_in_what_was_sampled_or_scored_and_not_in_what_the_cache_covers():
    nan = float("nan")

    def sampled(*logprobs):
        return SimpleNamespace(prompt_logprobs=None, outputs=[SimpleNamespace(logprobs=flat(*logprobs))])

    def prompt(cached, *logprobs):
        entries = [None, *({7: scored(logprob, 1)} for logprob in logprobs)]
        return SimpleNamespace(
            prompt_token_ids=[7] * len(entries), prompt_logprobs=entries, num_cached_tokens=cached, outputs=[]
        )

    assert has_nan(sampled(-1.0, nan)) and has_nan(sampled(nan, -1.0)) and not has_nan(sampled(-1.0, -2.0))
    assert not has_nan(sampled()) and not has_nan(sampled(float("-inf")))
    assert has_nan(prompt(None, -1.0, nan)) and not has_nan(prompt(0, -1.0, -2.0))
    assert not has_nan(prompt(1, nan, -1.0)) and has_nan(prompt(1, nan, nan))
