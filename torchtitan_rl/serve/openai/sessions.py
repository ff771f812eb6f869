"""Sessions: prompts and completions of one agent, turn by turn, as tokens.

A request gives a whole conversation as messages. A session recognises what the policy said before, and makes the next
prompt from the tokens of that turn: its prompt, what was sampled, and what the chat template puts behind. Requests that
go on from an earlier turn, from the beginning, or from something else all get along: each turn keeps its own prompt,
and `algorithm.datums` trains turns that extend each other as one sequence and any other as a sequence of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl.rollout.agent import Endpoint, SessionLimits
from torchtitan_rl.rollout.chat import Chat
from torchtitan_rl.rollout.policy import Policy
from torchtitan_rl.rollout.renderings import Renderings
from torchtitan_rl.rollout.sampler import SamplingFailed
from torchtitan_rl.serve.errors import Refused, invalid
from torchtitan_rl.serve.limits import Places, Rate
from torchtitan_rl.serve.openai.message_spans import MessageSpans
from torchtitan_rl.serve.openai.messages import compared, compared_answer, rendered_message
from torchtitan_rl.serve.openai.requests import ChatMessage, ChatRequest, CompletionRequest, Sampled
from torchtitan_rl.serve.openai.settings import sampling_params
from torchtitan_rl.serve.openai.stop_texts import cut
from torchtitan_rl.serve.openai.structure import Structure, refuse_for_training, structure
from torchtitan_rl.serve.openai.tool_calls import Call, ParsedCompletion, ToolReader, calls_of_json
from torchtitan_rl.tasks.family import stream
from torchtitan_rl.types import Completion, SamplingParams, Turn

__all__ = ["Answer", "Prompt", "Session"]


@dataclass(slots=True)
class Prompt:
    """What the policy is given: tokens, and what they stand for."""

    tokens: list[int]
    stop_token_ids: list[int] = field(default_factory=list)
    """The end of an assistant's turn, where it is not the tokenizer's end of sequence."""
    after: Answer | None = None
    """The earlier turn that the prompt goes on from; None: it begins a sequence."""
    messages: list[dict] = field(default_factory=list)
    tools: list[dict] = field(default_factory=list)
    key: int = 0
    """Of the conversation up to here."""
    text: str | None = None
    """The text, for a prompt that was given as text."""
    structure: Structure = field(default_factory=Structure)
    """What the answer must be."""
    num_drifted: int = 0
    """Messages that come back otherwise than the policy said them."""


@dataclass(slots=True, eq=False)
class Answer:
    """One completion, as tokens and as the client reads it."""

    id: str
    """24 letters that no other completion has; the identities of its calls have them too."""
    number: int
    """Counts the turns of a session, in the order in which they were asked for."""
    prompt: Prompt
    completion: Completion
    text: str
    """Without special tokens, and without the stop text."""
    content: str | None
    """The text besides calls of tools."""
    calls: list[Call]
    seconds: tuple[float, float, float] | None = None
    """See `Turn.seconds`; what an agent does with an answer is not known."""

    @property
    def tokens(self) -> list[int]:
        """The prompt's and the completion's."""
        return [*self.prompt.tokens, *self.completion.tokens]

    def begins(self, tokens: list[int]) -> bool:
        """Whether a prompt goes on from this turn."""
        num_prompt_tokens = len(self.prompt.tokens)
        end = num_prompt_tokens + len(self.completion.tokens)
        return (
            tokens[num_prompt_tokens:end] == self.completion.tokens and tokens[:num_prompt_tokens] == self.prompt.tokens
        )

    @property
    def finish_reason(self) -> str:
        """`length` also with calls: a parser may have closed the one that the limit cut off."""
        cut_off = self.completion.finish_reason == "length"
        return "tool_calls" if self.calls and not cut_off else self.completion.finish_reason


class Session:
    """One rollout, or one client without memory. `policy` samples, with its limits, its temperature and its stops.

    Turn i samples from the stream (seed, i). Nothing that was sampled is tokenised again.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        seed: int | None,
        context_tokens: int,
        vocab_size: int = 0,
        limits: SessionLimits,
        spans: MessageSpans,
        renderings: Renderings,
        places: Places | None = None,
        model: str = "policy",
        tool_reader: ToolReader | None = None,
        ignored: Sequence[str] = (),
    ) -> None:
        """`seed` None: the request's own, else a random one, and the request's temperature. `vocab_size` is the
        model's; 0: the tokenizer's. `ignored` names parameters of requests that are left out."""
        self.policy, self.seed, self.context_tokens, self.limits = policy, seed, context_tokens, limits
        self.vocab_size = vocab_size or len(policy.tokenizer)
        self.model, self.tool_reader, self.ignored = model, tool_reader, frozenset(ignored)
        self.id, self.secret = secrets.token_hex(8), secrets.token_urlsafe(24)
        self.endpoint: Endpoint | None = None
        self.answers: list[Answer] = []
        """What was answered and received, in the order in which it was asked for."""
        self.counts = dict.fromkeys(("drift", "undelivered", "refused"), 0)
        """`drift`: messages that came back otherwise than the policy had said them. `undelivered`: completions whose
        client had gone. `refused`: requests that were answered with an error. With a tool parser, `malformed`:
        completions that begin a call and hold none. With `ignored`, `ignored`: parameters that were left out."""
        if tool_reader is not None:
            self.counts["malformed"] = 0
        if self.ignored:
            self.counts["ignored"] = 0
        self.reward: tuple[float, dict[str, float]] | None = None
        self.ended_by = ""
        """The limit that refused the newest request: `turns` or `tokens`. Empty again once a later request is
        answered."""
        self.failure: SamplingFailed | None = None
        self.fault = ""
        """Why no reward of this session can count."""
        self.closed = False
        self._rate, self._places = Rate(limits.requests_per_s), places or Places(limits.max_parallel)
        self._num_requested = self._num_in_flight = self._num_tokens = 0
        self._limit_at = 0
        """The completions that had been asked for when `ended_by` was set."""
        self._began = time.perf_counter()
        self._by_key: dict[int, list[Answer]] = {}
        self._kept_keys: set[int] = set()
        self._spans, self._renderings = spans, renderings

    # Prompts.

    def chat_prompt(self, request: ChatRequest) -> Prompt:
        """The prompt of a conversation. Raises Refused for messages that cannot be rendered."""
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
        if self.policy.for_training:
            refuse_for_training(request, tools)
            constraint = Structure(reads_calls=request.tool_choice != "none")
        else:
            constraint = structure(request, tools, self.tool_reader)
        try:
            return dataclasses.replace(self._conversation(request.messages, tools), structure=constraint)
        except Exception as error:  # a template, or a tokenizer, may raise anything, always about the messages
            raise invalid(" ".join(str(error).split())[:500] or type(error).__name__, "messages") from error

    def _conversation(self, messages: list[ChatMessage], tools: list[dict]) -> Prompt:
        chat = Chat(self.policy.tokenizer, tools or None, self._renderings)
        rendered = [rendered_message(message) for message in messages]
        keys = [hash(("tools", json.dumps(tools)))]
        for message in messages:
            keys.append(hash((keys[-1], *compared(message))))
        num_drifted = 0
        for i in range(len(messages) - 1, -1, -1):
            if messages[i].role != "assistant":
                continue
            if (earlier := self._answer_sent_back(keys[i + 1], messages[i])) is not None:
                tokens = chat.extend(
                    earlier.prompt.tokens, earlier.completion, earlier.prompt.messages, rendered[i + 1 :]
                )
                stops = earlier.prompt.stop_token_ids
                return Prompt(tokens, stops, earlier, rendered, tools, keys[-1], num_drifted=num_drifted)
            num_drifted += keys[i] in self._kept_keys
        end = chat.end_of_turn(rendered)
        stops = [] if end in (None, self.policy.tokenizer.eos_token_id) else [end]
        return Prompt(chat.prompt(rendered), stops, None, rendered, tools, keys[-1], num_drifted=num_drifted)

    def text_prompts(self, request: CompletionRequest) -> list[Prompt]:
        """The prompts of a request for completions: text or tokens, one or several. Raises Refused."""
        content = request.prompt
        several = isinstance(content, list) and bool(content) and not isinstance(content[0], int)
        try:
            prompts = [self._plain(prompt) for prompt in (content if several else [content])]
        except (ValueError, TypeError, OverflowError) as error:
            raise invalid(f"prompt: {error}", "prompt") from error
        if any(not prompt.tokens for prompt in prompts):
            raise invalid("prompt: has no tokens; give at least one", "prompt")
        return prompts

    def _plain(self, prompt: Any) -> Prompt:
        if isinstance(prompt, str):
            earlier = [  # the same prompt once more is another branch, also after an empty answer
                a
                for a in self.answers
                if a.prompt.text is not None and a.prompt.text != prompt and prompt.startswith(a.prompt.text + a.text)
            ]
            if (after := max(earlier, key=lambda a: len(a.prompt.text + a.text), default=None)) is None:
                return Prompt(self.policy.encode(prompt), text=prompt)
            # The sampled tokens have the stop text, at which the answer was cut: it does not come twice.
            stop = self.policy.text(after.completion)[len(after.text) :]
            rest = prompt[len(after.prompt.text) + len(after.text) :].removeprefix(stop)
            return Prompt([*after.tokens, *self.policy.encode(rest)], after=after, text=prompt)
        self._check_ids(prompt, "prompt")
        after = next((answer for answer in reversed(self.answers) if answer.begins(prompt)), None)
        return Prompt(list(prompt), after=after)

    def _check_ids(self, ids: list[int], param: str) -> None:
        size = self.vocab_size
        if (wrong := next((i for i in ids if not 0 <= i < size), None)) is not None:
            raise invalid(f"{param}: token id {wrong} is outside the vocabulary of {size}; give ids of it", param)

    def count_tokens(self, request: ChatRequest) -> int:
        """The tokens of the prompt of a conversation; nothing is sampled. Raises Refused."""
        self._rate.take()
        return len(self.chat_prompt(request).tokens)

    # Completions.

    async def complete(
        self, prompts: list[Prompt], request: Sampled, client_gone: asyncio.Future[None]
    ) -> list[Answer]:
        """`n` completions of each prompt, prompt by prompt. They count as turns once `keep` is told. Raises Refused;
        with the status 499 once `client_gone` is done: the generators are told that nobody waits for them."""
        n = (request.n or 1) * len(prompts)
        self._admit(n)
        requests: list[tuple[Prompt, SamplingParams]] = []
        for prompt in prompts:
            room = self.context_tokens - len(prompt.tokens)
            if room < 1:
                self._stand_at("tokens")
                raise invalid(  # LiteLLM knows this case by OpenAI's words, and by no code
                    f"messages: the prompt has {len(prompt.tokens)} tokens, and this model's maximum context length is "
                    f"{self.context_tokens} tokens with a completion; send less",
                    "messages",
                    "context_length_exceeded",
                )
            self._check_ids(request.stop_token_ids or [], "stop_token_ids")
            params = sampling_params(
                request, self.policy, prompt.stop_token_ids, room, prompt.structure.tag, own=self.seed is None
            )
            requests += [(prompt, _nth(params, index)) for index in range(request.n or 1)]
        num_tokens = sum(len(prompt.tokens) + params.max_tokens for prompt, params in requests)
        self._places.take(n, num_tokens)
        first, self._num_requested = self._num_requested, self._num_requested + n
        self._num_in_flight += n
        calls = [
            asyncio.ensure_future(self._complete(prompt, params, first + i, request.stops))
            for i, (prompt, params) in enumerate(requests)
        ]
        completions = asyncio.gather(*calls)
        client_gone.add_done_callback(lambda _: completions.cancel())
        try:
            with self._spans.away():
                return await completions
        except asyncio.CancelledError:
            if not client_gone.done():
                raise
            self.counts["undelivered"] += n
            raise Refused(499, "client: has closed the connection") from None
        except RuntimeError as error:
            self.failure = SamplingFailed(str(error))
            raise Refused(
                503, f"the generators gave no completion ({error}); try again", code="no_completion"
            ) from error
        except ValueError as error:
            raise invalid(str(error)) from error
        finally:
            for call in calls:  # siblings of one that failed hold their places until they have ended
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            self._places.give(n, num_tokens)
            self._num_in_flight -= n

    def _admit(self, n: int) -> None:
        """Raises Refused for a session that is closed or has reached a limit."""
        limits = self.limits
        if self.closed:
            raise Refused(404, "session: has ended; open another", code="session_not_found")
        self._rate.take()
        # What failed, or came when its client had gone, is no turn: clients ask for it again.
        turns = limits.max_turns and len(self.answers) + self._num_in_flight + n > limits.max_turns
        if turns or (limits.max_tokens and self._num_tokens >= limits.max_tokens):
            self._stand_at("turns" if turns else "tokens")
            reached = f"{limits.max_turns} completions" if turns else f"{limits.max_tokens} sampled tokens"
            raise invalid(f"session: its limit of {reached} is reached; end here", code="session_limit_reached")

    def _stand_at(self, limit: str) -> None:
        self.ended_by, self._limit_at = limit, self._num_requested

    async def _complete(self, prompt: Prompt, params: SamplingParams, number: int, stops: list[str]) -> Answer:
        self._spans.go()
        seed = stream(self.seed, number) if self.seed is not None else params.seed
        params = dataclasses.replace(params, seed=secrets.randbits(63) if seed is None else seed)
        asked_s = time.perf_counter() - self._began
        with self._spans.away():
            completion = await self.policy.sampler.sample(
                prompt.tokens, params, policy_version=self.policy.policy_version
            )
        sampled_s = time.perf_counter() - self._began
        self._num_tokens += len(completion.tokens)
        text = cut(self.policy.text(completion), stops)
        answer_id = self._answer_id(number)
        read = self._read(prompt, completion, text, answer_id, stops)
        self._spans.stop()
        seconds = (asked_s, sampled_s, sampled_s)
        return Answer(answer_id, number, prompt, completion, text, read.content, read.calls, seconds)

    def _answer_id(self, number: int) -> str:
        """A rollout's are the same whenever it is sampled again: a template may show a call's identity."""
        if self.seed is None:
            return secrets.token_hex(12)
        return hashlib.blake2b(f"{self.seed}/{number}".encode(), digest_size=12).hexdigest()

    def _answer_sent_back(self, key: int, message: ChatMessage) -> Answer | None:
        """The answer that a client sends back as `message`: of several alike the one whose calls it names, else the one
        that was given last."""
        alike = self._by_key.get(key, [])
        named = {call.id for call in message.tool_calls or ()}
        return next((one for one in alike if named.intersection(call.id for call in one.calls)), (alike or [None])[-1])

    def _read(
        self, prompt: Prompt, completion: Completion, text: str, answer_id: str, stops: list[str]
    ) -> ParsedCompletion:
        if prompt.structure.calls_as_json:
            read = calls_of_json(text, answer_id)
        elif self.tool_reader is not None and prompt.tools and prompt.structure.reads_calls:
            read = self.tool_reader.read(completion, text, prompt.tools, answer_id, stops)
        else:
            return ParsedCompletion(text, [])
        if self.tool_reader is not None:
            self.counts["malformed"] += read.malformed
        return read

    def keep(self, answers: list[Answer]) -> None:
        """The client gets these completions: they are turns of the rollout from now on."""
        if self.closed:
            return
        if all(answer.number >= self._limit_at for answer in answers):
            self.ended_by = ""
        self.failure = None  # a later try of the client has healed it
        prompts = {id(answer.prompt): answer.prompt for answer in answers}
        self.counts["drift"] += sum(prompt.num_drifted for prompt in prompts.values())
        self.answers += answers
        self.answers.sort(key=lambda answer: answer.number)
        for answer in answers:
            if answer.prompt.messages:
                self._kept_keys.add(answer.prompt.key)
                key = hash((answer.prompt.key, *compared_answer(answer.content, answer.calls)))
                self._by_key.setdefault(key, []).append(answer)

    def turns(self) -> list[Turn]:
        """The turns, each after the one that it extends where nothing else went on from there, sequence by sequence in
        the order in which they began."""
        sequences: list[list[Answer]] = []
        for answer in self.answers:
            goes_on = next((s for s in sequences if s[-1] is answer.prompt.after), None)
            if goes_on is None:
                sequences.append([answer])
            else:
                goes_on.append(answer)
        flat = [answer for sequence in sequences for answer in sequence]
        return [Turn(prompt_tokens=a.prompt.tokens, completion=a.completion, seconds=a.seconds) for a in flat]


def _nth(params: SamplingParams, index: int) -> SamplingParams:
    """Of choice `index` of a request: choices of one seed are drawn with the seeds that follow, as vLLM's are."""
    return params if params.seed is None else dataclasses.replace(params, seed=(params.seed + index) % 2**63)
