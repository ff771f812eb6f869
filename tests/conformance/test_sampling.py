"""Samples come from the weights they are asked of, stop where they are told to, and carry true log-probabilities."""

import json
import pickle

import numpy as np
import pytest
import tinker
from kit import Kit, datum, logprobs, moved, near, prompt, weighted
from tinker import types

LONG = 24


@pytest.fixture(scope="module")
def client(kit: Kit, keeper: tinker.ServiceClient, state: str) -> tinker.TrainingClient:
    return kit.load(keeper, state)


@pytest.fixture(scope="module")
def path(kit: Kit, client: tinker.TrainingClient) -> str:
    return kit.wait(client.save_weights_for_sampler("sampling")).path


@pytest.fixture(scope="module")
def sampler(kit: Kit, keeper: tinker.ServiceClient, path: str) -> tinker.SamplingClient:
    return kit.wait(keeper.create_sampling_client(model_path=path))


def asked(kit: Kit, sampler: tinker.SamplingClient, count: int = 1, size: int = 6, **params) -> types.SampleResponse:
    """Samples of up to LONG tokens after a prompt of `size` tokens, without any stop unless `stop` is given."""
    params = {"max_tokens": LONG, "stop": [], **params}
    return kit.wait(sampler.sample(prompt(kit.sequence(size, 600)), count, types.SamplingParams(**params)))


def only(response: types.SampleResponse) -> types.SampledSequence:
    (sequence,) = response.sequences
    return sequence


def forward(kit: Kit, client: tinker.TrainingClient, *sequences) -> list[np.ndarray]:
    return logprobs(kit.wait(client.forward([weighted(np.asarray(tokens)) for tokens in sequences], "cross_entropy")))


def absolute(found, expected, tolerance: float) -> None:
    gap = np.asarray(found, dtype=np.float64) - np.asarray(expected, dtype=np.float64)
    near(gap, np.zeros_like(gap), tolerance)


def scores(kit: Kit, sampler: tinker.SamplingClient, tokens) -> np.ndarray:
    found = kit.wait(sampler.compute_logprobs(prompt(tokens)))
    assert len(found) == len(tokens) and found[0] is None
    return np.asarray(found[1:], dtype=np.float64)


def test_compute_logprobs_equals_forward(kit: Kit, client, sampler) -> None:
    sequences = [kit.sequence(length, 601) for length in (2, 9, 30)]
    for tokens, expected in zip(sequences, forward(kit, client, *sequences), strict=True):
        absolute(scores(kit, sampler, tokens), expected, 1e-4)


def test_base_model_sampler_is_the_base_model(kit: Kit, service, client) -> None:
    sampler = kit.wait(service.create_sampling_client(base_model=kit.base_model))
    assert sampler.get_base_model() == kit.base_model
    tokens = kit.sequence(20, 602)
    (expected,) = forward(kit, kit.fresh(service), tokens)
    absolute(scores(kit, sampler, tokens), expected, 1e-4)
    moved(forward(kit, client, tokens)[0], expected)


def test_sampler_of_the_weights_now(kit: Kit, service, state) -> None:
    """save_weights_and_get_sampling_client is a snapshot: later steps do not reach it."""
    client, tokens = kit.load(service, state), kit.sequence(16, 603)
    found = []
    for count in range(2):
        sampler = kit.wait(client.save_weights_and_get_sampling_client())
        found.append((sampler, *forward(kit, client, tokens)))
        kit.step(client, [weighted(kit.sequence(16, 604 + count))], lr=1e-2, eps=1e-6)
    moved(found[1][1], found[0][1])
    for sampler, expected in found:
        absolute(scores(kit, sampler, tokens), expected, 1e-4)


def test_named_sampler_weights(kit: Kit, client, sampler) -> None:
    tokens = kit.sequence(12, 606)
    assert sampler.get_base_model() == kit.base_model
    absolute(scores(kit, sampler, tokens), forward(kit, client, tokens)[0], 1e-4)


def test_sampled_logprobs_are_the_models(kit: Kit, client, sampler) -> None:
    start = kit.sequence(6, 600)
    for sequence in asked(kit, sampler, count=4).sequences:
        (expected,) = forward(kit, client, [*start, *sequence.tokens])
        absolute(sequence.logprobs, expected[len(start) - 1 :], 1e-4)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_number_of_samples(kit: Kit, sampler, count: int) -> None:
    response = asked(kit, sampler, count)
    assert len(response.sequences) == count
    for sequence in response.sequences:
        assert len(sequence.tokens) == len(sequence.logprobs) == LONG and sequence.stop_reason == "length"
    assert len({tuple(sequence.tokens) for sequence in response.sequences}) == count


def test_sequence_ids_are_distinct(kit: Kit, sampler) -> None:
    ids = [sequence.sequence_id for _ in range(3) for sequence in asked(kit, sampler, count=3).sequences]
    assert all(isinstance(one, str) and one for one in ids) and len(set(ids)) == 9


def test_seeds(kit: Kit, sampler) -> None:
    """The same seed, the same samples, different within one request; another seed, others; none, others each time."""
    first, again, other = ([one.tokens for one in asked(kit, sampler, 3, seed=seed).sequences] for seed in (7, 7, 8))
    assert first == again and first != other
    assert len({tuple(tokens) for tokens in first}) == 3
    assert only(asked(kit, sampler)).tokens != only(asked(kit, sampler)).tokens


def test_seed_holds_in_company(kit: Kit, sampler) -> None:
    """The same seed while 16 other requests run."""
    alone = only(asked(kit, sampler, seed=11)).tokens
    params = types.SamplingParams(max_tokens=LONG, stop=[])
    noise = [sampler.sample(prompt(kit.sequence(5 + count, 607)), 1, params) for count in range(16)]
    assert only(asked(kit, sampler, seed=11)).tokens == alone
    [kit.wait(one) for one in noise]


def test_greedy_is_the_most_likely_token(kit: Kit, client, sampler) -> None:
    greedy = only(asked(kit, sampler, temperature=0.0)).tokens
    for params in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}):
        assert only(asked(kit, sampler, **params)).tokens == greedy, params
    tokens = [*kit.sequence(6, 600).tolist(), *greedy]
    params = types.SamplingParams(max_tokens=1)
    best = kit.wait(sampler.sample(prompt(tokens), 1, params, topk_prompt_logprobs=1)).topk_prompt_logprobs
    assert [row[0][0] for row in best[6:]] == greedy


def test_stop_token_ids(kit: Kit, sampler) -> None:
    full = only(asked(kit, sampler, seed=3)).tokens
    place = next(index for index in range(3, LONG) if full[index] not in full[:index])
    sequence = only(asked(kit, sampler, seed=3, stop=[full[place]]))
    assert sequence.tokens in (full[:place], full[: place + 1]) and sequence.stop_reason == "stop"
    assert len(sequence.logprobs) == len(sequence.tokens)


def test_stop_strings(kit: Kit, sampler) -> None:
    if kit.weights is None:
        pytest.skip("needs the tokenizer of --weights")
    from transformers import AutoTokenizer

    text = AutoTokenizer.from_pretrained(kit.weights).decode
    full = only(asked(kit, sampler, seed=4, temperature=0.8)).tokens
    stop = text(full[8:10])
    end = next(index for index in range(LONG + 1) if stop in text(full[:index]))
    for given in (stop, [stop], ["never in a text of this model", stop]):
        sequence = only(asked(kit, sampler, seed=4, temperature=0.8, stop=given))
        assert sequence.stop_reason == "stop", given
        assert sequence.tokens == full[: len(sequence.tokens)] and end - 3 <= len(sequence.tokens) <= end


def end_token(kit: Kit) -> int:
    if kit.weights is None:
        pytest.skip("needs the end-of-sequence token of --weights")
    for name in ("generation_config.json", "config.json"):
        file = kit.weights / name
        token = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
        if token is not None:
            return token[0] if isinstance(token, list) else token
    pytest.skip("--weights has no eos_token_id")


def test_end_of_sequence_stops_unless_told_otherwise(kit: Kit, service, state) -> None:
    """A model that was taught to end at once: None stops there, [] goes on to max_tokens."""
    end, client = end_token(kit), kit.load(service, state)
    for count in range(40):
        tokens = kit.sequence(16, 620 + count)
        tokens[8:] = end
        one = datum(tokens, target_tokens=np.full(15, end), weights=np.ones(15))
        (seen,) = logprobs(kit.step(client, [one], lr=2e-2, eps=1e-6))
        if seen.min() > -0.1:
            break
    sampler = kit.wait(client.save_weights_and_get_sampling_client())
    ended, endless = only(asked(kit, sampler, stop=None)), only(asked(kit, sampler, stop=[]))
    assert ended.stop_reason == "stop" and len(ended.tokens) < LONG
    assert endless.stop_reason == "length" and len(endless.tokens) == LONG and end in endless.tokens


def test_64_samplers_at_once(kit: Kit, service, client, path) -> None:
    """64 sampling clients, each with a request under way: every answer is its own prompt's."""
    samplers = [service.create_sampling_client(model_path=path) for _ in range(64)]
    starts = [kit.sequence(4 + count % 5, 700 + count).tolist() for count in range(64)]
    params = types.SamplingParams(max_tokens=LONG, stop=[])
    futures = [kit.wait(one).sample(prompt(start), 1, params) for one, start in zip(samplers, starts, strict=True)]
    found = [only(kit.wait(future)) for future in futures]
    expected = forward(kit, client, *[[*start, *one.tokens] for start, one in zip(starts, found, strict=True)])
    for start, one, logp in zip(starts, found, expected, strict=True):
        assert len(one.tokens) == LONG
        absolute(one.logprobs, logp[len(start) - 1 :], 1e-4)


def test_pickled_sampler(kit: Kit, sampler) -> None:
    """A copy, as another process gets it, samples the same weights with sequence numbers of its own."""
    copy, tokens = pickle.loads(pickle.dumps(sampler)), kit.sequence(10, 608)
    assert only(asked(kit, copy, seed=5)).tokens == only(asked(kit, sampler, seed=5)).tokens
    absolute(scores(kit, copy, tokens), scores(kit, sampler, tokens), 1e-4)
