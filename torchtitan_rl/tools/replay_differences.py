"""Where a replay differs from the run that it follows, first of all."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torchtitan_rl.metrics import is_repeated
from torchtitan_rl.record.attempts import read_rollouts, read_versions
from torchtitan_rl.record.json_lines import encode
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.schedule import ScheduleEntry, engine_files, read_schedule, schedule_of

__all__ = ["ReplayDifference", "compared", "first_replay_difference"]

_PER_TOKEN = ("tokens", "policy_versions", "logprobs")
_OF_ROLLOUT = ("rollout_id", "task_id", "finish_reason", "reward", "reward_parts")
_OF_GROUP = ("masked", "left_out", "advantage")
_OF_SEQUENCE = ("tokens", "advantages", "token_weights", "old_logprobs", "policy_logprobs")


@dataclass(kw_only=True, slots=True)
class ReplayDifference:
    """The first thing that is not as it was."""

    step: int
    """The optimizer step of the batch, or after which the weights were published."""
    place: str
    """The rollout, turn and token; the metric; or the version and tensor."""
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        return f"step {self.step}, {self.place}: was {self.recorded!r}, is {self.replayed!r}"


def first_replay_difference(
    run: RunDir, attempt: int, replay: RunDir, *, first: int, last: int
) -> ReplayDifference | None:
    """The first difference between an attempt at a run and its replay, which trained the steps after `first` up to
    `last`; None: there is none. Compared are every token, log-probability, version, reward and advantage, the
    metrics that a run repeats, and the bytes of every published tensor."""
    rollouts = _by_step(_rollouts(run, first, last)), _by_step(_rollouts(replay, first, last))
    metrics = _by_step(_metrics(run, first, last)), _by_step(_metrics(replay, first, last))
    weights = _weights(run, attempt), _weights(replay, 1)
    for step in range(first, last + 1):
        for differences in (
            _of_rollouts(step, *(records[step] for records in rollouts)),
            _of_metrics(step, *(lines[step] for lines in metrics)),
            # The version after `first` is the checkpoint's, and the one after `last` may be published by nobody.
            _of_weights(step, *(published[step] for published in weights), complete=first < step < last),
        ):
            if (difference := next(differences, None)) is not None:
                return difference
    return None


def compared(replay: RunDir, *, first: int, last: int) -> str:
    """What `first_replay_difference` compared, in numbers."""
    records = list(_rollouts(replay, first, last))
    tokens = sum(len(turn["tokens"]) for record in records for turn in record["turns"] or ())
    versions = sum(len(published) for step, published in _weights(replay, 1).items() if first <= step <= last)
    steps = {record["step"] for record in records}
    return f"{len(steps)} batches, {len(records)} rollouts, {tokens} tokens, {versions} versions of the weights"


def _by_step(records: Iterator[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    by_step = defaultdict(list)
    for record in records:
        by_step[record["step"]].append(record)
    return by_step


def _rollouts(run: RunDir, first: int, last: int) -> Iterator[dict[str, Any]]:
    return (record for record in read_rollouts(run) if first < record["step"] <= last)


def _metrics(run: RunDir, first: int, last: int) -> Iterator[dict[str, Any]]:
    """The lines of training and of evaluations between two batches."""
    for line in run.read_metrics():
        trained = line["phase"] == "reinforcement" and first < line["step"] <= last
        if trained or line["phase"] == "evaluation" and first <= line["step"] < last:
            yield line


def _of_rollouts(step: int, recorded: list[dict], replayed: list[dict]) -> Iterator[ReplayDifference]:
    """In the order of causes: what was sampled in the whole batch, then rewards, then what was computed of them."""
    if len(recorded) != len(replayed):
        yield ReplayDifference(step=step, place="number of rollouts", recorded=len(recorded), replayed=len(replayed))
    pairs = list(zip(recorded, replayed))
    for before, now in pairs:
        yield from _of_turns(step, before, now)
    for columns in (_OF_ROLLOUT, _OF_GROUP):
        for before, now in pairs:
            for column in columns:
                if _differ(before[column], now[column]):
                    place = f"rollout {before['rollout_id']}, {column}"
                    yield ReplayDifference(step=step, place=place, recorded=before[column], replayed=now[column])
    for before, now in pairs:
        sequences = before["sequences"] or (), now["sequences"] or ()
        if len(sequences[0]) != len(sequences[1]):
            place, (was, is_now) = f"rollout {before['rollout_id']}, number of training sequences", map(len, sequences)
            yield ReplayDifference(step=step, place=place, recorded=was, replayed=is_now)
        for number, (was, is_now) in enumerate(zip(*sequences)):
            place = f"rollout {before['rollout_id']}, training sequence {number}"
            for column in _OF_SEQUENCE:
                yield from _of_lists(step, place, column, was[column], is_now[column])


def _of_turns(step: int, before: dict, now: dict) -> Iterator[ReplayDifference]:
    name, turns = f"rollout {before['rollout_id']}", (before["turns"] or [], now["turns"] or [])
    for turn, (was, is_now) in enumerate(zip(*turns)):
        for column in _PER_TOKEN:
            yield from _of_lists(step, f"{name}, turn {turn}", column, was[column], is_now[column])
    if len(turns[0]) != len(turns[1]):
        counts = map(len, turns)
        yield ReplayDifference(
            step=step, place=f"{name}, number of turns", recorded=next(counts), replayed=next(counts)
        )


def _of_lists(
    step: int, place: str, column: str, recorded: list | None, replayed: list | None
) -> Iterator[ReplayDifference]:
    for token, (was, is_now) in enumerate(zip_longest(recorded or (), replayed or ())):
        if _differ(was, is_now):
            yield ReplayDifference(step=step, place=f"{place}, token {token}, {column}", recorded=was, replayed=is_now)


def _differ(recorded: Any, replayed: Any) -> bool:
    """Whether two values differ. NaN is the same as NaN here, also inside of a list or mapping."""
    return recorded != replayed and encode(recorded) != encode(replayed)


def _of_metrics(step: int, recorded: list[dict], replayed: list[dict]) -> Iterator[ReplayDifference]:
    before, now = ({_name_of_line(line): line for line in lines} for lines in (recorded, replayed))
    if not now and "metrics" not in before:  # an evaluation beside the checkpoint that the replay began from
        return
    for name, line in before.items():
        other = now.get(name, {})
        for column, value in line.items():
            if is_repeated(column) and _differ(value, other.get(column)):
                yield ReplayDifference(step=step, place=f"{name}, {column}", recorded=value, replayed=other.get(column))


def _name_of_line(line: dict[str, Any]) -> str:
    if line["phase"] == "evaluation":
        return f"evaluation {json.dumps([line.get('eval/name'), line.get('eval/split')])}"
    return "metrics"


def _weights(run: RunDir, attempt: int) -> dict[int, list[tuple[int, str, list[str]]]]:
    """Step -> the versions that were published after it, each with its digests and names of tensors."""
    digests: dict[int, str] = {}
    names: list[str] = []
    for file in engine_files(schedule_of(run.path, attempt)):
        for entry in _loads(file):
            names = names or entry.tensors
            digests.setdefault(entry.version, entry.weights)
    by_step = defaultdict(list)
    for record in read_versions(run):
        if record["attempt"] == attempt and record["version"] in digests:
            by_step[record["step"]].append((record["version"], digests[record["version"]], names))
    return by_step


def _loads(file) -> Iterator[ScheduleEntry]:
    return (entry for entry in read_schedule(file) if entry.version is not None)


def _of_weights(step: int, recorded: list, replayed: list, *, complete: bool) -> Iterator[ReplayDifference]:
    """`complete`: the replay must have every version."""
    now = {version: digests for version, digests, _ in replayed}
    for version, digests, names in recorded:
        if complete and version not in now:
            yield ReplayDifference(step=step, place=f"weights of version {version}", recorded=digests, replayed=None)
        was, is_now = _tensors(digests), _tensors(now.get(version, ""))
        for i, (before, after) in enumerate(zip(was, is_now)):
            if before != after:
                place = f"weights of version {version}, {names[i] if names else f'tensor {i}'}"
                yield ReplayDifference(step=step, place=place, recorded=before, replayed=after)


def _tensors(digests: str) -> list[str]:
    return [digests[i : i + 8] for i in range(0, len(digests), 8)]
