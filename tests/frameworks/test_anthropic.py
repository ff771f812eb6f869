"""Anthropic's own SDK."""

import asyncio

import anthropic
import pytest
from problems import ENOUGH, PROBLEMS, TOOL, calculate, is_right

FUNCTION = {
    "name": TOOL["function"]["name"],
    "description": TOOL["function"]["description"],
    "input_schema": TOOL["function"]["parameters"],
}
ASKED = {"model": "policy", "max_tokens": 64, "extra_body": {"temperature": 0}}  # the SDK has no such parameter now
ONE = [{"role": "user", "content": "12+7"}]


@pytest.fixture(scope="module")
def sdk(root):
    return anthropic.Anthropic(base_url=root, api_key="none", max_retries=0)


def test_a_tool_is_called_its_result_sent_back_and_answered(sdk):
    right = 0
    for problem in PROBLEMS:
        messages = [{"role": "user", "content": problem}]
        called = sdk.messages.create(**ASKED, messages=messages, tools=[FUNCTION])
        messages.append({"role": "assistant", "content": called.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": calculate(block.input["e"])}
            for block in called.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results or "?"})
        answer = sdk.messages.create(**ASKED, messages=messages, tools=[FUNCTION])
        right += called.stop_reason == "tool_use" and is_right(problem, answer.content[0].text)
    assert right >= ENOUGH


def test_a_stream_says_what_the_whole_message_says_and_tokens_are_counted(sdk):
    whole = sdk.messages.create(**ASKED, messages=ONE)
    with sdk.messages.stream(**ASKED, messages=ONE) as stream:
        assert "".join(stream.text_stream) == stream.get_final_message().content[0].text == whole.content[0].text
    counted = sdk.messages.count_tokens(model="policy", messages=ONE)
    assert counted.input_tokens == whole.usage.input_tokens


def test_many_at_once(root):
    async def scene():
        async with anthropic.AsyncAnthropic(base_url=root, api_key="none", max_retries=0) as sdk:
            return await asyncio.gather(*(sdk.messages.create(**ASKED, messages=ONE) for _ in range(8)))

    answers = asyncio.run(scene())
    assert len({answer.id for answer in answers}) == 8 and len({answer.content[0].text for answer in answers}) == 1


def test_what_is_not_there_is_refused_by_the_errors_that_the_sdk_knows(sdk):
    with pytest.raises(anthropic.NotFoundError):
        sdk.messages.create(**ASKED | {"model": "claude"}, messages=ONE)
    with pytest.raises(anthropic.BadRequestError, match="prompt"):
        sdk.messages.create(**ASKED, messages=[{"role": "user", "content": "1" * 40_000}])
