"""A gateway over a sampler that says what a test tells it to, and the SDK's client on one of its sessions."""

from contextlib import asynccontextmanager
from pathlib import Path

from openai import AsyncOpenAI
from transformers import AutoTokenizer

import torchtitan_rl
from tests.kit.sampler import policy
from torchtitan_rl.rollout.agent import SessionLimits
from torchtitan_rl.serve.gateway import Gateway, Served

BYTES = AutoTokenizer.from_pretrained(Path(torchtitan_rl.__file__).parent / "assets" / "bytes")
END = "<|end|>"
"""Ends a turn of the byte tokenizer's template."""

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def shown(tokens):
    return BYTES.decode(tokens)


@asynccontextmanager
async def session(*texts, limits=None, context_tokens=512, seed=7, tool_parser="", ignored=(), **settings):
    """(session, SDK's client on it, the scripted sampler); the policy says `texts`; it trains unless told otherwise."""
    made = policy(*texts, tokenizer=BYTES, **{"for_training": True, "max_tokens": 64} | settings)
    async with Gateway(context_tokens=context_tokens) as gateway:
        opened = gateway.open_session(
            made, seed=seed, limits=limits or SessionLimits(), tool_parser=tool_parser, ignored=ignored
        )
        async with client(opened.endpoint.base_url, opened.endpoint.api_key) as sdk:
            yield opened, sdk, made.generator


def client(base_url, api_key="none"):
    return AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=20)


@asynccontextmanager
async def served(*texts, versions=(), no_base=None, api_key="", tool_parser="", ignored=(), **settings):
    """(gateway, SDK's client without a session, the scripted sampler)."""
    made = policy(*texts, tokenizer=BYTES, max_tokens=64, **settings)
    door = Served(name="policy", policy=made, versions=lambda: list(versions), tool_parser=tool_parser, ignored=ignored)
    if no_base is not None:
        door.no_base = no_base
    async with Gateway(context_tokens=512, served=door, api_key=api_key) as gateway:
        async with client(f"{gateway.url}/v1", api_key or "none") as sdk:
            yield gateway, sdk, made.generator
