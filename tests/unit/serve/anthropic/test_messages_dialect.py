"""Anthropic's Messages at the gateway, asked by Anthropic's SDK: the same rollout as by chat completions."""

import importlib
import json
from contextlib import asynccontextmanager

import anthropic
import httpx
import pytest

from tests.unit.serve.opened import BYTES, END, served, session, shown
from torchtitan_rl import adapters

pytestmark = pytest.mark.timeout(600)  # the first test waits for the import of vLLM

TOOL = {
    "name": "add",
    "description": "adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


@pytest.fixture(scope="module", autouse=True)
def vllm():
    """Imports vLLM, which a gateway does at the first request and takes a minute on a busy machine, before a client's
    time runs."""
    adapters.prepare_vllm(eager=True)
    importlib.import_module("torchtitan_rl.serve.anthropic.requests")


@asynccontextmanager
async def messages(*texts, **settings):
    """(session, Anthropic's client on it, the scripted sampler)."""
    async with session(*texts, **settings) as (opened, _, sampler):
        endpoint = opened.endpoint
        async with anthropic.AsyncAnthropic(
            base_url=endpoint.session_url, api_key=endpoint.api_key, max_retries=0, timeout=60
        ) as sdk:
            yield opened, sdk, sampler


def ask(*contents, **more):
    """A request whose contents are of the user and the assistant in turn."""
    roles = ("user", "assistant")
    made = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return {"model": "policy", "max_tokens": 32, "messages": made} | more


async def test_a_conversation_becomes_prompts_that_extend_each_other():
    async with messages("hi" + END, "ok" + END) as (opened, sdk, _):
        first = await sdk.messages.create(**ask("a", system="s"))
        assert (first.content[0].text, first.stop_reason, first.role) == ("hi", "end_turn", "assistant")
        text = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
        system = [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]
        await sdk.messages.create(**ask("a", first.content, [text], system=system, metadata={"user_id": "u"}))
        first_turn, second = opened.turns()
        assert shown(second.prompt_tokens).startswith("<|system|>s")
        so_far = [*first_turn.prompt_tokens, *first_turn.completion.tokens]
        assert second.prompt_tokens[: len(so_far)] == so_far
        assert first.usage.input_tokens == len(first_turn.prompt_tokens)
        assert first.usage.output_tokens == len(first_turn.completion.tokens)
        assert opened.counts["drift"] == 0


@pytest.mark.parametrize("takes", [True, False])
async def test_system_messages_within_stay_or_go_first_as_the_template_takes_them(takes, monkeypatch):
    if not takes:
        guard = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}"
        monkeypatch.setattr(BYTES, "chat_template", guard + "{% endif %}{% endfor %}" + BYTES.chat_template)
    async with messages("hi" + END) as (opened, sdk, _):
        made = ask("a", "b", "c", system="s")
        made["messages"].insert(2, {"role": "system", "content": " r"})
        await sdk.messages.create(**made)
        counted = await sdk.messages.count_tokens(**{k: v for k, v in made.items() if k != "max_tokens"})
        (turn,) = opened.turns()
        assert counted.input_tokens == len(turn.prompt_tokens)
        first = "<|system|>s" + ("" if takes else " r")
        within = f"<|system|> r{END}" if takes else ""
        assert shown(turn.prompt_tokens) == (
            f"{first}{END}<|user|>a{END}<|assistant|>b{END}{within}<|user|>c{END}<|assistant|>"
        )


async def test_sampled_tokens_are_kept_though_their_text_has_other_tokens():
    broken = [*BYTES.encode("x"), BYTES.encode("é")[0]]
    async with messages(broken, "ok" + END) as (opened, sdk, _):
        first = await sdk.messages.create(**ask("a", max_tokens=2))
        assert (first.content[0].text, first.stop_reason) == ("x\ufffd", "end_turn")
        await sdk.messages.create(**ask("a", first.content, "b"))
        first_turn, second = opened.turns()
        assert second.prompt_tokens[len(first_turn.prompt_tokens) :][:2] == broken


async def test_calls_of_tools_go_out_and_their_results_come_in():
    calls = "[add(a=1, b=2), add(a=3)]" + END
    async with messages(calls, "7" + END, tool_parser="pythonic") as (opened, sdk, _):
        request = ask("a", tools=[TOOL], tool_choice={"type": "auto"})
        first = await sdk.messages.create(**request)
        assert [(block.type, block.input) for block in first.content] == [
            ("tool_use", {"a": 1, "b": 2}),
            ("tool_use", {"a": 3}),
        ]
        assert first.stop_reason == "tool_use"
        one, two = first.content
        results = [
            {"type": "tool_result", "tool_use_id": one.id, "content": "3"},
            {
                "type": "tool_result",
                "tool_use_id": two.id,
                "content": [{"type": "text", "text": "3"}],
                "is_error": True,
            },
            {"type": "text", "text": "go on"},
        ]
        await sdk.messages.create(**ask("a", first.content, results, tools=[TOOL]))
        first_turn, second = opened.turns()
        so_far = [*first_turn.prompt_tokens, *first_turn.completion.tokens]
        assert second.prompt_tokens[: len(so_far)] == so_far
        assert shown(second.prompt_tokens).endswith(f"<|user|>go on{END}<|assistant|>")


@pytest.mark.parametrize("text", ["hello" + END, "[add(a=1, b=2), add(a=3)]" + END, END, "x" * 40])
async def test_a_stream_says_what_the_whole_answer_says(text):
    async with messages(text, text, tool_parser="pythonic") as (opened, sdk, _):
        whole = await sdk.messages.create(**ask("a", tools=[TOOL]))
        kinds = []
        async with sdk.messages.stream(**ask("a", tools=[TOOL])) as stream:
            async for event in stream:
                kinds.append(event.type)
            streamed = await stream.get_final_message()

        def compared(message):
            left_out = {"id": True, "content": {"__all__": {"id"}}}
            return message.model_dump(exclude=left_out, exclude_none=True)

        assert compared(streamed) == compared(whole)
        assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole.content)
        tokens = [turn.completion.tokens for turn in opened.turns()]
        assert tokens[0] == tokens[1]


async def test_a_stop_text_and_a_limit_are_reasons():
    async with messages("abc" + END, "x" * 40, for_training=False) as (_, sdk, _):
        stopped = await sdk.messages.create(**ask("a", stop_sequences=["z", "c"]))
        assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("ab", "stop_sequence", "c")
        limited = await sdk.messages.create(**ask("a", max_tokens=3))
        assert (limited.content[0].text, limited.stop_reason, limited.stop_sequence) == ("xxx", "max_tokens", None)


async def test_a_schema_is_kept_to_where_nothing_trains():
    async with messages('{"a": 1}' + END, for_training=False) as (_, sdk, sampler):
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        await sdk.messages.create(**ask("a", output_config={"format": {"type": "json_schema", "schema": schema}}))
        assert json.loads(sampler.asked[0][1].structure)["format"]["json_schema"] == schema


async def test_tokens_are_counted_as_they_are_given_and_nothing_is_sampled():
    async with messages("hi" + END) as (opened, sdk, sampler):
        request = ask("a", system="s", tools=[TOOL])
        counted = await sdk.messages.count_tokens(**{key: request[key] for key in request if key != "max_tokens"})
        assert not sampler.asked and not opened.answers
        first = await sdk.messages.create(**request)
        assert counted.input_tokens == first.usage.input_tokens == len(opened.turns()[0].prompt_tokens)


async def test_drift_is_counted_where_something_is_sampled():
    async with messages("hi" + END, "ok" + END) as (opened, sdk, _):
        await sdk.messages.create(**ask("a"))
        await sdk.messages.count_tokens(model="policy", messages=ask("a", "ho", "b")["messages"])
        assert opened.counts["drift"] == 0
        await sdk.messages.create(**ask("a", "ho", "b"))
        assert opened.counts["drift"] == 1


async def test_thinking_that_comes_back_is_the_templates_affair():
    async with messages("hi" + END, "ok" + END) as (opened, sdk, _):
        first = await sdk.messages.create(**ask("a", thinking={"type": "adaptive"}))
        blocks = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"}]
        await sdk.messages.create(**ask("a", [*blocks, *first.content], "b"))
        first_turn, second = opened.turns()
        so_far = [*first_turn.prompt_tokens, *first_turn.completion.tokens]
        assert second.prompt_tokens[: len(so_far)] == so_far
        assert opened.counts["drift"] == 0


REFUSED = {
    "temperature": ({"temperature": 0.5}, "temperature=0.5: this session trains"),
    "stop": ({"stop_sequences": [""]}, "stop_sequences (stop of chat completions): has an empty text"),
    "form": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        "output_config.format (response_format of chat completions): this session trains",
    ),
    "effort": (
        {"output_config": {"effort": "low"}},
        "output_config.effort (reasoning_effort of chat completions): is not offered",
    ),
    "parallel": (
        {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "tool_choice.disable_parallel_tool_use (parallel_tool_calls of chat completions): this session trains",
    ),
    "any": ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice: this session trains"),
    "thinking": ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking: is not offered: no budget"),
    "servers": ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: is not offered: no tools are run here"),
    "unknown": ({"king": 1}, "king: is not offered: there is no such parameter here"),
    "vllm's own": ({"cache_salt": "x"}, "cache_salt: is not offered: there is no such parameter here"),
    "their tool": ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type='bash_20250124'"),
    "no schema": ({"tools": [{"name": "add"}]}, "tools.0.input_schema: Field required"),
    "limit": ({"max_tokens": 0}, "max_tokens: Value error, max_tokens must be positive"),
    "no messages": ({"messages": []}, "messages: is empty"),
    "prefill": ({"messages": ask("a", "b")["messages"]}, "messages: the last is the assistant's"),
    "image": (
        {"messages": ask([{"type": "image", "source": {"type": "url", "url": "x"}}])["messages"]},
        "messages.0.content.0: a block of type 'image' is no text",
    ),
    "image in a result": (
        {"messages": ask([{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}])["messages"]},
        "messages.0.content.0: a block of type 'image' is no text",
    ),
    "document": ({"messages": ask([{"type": "document"}])["messages"]}, "messages.0.content.0.type: Input should be"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_refusals_have_anthropics_form_and_the_fields_name(name):
    more, begin = REFUSED[name]
    async with messages() as (opened, sdk, sampler):
        with pytest.raises(anthropic.BadRequestError) as refused:
            await sdk.post("/v1/messages", body=ask("a") | more, cast_to=object)
        body = refused.value.body
        assert body["type"] == "error" and body["error"].keys() == {"type", "message"}
        assert body["error"]["type"] == "invalid_request_error"
        assert body["error"]["message"].startswith(begin)
        assert not sampler.asked and opened.counts["refused"] == 1


async def test_named_fields_are_ignored():
    ignored = ("thinking", "temperature", "reasoning_effort", "context_management")
    async with messages("hi" + END, ignored=ignored) as (opened, sdk, _):
        more = {
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "temperature": 0.3,
            "context_management": {"a": 1},
        }
        await sdk.post("/v1/messages", body=ask("a", output_config={"effort": "low"}) | more, cast_to=object)
        assert opened.counts["ignored"] == 4


async def test_keys_versions_and_names_are_checked():
    async with served("hi" + END, "ho" + END, api_key="secret") as (gateway, _, _):
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
            for headers, status, kind in (
                ({}, 401, "authentication_error"),
                ({"x-api-key": "wrong"}, 401, "authentication_error"),
                ({"x-api-key": "secret", "anthropic-version": "2023-01-01"}, 400, "invalid_request_error"),
                ({"x-api-key": "secret", "anthropic-version": "2023-06-01"}, 200, None),
                ({"Authorization": "Bearer secret"}, 200, None),
            ):
                answer = await http.post("/v1/messages", json=ask("a"), headers=headers)
                assert answer.status_code == status
                assert kind is None or answer.json()["error"]["type"] == kind
            answer = await http.post("/v1/messages", json=ask("a", model="x"), headers={"x-api-key": "secret"})
            assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
            assert answer.json()["error"]["message"].startswith("model='x': is not served here")
            answer = await http.post("/v1/messages", json=ask("a", model="base"), headers={"x-api-key": "secret"})
            assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
            assert answer.json()["error"]["message"].startswith(
                "model='base': the policy has no adapters beside a base"
            )
            answer = await http.post(
                "/v1/messages", content=b"{", headers={"x-api-key": "secret", "Content-Type": "application/json"}
            )
            assert (answer.status_code, answer.json()["error"]["message"][:17]) == (400, "body: is not JSON")


@pytest.mark.parametrize("part", [{"type": "text", "text": 3}, {"type": "text"}])
async def test_a_part_of_a_tools_result_without_a_text_is_refused(part):
    result = {"type": "tool_result", "tool_use_id": "a", "content": [part]}
    async with messages("ok" + END) as (_, sdk, _):
        with pytest.raises(anthropic.BadRequestError, match=r"messages.0.content.0.content.0.text=.*: is no text"):
            await sdk.messages.create(model="policy", max_tokens=8, messages=[{"role": "user", "content": [result]}])
