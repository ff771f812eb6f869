"""Refusals in the form that OpenAI's SDKs expect: `{"error": {"message", "type", "param", "code"}}` with a status."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

__all__ = ["Refused", "invalid", "refusal_of", "answer"]

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refused(Exception):
    """An answer other than 2xx. `param` names the parameter at fault, `code` is the word that programs compare."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> Refused:
    """A request that is wrong in itself: status 400."""
    return Refused(400, message, param=param, code=code)


def refusal_of(error: ValidationError) -> Refused:
    """The first complaint of pydantic, as a refusal that names the field."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return invalid(f"body: is not JSON ({first['ctx']['error']}); send one JSON object", code="invalid_json")
    path = ".".join(str(part) for part in first["loc"] if not str(part).startswith("function-")) or "body"
    return invalid(f"{path}: {first['msg']}; mend the field", path)


def answer(refused: Refused) -> Response:
    # ensure_ascii: a message may quote half of a surrogate pair, which UTF-8 cannot express.
    content = json.dumps(refused.body, ensure_ascii=True).encode()
    return Response(content, refused.status, refused.headers, "application/json")
