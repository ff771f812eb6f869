"""What a sampling request tells about its prompt, and sampling requests that are wrong."""

import numpy as np
import pytest
import tinker
from kit import Kit, datum, logprobs, near, prompt, refused, weighted
from tinker import types

ONE = types.SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def client(kit: Kit, keeper: tinker.ServiceClient, state: str) -> tinker.TrainingClient:
    return kit.load(keeper, state)


@pytest.fixture(scope="module")
def sampler(kit: Kit, client: tinker.TrainingClient) -> tinker.SamplingClient:
    return kit.wait(client.save_weights_and_get_sampling_client())


@pytest.fixture(scope="module")
def tokens(kit: Kit) -> list[int]:
    return kit.sequence(13, 800).tolist()


@pytest.fixture(scope="module")
def expected(kit: Kit, client: tinker.TrainingClient, tokens: list[int]) -> np.ndarray:
    return logprobs(kit.wait(client.forward([weighted(np.asarray(tokens))], "cross_entropy")))[0]


def absolute(found, wanted, tolerance: float) -> None:
    gap = np.asarray(found, dtype=np.float64) - np.asarray(wanted, dtype=np.float64)
    near(gap, np.zeros_like(gap), tolerance)


def test_prompt_logprobs(kit: Kit, sampler, tokens, expected) -> None:
    response = kit.wait(sampler.sample(prompt(tokens), 2, types.SamplingParams(max_tokens=5, stop=[]),
                                       include_prompt_logprobs=True))  # fmt: skip
    assert len(response.prompt_logprobs) == len(tokens) and response.prompt_logprobs[0] is None
    absolute(response.prompt_logprobs[1:], expected, 1e-4)
    assert [len(one.tokens) for one in response.sequences] == [5, 5]
    assert kit.wait(sampler.sample(prompt(tokens), 1, ONE)).prompt_logprobs is None, "nobody asked for them"


def test_topk_prompt_logprobs(kit: Kit, client, sampler, tokens) -> None:
    """The five most likely tokens of every position but the first, most likely first, as forward scores them."""
    response = kit.wait(sampler.sample(prompt(tokens), 1, ONE, topk_prompt_logprobs=5))
    rows = response.topk_prompt_logprobs
    assert len(rows) == len(tokens) and rows[0] is None and all(len(row) == 5 for row in rows[1:])
    ids, found = (np.asarray([[pair[part] for pair in row] for row in rows[1:]]) for part in (0, 1))
    assert np.all(np.diff(found, axis=1) <= 0), "most likely first"
    wide = datum(tokens, target_tokens=ids.astype(np.int64), weights=np.ones(ids.shape))
    (scored,) = logprobs(kit.wait(client.forward([wide], "cross_entropy")))
    absolute(found, scored, 1e-4)
    if kit.vocabulary_known and kit.vocabulary <= 4096:
        everything = np.tile(np.arange(kit.vocabulary), (len(tokens) - 1, 1))
        wide = datum(tokens, target_tokens=everything, weights=np.ones(everything.shape))
        (all_scored,) = logprobs(kit.wait(client.forward([wide], "cross_entropy")))
        absolute(found, -np.sort(-all_scored, axis=1)[:, :5], 1e-4)


def test_topk_sample_logprobs(kit: Kit, sampler, tokens) -> None:
    """The sampled token of a greedy sample is the first of its row, with its log-probability."""
    params = types.SamplingParams(max_tokens=6, stop=[], temperature=0.0)
    (sequence,) = kit.wait(sampler.sample(prompt(tokens), 1, params, topk_sample_logprobs=3)).sequences
    assert [len(row) for row in sequence.topk_logprobs] == [3] * 6
    assert [row[0][0] for row in sequence.topk_logprobs] == sequence.tokens
    absolute([row[0][1] for row in sequence.topk_logprobs], sequence.logprobs, 1e-4)


def offered(kit: Kit, future) -> types.SampleResponse:
    """The answer; a server that does not have the feature says so with a user error."""
    try:
        return kit.wait(future)
    except tinker.RequestFailedError as error:
        assert str(error.category) == "user", error
    except tinker.APIStatusError as error:
        assert error.status_code in (400, 422, 501), error
    pytest.skip("the server does not offer it")


def test_last_prompt_logprobs(kit: Kit, sampler, tokens, expected) -> None:
    """prompt_logprobs_last_n: the last four are scored, the others are None."""
    found = offered(kit, sampler.compute_logprobs(prompt(tokens), prompt_logprobs_last_n=4))
    assert found[:-4] == [None] * (len(tokens) - 4)
    absolute(found[-4:], expected[-4:], 1e-4)


def test_target_prompt_logprobs(kit: Kit, client, sampler, tokens) -> None:
    """Named tokens' log-probabilities at every position, 0.0 where -1 names none."""
    ids = np.random.default_rng(9).integers(0, kit.vocabulary, (len(tokens) - 1, 3))
    targets = ids.copy()
    targets[::2, 1] = -1
    named = types.TensorData.from_numpy(targets)
    response = offered(kit, sampler.sample(prompt(tokens), 1, ONE, target_prompt_logprobs=named))
    one = datum(tokens, target_tokens=ids, weights=np.ones(ids.shape))
    (scored,) = logprobs(kit.wait(client.forward([one], "cross_entropy")))
    absolute(response.target_prompt_logprobs.to_numpy(), np.where(targets < 0, 0.0, scored), 1e-4)


def test_alternative_prompt_tokens(kit: Kit, client, sampler, tokens) -> None:
    """Four draws at every position but the first, with log-probabilities as forward scores them."""
    alternatives = offered(kit, sampler.sample(prompt(tokens), 1, ONE, prompt_alt_tokens_k=4)).prompt_alt_tokens
    ids = alternatives.tokens.to_numpy()
    assert ids.shape == (len(tokens) - 1, 4)
    one = datum(tokens, target_tokens=ids, weights=np.ones(ids.shape))
    (scored,) = logprobs(kit.wait(client.forward([one], "cross_entropy")))
    absolute(alternatives.logprobs.to_numpy(), scored, 1e-4)


WRONG = {
    "token-outside-vocabulary": ([1, 2**31 - 1], 1, {}),
    "token-negative": ([1, -1], 1, {}),
    "empty-prompt": ([], 1, {}),
    "no-samples": ([1, 2], 0, {}),
    "negative-samples": ([1, 2], -3, {}),
    "negative-temperature": ([1, 2], 1, {"temperature": -1.0}),
    "top-p-above-one": ([1, 2], 1, {"top_p": 1.5}),
    "top-k-negative": ([1, 2], 1, {"top_k": -7}),
    "max-tokens-negative": ([1, 2], 1, {"max_tokens": -1}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_sampling_request(kit: Kit, sampler, name: str) -> None:
    """Refused with category user; the next request of the same sampler is answered."""
    given, count, params = WRONG[name]
    params = types.SamplingParams(**{"max_tokens": 4, **params})
    refused(kit, lambda: sampler.sample(prompt(given), count, params))
    assert len(kit.wait(sampler.sample(prompt([1, 2]), 1, ONE)).sequences) == 1


def test_prompt_too_long(kit: Kit, sampler) -> None:
    models = kit.wait(kit.rest().get_server_capabilities()).supported_models
    limit = next((one.max_context_length for one in models if one.model_name == kit.base_model), None)
    if limit is None:
        pytest.skip("get_server_capabilities gives no max_context_length")
    refused(kit, lambda: sampler.sample(prompt(kit.sequence(limit + 1, 801)), 1, ONE))
    assert len(kit.wait(sampler.sample(prompt([1, 2]), 1, ONE)).sequences) == 1


def test_too_many_topk(kit: Kit, sampler, tokens) -> None:
    refused(kit, lambda: sampler.sample(prompt(tokens), 1, ONE, topk_prompt_logprobs=10**9))
    refused(kit, lambda: sampler.sample(prompt(tokens), 1, ONE, topk_prompt_logprobs=-1))
