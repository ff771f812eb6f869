"""What a run was, so that "the same run" is a check: `record.json` in the run's directory.

The file names what no other file of the run has: the code, the versions and the machine of each attempt. Of what other
files have it holds digests: of the config, the draws, the numbers that repeat, and each checkpoint's weights. Digests
are those of the end of the last attempt that reached it.
"""

from __future__ import annotations

import hashlib
import json
import platform as host
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import xxhash

from torchtitan_rl import platform
from torchtitan_rl.config.config_difference import LABELS, leaves
from torchtitan_rl.launch.agreement import facts
from torchtitan_rl.metrics import REPEATED_RULE, repeatable
from torchtitan_rl.record.attempts import read_ledger
from torchtitan_rl.record.json_lines import encode, parsed, replace_text
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.train.retention import complete
from torchtitan_rl.weights import checkpoint

__all__ = ["RunRecord", "begin_record", "compared_config", "digests_of", "finish_record", "read_record"]

_NAME = "record.json"
_RECORDING = "record."
"""The section of a config that says nothing about what is trained, as `LABELS` do not."""


@dataclass(kw_only=True, slots=True)
class RunRecord:
    """The content of `record.json`."""

    environments: list[dict[str, Any]] = field(default_factory=list)
    """Per attempt `attempt`, `code` (digest of the package's source), `versions`, `machine` (processor, system) and
    `cores`."""
    digests: dict[str, str] = field(default_factory=dict)
    """Name of a part -> digest: `config`, `draws`, `metrics`, and `checkpoints/NAME` of each checkpoint; empty while
    the run goes on or where it was cut off."""
    metrics_rule: int = 1
    """The `metrics.REPEATED_RULE` of the digest `metrics`; versions that recorded none had the first."""


def begin_record(run_dir: RunDir) -> None:
    """Adds the environment of an attempt that begins, and removes the digests of the attempt before."""
    environments = [] if (record := read_record(run_dir.path)) is None else record.environments
    here = facts(None)
    code = hashlib.sha256(json.dumps(here.files, sort_keys=True).encode()).hexdigest()[:16]
    environment = {"attempt": run_dir.attempt, "code": code, "package": _version("torchtitan_rl")}
    environment |= {"versions": here.versions, "machine": f"{_processor()}, {host.platform()}"}
    environment["cores"] = platform.num_cores()
    _write(run_dir, RunRecord(environments=[*environments, environment]))


def finish_record(run_dir: RunDir) -> None:
    """Adds the digests of a run that has come to its end."""
    record = read_record(run_dir.path) or RunRecord()
    record.digests, record.metrics_rule = digests_of(run_dir), REPEATED_RULE
    _write(run_dir, record)


def read_record(directory: Path) -> RunRecord | None:
    """None for a run without one. Raises ValueError for a file that is damaged."""
    file = directory / _NAME
    try:
        return RunRecord(**json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: is damaged ({error}); put it back from a copy") from error


def digests_of(run_dir: RunDir) -> dict[str, str]:
    """The digests of a run's files as they are now; see `RunRecord.digests`."""
    config = json.loads(run_dir.config_file.read_text(encoding="utf-8"))
    ledger = [(record["draw"], record["event"], record["task_id"]) for record in read_ledger(run_dir)]
    lines = [
        {"phase": line["phase"], "step": line["step"], **repeatable(line)}
        for line in run_dir.read_metrics()
        if line["phase"] != "checkpoint"
    ]
    digests = {
        "config": _digest(compared_config(config)),
        "draws": _digest(sorted(ledger, key=str)),  # a lag lets batches end in any order
        "metrics": _digest(lines),
    }
    return digests | {f"checkpoints/{path.name}": _weights(path) for path in complete(run_dir.checkpoints)}


def compared_config(config: dict[str, Any]) -> dict[str, Any]:
    """Dotted path -> value of a resolved config, without what says nothing about what is trained."""
    fields = leaves(config)
    return {path: value for path, value in fields if path not in LABELS and not path.startswith(_RECORDING)}


def _weights(saved: Path) -> str:
    """The digest of a checkpoint's weights and optimizer states, from the checksums that were written with them."""
    files = parsed(checkpoint.checksums_file(saved).read_text(encoding="utf-8"))
    return _digest({name: entry for name, entry in files.items() if name.endswith((".distcp", ".safetensors"))})


def _digest(value: Any) -> str:
    return xxhash.xxh3_64(json.dumps(encode(value), sort_keys=True).encode()).hexdigest()


def _write(run_dir: RunDir, record: RunRecord) -> None:
    replace_text(run_dir.path / _NAME, json.dumps(asdict(record), indent=1) + "\n")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    """The processor's name, as Linux says it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, host.machine())
