"""A model behind an OpenAI-compatible endpoint as a judge. The `openai` package comes with vLLM."""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl.tasks.judging import judge
from torchtitan_rl.tasks.limited import PerLoop, log_retries
from torchtitan_rl.tasks.reward_parts import Parts
from torchtitan_rl.types import Task

__all__ = ["HttpJudge", "Verdict", "only_number"]

LONGEST_WAIT_S = 120.0
"""Seconds that a server may ask the `openai` package to wait before a retry; a longer wait is no retry."""

Message = dict[str, str]


def only_number(text: str) -> float:
    """The number in a judge's answer, which is 7 in `Score-7`. Raises ValueError unless there is exactly one."""
    written = text.replace("\u2212", "-")  # the typographic minus sign
    numbers = re.findall(r"(?:(?<![\w)])[-+])?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", written)
    if len(numbers) != 1:
        raise ValueError(
            f"the judge answered {text[:80]!r}, which has {len(numbers)} numbers; ask for a number and nothing else, "
            "or give HttpJudge a parse function"
        )
    return float(numbers[0])


@dataclass(frozen=True, slots=True)
class Verdict:
    """Reads a judge that answers with one of a few words: `Verdict({"right": 1.0, "wrong": 0.0})`. Capitals, blanks and
    full stops at the end do not count. Raises ValueError for words that are empty or alike, and for an answer that is
    no such word."""

    scores: dict[str, float]
    """Word -> reward."""

    def __post_init__(self) -> None:
        words = [_bare(word) for word in self.scores]
        if not all(words) or len(set(words)) != len(words) or not words:
            raise ValueError(f"verdict.scores={self.scores}: has an empty word, or two that are alike; use words apart")

    def __call__(self, text: str) -> float:
        by_word = {_bare(word): score for word, score in self.scores.items()}
        if _bare(text) not in by_word:
            raise ValueError(
                f"the judge answered {text[:80]!r}, which is none of {', '.join(map(repr, self.scores))}; ask for one "
                "of these words and nothing else"
            )
        return by_word[_bare(text)]


def _bare(word: str) -> str:
    return word.strip().rstrip(". \t\n").casefold()


@dataclass(kw_only=True, slots=True)
class HttpJudge:
    """A reward function that asks a model about each completion, in a request of its own.

    The `openai` package retries what may pass: no connection, no answer in time, status 408, 409, 429 and 5xx. It waits
    half a second and longer, or as long as the server says. What fails after the last retry is a failed reward of the
    run: `algorithm.on_rollout_failure` says what follows.

    Example::

        HttpJudge(base_url="http://localhost:8000/v1", model="Qwen/Qwen3-8B", concurrency=32,
                  prompt="Question: {prompt}\\nAnswer: {completion}\\nHow good is it? Only a number from 0 to 1.")
    """

    base_url: str
    """Address of the endpoint, up to and with its version."""
    model: str
    prompt: str | Callable[[Task, str], str | list[Message]]
    """What the judge reads: a text in which {prompt}, {answer} and {completion} are filled in (write other braces
    twice), or a function of (task, completion) that returns text or messages."""
    parse: Callable[[str], float] = only_number
    """The reward from the judge's answer: `only_number`, a `Verdict`, or a function of your own. An error that `parse`
    raises is not retried; it fails the group's rewards."""
    concurrency: int = 8
    """Requests at a time."""
    retries: int = 2
    """Further tries of a request."""
    timeout_s: float = 30.0
    """Seconds of one try, waiting for a turn not included."""
    request: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0, "max_tokens": 512})
    """Further fields of each request."""
    chat: bool = True
    """False asks the endpoint to go on with a text (`/completions`), for a model without a chat template."""
    parse_truncated: bool = False
    """Whether `parse` also reads an answer that the token limit cut off. False: such an answer fails the group's
    rewards, because half a number reads as another number."""
    api_key_env: str = ""
    """Name of the environment variable that holds the key; empty: the endpoint needs none."""
    _clients: PerLoop = field(default_factory=PerLoop, init=False, repr=False, compare=False)
    _retried: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"http_judge.base_url={self.base_url!r}: is no address; begin with http:// or https://")
        if self.concurrency < 1:
            raise ValueError(f"http_judge.concurrency={self.concurrency}: allows no request; use 1 or more")
        if self.retries < 0:
            raise ValueError(f"http_judge.retries={self.retries}: is not possible; use 0 or more")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"http_judge.timeout_s={self.timeout_s}: is not possible; use a positive number")
        if isinstance(self.prompt, str):
            try:
                without = self.prompt.format(prompt="", answer="", completion="")
            except (KeyError, IndexError, ValueError, AttributeError) as error:
                raise ValueError(
                    f"http_judge.prompt={self.prompt[:60]!r}: cannot be filled in ({type(error).__name__}: {error}); "
                    "use {prompt}, {answer} and {completion}, and write other braces twice"
                ) from None
            if without == self.prompt.format(prompt="", answer="", completion="x"):
                raise ValueError(
                    f"http_judge.prompt={self.prompt[:60]!r}: does not show the judge the completion; put in "
                    "{completion}"
                )

    async def __call__(self, task: Task, completions: list[str]) -> list[float]:
        """One reward per completion; each is requested by itself. Raises the first error, once all have ended."""
        client, slots = self._clients.get(self._connect)
        results: list = await asyncio.gather(
            *(self._ask(client, slots, task, completion) for completion in completions), return_exceptions=True
        )
        if failed := next((answer for answer in results if isinstance(answer, BaseException)), None):
            raise failed
        return results

    async def judged(
        self, task: Task, completions: list[str], timeout_s: float, parts: Parts | None = None
    ) -> list[float]:
        """As `judging.judge` calls it: the judge's own deadline counts, not the run's `timeout_s`."""
        return await judge(self.__call__, task, completions, math.inf, parts)

    async def _ask(self, client: Any, slots: asyncio.Semaphore, task: Task, completion: str) -> float:
        content = _filled(self.prompt, task, completion)
        if not self.chat and not isinstance(content, str):
            raise ValueError("http_judge.chat=False: goes on with a text, and prompt gave messages; give a text")
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        body = {"messages": messages} if self.chat else {"prompt": content}
        async with slots:
            # The client's deadline begins again with every byte, and some servers send blanks while they think.
            limit_s = (self.retries + 1) * (self.timeout_s + LONGEST_WAIT_S)
            try:
                async with asyncio.timeout(limit_s) as scope:
                    asking = (client.chat.completions if self.chat else client.completions).with_raw_response
                    response = await asking.create(model=self.model, **body, **self.request)
                    answer = response.parse()
            except Exception as error:
                if scope.expired():
                    raise ConnectionError(
                        f"{self.base_url}: gave no whole answer within {limit_s:g} s, retries included; see what keeps "
                        "the server, or ask for less (max_tokens in http_judge.request)"
                    ) from error
                raise ConnectionError(f"{self.base_url}: {type(error).__name__}: {error}") from error
        if retries := response.retries_taken:
            self._retried += retries
            why = f"{self.base_url}: a request was answered at try {retries + 1}"
            log_retries(self._retried - retries, self._retried, why)
        if not getattr(answer, "choices", None):
            raise ValueError(
                f"http_judge.base_url={self.base_url!r}: gave no completion, but {str(answer)[:80]!r}; give the "
                "address up to and with its version, such as http://HOST:PORT/v1"
            )
        choice = answer.choices[0]
        text = (choice.message.content if self.chat else choice.text) or ""
        if choice.finish_reason == "length" and not self.parse_truncated:
            raise ValueError(
                f"the judge's answer {text[-80:]!r} was cut off by the token limit; raise max_tokens in "
                "http_judge.request, or set http_judge.parse_truncated"
            )
        return self.parse(text)

    def _connect(self) -> tuple[Any, asyncio.Semaphore]:
        import openai  # takes a second

        key = os.environ.get(self.api_key_env, "") if self.api_key_env else "none"
        if not key:
            raise ValueError(f"http_judge.api_key_env={self.api_key_env!r}: is not set; export the endpoint's key")
        client = openai.AsyncOpenAI(
            base_url=self.base_url, api_key=key, timeout=self.timeout_s, max_retries=self.retries
        )
        return client, asyncio.Semaphore(self.concurrency)


def _filled(prompt: str | Callable[[Task, str], str | list[Message]], task: Task, completion: str) -> Any:
    if not isinstance(prompt, str):
        return prompt(task, completion)
    question = task.prompt
    if not isinstance(question, str):
        question = "\n".join(f"{message['role']}: {message['content']}" for message in question)
    return prompt.format(prompt=question, answer=task.answer, completion=completion)
