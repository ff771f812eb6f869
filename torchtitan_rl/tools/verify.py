"""The verb `verify`: whether a run's files are those that it wrote, and whether two runs are the same run."""

from __future__ import annotations

import argparse
from typing import Any

from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.metrics import REPEATED_RULE
from torchtitan_rl.record.attempts import read_ledger
from torchtitan_rl.tools.first_difference import first_difference
from torchtitan_rl.tools.selection import opened
from torchtitan_rl.train.retention import complete
from torchtitan_rl.train.run_record import RunRecord, compared_config, digests_of, read_record
from torchtitan_rl.weights import checkpoint

__all__ = ["add_arguments", "differences_of", "environments", "problems_of", "run"]

_ANOTHER_RULE = (
    "another version recorded the digest of other metrics, which is not compared; checksums.jsonl has the file's"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="another one, which should be the same run")


def run(args: argparse.Namespace) -> int:
    """Prints what is wrong with the files of each run, and where the runs differ first. Returns 1 where anything is."""
    runs = [opened(path) for path in (args.run, args.other) if path]
    problems = [f"{run.path}: {problem}" for run in runs for problem in problems_of(run)]
    notes = [f"{run.path}: {_ANOTHER_RULE}" for run in runs if not _metrics_compare(_record(run))]
    if len(runs) == 2:
        problems += differences_of(*runs)
        notes += environments(*runs)
    for note in notes:
        print(f"note: {note}")
    for problem in problems:
        print(problem)
    if not problems:
        print("the files are as they were written" if len(runs) == 1 else "the same run")
    return 1 if problems else 0


def problems_of(run: Run) -> list[str]:
    """A sentence for each file of a run that is missing or not what was written, and for each part whose digest is not
    the recorded one."""
    record = _record(run)
    problems = run.directory.checksums.problems()
    problems += [
        f"{path.name}: {text}" for path in complete(run.directory.checkpoints) if (text := checkpoint.problem(path))
    ]
    if problems:
        return problems
    digests = digests_of(run.directory)
    if not record.digests:
        return ["record.json: has no digests, because the run has not come to its end; go on with it first"]
    missing = [f"{part}: is recorded and not there" for part in record.digests if part not in digests]
    return missing + [
        f"{part}: has the digest {digests[part]}, {digest} is recorded"
        for part, digest in record.digests.items()
        if part in digests and digests[part] != digest and (part != "metrics" or _metrics_compare(record))
    ]


def _metrics_compare(record: RunRecord) -> bool:
    """Whether a digest of metrics that is taken now compares with the record's."""
    return not record.digests or record.metrics_rule == REPEATED_RULE


def _record(run: Run) -> RunRecord:
    if (record := read_record(run.path)) is None:
        raise ValueError(
            f"run={str(run.path)!r}: has no record.json, an older version made it; `torchtitan-rl audit` checks its "
            "files"
        )
    return record


def differences_of(first: Run, second: Run) -> list[str]:
    """How two runs differ: the first difference of the config, of the draws, of the batches, of the checkpoints that
    both have. Empty: they are the same run."""
    ours, theirs = (digests_of(run.directory) for run in (first, second))
    differences = []
    if ours["config"] != theirs["config"] and (field := _config_difference(first, second)):
        differences.append(field)
    if ours["draws"] != theirs["draws"]:
        differences.append(f"draws: {_first_other_draw(first, second)}")
    if difference := first_difference(first, second):
        differences.append(f"first batch that differs: {difference.summary()}")
    elif ours["metrics"] != theirs["metrics"]:
        steps = [max((line["step"] for line in run.lines()), default=0) for run in (first, second)]
        differences.append(f"metrics: equal as far as both go; the last steps are {steps[0]} and {steps[1]}")
    for part in sorted(ours.keys() & theirs.keys(), key=lambda name: (len(name), name)):
        if part.startswith("checkpoints/") and ours[part] != theirs[part]:
            differences.append(f"{part}: other weights or optimizer states")
            break
    return differences


def _config_difference(first: Run, second: Run) -> str:
    """The first field that two configs have otherwise, and how many more there are; empty where there is none. A field
    that one of them lacks, because its version did not have the field, is one that is None."""
    configs = [compared_config(run.config()) for run in (first, second)]
    differing = [path for path in configs[0] | configs[1] if configs[0].get(path) != configs[1].get(path)]
    if not differing:
        return ""
    values = [repr(config[differing[0]]) if differing[0] in config else "not recorded" for config in configs]
    more = f", and {len(differing) - 1} more fields" if len(differing) > 1 else ""
    return f"config: {differing[0]} is {values[0]} and {values[1]}{more}"


def _first_other_draw(first: Run, second: Run) -> str:
    """The first record of a draw that only one of two runs has."""
    events = [
        {(record["draw"], record["event"]): record["task_id"] for record in read_ledger(run.directory)}
        for run in (first, second)
    ]
    keys = sorted(events[0] | events[1], key=lambda key: ([int(part) for part in key[0].split("/")], key[1]))
    for draw, event in keys:
        tasks = [run_events.get((draw, event), "no such record") for run_events in events]
        if tasks[0] != tasks[1]:
            return f"{draw} {event}: {tasks[0]} and {tasks[1]}"
    return "a draw is recorded more than once"


def environments(first: Run, second: Run) -> list[str]:
    """How the last attempts of two runs differ in code, versions and machine, in sentences. Two runs may be the same
    run in spite of that."""
    last = [_flat((_record(run).environments or [{}])[-1]) for run in (first, second)]
    return [
        f"{name} is {last[0].get(name, 'not recorded')} and {last[1].get(name, 'not recorded')}"
        for name in last[0] | last[1]
        if last[0].get(name) != last[1].get(name)
    ]


def _flat(environment: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in environment.items() if name not in ("attempt", "versions")}
    return plain | environment.get("versions", {})
