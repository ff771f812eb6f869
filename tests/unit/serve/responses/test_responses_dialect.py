"""OpenAI's Responses at the gateway, asked by OpenAI's SDK: the same rollout as by chat completions."""

import asyncio
import importlib

import httpx
import openai
import pytest

from tests.unit.serve.opened import ADD, BYTES, END, served, session, shown
from torchtitan_rl import adapters
from torchtitan_rl.rollout.agent import SessionLimits
from torchtitan_rl.rollout.ignored_parameters import RESPONSES_NOT_OFFERED
from torchtitan_rl.serve.limits import ServerLimits

pytestmark = pytest.mark.timeout(600)  # the first test waits for the import of vLLM

TOOL = {"type": "function", **ADD["function"], "strict": None}
CALLS = "[add(a=1, b=2), add(a=3)]" + END


@pytest.fixture(scope="module", autouse=True)
def vllm():
    """Imports vLLM, which a gateway does at the first request and takes a minute on a busy machine, before a client's
    time runs."""
    adapters.prepare_vllm(eager=True)
    importlib.import_module("torchtitan_rl.serve.responses.response_events")


def user(text):
    return {"role": "user", "content": text}


def extends(earlier, later):
    so_far = [*earlier.prompt_tokens, *earlier.completion.tokens]
    return later.prompt_tokens[: len(so_far)] == so_far


async def test_a_conversation_goes_on_by_the_id_of_a_response():
    async with session("hi" + END, "ok" + END) as (opened, sdk, _):
        first = await sdk.responses.create(model="policy", input="a", instructions="s", metadata={"k": "v"})
        assert (first.output_text, first.status, first.output[0].role) == ("hi", "completed", "assistant")
        assert (first.instructions, first.metadata, first.id[:5]) == ("s", {"k": "v"}, "resp_")
        second = await sdk.responses.create(
            model="policy", input="b", instructions="s", previous_response_id=first.id, metadata={}
        )
        assert second.previous_response_id == first.id
        first_turn, second_turn = opened.turns()
        assert shown(first_turn.prompt_tokens).startswith(f"<|system|>s{END}<|user|>a")
        assert extends(first_turn, second_turn)
        assert shown(second_turn.prompt_tokens).endswith(f"<|user|>b{END}<|assistant|>")
        assert (first.usage.input_tokens, first.usage.output_tokens) == (
            len(first_turn.prompt_tokens),
            len(first_turn.completion.tokens),
        )
        assert opened.counts["drift"] == 0


async def test_a_conversation_goes_on_by_items_that_are_sent_back():
    async with session("hi" + END, "ok" + END) as (opened, sdk, _):
        items = [user([{"type": "input_text", "text": "a"}])]
        first = await sdk.responses.create(model="policy", input=items, store=False)
        items += [*first.output, {"type": "message", **user("b")}]
        await sdk.responses.create(model="policy", input=items, store=False)
        assert extends(*opened.turns())
        assert opened.counts["drift"] == 0


async def test_instructions_hold_for_one_request_and_system_messages_stay():
    async with session("hi" + END, "ok" + END) as (opened, sdk, _):
        system = {"role": "developer", "content": "d"}
        first = await sdk.responses.create(model="policy", input=[system, user("a")], instructions="s")
        await sdk.responses.create(model="policy", input="b", previous_response_id=first.id)
        text = shown(opened.turns()[1].prompt_tokens)
        assert text.startswith(f"<|system|>d{END}<|user|>a") and "hi" in text


@pytest.mark.parametrize("stateful", [True, False])
async def test_sampled_tokens_are_kept_though_their_text_has_other_tokens(stateful):
    broken = [*BYTES.encode("x"), BYTES.encode("é")[0]]
    async with session(broken, "ok" + END) as (opened, sdk, _):
        first = await sdk.responses.create(model="policy", input="a", max_output_tokens=2)
        assert first.output_text == "x\ufffd"
        if stateful:
            await sdk.responses.create(model="policy", input="b", previous_response_id=first.id)
        else:
            await sdk.responses.create(model="policy", input=[user("a"), *first.output, user("b")])
        first_turn, second = opened.turns()
        assert second.prompt_tokens[len(first_turn.prompt_tokens) :][:2] == broken


@pytest.mark.parametrize("stateful", [True, False])
async def test_calls_of_tools_go_out_and_their_results_come_in(stateful):
    async with session(CALLS, "7" + END, tool_parser="pythonic") as (opened, sdk, _):
        first = await sdk.responses.create(model="policy", input="a", tools=[TOOL], tool_choice="auto")
        assert [(item.type, item.name, item.arguments) for item in first.output] == [
            ("function_call", "add", '{"a": 1, "b": 2}'),
            ("function_call", "add", '{"a": 3}'),
        ]
        one, two = first.output
        assert one.call_id != two.call_id and one.status == "completed"
        results = [
            {"type": "function_call_output", "call_id": one.call_id, "output": "3"},
            {"type": "function_call_output", "call_id": two.call_id, "output": [{"type": "input_text", "text": "3"}]},
        ]
        if stateful:
            more = {"input": results, "previous_response_id": first.id}
        else:
            more = {"input": [user("a"), *first.output, *results]}
        second = await sdk.responses.create(model="policy", tools=[TOOL], **more)
        assert second.output_text == "7"
        assert extends(*opened.turns())
        assert opened.counts["drift"] == 0


@pytest.mark.parametrize("text", ["hello" + END, CALLS, END, "x" * 40])
async def test_a_stream_says_what_the_whole_answer_says(text):
    async with session(text, text, tool_parser="pythonic", max_tokens=32) as (opened, sdk, _):
        asked = {"model": "policy", "input": "a", "tools": [TOOL], "include": ["message.output_text.logprobs"]}
        whole = await sdk.responses.create(**asked)
        events = []
        async with sdk.responses.stream(**asked) as stream:
            async for event in stream:
                events.append(event)
        streamed = events[-1].response  # the SDK's `get_final_response` knows complete ones alone

        def compared(response):
            dumped = response.model_dump(exclude={"id", "created_at"})
            for item in dumped["output"]:
                for name in ("id", "call_id", "parsed_arguments"):
                    item.pop(name, None)
                for part in item.get("content", ()):
                    part.pop("parsed", None)
            return dumped

        assert compared(streamed) == compared(whole)
        kinds = [event.type for event in events]
        assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
        assert kinds[-1] == f"response.{whole.status}" and whole.status in ("completed", "incomplete")
        assert kinds.count("response.output_item.added") == len(whole.output)
        assert kinds.count("response.output_item.done") == len(whole.output)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        tokens = [turn.completion.tokens for turn in opened.turns()]
        assert tokens[0] == tokens[1]
        stored = await sdk.responses.retrieve(streamed.id)
        assert [item.id for item in stored.output] == [item.id for item in streamed.output]


async def test_the_events_of_a_text_and_of_a_call_come_in_order():
    async with session("hi" + END, "[add(a=1)]" + END, tool_parser="pythonic") as (_, sdk, _):
        kinds = []
        for _ in range(2):
            async for event in await sdk.responses.create(model="policy", input="a", tools=[TOOL], stream=True):
                kinds.append(event.type.removeprefix("response."))
        text, call = kinds[: kinds.index("completed") + 1], kinds[kinds.index("completed") + 1 :]
        assert text == [
            *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
            *("output_text.done", "content_part.done", "output_item.done", "completed"),
        ]
        assert call == [
            *("created", "in_progress", "output_item.added", "function_call_arguments.delta"),
            *("function_call_arguments.done", "output_item.done", "completed"),
        ]


async def test_a_client_that_waits_in_a_thread_is_answered():
    async with session("hi" + END, "ok" + END) as (opened, sdk, _):
        endpoint = opened.endpoint

        def ask():
            with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as waiting:
                first = waiting.responses.create(model="policy", input="a")
                with waiting.responses.stream(model="policy", input="b", previous_response_id=first.id) as stream:
                    stream.until_done()
                    return first.output_text, stream.get_final_response().output_text

        assert await asyncio.to_thread(ask) == ("hi", "ok")
        assert extends(*opened.turns())


async def test_a_limit_leaves_a_response_incomplete_and_a_conversation_goes_on_from_it():
    async with session("x" * 40, "y" + END, for_training=False) as (opened, sdk, _):
        cut = await sdk.responses.create(model="policy", input="a", max_output_tokens=3)
        assert (cut.output_text, cut.status, cut.output[0].status) == ("xxx", "incomplete", "incomplete")
        assert cut.incomplete_details.reason == "max_output_tokens"
        await sdk.responses.create(model="policy", input="b", previous_response_id=cut.id)
        assert extends(*opened.turns())


async def test_log_probabilities_are_of_each_sampled_token():
    async with session("hi" + END, "hi" + END) as (opened, sdk, _):
        include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
        first = await sdk.responses.create(model="policy", input="a", include=include)
        logprobs = first.output[0].content[0].logprobs
        assert [each.logprob for each in logprobs] == opened.turns()[0].completion.logprobs
        assert [each.token for each in logprobs] == ["h", "i", END]
        without = await sdk.responses.create(model="policy", input="a")
        assert not without.output[0].content[0].logprobs


async def test_reasoning_that_comes_back_is_the_templates_affair():
    async with session("hi" + END, "ok" + END) as (opened, sdk, _):
        first = await sdk.responses.create(model="policy", input="a")
        thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
        nothing = {"type": "reasoning", "id": "rs_1", "summary": []}
        items = [user("a"), thought, nothing, *first.output, user("b")]
        await sdk.responses.create(model="policy", input=items)
        assert extends(*opened.turns())
        assert opened.answers[1].prompt.messages[1]["reasoning_content"] == "hm"
        assert opened.counts["drift"] == 0


async def test_stored_responses_are_read_deleted_and_not_kept_where_nobody_wants_them():
    async with session("a" + END, "b" + END, "c" + END) as (_, sdk, _):
        first = await sdk.responses.create(model="policy", input="a")
        kept = await sdk.responses.retrieve(first.id)
        assert kept.model_dump() == first.model_dump()
        await sdk.responses.delete(first.id)
        passing = await sdk.responses.create(model="policy", input="a", store=False)
        for absent in (first.id, passing.id, "resp_x"):
            for call in (sdk.responses.retrieve, sdk.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    await call(absent)
            with pytest.raises(openai.BadRequestError) as refused:
                await sdk.responses.create(model="policy", input="b", previous_response_id=absent)
            assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
        with pytest.raises(openai.BadRequestError, match="stream: is not offered"):
            await sdk.responses.retrieve(first.id, stream=True)


async def test_the_items_of_a_response_are_those_of_its_whole_conversation():
    async with session(CALLS, "7" + END, tool_parser="pythonic") as (_, sdk, _):
        parts = [{"type": "input_text", "text": "c"}]
        items = [user("a"), {"role": "assistant", "content": "b"}, {"type": "message", **user(parts)}]
        first = await sdk.responses.create(model="policy", input=items, instructions="s", tools=[TOOL])
        one, two = first.output
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in (one, two)]
        second = await sdk.responses.create(model="policy", input=results, previous_response_id=first.id, tools=[TOOL])
        of_first = [item async for item in sdk.responses.input_items.list(first.id, order="asc")]
        assert [(type(item).__name__, item.role, item.content[0].text) for item in of_first] == [
            ("ResponseInputMessageItem", "user", "a"),
            ("ResponseOutputMessage", "assistant", "b"),
            ("ResponseInputMessageItem", "user", "c"),
        ]
        of_second = [item async for item in sdk.responses.input_items.list(second.id, limit=2)]
        assert [item.type for item in of_second] == [
            *("function_call_output", "function_call_output", "function_call", "function_call", *["message"] * 3)
        ]
        assert [item.id for item in of_second[:1:-1]] == [item.id for item in [*of_first, one, two]]
        assert [item.call_id for item in of_second[3:1:-1]] == [one.call_id, two.call_id]
        assert all(type(item).__name__ != "BaseModel" and item.id for item in of_second)
        page = await sdk.responses.input_items.list(second.id, limit=2, order="asc", after=of_first[0].id)
        assert [item.id for item in page.data] == [item.id for item in of_first[1:]] and page.has_more
        for more, begin in (
            ({"after": "x"}, "after='x': is no item of this response"),
            ({"limit": 0}, "limit='0': is no number from 1 to 100"),
            ({"limit": 10**12}, "limit='1000000000000': is no number"),
            ({"order": "up"}, "order='up': is neither asc nor desc"),
            ({"include": ["file_search_call.results"]}, "include[]: is not offered: items come whole"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await sdk.responses.input_items.list(second.id, **more)
            assert refused.value.body["message"].startswith(begin) and begin.startswith(refused.value.param)
        with pytest.raises(openai.NotFoundError, match="Response with id 'resp_x' not found."):
            await sdk.responses.input_items.list("resp_x")


async def test_a_prompt_is_counted_before_it_is_asked_for():
    async with session("hi" + END, "ok" + END) as (opened, sdk, sampler):
        asked = {"model": "policy", "input": "a", "instructions": "s", "tools": [TOOL]}
        form = {"format": {"type": "json_object"}}
        counted = await sdk.responses.input_tokens.count(**asked, text=form, tool_choice="required")
        assert counted.object == "response.input_tokens" and not sampler.asked
        first = await sdk.responses.create(**asked)
        assert counted.input_tokens == first.usage.input_tokens
        more = {"previous_response_id": first.id, "instructions": "s", "tools": [TOOL]}
        alone = await sdk.responses.input_tokens.count(**more)
        counted = await sdk.responses.input_tokens.count(**more, input="b")
        second = await sdk.responses.create(model="policy", **more, input="b")
        assert first.usage.total_tokens < alone.input_tokens < counted.input_tokens == second.usage.input_tokens
        assert len(opened.turns()) == 2
        for wrong, begin in (
            ({}, "input: is neither text nor a list"),
            ({"input": "a", "truncation": "auto"}, "truncation: is not offered"),
            ({"input": "a", "personality": "friendly"}, "personality: is not offered"),
            ({"input": "a", "extra_body": {"max_output_tokens": 3}}, "max_output_tokens: is not offered"),
            ({"input": "a", "previous_response_id": "resp_x"}, "previous_response_id='resp_x': no such response"),
        ):
            with pytest.raises(openai.BadRequestError, match=begin):
                await sdk.responses.input_tokens.count(**wrong)
        with pytest.raises(openai.NotFoundError, match="model='x'"):
            await sdk.responses.input_tokens.count(model="x", input="a")


async def test_a_parameter_of_chat_completions_is_refused_by_its_reason_or_ignored():
    asked = {"model": "policy", "input": "a", "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    async with served("a" + END) as (_, sdk, _):
        with pytest.raises(
            openai.BadRequestError, match="chat_template_kwargs: is not offered: the tokenizer's template"
        ):
            await sdk.responses.create(**asked)
    async with served("a" + END, ignored=("chat_template_kwargs",)) as (_, sdk, _):
        assert (await sdk.responses.create(**asked)).status == "completed"


async def test_a_response_is_done_and_cannot_be_cancelled():
    async with served("a" + END) as (_, sdk, _):
        made = await sdk.responses.create(model="policy", input="a")
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
            await sdk.responses.cancel(made.id)
        with pytest.raises(openai.NotFoundError, match="Response with id 'resp_x' not found."):
            await sdk.responses.cancel("resp_x")


async def test_a_session_reads_its_own_responses_alone():
    async with served("a" + END, "b" + END) as (gateway, sdk, _):
        first = await sdk.responses.create(model="policy", input="a")
        opened = gateway.open_session(gateway.sessions.served.policy, seed=1, limits=SessionLimits())
        own = sdk.copy(base_url=opened.endpoint.base_url, api_key=opened.endpoint.api_key)
        with pytest.raises(openai.NotFoundError):
            await own.responses.retrieve(first.id)
        second = await own.responses.create(model="policy", input="a")
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.retrieve(second.id)
        assert (await own.responses.retrieve(second.id)).id == second.id
        assert gateway.sessions.stored(opened).num_bytes > 0
        gateway.end_session(opened)
        assert gateway.sessions.stored(opened).num_bytes == 0


async def test_the_oldest_responses_make_way():
    async with served(*["a" + END] * 4) as (gateway, sdk, _):
        gateway.sessions.limits = ServerLimits(max_stored_responses=2)
        first, second = [await sdk.responses.create(model="policy", input="a") for _ in range(2)]
        await sdk.responses.retrieve(first.id)
        third = await sdk.responses.create(model="policy", input="a")
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.retrieve(second.id)
        assert [(await sdk.responses.retrieve(each.id)).id for each in (first, third)] == [first.id, third.id]


BUILT_IN = (
    *("web_search", "web_search_preview", "file_search", "code_interpreter", "computer", "computer_use_preview"),
    *("mcp", "image_generation", "local_shell", "shell", "apply_patch", "custom", "namespace"),
)
REFUSED = {
    **{name: ({"tools": [TOOL, {"type": name}], "king": 1}, f"tools.1.type='{name}'") for name in BUILT_IN},
    **{
        name: ({name: "auto" if name == "truncation" else {"id": "x"}}, f"{name}: is not offered")
        for name in RESPONSES_NOT_OFFERED
    },
    "background": ({"background": True}, "background: is not offered"),
    "temperature": ({"temperature": 0.5}, "temperature=0.5: this session trains"),
    "top_p": ({"top_p": 0.5}, "top_p=0.5: this session trains"),
    "form": (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}},
        "text.format (response_format of chat completions): this session trains",
    ),
    "verbosity": ({"text": {"verbosity": "low"}}, "text.verbosity (verbosity of chat completions): is not offered"),
    "effort": (
        {"reasoning": {"effort": "low"}},
        "reasoning.effort (reasoning_effort of chat completions): is not offered",
    ),
    "summary": ({"reasoning": {"summary": "detailed"}}, "reasoning.summary: is not offered"),
    "parallel": ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls: this session trains"),
    "required": ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice: this session trains"),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice: "),
    "a hosted choice": ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type='mcp'"),
    "no such choice": ({"tools": [TOOL], "tool_choice": "king"}, "tool_choice"),
    "included": ({"include": ["file_search_call.results"]}, "include.0='file_search_call.results'"),
    "top_logprobs": ({"top_logprobs": 3}, "top_logprobs: is not offered: the engine gives"),
    "logit_bias": ({"logit_bias": {"1": 1}}, "logit_bias: is not offered"),
    "unknown": ({"king": 1}, "king: is not offered: there is no such parameter here"),
    "vllm's own": ({"cache_salt": "x"}, "cache_salt: is not offered: there is no such parameter here"),
    "no name": ({"tools": [{"type": "function"}]}, "tools.0.name: Field required"),
    "deferred": ({"tools": [TOOL | {"defer_loading": True}]}, "tools.0.defer_loading: is not offered"),
    "limit": ({"max_output_tokens": 0}, "max_output_tokens (max_tokens of chat completions): Input should be greater"),
    "no number": ({"max_output_tokens": "x"}, "max_output_tokens: Input should be a valid integer"),
    "nothing": ({"input": []}, "input (messages of chat completions): List should have at least 1 item"),
    "no input": ({"input": None}, "input: is neither text nor a list"),
    "prefill": (
        {"input": [user("a"), {"role": "assistant", "content": "b", "status": "incomplete"}]},
        "input.1.status='incomplete': is not offered: a completion begins a new message",
    ),
    "role": ({"input": [{"role": "king", "content": "a"}]}, "input.0.role='king'"),
    "image": (
        {"input": [user([{"type": "input_image", "image_url": "x"}])]},
        "input.0.content.0: a part of type 'input_image' is no text",
    ),
    "image in a result": (
        {"input": [user("a"), {"type": "function_call_output", "call_id": "x", "output": [{"type": "input_image"}]}]},
        "input.1.output.0: a part of type 'input_image' is no text",
    ),
    "call without a name": (
        {"input": [{"type": "function_call", "call_id": "x", "arguments": "{}"}]},
        "input.0.name: Field required",
    ),
    "result without a call": ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id: is no"),
    "sealed": (
        {"input": [user("a"), {"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
        "input.1.encrypted_content: is not offered",
    ),
    "item": ({"input": [{"type": "web_search_call", "id": "x"}]}, "input.0.type='web_search_call': is not offered"),
    "reference": ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type='item_reference'"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_refusals_have_openais_form_and_the_fields_name(name):
    more, begin = REFUSED[name]
    async with session() as (opened, sdk, sampler):
        with pytest.raises(openai.BadRequestError) as refused:
            await sdk.post("/responses", body={"model": "policy", "input": "a"} | more, cast_to=object)
        body = refused.value.body
        assert body.keys() == {"message", "type", "param", "code"}
        assert body["type"] == "invalid_request_error"
        assert body["message"].startswith(begin)
        assert begin.startswith(body["param"])
        assert not sampler.asked and opened.counts["refused"] == 1


async def test_fields_that_ask_for_nothing_are_taken():
    async with session("hi" + END) as (_, sdk, _):
        neutral = {
            **{"background": False, "truncation": "disabled", "conversation": None, "context_management": []},
            **{
                "reasoning": {"effort": "none", "context": "auto", "summary": "auto"},
                "text": {"format": {"type": "text"}},
            },
            **{"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "top_logprobs": 0, "temperature": 1.0},
            **{"user": "u", "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s"},
            **{"max_tool_calls": 3, "stream_options": {"include_obfuscation": False}, "metadata": None},
        }
        answer = await sdk.post("/responses", body={"model": "policy", "input": "a"} | neutral, cast_to=object)
        assert answer["output"][0]["content"][0]["text"] == "hi"


async def test_named_fields_are_ignored():
    ignored = ("truncation", "temperature", "reasoning_effort", "response_format", "background")
    async with session("hi" + END, ignored=ignored) as (opened, sdk, _):
        await sdk.responses.create(
            model="policy", input="a", temperature=0.3, truncation="auto", background=True,
            reasoning={"effort": "low"}, text={"format": {"type": "json_object"}},
        )  # fmt: skip
        assert opened.counts["ignored"] == 5


async def test_parameters_of_sampling_arrive():
    async with served("hi" + END) as (_, sdk, sampler):
        more = {"top_k": 5, "seed": 7, "stop": ["z"], "presence_penalty": 0.5}
        made = await sdk.responses.create(
            model="policy", input="a", temperature=0.5, top_p=0.9, max_output_tokens=9, extra_body=more
        )
        _, params = sampler.asked[0]
        assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 5, 7)
        assert (params.max_tokens, params.stop, params.presence_penalty) == (9, ["z"], 0.5)
        assert (made.temperature, made.top_p, made.max_output_tokens) == (0.5, 0.9, 9)


async def test_a_form_is_kept_to_where_nothing_trains():
    async with served('{"a": 1}' + END) as (_, sdk, sampler):
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        form = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
        made = await sdk.responses.create(model="policy", input="a", text={"format": form})
        assert "json_schema" in sampler.asked[0][1].structure
        assert made.text.format.schema_ == schema


@pytest.mark.parametrize("value", [b"NaN", rb'"\ud800"'])
async def test_what_no_answer_could_repeat_is_no_json(value):
    async with served() as (gateway, _, _):
        tool = b'{"type": "function", "name": "a", "parameters": {"x": %b}}' % value
        content = b'{"model": "policy", "input": "a", "tools": [%b]}' % tool
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
            answer = await http.post("/v1/responses", content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


async def test_keys_and_names_are_checked():
    async with served("hi" + END, api_key="secret") as (gateway, sdk, _):
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
            body = {"model": "policy", "input": "a"}
            assert (await http.post("/v1/responses", json=body)).status_code == 401
            assert (await http.get("/v1/responses/resp_x")).status_code == 401
            assert (await http.delete("/v1/responses/resp_x")).status_code == 401
            assert (await http.get("/v1/responses/resp_x/input_items")).status_code == 401
            assert (await http.post("/v1/responses/input_tokens", json=body)).status_code == 401
        made = await sdk.responses.create(**body)
        assert (await sdk.responses.retrieve(made.id)).output_text == "hi"
        with pytest.raises(openai.NotFoundError, match="model='x': is not served here"):
            await sdk.responses.create(model="x", input="a")
        with pytest.raises(
            openai.NotFoundError, match="model='base': the policy has no adapters beside a base"
        ) as refused:
            await sdk.responses.create(model="base", input="a")
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
