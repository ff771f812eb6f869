"""What clients are sent: chat completions and completions, whole or as a stream, in OpenAI's form."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from typing import Any

from torchtitan_rl.rollout.token_texts import pieces
from torchtitan_rl.serve.openai.requests import ChatRequest, CompletionRequest, Sampled
from torchtitan_rl.serve.openai.sessions import Answer

__all__ = [
    "answer_message",
    "chat_answer",
    "completion_answer",
    "event_stream",
    "chat_chunks",
    "completion_chunks",
    "model_list",
    "token_logprobs",
]

_NEVER = -9999.0
"""JSON has no infinity; vLLM writes the same."""


def chat_answer(answers: list[Answer], request: ChatRequest, model: str, name: str, tokenizer) -> dict[str, Any]:
    """A `chat.completion`; `name` is its id."""
    choices = [
        {
            "index": i,
            "message": answer_message(answer),
            "logprobs": {"content": token_logprobs(answer, tokenizer), "refusal": None} if request.logprobs else None,
            "finish_reason": answer.finish_reason,
            **_tokens(answer, request),
        }
        for i, answer in enumerate(answers)
    ]
    whole = {"id": name, "object": "chat.completion", "created": int(time.time()), "model": model, "choices": choices}
    if request.return_token_ids:
        whole["prompt_token_ids"] = answers[0].prompt.tokens
    return whole | {"usage": _usage(answers)}


def completion_answer(
    answers: list[Answer], request: CompletionRequest, model: str, name: str, tokenizer
) -> dict[str, Any]:
    """A `text_completion`."""
    choices = [
        {
            "index": i,
            "text": answer.text,
            "logprobs": None if request.logprobs is None else _completion_logprobs(answer, tokenizer),
            "finish_reason": answer.completion.finish_reason,
            **_tokens(answer, request),
            **({"prompt_token_ids": answer.prompt.tokens} if request.return_token_ids else {}),
        }
        for i, answer in enumerate(answers)
    ]
    head = {"id": name, "object": "text_completion", "created": int(time.time()), "model": model}
    return head | {"choices": choices, "usage": _usage(answers)}


def chat_chunks(whole: dict[str, Any], request: ChatRequest) -> Iterator[dict[str, Any]]:
    """The same answer as chunks: for each choice its role, its text with calls, and its end."""
    head = {key: whole[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    if "prompt_token_ids" in whole:
        head["prompt_token_ids"] = whole["prompt_token_ids"]
    for choice in whole["choices"]:
        index, message = choice["index"], choice["message"]
        yield head | {
            "choices": [{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
        }
        head.pop("prompt_token_ids", None)
        delta: dict[str, Any] = {} if message["content"] is None else {"content": message["content"]}
        if calls := message.get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        choice_chunk = {"index": index, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
        yield head | {
            "choices": [choice_chunk | {key: choice[key] for key in ("token_ids", "policy_versions") if key in choice}]
        }
        yield head | {"choices": [{"index": index, "delta": {}, "finish_reason": choice["finish_reason"]}]}
    if request.stream_options is not None and request.stream_options.include_usage:
        yield head | {"choices": [], "usage": whole["usage"]}


def completion_chunks(whole: dict[str, Any], request: CompletionRequest) -> Iterator[dict[str, Any]]:
    head = {key: whole[key] for key in ("id", "object", "created", "model")}
    for choice in whole["choices"]:
        yield head | {"choices": [choice]}
    if request.stream_options is not None and request.stream_options.include_usage:
        yield head | {"choices": [], "usage": whole["usage"]}


def event_stream(chunks: Iterator[dict[str, Any]]) -> bytes:
    """Chunks as server-sent events, with the end that SDKs wait for."""
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def model_list(models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Name of a model -> what else is said of it, as a `list` of models."""
    entries = [
        {"id": name, "object": "model", "created": 0, "owned_by": "torchtitan-rl", **more}
        for name, more in models.items()
    ]
    return {"object": "list", "data": entries}


def answer_message(answer: Answer) -> dict[str, Any]:
    """The assistant's message that an answer is, as a client sends it back."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return message


def _tokens(answer: Answer, request: Sampled) -> dict[str, Any]:
    """What a request may ask for beyond OpenAI's fields, of each sampled token."""
    more: dict[str, Any] = {}
    if request.return_token_ids:
        more["token_ids"] = answer.completion.tokens
    if request.return_policy_versions:
        more["policy_versions"] = answer.completion.policy_versions
    return more


def token_logprobs(answer: Answer, tokenizer) -> list[dict[str, Any]]:
    """Each sampled token with its log-probability. The bytes of all tokens, joined, are those of the text."""
    return [
        {"token": text, "logprob": _finite(value), "bytes": list(text.encode("utf-8", "replace")), "top_logprobs": []}
        for text, value in zip(pieces(tokenizer, answer.completion.tokens), answer.completion.logprobs)
    ]


def _completion_logprobs(answer: Answer, tokenizer) -> dict[str, Any]:
    texts = pieces(tokenizer, answer.completion.tokens)
    offsets, at = [], 0
    for text in texts:
        offsets.append(at)
        at += len(text)
    logprobs = [_finite(value) for value in answer.completion.logprobs]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _NEVER


def _usage(answers: list[Answer]) -> dict[str, int]:
    prompts = {id(answer.prompt): len(answer.prompt.tokens) for answer in answers}
    num_prompt_tokens = sum(prompts.values())
    num_sampled_tokens = sum(len(answer.completion.tokens) for answer in answers)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_sampled_tokens,
        "total_tokens": num_prompt_tokens + num_sampled_tokens,
    }
