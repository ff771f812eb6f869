"""Calls of tools: rendered as the policy wrote them, named apart, and read quietly where they are none."""

import json
import logging

import httpx
import pytest

from tests.unit.serve.opened import ADD, BYTES, END, served, session, shown, user
from torchtitan_rl.serve.gateway import Served
from torchtitan_rl.serve.openai.tool_calls import ToolReader
from torchtitan_rl.serve.run_gateway import Address
from torchtitan_rl.types import Completion

ASKED = [user("1+2")]
WRITTEN = [
    '[calc(e="12+7")]',
    "[add(a=1, b=-2.5)]",
    '[add(a=1, b=2), calc(e="3\\n\\"x\\"")]',
    '[f(l=[1, "a", {"k": None}], t=True, n=None, d={})]',
    "[f()]",
    '[say(text="Käse 3€, 日本")]',
]


@pytest.fixture(scope="module")
def reader():
    return ToolReader("pythonic", BYTES)


def completion_of(text):
    tokens = BYTES.encode(text + END)
    return Completion(tokens=tokens, logprobs=[], policy_versions=[], finish_reason="stop")


def rendered(message):
    return BYTES.apply_chat_template([*ASKED, message], tokenize=False).removeprefix(f"<|user|>1+2{END}<|assistant|>")


@pytest.mark.parametrize("text", WRITTEN)
def test_the_byte_template_writes_calls_as_the_policy_did(reader, text):
    read = reader.read(completion_of(text), text, [ADD], "x", [])
    assert read.calls and read.content is None
    functions = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in read.calls]
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": each} for each in functions]}
    assert rendered(message) == text + END


def test_reasoning_before_a_call_stays_in_the_text():
    call = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    text = f"so it is</think>\n{call}"
    read = ToolReader("qwen3_coder", BYTES).read(completion_of(text), text, [ADD], "x", [])
    assert read.content == "so it is</think>" and [each.name for each in read.calls] == ["add"]


async def test_a_client_goes_on_from_the_answer_whose_calls_it_names():
    calls = ["[add(a=1, b=2)]", "[add(a=1,b=2)]"]
    said = [*(call + END for call in calls), "3" + END, "3" + END]
    async with session(*said, tool_parser="pythonic") as (_, sdk, sampler):
        first = await sdk.chat.completions.create(model="policy", messages=ASKED, tools=[ADD], n=2)
        for choice, call in zip(first.choices, calls):
            result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "3"}
            messages = [*ASKED, choice.message.model_dump(exclude_none=True), result]
            await sdk.chat.completions.create(model="policy", messages=messages, tools=[ADD])
            (before, _), (prompt, _) = sampler.asked[0], sampler.asked[-1]
            sampled = BYTES.encode(call + END)
            assert prompt[len(before) : len(before) + len(sampled)] == sampled


async def test_a_call_in_an_answer_that_its_limit_cut_off_is_not_the_end_of_it():
    call = "[add(a=1, b=2)]"
    async with served(call + "and so on", tool_parser="pythonic") as (_, sdk, _):
        answer = await sdk.chat.completions.create(model="policy", messages=ASKED, tools=[ADD], max_tokens=len(call))
        (choice,) = answer.choices
        assert choice.finish_reason == "length" and choice.message.tool_calls[0].function.name == "add"


async def test_a_client_without_a_session_that_sends_a_call_back_meets_the_tokens_that_were_sampled():
    call = "[add(a=1, b=2)]"
    async with served(call + END, "3" + END, tool_parser="pythonic") as (_, sdk, sampler):
        first = await sdk.chat.completions.create(model="policy", messages=ASKED, tools=[ADD])
        message = first.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
        messages = [*ASKED, message.model_dump(exclude_none=True), result]
        second = await sdk.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        assert second.choices[0].message.content == "3"
        before, after = (tokens for tokens, _ in sampler.asked)
        sampled = BYTES.encode(call + END)
        assert after[: len(before) + len(sampled)] == [*before, *sampled]
        assert shown(after[len(before) + len(sampled) :]) == f"<|tool|>3{END}<|assistant|>"


def with_template(template):
    import copy

    tokenizer = copy.deepcopy(BYTES)
    tokenizer.chat_template = template
    return tokenizer


WITHOUT_CALLS = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_serving_with_a_template_that_leaves_calls_out_is_refused(caplog):
    from tests.kit.sampler import policy

    def address(tokenizer, parser="pythonic"):
        door = Served(name="policy", policy=policy("a", tokenizer=tokenizer), versions=list)
        return Address(port=0, tool_parser=parser).gateway(door, context_tokens=64, vocab_size=262)

    address(BYTES)
    assert not caplog.records
    with pytest.raises(ValueError, match="tool_parser='pythonic': the tokenizer's chat template leaves tool_calls out"):
        address(with_template(WITHOUT_CALLS))
    with pytest.raises(ValueError, match="refuses a conversation with a call of a tool .*no tools here"):
        address(with_template("{{ raise_exception('no tools here') }}"))
    caplog.clear()
    address(BYTES, "hermes")  # the template's form is Python's
    assert "'hermes': reads no such call in what the chat template writes for one, '[look_up(" in caplog.text


@pytest.mark.parametrize("sessions", [True, False])
async def test_no_two_calls_have_one_identity(sessions):
    call = "[add(a=1, b=2), add(a=3, b=4)]" + END
    opened = session if sessions else served
    async with opened(*[call] * 4, tool_parser="pythonic") as (_, sdk, _):
        answers = [
            await sdk.chat.completions.create(model="policy", messages=ASKED, tools=[ADD], n=n) for n in (2, 1, 1)
        ]
        ids = [call.id for a in answers for choice in a.choices for call in choice.message.tool_calls]
        assert len(set(ids)) == 8 and all(len(each) <= 40 for each in ids)
        assert len({answer.id for answer in answers}) == 3
        assert all(
            answer.id.removeprefix("chatcmpl-") in answer.choices[0].message.tool_calls[0].id for answer in answers
        )


async def test_a_rollout_that_is_sampled_again_has_the_same_identities_and_another_has_others():
    async def ids(seed):
        async with session("[add(a=1, b=2)]" + END, tool_parser="pythonic", seed=seed) as (_, sdk, _):
            answer = await sdk.chat.completions.create(model="policy", messages=ASKED, tools=[ADD])
            return answer.choices[0].message.tool_calls[0].id

    assert await ids(7) == await ids(7) != await ids(8)


MALFORMED = ["[add(a=1, b=open('x'))]", "[add(a=1 b=2)]", "[add(a=-'x')]"]


@pytest.mark.parametrize("text", MALFORMED)
async def test_a_call_that_is_none_is_text_and_counted_and_prints_nothing(text, caplog, capfd):
    with caplog.at_level(logging.DEBUG):
        async with session(text + END, "3" + END, tool_parser="pythonic") as (opened, sdk, _):
            for _ in range(2):
                answer = await sdk.chat.completions.create(model="policy", messages=ASKED, tools=[ADD])
                assert answer.choices[0].message.tool_calls is None
            assert opened.counts["malformed"] == 1
            async with httpx.AsyncClient() as http:
                root = opened.endpoint.base_url.split("/sessions")[0]
                assert (await http.get(f"{root}/healthz")).json()["num_malformed_calls"] == 1
    printed = capfd.readouterr()
    assert "Traceback" not in printed.err + printed.out + caplog.text
    assert not [record for record in caplog.records if record.name.startswith("vllm")]


async def test_without_a_tool_parser_no_call_is_counted():
    async with session("a" + END) as (opened, _, _):
        assert "malformed" not in opened.counts and "ignored" not in opened.counts
