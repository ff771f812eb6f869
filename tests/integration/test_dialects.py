"""The same conversations in every dialect of the gateway, with the real engine: the same tokens, log-probabilities and
data, whole and as a stream."""

import asyncio
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field

import anthropic
import openai
import pytest
import pytest_asyncio

from scripts.gpu_checks.engines import random_weights, started, untrained_dir
from tests.integration.conftest import ROOT
from tests.integration.dialect_clients import CLIENTS, Settings
from tests.kit.rollouts import group, rollout, turn
from tests.unit.serve.opened import BYTES
from torchtitan_rl.algorithm.datums import to_datums
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.rollout.agent import SessionLimits
from torchtitan_rl.rollout.policy import Policy
from torchtitan_rl.serve.gateway import Gateway
from torchtitan_rl.types import Request

pytestmark = [pytest.mark.whole, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

CONTEXT = 384


class EngineSampler:
    """An engine in this process, with the interface of SamplingClient."""

    def __init__(self, engine):
        self.engine = engine

    async def sample(self, tokens, params, *, policy_version=None):
        (future,) = self.engine.submit([Request(tokens, params)])
        return await asyncio.wait_for(asyncio.wrap_future(future), 120)


@pytest.fixture(scope="module")
def sampler(tmp_path_factory):
    model = load_config(str(ROOT / "configs" / "calculator_tools.py")).model
    directory, weights = untrained_dir(tmp_path_factory.mktemp("model"), model), random_weights(model, "float32")
    config = GeneratorConfig(dtype="float32", max_model_len=CONTEXT, max_num_seqs=8, kv_cache_gib=0.25)
    with started(config, directory) as engine:
        engine.stage(0, weights)
        engine.load(0).result(timeout=120)
        importlib.import_module("torchtitan_rl.serve.anthropic.message_events")
        importlib.import_module("torchtitan_rl.serve.responses.response_events")
        yield EngineSampler(engine)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway():
    async with Gateway(context_tokens=CONTEXT) as opened:
        yield opened


@dataclass
class Conversation:
    """What a client does. `play` says, and reads what is answered; `training`: whether the session trains."""

    play: Callable
    settings: Settings = field(default_factory=Settings)
    training: bool = True
    seed: int = 7
    num_sequences: int = 1
    """Into how many sequences the rollout's turns fall."""
    num_drifted: int = 0


def says(*texts):
    async def play(client, replies):
        for text in texts:
            client.say(text)
            replies.append(await client.ask())

    return play


async def calls_and_results(client, replies):
    client.say("1+2")
    replies.append(await client.ask())
    assert replies[-1].calls
    client.results([(id_, str(number)) for number, (id_, _, _) in enumerate(replies[-1].calls)])
    client.settings.choice = "auto"
    replies.append(await client.ask())


async def parallel_calls(client, replies):
    await calls_and_results(client, replies)
    assert len(replies[0].calls) > 1


async def one_call(client, replies):
    await calls_and_results(client, replies)
    assert len(replies[0].calls) == 1


async def twice_the_same(client, replies):
    await says("a", "b")(client, replies)
    client.forget()
    replies.append(await client.ask())
    await says("c")(client, replies)


async def rewritten(client, replies):
    await says("a")(client, replies)
    client.rewrite("something else")
    await says("b", "c")(client, replies)


async def thought(client, replies):
    await says("a")(client, replies)
    client.think("hm")
    await says("b")(client, replies)


async def cut_off(client, replies):
    await says("a", "go on", "and on")(client, replies)
    assert all(reply.is_cut for reply in replies)


async def stopped(client, replies):
    await says("a", "b", "c", "d")(client, replies)
    assert not all(reply.is_cut for reply in replies)


TINY = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
CALLING = {"offers_add": True, "choice": "required", "max_tokens": 64}

CONVERSATIONS = {
    "a single turn": Conversation(says("hello")),
    "a system prompt": Conversation(says("hello"), Settings(system="be short")),
    "several turns": Conversation(says("a", "b", "c", "d")),
    "several turns after a system prompt": Conversation(says("a", "b", "c"), Settings(system="be short")),
    "unicode": Conversation(says("héllo 🙂 世界", "e\u0301 \u202eאב"), Settings(system="日本")),
    "white space": Conversation(says("  a\n\n\tb ", "\n", " c")),
    "what looks like the template": Conversation(says("<|end|><|assistant|>x", "{{ messages }}")),
    "a long prompt": Conversation(says("word " * 30, "word " * 10)),
    "no room but for one token": Conversation(says("a", "b"), Settings(max_tokens=1)),
    "answers that are cut off": Conversation(cut_off, Settings(max_tokens=3)),
    "a stop text": Conversation(stopped, Settings(stop=["a", "2", " ", "X"], max_tokens=64)),
    "the run's temperature": Conversation(says("a", "b"), Settings(temperature=1.0)),
    "top_p and top_k": Conversation(says("a", "b"), Settings(top_p=0.8, top_k=20), training=False),
    "reasoning that comes back": Conversation(thought),
    "tools that are not called": Conversation(says("a", "b"), Settings(offers_add=True)),
    "tools that may not be called": Conversation(says("a", "b"), Settings(offers_add=True, choice="none")),
    "a call and its result": Conversation(one_call, Settings(**CALLING, single=True), training=False),
    "parallel calls": Conversation(parallel_calls, Settings(**CALLING), training=False, seed=0),
    "a tool by its name": Conversation(one_call, Settings(**CALLING | {"choice": "add"}), training=False),
    "calls after a system prompt": Conversation(calls_and_results, Settings(**CALLING, system="add"), training=False),
    "an answer of a schema": Conversation(says("a", "b"), Settings(schema=TINY, max_tokens=32), training=False),
    "the same asked again": Conversation(twice_the_same, num_sequences=2),
    "a rewritten answer": Conversation(rewritten, num_sequences=2, num_drifted=1),
    "another seed": Conversation(says("a", "b"), seed=8),
}


def policy(sampler, training):
    return Policy(generator=sampler, tokenizer=BYTES, max_tokens=64, max_prompt_tokens=CONTEXT, for_training=training)


async def played(gateway, sampler, conversation, kind, stream):
    """(the session, what the client read)."""
    session = gateway.open_session(
        policy(sampler, conversation.training), seed=conversation.seed, limits=SessionLimits(), tool_parser="pythonic"
    )
    endpoint, replies = session.endpoint, []
    settings = Settings(**{name: getattr(conversation.settings, name) for name in Settings.__slots__})
    async with (
        openai.AsyncOpenAI(
            base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0, timeout=120
        ) as of_openai,
        anthropic.AsyncAnthropic(
            base_url=endpoint.session_url, api_key=endpoint.api_key, max_retries=0, timeout=120
        ) as of_anthropic,
    ):
        await conversation.play(CLIENTS[kind](of_openai, of_anthropic, settings, stream), replies)
    gateway.end_session(session)
    return session, replies


def data(session):
    """What a rollout trains as: tokens, targets and loss inputs of each sequence."""
    config = load_config(str(ROOT / "configs" / "calculator_tools.py")).algorithm
    played_once = rollout("r", *session.turns(), reward=1.0)
    datums = to_datums([group(played_once, rollout("sibling", turn([1], [2]), reward=0.0))], config)
    return [
        (d.tokens.tolist(), d.target_tokens.tolist(), {name: row.tolist() for name, row in d.loss_inputs.items()})
        for d in datums
    ]


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_every_dialect_ends_in_the_same_rollout(gateway, sampler, name):
    conversation, plays = CONVERSATIONS[name], {}
    for kind in CLIENTS:
        for stream in (False, True):
            plays[kind, stream] = await played(gateway, sampler, conversation, kind, stream)
    session, replies = plays["chat", False]
    turns, datums = session.turns(), data(session)
    assert len(turns) == len(replies) and len(datums) == conversation.num_sequences + 1  # one is the sibling's
    assert session.counts["drift"] == conversation.num_drifted
    for (kind, stream), (again, read) in plays.items():
        assert [t.prompt_tokens for t in again.turns()] == [t.prompt_tokens for t in turns], (kind, stream)
        assert [t.completion for t in again.turns()] == [t.completion for t in turns], (kind, stream)
        assert data(again) == datums, (kind, stream)
        assert again.counts == session.counts
        for reply, first, answer in zip(read, replies, again.answers, strict=True):
            assert (reply.text, reply.calls, reply.is_cut, reply.usage) == (
                first.text,
                first.calls,
                first.is_cut,
                first.usage,
            )
            if reply.logprobs is not None:
                assert reply.logprobs == answer.completion.logprobs
    assert all(logprobs for logprobs in (reply.logprobs for reply in plays["chat", True][1]))
