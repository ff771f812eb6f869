"""LiteLLM, by its OpenAI-compatible provider, by Anthropic's, and by Responses."""

import asyncio
import json

import litellm
import pytest
from problems import ENOUGH, PROBLEMS, TOOL, Verdict, calculate, is_right


@pytest.fixture(scope="module")
def asked(url):
    return {"model": "openai/policy", "api_base": url, "api_key": "none", "num_retries": 0}


ONE = [{"role": "user", "content": "12+7"}]


def test_a_completion_and_its_usage_and_many_at_once(asked):
    answer = litellm.completion(**asked, messages=ONE, seed=3, max_tokens=16)

    async def many():
        return await asyncio.gather(
            *(litellm.acompletion(**asked, messages=ONE, seed=3, max_tokens=16) for _ in range(4))
        )

    assert {a.choices[0].message.content for a in asyncio.run(many())} == {answer.choices[0].message.content}
    assert 0 < answer.usage.completion_tokens <= 16


def test_a_stream(asked):
    whole = litellm.completion(**asked, messages=ONE, seed=3, max_tokens=16).choices[0].message.content
    chunks = litellm.completion(**asked, messages=ONE, seed=3, max_tokens=16, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def right_answers(asked):
    """Of PROBLEMS: a call of the tool, its result sent back, and the right answer."""
    right = 0
    for problem in PROBLEMS:
        messages = [{"role": "user", "content": problem}]
        called = litellm.completion(**asked, messages=messages, tools=[TOOL], temperature=0).choices[0].message
        messages.append(called.model_dump())
        for call in called.tool_calls or ():
            value = calculate(json.loads(call.function.arguments)["e"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": value})
        answer = litellm.completion(**asked, messages=messages, tools=[TOOL], temperature=0).choices[0].message
        right += bool(called.tool_calls) and is_right(problem, answer.content)
    return right


def test_a_tool_is_called_its_result_sent_back_and_answered(asked):
    assert right_answers(asked) >= ENOUGH


def test_an_answer_of_a_schema_and_a_prompt_that_is_too_long(asked):
    answer = litellm.completion(**asked, messages=ONE, response_format=Verdict, seed=1)
    Verdict.model_validate_json(answer.choices[0].message.content)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked, messages=[{"role": "user", "content": "1" * 40_000}])


def test_messages_by_anthropics_provider(root):
    asked = {"model": "anthropic/policy", "api_base": root, "api_key": "none", "num_retries": 0, "max_tokens": 64}
    assert right_answers(asked) >= ENOUGH


def test_a_response_and_one_that_goes_on_from_it(asked):
    first = litellm.responses(**asked, input="12+7", temperature=0, max_output_tokens=16)
    events = litellm.responses(
        **asked, input="6*8", previous_response_id=first.id, temperature=0, max_output_tokens=16, stream=True
    )
    assert first.usage.output_tokens > 0 and list(events)[-1].type == "response.completed"
