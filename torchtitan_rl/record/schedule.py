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
    {"iteration": 9, "unfinished": 2, "version": 4, "weights": "...", "under_way": [[1, 17], [2, 21]], "temperature": 1}
    {"ended": [1, 22, 0]}
    {"iteration": 12, "unfinished": 1, "cancelled": [2], "at": ...}

`iteration` counts the engine's steps before the command, `unfinished` its requests. A request has its number in the
order of the sampling client's requests, which a second replica's record repeats where the first was lost, and its
`request_key`. A load says which requests were under way, `UnderWay`, and a line of its own says that one of these has
ended, so that a replay can begin at any load: `company`. A request is cancelled when nobody waits for its answer any
more. `weights` are 8 hexadecimal digits a tensor, in the order of
`tensors`, their names, which the first load has. The engine's own thread appends each command before it takes the next
step, so a killed process leaves no step without its commands.
"""

from __future__ import annotations

import json
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
from torchtitan_rl.record.json_lines import append_to, json_line, parsed
from torchtitan_rl.types import Request

if TYPE_CHECKING:
    import torch

__all__ = [
    "ENVIRONMENT",
    "Companion",
    "ScheduleEntry",
    "ScheduleFile",
    "Schedules",
    "UnderWay",
    "company",
    "digests",
    "engine_files",
    "environment",
    "followed_entries",
    "read_environment",
    "read_schedule",
    "request_key",
    "schedule_of",
    "since",
    "since_load",
    "write_environment",
]

ENVIRONMENT = "environment.json"
_ENGINE_FILE = re.compile(r"(?P<role>generator-\d+)-(?P<number>\d+)\.jsonl")


@dataclass(kw_only=True, slots=True)
class ScheduleEntry:
    """A command that an engine executed: it admitted requests, loaded a version, or cancelled requests."""

    iteration: int
    """The steps that the engine had taken before."""
    unfinished: int
    """The requests in the engine before the command."""
    at: int = 0
    """Milliseconds since 1970. A replay uses only the order between engines (`dispatch.recorded_routes`)."""
    requests: list[tuple[int, str]] = field(default_factory=list)
    """(number, key) of each request, in the order of admission; empty for another command."""
    version: int | None = None
    """The version that was loaded; None for another command."""
    weights: str = ""
    """`digests` of the loaded tensors."""
    tensors: list[str] = field(default_factory=list)
    """The names of the tensors, at the first load."""
    slot: int | None = None
    """The slot into which adapters were loaded; None: the version is whole weights."""
    adapters: list[int] = field(default_factory=list)
    """`Request.adapter` of each request; empty: the engine has no slots."""
    cancelled: list[int] = field(default_factory=list)
    """The numbers of requests whose callers had gone, and which were in the engine."""
    under_way: list[list[int]] | None = None
    """Of a load: the requests in the engine, as `UnderWay.row`; None: they were not recorded."""
    temperature: float | None | list[float | None] = None
    """Of the requests in `under_way`: one for all, or one each, as `UnderWay.temperature`."""
    ended: list[list[int]] = field(default_factory=list)
    """[number, tokens of prompt and completion, tokens of the prompt that the prefix cache had] of each request that
    was under way at a load and has ended before the next command."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnderWay:
    """A request that is in an engine while it loads weights, or that has ended in the step before and still has its row
    in the batch."""

    number: int
    """The request's; 0: it has ended."""
    num_tokens: int
    """Of its prompt, and sampled so far."""
    num_computed: int
    """The tokens whose keys and values the cache has: all but the last one; 0: the request waits for its first step,
    -1: for its next one, because the engine had taken its blocks of the cache from it."""
    temperature: float | None
    """None: it is scored, or drawn from an altered distribution."""

    def row(self) -> list[int]:
        """[number, tokens], and the computed ones where these are not all but the last."""
        usual = self.num_computed == self.num_tokens - 1
        return [self.number, self.num_tokens] if usual else [self.number, self.num_tokens, self.num_computed]


@dataclass(frozen=True, kw_only=True, slots=True)
class Companion:
    """A request of a record that takes its part in the steps of a replay's engine and is not answered there: as many
    tokens at every step as the recorded one had. What the tokens are changes nothing in the rows of others."""

    number: int
    """The recorded request's; 0: it has ended."""
    num_tokens: int
    """Tokens of prompt and completion at the load; 0: its row becomes free at the next step."""
    num_computed: int
    """Tokens whose keys and values are cached when it begins; of a request that waits, those that the prefix cache
    had."""
    waits: bool
    """Whether it is in the queue at the load, and has no row yet."""
    num_left: int | None
    """The tokens that it samples after the load; None: it does not end in the record, or is cancelled."""
    temperature: float


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
    after_load: int | None = None
    """Only what came from the load of this version on is followed, see `since_load`; None: all of it."""
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
                self._file = self.path.open("xb", buffering=0)
                return
            except FileExistsError:
                number += 1

    def admitted(self, iteration: int, unfinished: int, requests: Sequence[Request]) -> None:
        keys = [(request.number, request_key(request)) for request in requests]
        adapters = [request.adapter for request in requests if request.adapter is not None]
        admission = {"requests": keys} | ({"adapters": adapters} if adapters else {})
        self._write({"iteration": iteration, "unfinished": unfinished} | admission)

    def loaded(
        self,
        iteration: int,
        unfinished: int,
        version: int,
        weights: str,
        names: Sequence[str],
        under_way: Sequence[UnderWay] = (),
        slot: int | None = None,
    ) -> None:
        """`weights` are `digests`, `names` those of the tensors in order. `under_way` has the rows of the engine's
        batch in order, and then the requests that wait in its queue. `slot`: of adapters, None: whole weights."""
        names, self._names_are_known = [] if self._names_are_known else list(names), True
        load: dict[str, Any] = {"version": version, "weights": weights} | ({"tensors": names} if names else {})
        load |= {} if slot is None else {"slot": slot}
        load["under_way"] = [request.row() for request in under_way]
        temperatures = [request.temperature for request in under_way if request.number]
        if temperatures:
            alike = len(set(temperatures)) == 1
            load["temperature"] = temperatures[0] if alike else [request.temperature for request in under_way]
        self._write({"iteration": iteration, "unfinished": unfinished} | load)

    def cancelled(self, iteration: int, unfinished: int, numbers: Sequence[int]) -> None:
        self._write({"iteration": iteration, "unfinished": unfinished, "cancelled": list(numbers)})

    def ended(self, number: int, num_tokens: int, num_cached: int) -> None:
        """Notes the end of a request that was under way at a load, see `ScheduleEntry.ended`: at once, for the record
        of an engine that is killed."""
        append_to(self._file, json_line({"ended": [number, num_tokens, num_cached]}))

    def _write(self, line: dict[str, Any]) -> None:
        append_to(self._file, json_line(line | {"at": time.time_ns() // 1_000_000}))

    def close(self) -> None:
        self._file.close()


_SETTINGS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop_token_ids",
    "stop",
    "ignore_eos",
    "structure",
)
"""The fields of `SamplingParams` that name a request. Records of earlier versions are replayed: the order stays."""


def request_key(request: Request) -> str:
    """Names a request by what it asks: 16 hexadecimal digits. Equal requests have equal keys."""
    params = request.params
    settings = "None"
    if params is not None:
        settings = f"SamplingParams({', '.join(f'{name}={getattr(params, name)!r}' for name in _SETTINGS)})"
    text = f"({request.tokens!r}, {settings}, {request.top_k!r}, {request.cached!r})"
    return xxhash.xxh3_64_hexdigest(text.encode())


def digests(tensors: Mapping[str, torch.Tensor]) -> str:
    """8 hexadecimal digits of the bytes of each tensor, in the order of names. All cores compute them, of tensors that
    share their memory once."""
    import torch

    def digest(tensor: torch.Tensor) -> str:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return xxhash.xxh3_64_hexdigest(data.data)[:8]

    def memory(tensor: torch.Tensor) -> tuple:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype

    distinct = {memory(tensor): tensor for tensor in tensors.values()}
    digest_of = dict(zip(distinct, platform.in_threads(digest, list(distinct.values()))))
    return "".join(digest_of[memory(tensors[name])] for name in sorted(tensors))


def followed_entries(file: Path, schedules: Schedules) -> list[ScheduleEntry]:
    """The commands of an engine that a replay follows."""
    entries = list(read_schedule(file))
    if schedules.after_load is not None:
        return since_load(entries, schedules.after_load)
    return since(entries, schedules.after_request) if schedules.after_request else entries


def since(entries: Iterable[ScheduleEntry], num_requests: int) -> list[ScheduleEntry]:
    """The commands of an engine after the first `num_requests` requests of its sampling client, all of which had been
    answered, with the load of the version that it held then. The steps are counted from the load on."""
    load, kept = None, list[ScheduleEntry]()
    for entry in entries:
        later = [place for place, (number, _) in enumerate(entry.requests) if number > num_requests]
        if later:
            requests, adapters = [entry.requests[place] for place in later], entry.adapters
            kept.append(
                replace(entry, requests=requests, adapters=[adapters[place] for place in later] if adapters else [])
            )
        elif (entry.version is not None or entry.cancelled) and kept:
            kept.append(entry)
        elif entry.version is not None:
            load = entry
    first = kept[0].iteration if kept else 0
    followed = [replace(entry, iteration=entry.iteration - first) for entry in kept]
    return followed if load is None else [replace(load, iteration=0, unfinished=0), *followed]


def since_load(entries: Sequence[ScheduleEntry], version: int) -> list[ScheduleEntry]:
    """The commands of an engine from its load of a version on, with the steps counted from there. All of them, where
    the engine began later; none, where it had ended."""
    loads = [(number, entry.version) for number, entry in enumerate(entries) if entry.version is not None]
    place = next((number for number, loaded in reversed(loads) if loaded == version), None)
    if place is None:
        return list(entries) if loads and loads[0][1] > version else []
    first = entries[place].iteration
    return [replace(entry, iteration=entry.iteration - first) for entry in entries[place:]]


def company(entries: Sequence[ScheduleEntry]) -> list[Companion]:
    """The requests that were under way at the load that the entries begin with: those in the rows of the batch first,
    in order. Raises ValueError for a request that nothing can take the place of, with what it is."""
    if not entries or not entries[0].under_way:
        return []
    rows, recorded_temperatures = entries[0].under_way, entries[0].temperature
    temperatures = (
        recorded_temperatures if isinstance(recorded_temperatures, list) else [recorded_temperatures] * len(rows)
    )
    ended = {number: (tokens, cached) for entry in entries for number, tokens, cached in entry.ended}
    companions = []
    for (number, num_tokens, *computed), temperature in zip(rows, temperatures, strict=True):
        num_computed = computed[0] if computed else num_tokens - 1
        end, cached = ended.get(number, (None, 0))
        waits = number != 0 and num_computed == 0
        if number and (problem := _no_company(num_tokens, num_computed, temperature)):
            raise ValueError(f"request {number} {problem}")
        companions.append(
            Companion(
                number=number,
                num_tokens=num_tokens,
                num_computed=cached if waits else num_computed,
                waits=waits,
                num_left=None if end is None else end - num_tokens,
                temperature=temperature or 0.0,
            )
        )
    return companions


def _no_company(num_tokens: int, num_computed: int, temperature: float | None) -> str:
    """Why nothing can take the place of a request under way; empty: something can."""
    if temperature is None:
        return "was scored, or drawn from an altered distribution"
    if num_computed < 0:
        return "waited for blocks of the cache, which generator.kv_cache_gib was too small for"
    return "had a part of its prompt computed" if 0 < num_computed < num_tokens - 1 else ""


def schedule_of(run: Path, attempt: int) -> Path:
    """The directory of an attempt's schedule."""
    return run / "schedule" / f"attempt-{attempt}"


def engine_files(directory: Path) -> list[Path]:
    """The files of an attempt's engines, by replica and then in the order in which they took a replica's place."""
    matched = ((_ENGINE_FILE.fullmatch(file.name), file) for file in directory.glob("generator-*.jsonl"))
    return [
        file for *_, file in sorted((_replica_index(m["role"]), int(m["number"]), file) for m, file in matched if m)
    ]


def _replica_index(role: str) -> int:
    return int(role.removeprefix("generator-"))


def read_schedule(file: Path) -> Iterator[ScheduleEntry]:
    """The commands of an engine, in order; without a last line that a kill has cut off. Raises ValueError for a line
    that is damaged."""
    entry: ScheduleEntry | None = None
    for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], 1):
        try:
            if not isinstance(fields := parsed(line), dict):
                raise TypeError(f"it holds a {type(fields).__name__}")
            if entry is not None and fields.keys() == {"ended"}:
                entry.ended.append(fields["ended"])
                continue
            fields["requests"] = [(n, key) for n, key in fields.get("requests", ())]
            following = ScheduleEntry(**fields)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{file}, line {number}: is no command of an engine ({error}); put the file back as it was"
            ) from error
        if entry is not None:
            yield entry
        entry = following
    if entry is not None:
        yield entry


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
