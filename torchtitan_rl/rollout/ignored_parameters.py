"""Parameters of the gateway's endpoints that a session refuses, or does without where `ignored` names them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from torchtitan_rl.types import NEUTRAL

__all__ = ["CONSTRAINTS", "IGNORABLE", "MESSAGES_NOT_OFFERED", "NOT_OFFERED", "RESPONSES_NOT_OFFERED", "check_ignored"]

_OTHER = "it would draw from another distribution than the policy's"
_TOKENS = "ask for return_token_ids to see what was sampled"

NOT_OFFERED: dict[str, tuple[tuple, str]] = {
    "logit_bias": (({},), _OTHER),
    "functions": (([],), "it was replaced by tools; use tools"),
    "function_call": (("none", "auto"), "it was replaced by tool_choice; use tools"),
    "modalities": ((["text"],), "the policy writes text only"),
    "audio": ((), "the policy writes text only"),
    "prediction": ((), "there is no speculative decoding from a given text"),
    "web_search_options": ((), "there is no search"),
    "reasoning_effort": (("none",), "the chat template decides; write it into the messages"),
    "verbosity": ((), "the chat template decides; write it into the messages"),
    "best_of": ((1,), "ask for n completions and choose"),
    "echo": ((False,), "the prompt is known to who sent it"),
    "suffix": (("",), "the policy writes from left to right"),
    "top_logprobs": ((0,), "the engine gives the log-probability of each sampled token, and of no other"),
    "prompt_logprobs": ((0,), "the engine gives log-probabilities of sampled tokens"),
    "min_tokens": ((0,), _OTHER),
    "bad_words": (([],), _OTHER),
    "allowed_token_ids": (([],), _OTHER),
    "structured_outputs": ((), "use response_format"),
    "use_beam_search": ((False,), "completions are sampled"),
    "length_penalty": ((1.0,), "completions are sampled"),
    "skip_special_tokens": ((True,), _TOKENS),
    "spaces_between_special_tokens": ((True,), _TOKENS),
    "include_stop_str_in_output": ((False,), _TOKENS),
    "chat_template": ((), "the tokenizer's template renders"),
    "chat_template_kwargs": (({},), "the tokenizer's template renders, with nothing but messages and tools"),
    "add_generation_prompt": ((True,), "a completion begins a new message"),
    "continue_final_message": ((False,), "a completion begins a new message"),
}
"""Parameter -> (values that ask for nothing, why anything else is refused)."""

_UNTOUCHED = "nothing is cut out of a conversation here; send what the policy shall read"

MESSAGES_NOT_OFFERED: dict[str, tuple[tuple, str]] = {
    "thinking": (
        ({"type": "disabled"}, {"type": "adaptive"}),
        "no budget of tokens is kept for thinking; the chat template decides whether the policy thinks",
    ),
    "context_management": (
        ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        _UNTOUCHED,
    ),
    "container": ((), "no code is run here"),
    "mcp_servers": (([],), "no tools are run here"),
    "output_format": ((), "it was replaced; use output_config.format"),
    "speed": (("standard",), "there is one speed"),
}
"""The same of Anthropic's Messages, besides what they share with chat completions."""

RESPONSES_NOT_OFFERED: dict[str, tuple[tuple, str]] = {
    "background": ((False,), "a response is sent to who waits for it"),
    "context_management": (([],), _UNTOUCHED),
    "conversation": ((), "no conversations are kept but by their responses; use previous_response_id"),
    "moderation": ((), "nothing is judged but by the reward"),
    "prompt": ((), "no prompts are kept; send instructions and input"),
    "truncation": (("disabled",), _UNTOUCHED),
}
"""The same of OpenAI's Responses, besides what they share with chat completions."""

CONSTRAINTS: dict[str, tuple] = {
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
}
"""Parameter that constrains what the policy may say -> values that constrain nothing."""

IGNORABLE: dict[str, tuple] = (
    {"temperature": (), **NEUTRAL}
    | CONSTRAINTS
    | {name: neutral for name, (neutral, _) in (RESPONSES_NOT_OFFERED | MESSAGES_NOT_OFFERED | NOT_OFFERED).items()}
)
"""Parameter that a session may do without -> values that ask for nothing."""


def check_ignored(names: Iterable[str], where: str) -> None:
    """Raises ValueError for a name that no session can ignore; `where` is the setting that has the name."""
    for name in names:
        if name not in IGNORABLE:
            near: Any = difflib.get_close_matches(str(name), IGNORABLE, 1)
            proposal = f"did you mean {near[0]}?" if near else f"use some of {', '.join(sorted(IGNORABLE))}"
            raise ValueError(f"{where}={name!r}: is no parameter that a session can ignore; {proposal}")
