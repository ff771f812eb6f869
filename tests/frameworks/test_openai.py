"""OpenAI's own SDK."""

import asyncio
import json
import math

import openai
import pytest
from problems import ENOUGH, MORE_PROBLEMS, PROBLEMS, TOOL, Verdict, calculate, is_right
from pydantic_core import from_json

ASKED = {"model": "policy", "messages": [{"role": "user", "content": "12+7"}]}
OTHER = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def sdk(url):
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def test_a_seed_gives_the_same_answer_and_usage_counts_it(sdk):
    first, second = (sdk.chat.completions.create(**ASKED, seed=3, max_tokens=16) for _ in range(2))
    assert first.choices[0].message.content == second.choices[0].message.content and first.id != second.id
    usage = first.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens and 0 < usage.completion_tokens <= 16


def test_a_stream_says_what_the_whole_answer_says(sdk):
    whole = sdk.chat.completions.create(**ASKED, seed=4, max_tokens=16)
    chunks = list(
        sdk.chat.completions.create(**ASKED, seed=4, max_tokens=16, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_several_choices_with_log_probabilities_and_a_stop(sdk):
    answer = sdk.chat.completions.create(**ASKED, n=3, logprobs=True, max_tokens=12, stop=["9"], seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert "9" not in choice.message.content
        assert all(math.isfinite(entry.logprob) and entry.logprob <= 0 for entry in choice.logprobs.content)


def test_a_tool_is_called_its_result_sent_back_and_answered(sdk):
    problems, right = [*PROBLEMS, *MORE_PROBLEMS], 0
    assert len(problems) == 30
    for problem in problems:
        messages = [{"role": "user", "content": problem}]
        asked = {"model": "policy", "tools": [TOOL], "temperature": 0}
        called = sdk.chat.completions.create(**asked, messages=messages).choices[0]
        messages.append(called.message)
        for call in called.message.tool_calls or ():
            value = calculate(json.loads(call.function.arguments)["e"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": value})
        answer = sdk.chat.completions.create(**asked, messages=messages).choices[0].message
        right += called.finish_reason == "tool_calls" and is_right(problem, answer.content)
    assert right >= 3 * ENOUGH
    print(f"a trained agent, served: right {right} of 30")


def test_a_choice_of_tools_holds(sdk):
    def names(**choice):
        answer = sdk.chat.completions.create(**ASKED, tools=[TOOL, OTHER], max_tokens=400, seed=2, **choice)
        return [call.function.name for call in answer.choices[0].message.tool_calls or ()]

    assert names(tool_choice="none") == []
    assert names(tool_choice="required") and len(names(tool_choice="required", parallel_tool_calls=False)) == 1
    assert names(tool_choice={"type": "function", "function": {"name": "look_up"}}) == ["look_up"]
    assert names(tool_choice={"type": "function", "function": {"name": "calc"}}) == ["calc"]


def test_an_answer_is_a_json_object_and_one_of_a_schema(sdk):
    answers = sdk.chat.completions.create(
        **ASKED, response_format={"type": "json_object"}, max_tokens=1000, n=8, seed=1
    )
    # The policy knows no JSON and seldom ends an object: what it has written is the beginning of one.
    for choice in answers.choices:
        assert choice.finish_reason in ("stop", "length")
        partial = "off" if choice.finish_reason == "stop" else "trailing-strings"
        assert isinstance(from_json(choice.message.content, allow_partial=partial), dict)
    parsed = sdk.chat.completions.parse(**ASKED, response_format=Verdict, seed=5).choices[0].message.parsed
    assert isinstance(parsed, Verdict)


FUNCTION = {"type": "function", "strict": False, **TOOL["function"]}


def test_responses_call_a_tool_with_and_without_state(sdk):
    asked, right = {"model": "policy", "tools": [FUNCTION], "temperature": 0}, 0
    for problem in PROBLEMS:
        items = [{"role": "user", "content": problem}]
        first = sdk.responses.create(**asked, input=items)
        results = [
            {"type": "function_call_output", "call_id": c.call_id, "output": calculate(json.loads(c.arguments)["e"])}
            for c in first.output
            if c.type == "function_call"
        ]
        with_state = sdk.responses.create(**asked, input=results, previous_response_id=first.id)
        whole = [*items, *(item.model_dump(exclude_none=True) for item in first.output), *results]
        without = sdk.responses.create(**asked, input=whole)
        right += bool(results) and is_right(problem, without.output_text)
        assert with_state.output_text == without.output_text
    assert right >= ENOUGH


def test_a_streamed_response_is_the_whole_one(sdk):
    asked = {"model": "policy", "input": "12+7", "temperature": 0, "max_output_tokens": 16}
    whole = sdk.responses.create(**asked, include=["message.output_text.logprobs"])
    with sdk.responses.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == whole.output_text
    assert whole.output[0].content[0].logprobs

    async def one():
        async with openai.AsyncOpenAI(base_url=str(sdk.base_url), api_key="none", max_retries=0) as other:
            return await other.responses.create(**asked)

    assert asyncio.run(one()).output_text == whole.output_text
    with pytest.raises(openai.BadRequestError, match="web_search"):
        sdk.responses.create(**asked, tools=[{"type": "web_search"}])


def test_many_at_once(url):
    async def scene():
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as sdk:
            asked = (sdk.chat.completions.create(**ASKED, seed=i, max_tokens=8) for i in range(16))
            return await asyncio.gather(*asked)

    answers = asyncio.run(scene())
    assert len({answer.id for answer in answers}) == 16


def test_what_is_not_there_is_refused_by_the_codes_that_sdks_know(sdk):
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(model="policy", messages=[{"role": "user", "content": "1" * 40_000}])
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as refused:
        sdk.chat.completions.create(model="gpt-4o", messages=ASKED["messages"])
    assert refused.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        sdk.embeddings.create(model="policy", input="a")
    with pytest.raises(openai.BadRequestError, match="logit_bias: is not offered"):
        sdk.chat.completions.create(**ASKED, logit_bias={"5": 1})
