"""Requests for other generator replicas or hosts, and their answers: files in the directory of a run that goes on.

scale/open.json        the hosts of the run, written once it reads requests: {"hosts"}; [] where no host can join
scale/ID.json          what was asked for: {"replicas", "join", "leave"}
scale/ID.answer.json   the answer: {"replicas", "problem"}

Requests do not replace each other: the nodes of a job ask at the same time.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["ScaleAnswer", "ScaleRequest", "answer", "answer_to", "ask", "close", "hosts_of", "open_for", "requests_in"]

_DIRECTORY, _OPEN, _ANSWER = "scale", "open", ".answer"


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """What a run is asked for: one of the three."""

    id: str
    replicas: int | None = None
    """How many replicas the run is to have."""
    join: tuple[str, ...] = ()
    """Workers, tcp://HOST:PORT, whose hosts are to join, with replicas of their own."""
    leave: tuple[str, ...] = ()
    """Workers whose hosts are to leave, with their replicas."""


@dataclass(frozen=True, slots=True)
class ScaleAnswer:
    """How many replicas the run has after a request."""

    replicas: int
    problem: str
    """Why the run has not done what it was asked for; "" where it has."""


def open_for(run: Path, hosts: list[str]) -> None:
    """Says that the run reads requests from now on, and which hosts it has: [] where none can join it."""
    close(run)  # requests of an earlier attempt
    (run / _DIRECTORY).mkdir()
    _write(run / _DIRECTORY / f"{_OPEN}.json", {"hosts": hosts})


def close(run: Path) -> None:
    """Removes requests and answers: no more are read."""
    shutil.rmtree(run / _DIRECTORY, ignore_errors=True)


def hosts_of(run: Path) -> list[str] | None:
    """Addresses HOST:PORT of the hosts of a run that reads requests; None where it does not."""
    content = _read(run / _DIRECTORY / f"{_OPEN}.json")
    return None if content is None else content["hosts"]


def ask(
    run: Path, *, replicas: int | None = None, join: tuple[str, ...] = (), leave: tuple[str, ...] = ()
) -> ScaleRequest:
    """Leaves a request. Raises ValueError for a run that does not read any."""
    request = ScaleRequest(f"{time.time_ns():020d}-{uuid.uuid4().hex}", replicas, join, leave)
    wishes = {name: value for name, value in asdict(request).items() if name != "id"}
    try:
        _write(_file(run, request.id), wishes)
    except FileNotFoundError:
        raise ValueError(
            f"run={str(run)!r}: reads no requests; it still starts, or evaluates after its last step"
        ) from None
    return request


def requests_in(run: Path) -> list[ScaleRequest]:
    """All requests that have no answer yet, in the order of time. Raises ValueError for a file that is none."""
    directory = run / _DIRECTORY
    names = {file.stem for file in directory.glob("*.json")} - {_OPEN}
    requests = []
    for name in sorted(name for name in names if not name.endswith(_ANSWER) and f"{name}{_ANSWER}" not in names):
        match _read(directory / f"{name}.json"):
            case None:
                pass  # who asked does not wait any more
            case {"replicas": int() | None as replicas, "join": list(join), "leave": list(leave)}:
                requests.append(ScaleRequest(name, replicas, tuple(map(str, join)), tuple(map(str, leave))))
            case _:
                (directory / f"{name}.json").unlink()
                raise ValueError(f"{directory / name}.json: is no request; ask with `torchtitan-rl scale`")
    return requests


def answer(run: Path, request: ScaleRequest, replicas: int, problem: str) -> None:
    """Answers a request."""
    _write(_file(run, request.id + _ANSWER), asdict(ScaleAnswer(replicas, problem)))


def answer_to(run: Path, request: ScaleRequest) -> ScaleAnswer | None:
    """The answer to a request, once; None before there is one."""
    content = _read(_file(run, request.id + _ANSWER))
    if content is None:
        return None
    for name in (request.id, request.id + _ANSWER):  # the request first: without an answer it would count as new
        _file(run, name).unlink(missing_ok=True)
    return ScaleAnswer(**content)


def _file(run: Path, name: str) -> Path:
    return run / _DIRECTORY / f"{name}.json"


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
        file.unlink()
        raise ValueError(f"{file}: is no JSON ({error}); ask with `torchtitan-rl scale`") from None
