"""Refusals in the form that Anthropic's SDKs expect: `{"type": "error", "error": {"type", "message"}}`."""

from __future__ import annotations

import json

from starlette.responses import Response

from torchtitan_rl.serve.dialect import renamed
from torchtitan_rl.serve.errors import Refused

__all__ = ["NAMES", "anthropic_answer"]

NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""Parameter of chat completions -> the field of Messages that it was made from."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

_rename = renamed(NAMES)


def anthropic_answer(refused: Refused) -> Response:
    refused = _rename(refused)
    kind = _TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    content = json.dumps({"type": "error", "error": {"type": kind, "message": refused.message}}, ensure_ascii=True)
    return Response(content.encode(), refused.status, refused.headers, "application/json")
