"""Requests in the protocol's words, and answers that a closed client does not give."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("tinker")
from tests.kit.versions import Versions
from torchtitan_rl.dispatch.tinker.remote_sampler import RemoteSamplingClient
from torchtitan_rl.dispatch.tinker.session import Samplers
from torchtitan_rl.types import SamplingParams


class Never:
    """A service that does not answer."""

    def sample(self, *args, **options):
        async def wait():
            await asyncio.sleep(60)

        return SimpleNamespace(result_async=wait)


@pytest.fixture
def client():
    samplers = Samplers()
    samplers.add(3, Never())
    return RemoteSamplingClient(samplers, Versions(3), max_model_len=32, timeout_s=0.05, eos=1)


@pytest.mark.parametrize(
    "given, stop",
    [
        ({}, None),
        ({"ignore_eos": True}, []),
        ({"stop_token_ids": [5, 7]}, [5, 7, 1]),
        ({"stop_token_ids": [5], "ignore_eos": True}, [5]),
        ({"stop": ["."], "ignore_eos": True}, ["."]),
    ],
)
def test_what_ends_a_completion_is_said_in_the_protocols_words(client, given, stop):
    asked = client._sampling_params(SamplingParams(max_tokens=4, seed=2, **given))
    assert asked == {"max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": 2, "stop": stop}


@pytest.mark.parametrize(
    "given, message",
    [
        ({"min_p": 0.1}, "min_p=0.1: Tinker's protocol has no such setting"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2: Tinker's protocol has no such setting"),
        ({"stop": ["."]}, r"stop=\['\.'\]: in Tinker's protocol texts end a completion instead of tokens"),
        ({"stop": ["."], "stop_token_ids": [4], "ignore_eos": True}, r"stop=\['\.'\]: in Tinker's protocol"),
    ],
)
async def test_what_the_protocol_cannot_say_is_refused(client, given, message):
    with pytest.raises(ValueError, match=message):
        await client.sample([3, 4], SamplingParams(max_tokens=4, **given))


async def test_nothing_is_known_of_the_services_engines(client):
    assert client.health() == {"generator-0": "healthy"} and client.in_flight() == [0] and client.stalls() == [0.0]
    assert client.request_times() == {} and client.loaded_version() is None and client.num_requests == 0
    for name, call in {
        "load_hf": client.load_hf("directory"),
        "profile": client.profile("generator-0", 0, ""),
        "weights": client.weights(),
    }.items():
        with pytest.raises(RuntimeError, match=rf"^policy-0\.{name}: ValueError: a remote service keeps weights"):
            await call


async def test_every_wait_ends(client):
    with pytest.raises(RuntimeError, match=r"prompt of 2 tokens: the service did not answer within 0\.05 s"):
        await client.sample([3, 4], SamplingParams(max_tokens=4))
    with pytest.raises(ValueError, match=r"policy_version=9: is not published; the service has \[3\]"):
        await client.score([3, 4], policy_version=9)
    waiting = asyncio.ensure_future(client.score([3, 4]))
    await asyncio.sleep(0)
    assert await asyncio.sleep(0, client.in_flight()) == [1]
    client.close()
    with pytest.raises(RuntimeError, match="the client was closed before the service answered"):
        await waiting
