"""Clients of the gateway's dialects with one interface, each by its SDK: what a conversation says is said in all of
them."""

import json
from dataclasses import dataclass, field
from typing import Any

from tests.unit.serve.opened import ADD


@dataclass(slots=True)
class Reply:
    """What a client reads of an answer."""

    text: str
    calls: list[tuple[str, str, dict]]
    """Identity, name and arguments."""
    is_cut: bool
    """Whether a limit of tokens ended it."""
    usage: tuple[int, int]
    """Tokens of the prompt and of the answer."""
    logprobs: list[float] | None
    """None: the dialect has none, or there is no text to carry them."""


@dataclass(slots=True, kw_only=True)
class Settings:
    """What a conversation asks for besides its words."""

    system: str = ""
    max_tokens: int = 12
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: list[str] = field(default_factory=list)
    offers_add: bool = False
    """Whether the tool `add` is there."""
    choice: str | None = None
    """`auto`, `none`, `required`, or the name of the tool."""
    single: bool = False
    """At most one call."""
    schema: dict | None = None
    """Of the answer."""


def _set(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, [], "")}


class ChatClient:
    """Chat completions: the whole conversation in every request."""

    def __init__(self, openai, anthropic, settings: Settings, stream: bool) -> None:
        self.sdk, self.settings, self.stream = openai, settings, stream
        self.messages = [{"role": "system", "content": settings.system}] if settings.system else []

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def results(self, results: list[tuple[str, str]]) -> None:
        self.messages += [{"role": "tool", "tool_call_id": id_, "content": text} for id_, text in results]

    def think(self, text: str) -> None:
        """The last answer comes back with reasoning before it."""
        self.messages[-1]["reasoning_content"] = text

    def rewrite(self, text: str) -> None:
        """The last answer comes back as another one."""
        self.messages[-1] = {"role": "assistant", "content": text}

    def forget(self) -> None:
        """The last answer does not come back."""
        self.messages.pop()

    async def ask(self) -> Reply:
        chosen = self.settings
        choice, schema = chosen.choice, chosen.schema
        if choice not in (None, "auto", "none", "required"):
            choice = {"type": "function", "function": {"name": choice}}
        form = None if schema is None else {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        request = _set(
            messages=self.messages,
            max_completion_tokens=chosen.max_tokens,
            temperature=chosen.temperature,
            top_p=chosen.top_p,
            stop=chosen.stop,
            tools=[ADD] if chosen.offers_add else None,
            tool_choice=choice,
            parallel_tool_calls=False if chosen.single else None,
            response_format=form,
            extra_body=_set(top_k=chosen.top_k),
        )
        request |= {"model": "policy", "logprobs": True}
        if self.stream:
            message, logprobs, reason, usage = await self._streamed(request)
        else:
            answer = await self.sdk.chat.completions.create(**request)
            choice, usage = answer.choices[0], answer.usage
            message, reason = choice.message.model_dump(exclude_none=True), choice.finish_reason
            logprobs = [each.logprob for each in choice.logprobs.content]
        self.messages.append(message)
        functions = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
        calls = [(id_, function["name"], json.loads(function["arguments"])) for id_, function in functions]
        counted = (usage.prompt_tokens, usage.completion_tokens)
        return Reply(message.get("content") or "", calls, reason == "length", counted, logprobs)

    async def _streamed(self, request):
        message, logprobs, reason = {"role": "assistant"}, [], None
        more = {"stream": True, "stream_options": {"include_usage": True}}
        async for chunk in await self.sdk.chat.completions.create(**request, **more):
            for choice in chunk.choices:
                delta = choice.delta
                if delta.content is not None:
                    message["content"] = message.get("content", "") + delta.content
                for call in delta.tool_calls or ():
                    message.setdefault("tool_calls", []).append(call.model_dump(exclude={"index"}))
                logprobs += [each.logprob for each in (choice.logprobs.content if choice.logprobs else ())]
                reason = choice.finish_reason or reason
            usage = chunk.usage
        return message, logprobs, reason, usage


class ItemsClient:
    """Responses, with nothing stored: the whole conversation in every request."""

    def __init__(self, openai, anthropic, settings: Settings, stream: bool) -> None:
        self.sdk, self.settings, self.stream = openai, settings, stream
        self.items: list[dict[str, Any]] = []
        self.num_last = 0
        """Items of the last answer."""

    def say(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def results(self, results: list[tuple[str, str]]) -> None:
        self.items += [{"type": "function_call_output", "call_id": id_, "output": text} for id_, text in results]

    def think(self, text: str) -> None:
        thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}
        self.items.insert(len(self.items) - self.num_last, thought)

    def rewrite(self, text: str) -> None:
        self.forget()
        self.items.append({"role": "assistant", "content": text})

    def forget(self) -> None:
        del self.items[-self.num_last :]

    async def ask(self) -> Reply:
        made = await self.send(input=self.items, store=False)
        self.items += [item.model_dump(exclude_none=True) for item in made.output]
        self.num_last = len(made.output)
        return self.read(made)

    async def send(self, **more: Any) -> Any:
        chosen = self.settings
        choice = chosen.choice
        if choice not in (None, "auto", "none", "required"):
            choice = {"type": "function", "name": choice}
        form = None
        if chosen.schema is not None:
            form = {"format": {"type": "json_schema", "name": "a", "schema": chosen.schema}}
        request = _set(
            instructions=chosen.system,
            max_output_tokens=chosen.max_tokens,
            temperature=chosen.temperature,
            top_p=chosen.top_p,
            tools=[{"type": "function", **ADD["function"]}] if chosen.offers_add else None,
            tool_choice=choice,
            parallel_tool_calls=False if chosen.single else None,
            text=form,
            extra_body=_set(top_k=chosen.top_k, stop=chosen.stop),
        )
        request |= {"model": "policy", "include": ["message.output_text.logprobs"]} | more
        if not self.stream:
            return await self.sdk.responses.create(**request)
        async for event in await self.sdk.responses.create(**request, stream=True):
            last = event
        assert last.type == f"response.{last.response.status}"
        return last.response

    @staticmethod
    def read(made) -> Reply:
        calls = [
            (each.call_id, each.name, json.loads(each.arguments)) for each in made.output if each.type != "message"
        ]
        texts = [part for each in made.output if each.type == "message" for part in each.content]
        logprobs = [each.logprob for part in texts for each in part.logprobs or ()] if texts else None
        usage = (made.usage.input_tokens, made.usage.output_tokens)
        return Reply(made.output_text, calls, made.status == "incomplete", usage, logprobs)


class StoredClient(ItemsClient):
    """Responses that go on by `previous_response_id`: a request has what is new. What was stored cannot be rewritten;
    such a conversation begins anew with its items."""

    def __init__(self, openai, anthropic, settings: Settings, stream: bool) -> None:
        super().__init__(openai, anthropic, settings, stream)
        self.previous: list[str | None] = [None]
        """The responses of the conversation, the last one last."""
        self.num_stored = [0]
        """The items that were there after each of them."""

    def think(self, text: str) -> None:
        pass  # the stored answer is what the policy said

    def rewrite(self, text: str) -> None:
        super().rewrite(text)
        self.previous, self.num_stored = [None], [0]

    def forget(self) -> None:
        super().forget()
        self.previous.pop(), self.num_stored.pop()

    async def ask(self) -> Reply:
        made = await self.send(input=self.items[self.num_stored[-1] :], previous_response_id=self.previous[-1])
        self.items += [item.model_dump(exclude_none=True) for item in made.output]
        self.num_last = len(made.output)
        self.previous.append(made.id)
        self.num_stored.append(len(self.items))
        return self.read(made)


class MessagesClient:
    """Anthropic's Messages: the whole conversation in every request."""

    def __init__(self, openai, anthropic, settings: Settings, stream: bool) -> None:
        self.sdk, self.settings, self.stream = anthropic, settings, stream
        self.messages: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def results(self, results: list[tuple[str, str]]) -> None:
        blocks = [{"type": "tool_result", "tool_use_id": id_, "content": text} for id_, text in results]
        self.messages.append({"role": "user", "content": blocks})

    def think(self, text: str) -> None:
        self.messages[-1]["content"].insert(0, {"type": "thinking", "thinking": text, "signature": "s"})

    def rewrite(self, text: str) -> None:
        self.messages[-1] = {"role": "assistant", "content": text}

    def forget(self) -> None:
        self.messages.pop()

    async def ask(self) -> Reply:
        chosen = self.settings
        tool = {key: ADD["function"][key] for key in ("name", "description")}
        tool["input_schema"] = ADD["function"]["parameters"]
        names = {None: None, "auto": {"type": "auto"}, "none": {"type": "none"}, "required": {"type": "any"}}
        choice = names[chosen.choice] if chosen.choice in names else {"type": "tool", "name": chosen.choice}
        if chosen.single:
            choice = (choice or {"type": "auto"}) | {"disable_parallel_tool_use": True}
        schema = chosen.schema
        request = _set(
            messages=self.messages,
            system=chosen.system,
            stop_sequences=chosen.stop,
            tools=[tool] if chosen.offers_add else None,
            tool_choice=choice,
            output_config=None if schema is None else {"format": {"type": "json_schema", "schema": schema}},
            extra_body=_set(temperature=chosen.temperature, top_p=chosen.top_p, top_k=chosen.top_k),  # the SDK has none
        )
        request |= {"model": "policy", "max_tokens": chosen.max_tokens}
        if self.stream:
            async with self.sdk.messages.stream(**request) as stream:
                made = await stream.get_final_message()
        else:
            made = await self.sdk.messages.create(**request)
        self.messages.append(
            {"role": "assistant", "content": [each.model_dump(exclude_none=True) for each in made.content]}
        )
        calls = [(each.id, each.name, each.input) for each in made.content if each.type == "tool_use"]
        text = "".join(each.text for each in made.content if each.type == "text")
        usage = (made.usage.input_tokens, made.usage.output_tokens)
        return Reply(text, calls, made.stop_reason == "max_tokens", usage, None)


CLIENTS = {"chat": ChatClient, "items": ItemsClient, "stored": StoredClient, "messages": MessagesClient}
