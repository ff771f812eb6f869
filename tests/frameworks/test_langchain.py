"""LangChain, and its agent on LangGraph, on each of the three dialects."""

import asyncio

import httpx
import pytest
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from problems import ENOUGH, PROBLEMS, Verdict, calculate, is_right


@pytest.fixture(params=["chat", "responses", "messages"])
def model(request, url, root):
    asked = {"model": "policy", "api_key": "none", "max_retries": 0, "temperature": 0, "max_tokens": 64}
    if request.param == "messages":
        return ChatAnthropic(base_url=root, **asked)
    # Without a client of its own it would use the one of the test before, whose event loop is closed.
    own = httpx.AsyncClient()
    return ChatOpenAI(base_url=url, use_responses_api=request.param == "responses", http_async_client=own, **asked)


@tool
def calc(e: str) -> str:
    """a+b"""
    return calculate(e)


def test_a_message_its_usage_a_stream_and_a_batch(model):
    answer = model.invoke("12+7")
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in model.stream("12+7")) == answer.text
    assert {each.text for each in asyncio.run(model.abatch(["12+7"] * 4))} == {answer.text}


def test_bound_tools_by_hand(model):
    bound, right = model.bind_tools([calc]), 0
    for problem in PROBLEMS:
        messages = [HumanMessage(problem)]
        messages.append(bound.invoke(messages))
        messages += [calc.invoke(call) for call in messages[-1].tool_calls]
        right += len(messages) == 3 and is_right(problem, bound.invoke(messages).text)
    assert right >= ENOUGH


def test_an_agent(model):
    agent = create_agent(model, [calc])
    answers = [agent.invoke({"messages": [HumanMessage(problem)]})["messages"] for problem in PROBLEMS]
    assert sum(len(a) == 4 and is_right(p, a[-1].text) for p, a in zip(PROBLEMS, answers)) >= ENOUGH


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_structured_output(model, method):
    assert isinstance(model.with_structured_output(Verdict, method=method).invoke("12+7"), Verdict)
