"""Streams of the samples of one request, and the weights that a path names."""

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np
import torch
from scipy import stats

from torchtitan_rl import adapters

adapters.prepare_vllm(eager=True)

from torchtitan_rl.engine.gumbel import gumbel_argmax  # noqa: E402
from torchtitan_rl.engine.noise import splitmix64  # noqa: E402
from torchtitan_rl.serve.limits import Places  # noqa: E402
from torchtitan_rl.serve.tinker import sampling_sessions  # noqa: E402
from torchtitan_rl.serve.tinker.bodies import SampleBody, SamplingBody  # noqa: E402
from torchtitan_rl.serve.tinker.futures import Futures  # noqa: E402
from torchtitan_rl.serve.tinker.json_answers import as_json  # noqa: E402
from torchtitan_rl.serve.tinker.samplers import Versions  # noqa: E402
from torchtitan_rl.serve.tinker.sampling_sessions import Generators, Sampling  # noqa: E402
from torchtitan_rl.serve.tinker.saved_states import ModelRecord, SavedStates  # noqa: E402
from torchtitan_rl.types import Completion  # noqa: E402

SEEDS, SAMPLES, TOKENS, VOCABULARY = 20, 16, 24, 64


def sampling():
    """No request is made: the streams are a function of seed and index."""
    generators = Generators(None, None, max_parallel=0)
    return Sampling(generators, None, None, base_model="tiny", context_tokens=64, vocab_size=VOCABULARY)


def drawn(seed):
    """The tokens (SAMPLES, TOKENS) that the noise alone draws: all logits are equal."""
    asked = SamplingBody(max_tokens=TOKENS, seed=seed)
    streams = [sampling()._params(asked, 4, index).seed for index in range(SAMPLES)]
    seeds = np.repeat(np.asarray(streams, dtype=np.uint64), TOKENS)
    keys = splitmix64(seeds, np.tile(np.arange(TOKENS), SAMPLES))
    return gumbel_argmax(torch.zeros(SAMPLES * TOKENS, VOCABULARY), torch.from_numpy(keys)).view(SAMPLES, TOKENS)


def test_no_sample_of_a_seeded_request_is_another_one_shifted():
    tokens_S16T = torch.stack([drawn(seed) for seed in range(SEEDS)])
    apart = ~torch.eye(SAMPLES, dtype=torch.bool)
    distance = torch.arange(SAMPLES)[:, None] - torch.arange(SAMPLES)
    for lag in range(TOKENS):
        later, earlier = tokens_S16T[:, :, None, lag:], tokens_S16T[:, None, :, : TOKENS - lag]
        equal = (later == earlier).float().mean(dim=(0, 3))
        compared = SEEDS * (TOKENS - lag)
        number = compared * int(apart.sum())
        sigma = (1 / VOCABULARY * (1 - 1 / VOCABULARY) / number) ** 0.5
        assert equal[apart].mean() <= 1 / VOCABULARY + 3 * sigma, lag
        for step in range(1 - SAMPLES, SAMPLES):  # a shift relates pairs of one distance
            pairs = apart & (distance == step)
            if count := int(pairs.sum()):
                hits = round(float(equal[pairs].sum()) * compared)
                assert stats.binom.sf(hits - 1, count * compared, 1 / VOCABULARY) > 1e-5, (lag, step)


def test_the_streams_of_a_request_are_named_by_seed_and_index_alone():
    asked = SamplingBody(max_tokens=4, seed=7)
    assert sampling()._params(asked, 4, 3).seed == sampling()._params(asked, 9, 3).seed
    seeds = {
        sampling()._params(SamplingBody(seed=seed), 4, index).seed for seed in (-3, 0, 7, 2**80) for index in range(9)
    }
    assert len(seeds) == 36 and all(0 <= seed < 2**63 for seed in seeds)


def test_a_path_that_was_deleted_and_saved_again_names_the_new_weights(tmp_path):
    checkpoints, record = SavedStates(tmp_path / "models"), ModelRecord(model_id="ab12:train:0", base_model="tiny")
    versions = Versions(None, max_published=1, max_spooled=1, spool=tmp_path / "spool")
    sampling = Sampling(
        Generators(None, versions, max_parallel=1),
        checkpoints,
        None,
        base_model="tiny",
        context_tokens=64,
        vocab_size=VOCABULARY,
    )

    def save(weights):
        writing = checkpoints.begin(record, "sampler_weights", "kept", overwrite=False)
        (writing / "weights.safetensors").write_text(weights)
        return checkpoints.commit(record, "sampler_weights", "kept", ttl_s=None, metadata=None).path

    def version(sampler_id):
        return sampling.open(sampler_id, "session", base_model=None, model_path=path, version=None).version

    path = save("old")
    old, of_the_same = version("first"), version("second")
    checkpoints.remove(record.model_id, "sampler_weights/kept")
    assert save("new") == path
    new, first = version("third"), version("first")
    assert old == of_the_same == first and new != old and old in versions and new in versions


class Sampler:
    """Samples a token after a while; `failing` is the number of the sample that fails at once."""

    def __init__(self, failing=None):
        self.failing, self.num_asked, self.num_under_way = failing, 0, 0

    async def sample(self, tokens, params, policy_version=None):
        self.num_asked += 1
        if self.num_asked == self.failing:
            raise ValueError("no such sample")
        self.num_under_way += 1
        try:
            await asyncio.sleep(0.05 if self.failing is None else 5)
        finally:
            self.num_under_way -= 1
        return Completion(tokens=[1], logprobs=[-0.5], policy_versions=[0], finish_reason="stop")

    async def score(self, tokens, policy_version=None):
        return [-1.0] * (len(tokens) - 1)


class Published:
    @asynccontextmanager
    async def published(self, version):
        yield


async def asked(sampler, places, **fields):
    futures = Futures()
    generators = SimpleNamespace(client=sampler, versions=Published(), turns=None, places=places, loaded={})
    made = Sampling(generators, None, futures, base_model="b", context_tokens=9, vocab_size=9)
    body = SampleBody(prompt={"chunks": [{"tokens": [3]}]}, sampling_params={}, base_model="b", **fields)
    return await futures.fetch(made.submit(body)[0], 5)


async def test_where_a_sample_fails_the_others_end_before_their_places_are_free():
    sampler, places = Sampler(failing=1), Places(100)
    answer = await asked(sampler, places, num_samples=4)
    assert "no such sample" in answer.message and places.taken == sampler.num_under_way == 0


async def test_more_likeliest_tokens_than_a_generator_may_make_are_refused(monkeypatch):
    monkeypatch.setattr(sampling_sessions, "MAX_TOP_LOGPROBS", 1)
    for field in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        answer = await asked(Sampler(), Places(100), num_samples=1, **{field: 2})
        assert answer.category == "user" and f"{field}=2: of " in answer.message and "may have 1;" in answer.message


async def test_a_prompt_of_one_token_has_no_likeliest_tokens_before_it():
    answer = await asked(Sampler(), Places(100), num_samples=1, prompt_logprobs=True, topk_prompt_logprobs=2)
    content = json.loads(as_json(answer.kind, answer.content))
    assert content["prompt_logprobs"] == content["topk_prompt_logprobs"] == [None]
