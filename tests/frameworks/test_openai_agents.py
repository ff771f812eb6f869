"""OpenAI's Agents SDK, on chat completions and on Responses, its default."""

import asyncio
from typing import Literal

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
)
from problems import ENOUGH, PROBLEMS, Verdict, calculate, is_right


@function_tool
def calc(e: str) -> str:
    """a+b"""
    return calculate(e)


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel], ids=["chat", "responses"])
def model(request, url):
    sdk = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    return request.param(model="policy", openai_client=sdk)


def settings(**more):
    return ModelSettings(temperature=0, max_tokens=64, **more)


def kinds(result):
    return [item.type for item in result.new_items]


def test_a_tool_is_called_and_its_result_answered(model):
    agent = Agent(name="a", model=model, tools=[calc], model_settings=settings())

    async def scene():
        return [await Runner.run(agent, problem) for problem in PROBLEMS]

    results = asyncio.run(scene())
    right = [is_right(p, r.final_output) and "tool_call_item" in kinds(r) for p, r in zip(PROBLEMS, results)]
    assert sum(right) >= ENOUGH


def test_a_call_that_is_required(model):
    @function_tool
    def look_up(place: Literal["here", "there"]) -> str:
        """looks up"""
        return place

    agent = Agent(
        name="a",
        model=model,
        tools=[look_up],
        model_settings=settings(tool_choice="required", parallel_tool_calls=False),
        tool_use_behavior="stop_on_first_tool",
    )
    assert asyncio.run(Runner.run(agent, "12+7")).final_output in ("here", "there")


def test_an_output_of_a_type(model):
    agent = Agent(name="a", model=model, output_type=Verdict, model_settings=settings())
    assert isinstance(asyncio.run(Runner.run(agent, "12+7")).final_output, Verdict)


def test_a_stream_and_a_memory(model):
    agent = Agent(name="a", model=model, tools=[calc], model_settings=settings())

    async def scene():
        session = SQLiteSession("one")
        streamed = Runner.run_streamed(agent, "12+7", session=session)
        events = [event async for event in streamed.stream_events()]
        await Runner.run(agent, "6*8", session=session)
        return streamed.final_output, events, await session.get_items()

    answer, events, items = asyncio.run(scene())
    assert answer == "19" and any(event.type == "raw_response_event" for event in events)
    assert [item["content"] for item in items if item.get("role") == "user"] == ["12+7", "6*8"]
