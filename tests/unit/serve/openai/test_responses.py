"""Answers against the types of OpenAI's SDK, field by field, whole and as a stream."""

import httpx
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.model import Model

from tests.unit.serve.opened import ADD, END, session, user


def posted(session_, path, body):
    endpoint = session_.endpoint
    return httpx.AsyncClient().post(
        f"{endpoint.base_url}/{path}", json=body, headers={"Authorization": f"Bearer {endpoint.api_key}"}
    )


async def test_answers_are_of_the_sdks_types():
    texts = ["hi" + END, "[add(a=1, b=2)]" + END, "x" + END, "y" + END, "text", "more"]
    async with session(*texts, tool_parser="pythonic") as (opened, sdk, _):
        chat = {"model": "policy", "messages": [user("a")], "logprobs": True}
        whole = ChatCompletion.model_validate((await posted(opened, "chat/completions", chat)).json(), strict=True)
        assert [entry.token for entry in whole.choices[0].logprobs.content] == ["h", "i", END]
        assert whole.choices[0].logprobs.content[0].bytes == [104]
        assert whole.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
            "prompt_tokens": 4,
            "completion_tokens": 3,
            "total_tokens": 7,
        }
        calls = await posted(opened, "chat/completions", chat | {"tools": [ADD]})
        called = ChatCompletion.model_validate(calls.json(), strict=True).choices[0]
        assert called.message.tool_calls[0].function.arguments == '{"a": 1, "b": 2}'
        several = await posted(opened, "chat/completions", chat | {"n": 2})
        both = ChatCompletion.model_validate(several.json(), strict=True)
        assert [(choice.index, choice.message.content) for choice in both.choices] == [(0, "x"), (1, "y")]
        plain = {"model": "policy", "prompt": ["a", "b"], "logprobs": 0}
        text = Completion.model_validate((await posted(opened, "completions", plain)).json(), strict=True)
        assert [choice.text for choice in text.choices] == ["text", "more"]
        assert text.choices[0].logprobs.text_offset == [0, 1, 2, 3]
        listed = await sdk.models.list()
        assert [type(model) for model in listed.data] == [Model] and listed.data[0].id == "policy"
        assert (await sdk.models.retrieve("policy")).id == "policy"


async def test_bytes_and_offsets_are_those_of_the_text_where_a_letter_has_several_tokens():
    async with session("né€" + END, "né€!") as (_, sdk, _):
        chat = await sdk.chat.completions.create(model="policy", messages=[user("a")], logprobs=True)
        entries = chat.choices[0].logprobs.content
        assert [entry.token for entry in entries] == ["n", "", "é", "", "", "€", END]
        assert bytes(byte for entry in entries for byte in entry.bytes) == ("né€" + END).encode()
        text = await sdk.completions.create(model="policy", prompt="a", logprobs=0)
        logprobs, answer = text.choices[0].logprobs, text.choices[0].text
        assert logprobs.text_offset == [0, 1, 1, 2, 2, 2, 3]
        assert all(answer[at:].startswith(token) for token, at in zip(logprobs.tokens, logprobs.text_offset))


STRICT = {**ADD, "function": {**ADD["function"], "strict": True}}  # version 2 of the SDK streams no other tools


async def test_a_stream_says_the_same_in_chunks():
    async with session("hi" + END, "[add(a=1, b=2)]" + END, "more", tool_parser="pythonic") as (opened, sdk, _):
        options = {"include_usage": True}
        stream = await sdk.chat.completions.create(
            model="policy", messages=[user("a")], stream=True, stream_options=options, logprobs=True
        )
        chunks = [chunk async for chunk in stream]
        for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hi"
        assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-1].usage.total_tokens == 7
        async with sdk.chat.completions.stream(model="policy", messages=[user("a")], tools=[STRICT]) as events:
            final = await events.get_final_completion()
        assert final.choices[0].message.tool_calls[0].function.arguments == '{"a": 1, "b": 2}'
        stream = await sdk.completions.create(model="policy", prompt="a", stream=True)
        assert [chunk.choices[0].text async for chunk in stream] == ["more"]
        assert len(opened.turns()) == 3
