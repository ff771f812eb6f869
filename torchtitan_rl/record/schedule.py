"""The schedule of a run: what the clock decided. With it the same engine steps can be taken again.

An engine is a function of its commands and of the number of steps it had taken when it executed each of them: which
requests share a step, and which version samples a token, follow. So the commands are all that is recorded. With
adapters side by side (`generator.max_adapters`) a load names the slot, and an admission the version of each request::

    schedule/attempt-1/environment.json       what else the numbers depend on: versions, processor, cores, backend
    schedule/attempt-1/generator-0-1.jsonl    the commands of replica 0's first engine; its replacement's are in -2

    {"iteration": 0, "unfinished": 0, "version": 3, "weights": "9c04e1d2...", "tensors": ["norm", ...], "at": ...}
    {"iteration": 0, "unfinished": 0, "requests": [[1, "a81f09c24e7b5d60"], [2, "07d0cc1f9b8e2a34"]], "at": ...}
    {"iteration": 0, "unfinished": 0, "version": 3, "weights": ..., "tensors": [...], "slot": 1, "at": ...}
    {"iteration": 0, "unfinished": 0, "requests": [[1, "a81f09c24e7b5d60"], ...], "adapters": [3, ...], "at": ...}

`iteration` counts the engine's steps before the command, `unfinished` its requests. A request has its number in the
order of the sampling client's requests, which a second replica's record repeats where the first was lost, and its
`request_key`. `weights` are 8 hexadecimal digits a tensor, in the order of `tensors`, their names, which the first load
has. The engine's own thread appends each command before it takes the next step, so a killed process leaves no step
without its commands.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Any

import xxhash

from torchtitan_rl import platform
from torchtitan_rl.record.json_lines import json_line, parsed
from torchtitan_rl.types import Request

if TYPE_CHECKING:
    import torch

__all__ = [
    "ENVIRONMENT",
    "Entry",
    "ScheduleFile",
    "Schedules",
    "digests",
    "engine_files",
    "environment",
    "followed_entries",
    "read_environment",
    "read_schedule",
    "request_key",
    "schedule_of",
    "since",
    "write_environment",
]

ENVIRONMENT = "environment.json"
_ENGINE_FILE = re.compile(r"(?P<role>generator-\d+)-(?P<number>\d+)\.jsonl")


@dataclass(kw_only=True, slots=True)
class Entry:
    """A command that an engine executed: it admitted requests, or loaded a version."""

    iteration: int
    """The steps that the engine had taken before."""
    unfinished: int
    """The requests in the engine before the command."""
    at: int = 0
    """Milliseconds since 1970. No replay depends on the differences."""
    requests: list[tuple[int, str]] = field(default_factory=list)
    """(number, key) of each request, in the order of admission; empty for a load."""
    version: int | None = None
    """The version that was loaded; None for an admission."""
    weights: str = ""
    """`digests` of the loaded tensors."""
    tensors: list[str] = field(default_factory=list)
    """The names of the tensors, at the first load."""
    slot: int | None = None
    """The slot into which adapters were loaded; None: the version is whole weights."""
    adapters: list[int] = field(default_factory=list)
    """`Request.adapter` of each request; empty: the engine has no slots."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedules:
    """Where the engines of a run write their schedules, and whose they follow."""

    directory: str
    """Of this attempt, such as `RUN/schedule/attempt-1`."""
    followed: Mapping[str, str] = field(default_factory=dict)
    """Role of a replica -> the file of the engine whose commands it executes at the same iterations; empty: each
    command is executed as it comes."""
    after_request: int = 0
    """Only what came after this many requests of the attempt is followed, see `since`."""
    patience_s: float | None = None
    """Seconds for which an engine waits for a command that is due before it follows no further; None: forever, for a
    process that may stand at a breakpoint."""


class ScheduleFile:
    """Writes the schedule of one engine, in the first file of the role that does not exist yet."""

    def __init__(self, directory: str, role: str) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._names_are_known = False
        number = 1
        while True:
            self.path = Path(directory) / f"{role}-{number}.jsonl"
            try:
                self._file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
                return
            except FileExistsError:
                number += 1

    def admitted(self, iteration: int, unfinished: int, requests: Sequence[Request]) -> None:
        keys = [(request.number, request_key(request)) for request in requests]
        adapters = [request.adapter for request in requests if request.adapter is not None]
        admission = {"requests": keys} | ({"adapters": adapters} if adapters else {})
        self._write({"iteration": iteration, "unfinished": unfinished} | admission)

    def loaded(
        self, iteration: int, unfinished: int, version: int, weights: str, names: Sequence[str], slot: int | None = None
    ) -> None:
        """`weights` are `digests`, `names` those of the tensors in order; `slot`: of adapters, None: whole weights."""
        names, self._names_are_known = [] if self._names_are_known else list(names), True
        load: dict[str, Any] = {"version": version, "weights": weights} | ({"tensors": names} if names else {})
        load |= {} if slot is None else {"slot": slot}
        self._write({"iteration": iteration, "unfinished": unfinished} | load)

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._file, json_line(line | {"at": time.time_ns() // 1_000_000}))

    def close(self) -> None:
        os.close(self._file)


def request_key(request: Request) -> str:
    """Names a request by what it asks: 16 hexadecimal digits. Equal requests have equal keys."""
    text = repr((request.tokens, request.params, request.top_k, request.cached))
    return xxhash.xxh3_64_hexdigest(text.encode())


def digests(tensors: Mapping[str, torch.Tensor]) -> str:
    """8 hexadecimal digits of the bytes of each tensor, in the order of names."""
    import torch

    def digest(tensor: torch.Tensor) -> str:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return xxhash.xxh3_64_hexdigest(data.data)[:8]

    return "".join(digest(tensors[name]) for name in sorted(tensors))


def followed_entries(file: Path, schedules: Schedules) -> list[Entry]:
    """The commands of an engine that a replay follows."""
    entries = list(read_schedule(file))
    return since(entries, schedules.after_request) if schedules.after_request else entries


def since(entries: Iterable[Entry], num_requests: int) -> list[Entry]:
    """The commands of an engine after the first `num_requests` requests of its sampling client, all of which had been
    answered, with the load of the version that it held then. The steps are counted from the load on."""
    load, kept = None, list[Entry]()
    for entry in entries:
        later = [place for place, (number, _) in enumerate(entry.requests) if number > num_requests]
        if later:
            requests, adapters = [entry.requests[place] for place in later], entry.adapters
            kept.append(
                replace(entry, requests=requests, adapters=[adapters[place] for place in later] if adapters else [])
            )
        elif entry.version is not None and kept:
            kept.append(entry)
        elif entry.version is not None:
            load = entry
    first = kept[0].iteration if kept else 0
    followed = [replace(entry, iteration=entry.iteration - first) for entry in kept]
    return followed if load is None else [replace(load, iteration=0, unfinished=0), *followed]


def schedule_of(run: Path, attempt: int) -> Path:
    """The directory of an attempt's schedule."""
    return run / "schedule" / f"attempt-{attempt}"


def engine_files(directory: Path) -> list[Path]:
    """The files of an attempt's engines, by replica and then in the order in which they took a replica's place."""
    matched = ((_ENGINE_FILE.fullmatch(file.name), file) for file in directory.glob("generator-*.jsonl"))
    return [file for *_, file in sorted((_place(m["role"]), int(m["number"]), file) for m, file in matched if m)]


def _place(role: str) -> int:
    return int(role.removeprefix("generator-"))


def read_schedule(file: Path) -> Iterator[Entry]:
    """The commands of an engine, in order; without a last line that a kill has cut off. Raises ValueError for a line
    that is damaged."""
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n")[:-1], 1):
        try:
            fields = parsed(line)
            fields["requests"] = [(n, key) for n, key in fields.get("requests", ())]
            yield Entry(**fields)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{file}, line {number}: is no command of an engine ({error}); put the file back as it was"
            ) from error


def environment(backend: str, *, shares_cores: bool) -> dict[str, Any]:
    """What the numbers of a run on this machine depend on besides its config and code. `shares_cores`: whether trainers
    and generators compute at the same time on this machine, and so with fewer threads each."""
    here: dict[str, Any] = {"backend": backend, "shares_cores": shares_cores, "cores": platform.num_cores()}
    here |= {"device": platform.device_type(), "processor": _processor(), "python": python_version()}
    return here | {name: _version(name) for name in ("torch", "torchtitan", "vllm")}


def _version(package: str) -> str:
    """The installed version; empty for none. vLLM has a package of another name for CPUs."""
    for name in (package, f"{package}-cpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    return ""


def _processor() -> str:
    """The processor's model, as the kernel names it; empty where it does not."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return ""


def write_environment(directory: Path, environment: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ENVIRONMENT).write_text(json.dumps(environment, indent=1) + "\n", encoding="utf-8")


def read_environment(directory: Path) -> dict[str, Any]:
    """What `write_environment` wrote; {} where there is none."""
    file = directory / ENVIRONMENT
    return parsed(file.read_text(encoding="utf-8")) if file.exists() else {}
