"""A request for another number of generator replicas, and its answer: files in the directory of a run that goes on.

scale.json     what was asked for: {"id", "replicas"}
scaled.json    the answer: {"id", "replicas", "problem"}
"""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["ScaleAnswer", "ScaleRequest", "answer", "answer_to", "ask", "forget", "request_in"]

_REQUEST, _ANSWER = "scale.json", "scaled.json"


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """How many replicas a run is to have."""

    id: str
    replicas: int


@dataclass(frozen=True, slots=True)
class ScaleAnswer:
    """How many replicas the run has after a request."""

    id: str
    """Of the request."""
    replicas: int
    problem: str
    """Why the number is not the one that was asked for; "" where it is."""


def ask(run: Path, replicas: int) -> ScaleRequest:
    """Leaves a request; one that nobody has read yet is replaced."""
    request = ScaleRequest(uuid.uuid4().hex, replicas)
    _write(run / _REQUEST, asdict(request))
    return request


def request_in(run: Path) -> ScaleRequest | None:
    """The last request; None where there is none. Raises ValueError for a file that is none."""
    content = _read(run / _REQUEST)
    if content is None:
        return None
    match content:
        case {"id": str(id), "replicas": int(replicas)}:
            return ScaleRequest(id, replicas)
    raise ValueError(f"{run / _REQUEST}: is no request; ask with `torchtitan-rl scale`")


def answer(run: Path, request: ScaleRequest, replicas: int, problem: str) -> None:
    """Answers a request; a further one is awaited then."""
    _write(run / _ANSWER, asdict(ScaleAnswer(request.id, replicas, problem)))


def answer_to(run: Path, request: ScaleRequest) -> ScaleAnswer | None:
    """The answer to a request; None before there is one."""
    content = _read(run / _ANSWER)
    return ScaleAnswer(**content) if content is not None and content["id"] == request.id else None


def forget(run: Path) -> None:
    """Removes request and answer."""
    for name in (_REQUEST, _ANSWER):
        (run / name).unlink(missing_ok=True)


def _write(file: Path, content: dict) -> None:
    beside = file.with_name(f"{file.name}.writing")
    beside.write_text(json.dumps(content) + "\n", encoding="utf-8")
    os.replace(beside, file)


def _read(file: Path) -> dict | None:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: is no JSON ({error}); ask with `torchtitan-rl scale`") from None
