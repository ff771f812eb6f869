"""Refusals of Responses: OpenAI's form, with the fields as this dialect names them."""

from __future__ import annotations

from starlette.responses import Response

from torchtitan_rl.serve.dialect import renamed
from torchtitan_rl.serve.errors import Refused, answer

__all__ = ["NAMES", "responses_answer"]

NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
}
"""Parameter of chat completions -> the field of Responses that it was made from."""

_rename = renamed(NAMES)


def responses_answer(refused: Refused) -> Response:
    return answer(_rename(refused))
