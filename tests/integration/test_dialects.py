"""The same conversations in every dialect of the gateway, with the real engine: the same tokens, log-probabilities and
data, whole and as a stream."""

import asyncio
import dataclasses
import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import anthropic
import openai
import pytest
import pytest_asyncio
import torch

from scripts.gpu_checks.engines import random_weights, started, untrained_dir
from tests.integration.captured_calls import Caller, check_records
from tests.integration.conftest import ROOT
from tests.integration.dialect_clients import CLIENTS, Settings
from tests.kit.rollouts import group, rollout, turn
from tests.unit.serve.opened import BYTES
from torchtitan_rl.algorithm import credit
from torchtitan_rl.algorithm.advantages import group_centered
from torchtitan_rl.algorithm.datums import to_datums
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.record import attempts
from torchtitan_rl.record.recorder import RolloutsEnded, TrainedOn
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.run_dir_writer import RunDirWriter
from torchtitan_rl.rollout.agent import SessionLimits
from torchtitan_rl.rollout.external import external
from torchtitan_rl.rollout.policy import Policy
from torchtitan_rl.serve.gateway import Gateway
from torchtitan_rl.tools.view.turn_tree import TurnTree
from torchtitan_rl.types import Request, Task
from torchtitan_rl.types.branches import branches, parents

pytestmark = [pytest.mark.whole, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

CONTEXT = 384


class EngineSampler:
    """An engine in this process, with the interface of SamplingClient."""

    def __init__(self, engine):
        self.engine = engine
        self.answered = []
        """What the engine was asked and answered, copied before anybody else has it: see `captured_calls`."""

    async def sample(self, tokens, params, *, policy_version=None):
        (future,) = self.engine.submit([Request(tokens, params)])
        sampled = await asyncio.wait_for(asyncio.wrap_future(future), 120)
        lists = (tokens, sampled.tokens, sampled.logprobs, sampled.policy_versions)
        self.answered.append(tuple(map(tuple, lists)))
        return sampled


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


async def played_and_recorded(gateway, sampler, agent, path, *, num_rollouts, **algorithm):
    """(rollouts, data, records read back) of one group that an agent has played through the gateway."""
    workflow = external(agent, timeout_s=300)
    workflow.attach(gateway)
    task, of = Task(id="t", prompt="", answer=""), policy(sampler, training=True)
    seeds = range(100, 100 + num_rollouts)
    rollouts = await asyncio.gather(*(workflow(task, of, rollout_id=f"0/0/{seed}", seed=seed) for seed in seeds))
    config = load_config(str(ROOT / "configs" / "calculator_tools.py")).algorithm
    of_task = group(*rollouts)
    datums = to_datums([of_task], dataclasses.replace(config, **algorithm))
    run_dir = RunDir.create(path)
    attempts.begin(run_dir, None)
    writer = RunDirWriter(run_dir, BYTES.decode)
    writer.trained(TrainedOn(sequences=[(d, d.loss_inputs["sampling_logprobs"]) for d in datums]))
    writer.rollouts(RolloutsEnded(step=1, groups=[of_task]))
    return rollouts, datums, list(attempts.read_rollouts(run_dir))


async def test_records_have_the_tokens_of_the_engine_whatever_clients_do(gateway, sampler, tmp_path):
    caller = Caller(num_calls=8)
    rollouts, datums, records = await played_and_recorded(gateway, sampler, caller, tmp_path, num_rollouts=8)
    checked = check_records(records, sampler.answered, caller.counts)
    assert checked["calls"] >= 64 and all(caller.counts[kind] for kind in ("retry", "dropped", "branch", *CLIENTS))
    assert checked["turns"] + sum(r.counts["undelivered"] for r in rollouts) <= checked["calls"]
    turns = [turn for played in rollouts for turn in played.turns]
    for datum in datums:
        of_rollout = rollouts[datum.rollout].turns
        for index, first, count in datum.turns:
            logprobs = torch.tensor(of_rollout[index].completion.logprobs)
            assert torch.equal(datum.loss_inputs["sampling_logprobs"][first : first + count], logprobs)
    assert sum(len(datum.turns) for datum in datums) == len(turns)


async def branching(task, endpoint):
    """A question, two ways to go on from its answer, and between them a conversation of its own."""
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, timeout=120) as sdk:

        async def ask(messages):
            answer = await sdk.chat.completions.create(model="policy", messages=messages, max_completion_tokens=8)
            return [*messages, answer.choices[0].message.model_dump(exclude_none=True)]

        root = await ask([{"role": "user", "content": "1+2"}])
        first = await ask([*root, {"role": "user", "content": "sure?"}])
        await ask([*first, {"role": "user", "content": "really?"}])
        await ask([{"role": "user", "content": "a title"}])
        await ask([*root, {"role": "user", "content": "why?"}])
    return endpoint.seed - 100.0


def by_depth(rollout):
    """Credit of one's own: half for each turn that a turn goes on from."""
    credits = []
    for parent in parents(rollout.turns):
        credits.append(1.0 if parent is None else credits[parent] / 2)
    return credits


@pytest.mark.parametrize(
    ("credit_fn", "credits", "num_sequences"),
    [
        (None, [1, 1, 1, 1, 1], 3),
        (credit.all_branches, [1, 1, 1, 1, 1], 3),
        (credit.last_branch, [1, 0, 0, 0, 1], 2),
        (by_depth, [1, 0.5, 0.25, 1, 0.5], 3),
    ],
)
async def test_each_branch_is_a_sequence_and_has_the_credit_of_the_hook(
    gateway, sampler, tmp_path, credit_fn, credits, num_sequences
):
    rollouts, datums, records = await played_and_recorded(
        gateway, sampler, branching, tmp_path, num_rollouts=2, credit_fn=credit_fn, advantage_fn=group_centered
    )
    assert len(datums) == 2 * num_sequences
    for place, (played, record) in enumerate(zip(rollouts, records, strict=True)):
        assert [turn["extends"] for turn in record["turns"]] == [None, 0, 1, None, 0]
        assert branches(played.turns) == [[0, 1, 2], [3], [0, 4]]
        learned = [Counter() for _ in played.turns]  # advantage -> tokens in a loss
        for datum in datums:
            for index, first, count in datum.turns if datum.rollout == place else ():
                trained = datum.loss_inputs["loss_mask"][first : first + count] > 0
                learned[index] += Counter(datum.loss_inputs["advantages"][first : first + count][trained].tolist())
        own = -0.5 if place == 0 else 0.5
        lengths = [len(turn.completion.tokens) for turn in played.turns]
        assert learned == [Counter({own * factor: n} if factor else {}) for factor, n in zip(credits, lengths)]
        trained = sum(datum.loss_inputs["loss_mask"].sum().item() for datum in datums if datum.rollout == place)
        assert trained == sum(n for factor, n in zip(credits, lengths) if factor)
        tree = TurnTree.of(record)
        assert tree.num_branches == 3 and [node.column for node in tree.nodes] == [0, 0, 0, 1, 2]
        assert [node.trains for node in tree.nodes] == [factor > 0 for factor in credits]
