"""Smolagents. Its prompts are thousands of letters, on which the small policy says anything: what is asked for is
form."""

import json

import pytest
from smolagents import OpenAIModel, Tool, ToolCallingAgent
from smolagents.models import ChatMessage, MessageRole


@pytest.fixture
def model(url):
    return OpenAIModel("policy", api_base=url, api_key="none", client_kwargs={"max_retries": 0}, max_tokens=1000)


ASKED = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": "12+7"}])]


def test_a_model_with_stop_texts_and_its_stream(model):
    whole = model.generate(ASKED, stop_sequences=["9"], temperature=0)
    assert "9" not in whole.content and whole.token_usage.output_tokens > 0
    deltas = model.generate_stream(ASKED, stop_sequences=["9"], temperature=0)
    assert "".join(delta.content or "" for delta in deltas) == whole.content


def test_a_model_held_to_a_schema(model):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert json.loads(model.generate(ASKED, response_format=asked).content)["a"] in (True, False)


class Where(Tool):
    name = "where"
    description = "looks"
    inputs = {"place": {"type": "string", "description": "a place", "enum": ["here", "there"]}}
    output_type = "string"

    def forward(self, place: str) -> str:
        return place


def test_an_agent_whose_every_step_is_a_call(model):
    agent = ToolCallingAgent(tools=[Where()], model=model, max_steps=3, verbosity_level=0)
    agent.run("12+7")
    steps = [step for step in agent.memory.steps if getattr(step, "tool_calls", None)]
    assert steps and {call.name for step in steps for call in step.tool_calls} <= {"where", "final_answer"}
    assert not [step for step in steps if step.error is not None]
