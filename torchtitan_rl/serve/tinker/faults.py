"""Failures in the form that Tinker's SDK expects: a sentence with a category, as a future's answer or with a status."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import ValidationError
from starlette.responses import Response

from torchtitan_rl.serve.errors import Refused

__all__ = ["Fault", "user", "server", "fault_of", "answer"]


class Fault(Exception):
    """Why a request failed: `"user"`, the request is at fault, or `"server"`."""

    def __init__(self, message: str, category: Literal["user", "server"], *, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.category, self.status = message, category, status

    @property
    def body(self) -> dict[str, str]:
        """As the answer of a future."""
        return {"error": self.message, "category": self.category}


def user(message: str, *, status: int = 400) -> Fault:
    """A fault of the request."""
    return Fault(message, "user", status=status)


def server(message: str) -> Fault:
    """A fault of the server."""
    return Fault(message, "server", status=500)


def fault_of(error: Exception) -> Fault:
    """The fault that an exception below the routes stands for: a ValueError is the caller's."""
    if isinstance(error, Fault):
        return error
    if isinstance(error, Refused):
        return Fault(error.message, "user", status=error.status)
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return user(f"{'.'.join(str(part) for part in first['loc']) or 'body'}: {first['msg']}; mend the field")
    if isinstance(error, ValueError):
        return user(str(error))
    return server(f"{type(error).__name__}: {error}")


def answer(fault: Fault) -> Response:
    """A fault as an answer of its own, for a request that made no future."""
    content = json.dumps(fault.body | {"detail": fault.message}).encode()
    return Response(content, fault.status, media_type="application/json")
