"""Conversations as tokens. Sampled tokens are never tokenised again: a prompt is the last prompt with tokens appended.

A chat template renders a whole list of messages as text. A rollout needs only the tokens between the end of one
completion and the beginning of the next. `Chat.between` cuts these tokens out of a rendering in which a mark stands for
the completion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchtitan_rl.rollout.renderings import Renderings, digest
from torchtitan_rl.tasks.env import Message, Observation
from torchtitan_rl.types import Completion

__all__ = ["Chat", "Dialogue", "takes_system_messages_within"]

_MARK = "what-the-policy-said"


class Chat:
    """A tokenizer's chat template.

    Example, with the template of the character tokenizer: `prompt([user])` is `<user>:hi\\n<assistant>:`, and
    `between([user], [tool])` is `<eos>\\n<tool>:7\\n<assistant>:`.
    Raises ValueError when the tokenizer has no template, or when the template refuses messages or omits some.
    """

    def __init__(self, tokenizer, tools: list[dict] | None = None, renderings: Renderings | None = None) -> None:
        """`renderings` keeps what the template rendered; None: every call renders."""
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "tokenizer.chat_template=None: the prompt is a list of messages and the tokenizer has no chat "
                "template; set model.assets to one that has, or give prompts as text"
            )
        self.tokenizer, self.tools = tokenizer, tools
        self._renderings = renderings
        # The tools' hash is kept: descriptions of tools are many times as large as their tokens.
        self._template = "" if renderings is None else f"{id(tokenizer)} {digest(tools).hex()}"

    def prompt(self, messages: list[Message]) -> list[int]:
        """Tokens of `messages` up to the beginning of the assistant's next message."""
        return self._once([messages], lambda: self._encode(self._text(messages, more=True)))

    def between(self, history: list[Message], following: list[Message], *, more: bool = True) -> list[int]:
        """Tokens after the text of the assistant's message that follows `history`: the end of the turn, the `following`
        messages and, with `more`, the beginning of the assistant's next message."""
        return self._once([history, following, more], lambda: self._between(history, following, more))

    def _between(self, history: list[Message], following: list[Message], more: bool) -> list[int]:
        mark, number, messages = _MARK, 0, str([history, following, self.tools])
        while mark in messages:
            number += 1
            mark = f"{_MARK}-{number}-"
        text = self._text([*history, {"role": "assistant", "content": mark}, *following], more)
        if text.count(mark) != 1:
            raise ValueError(
                f"tokenizer.chat_template: shows an assistant message {text.count(mark)} times after "
                f"{len(history)} messages; use a template that shows each once"
            )
        return self._encode(text.partition(mark)[2])

    def end_of_turn(self, messages: list[Message]) -> int | None:
        """The special token that ends an assistant's turn after `messages`; None where the template has none."""
        # Rendered with more to come, because some templates leave the last turn open.
        return self._first_special(self.between(messages, []))

    def extend(
        self, tokens: list[int], completion: Completion, history: list[Message], following: list[Message]
    ) -> list[int]:
        """The next prompt: `tokens`, the completion's tokens, and the tokens of `between`.

        A completion that a stop string or the token limit cut off gets the template's end of turn; a completion that
        sampled the end of turn keeps its own.
        """
        between = self.between(history, following)
        if completion.tokens[-1:] == [self._first_special(between)]:
            between = between[1:]
        return [*tokens, *completion.tokens, *between]

    def render(self, messages: list[Message]) -> tuple[list[int], list[bool]]:
        """(tokens of a whole conversation, mask: True for the assistant's text and its ends of turns).

        For demonstrations: a rollout with the same messages has the same tokens. A template that rewrites earlier
        turns, for example by leaving out old reasoning, renders a finished conversation to other tokens.
        Raises ValueError when there is no assistant message.
        """
        spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not spoken:
            raise ValueError(f"messages={repr(messages)[:80]}: has no assistant message; there is nothing to imitate")
        tokens = list(self.prompt(messages[: spoken[0]]))  # a copy: `Renderings` keeps the list
        mask = [False] * len(tokens)
        for i, following in zip(spoken, [*spoken[1:], None]):
            content_tokens = self._encode(messages[i]["content"])
            between = self.between(messages[:i], messages[i + 1 : following], more=following is not None)
            ends = self._first_special(between) is not None
            if not ends and i == spoken[-1] and (end := self.end_of_turn(messages[:i])) is not None:
                between, ends = [end, *between], True  # an open turn: the policy must learn its end
            tokens += content_tokens + between
            mask += [True] * len(content_tokens) + [ends and j == 0 for j in range(len(between))]
        return tokens, mask

    def _once(self, arguments: list, render: Callable[[], list[int]]) -> list[int]:
        return render() if self._renderings is None else self._renderings.once([self._template, arguments], render)

    def _first_special(self, tokens: list[int]) -> int | None:
        return tokens[0] if tokens and tokens[0] in self.tokenizer.all_special_ids else None

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _text(self, messages: list[Message], more: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=self.tools, tokenize=False, add_generation_prompt=more
            )
        except Exception as error:  # a template may raise anything, always about the messages
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(
                f"tokenizer.chat_template: refuses messages of the roles {roles} "
                f"({' '.join(str(error).split())}); give it what it takes"
            ) from error


def takes_system_messages_within(tokenizer: Any) -> bool:
    """Whether the chat template renders a system message after others; some, such as Qwen3.5's, refuse it."""
    messages = [{"role": role, "content": "-"} for role in ("system", "user", "system", "user")]
    try:
        Chat(tokenizer).prompt(messages)
    except ValueError:
        return False
    return True


class Dialogue:
    """The prompts of one rollout: each is the previous prompt, its completion and an observation. The first observation
    sets the kind: text, messages or tokens. Raises ValueError for an observation of another kind."""

    def __init__(self, tokenizer, first: Observation, tools: list[dict] | None = None) -> None:
        # Where a type is ignored below, `kind` has told text, messages and tokens apart.
        self.tokenizer, self.kind = tokenizer, _kind(first)
        self.stop_token_ids: list[int] = []
        """The end of an assistant's turn, where the template's differs from the tokenizer's end-of-sequence token."""
        if self.kind == "messages":
            self.messages: list[Any] = list(first)
            self.chat = Chat(tokenizer, tools)
            end = self.chat.end_of_turn(self.messages)
            self.stop_token_ids = [] if end in (None, tokenizer.eos_token_id) else [end]
            self.tokens = self.chat.prompt(self.messages)
        else:
            self.tokens = self._plain(first)  # type: ignore[arg-type]

    def extend(self, completion: Completion, observation: Observation) -> None:
        """Makes `tokens` the next prompt: appends a completion and the environment's observation."""
        if (kind := _kind(observation)) != self.kind:
            raise ValueError(
                f"observation={repr(observation)[:80]}: is {kind} where the first was {self.kind}; keep to one kind"
            )
        if self.kind == "messages":
            self.tokens = self.chat.extend(self.tokens, completion, self.messages, observation)  # type: ignore[arg-type]
            text = self.tokenizer.decode(completion.tokens, skip_special_tokens=True)
            self.messages += [{"role": "assistant", "content": text}, *observation]
        else:
            self.tokens = [*self.tokens, *completion.tokens, *self._plain(observation)]  # type: ignore[arg-type]

    def _plain(self, observation: str | list[int]) -> list[int]:
        if isinstance(observation, str):
            return self.tokenizer.encode(observation, add_special_tokens=False)
        return list(observation)


def _kind(observation: Observation) -> str:
    if isinstance(observation, str):
        return "text"
    return "messages" if isinstance(observation[0], dict) else "tokens"
