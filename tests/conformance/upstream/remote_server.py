"""Stands in for vLLM's module `tests.utils`, of which the tests of its routes use one class: here it starts nothing and
leads to the server at UPSTREAM_URL."""

import os

import anthropic
import openai

__all__ = ["RemoteOpenAIServer"]

_SETTINGS = {"api_key": "none", "max_retries": 0, "timeout": 300}


class RemoteOpenAIServer:
    """A server that runs already. Its model and arguments are those of its start."""

    def __init__(self, model: str, arguments: list[str], *, env_dict: dict[str, str] | None = None, **more) -> None:
        self.root = os.environ["UPSTREAM_URL"].removesuffix("/v1")

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *exc_info) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join([self.root, *parts])

    def get_client(self, **settings) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.root}/v1", **_SETTINGS | settings)

    def get_async_client(self, **settings) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.root}/v1", **_SETTINGS | settings)

    def get_async_client_anthropic(self, **settings) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.root, **_SETTINGS | settings)
