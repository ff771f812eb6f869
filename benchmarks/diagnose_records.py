"""Faults made from the files of a real run, for what no short run shows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from torchtitan_rl.record.run_dir import RunDir

__all__ = ["recorded"]


def recorded(directory: Path) -> list[tuple[str, str, Path]]:
    """(name, the rule that is to name it, directory) of each fault. Copies the run `clean-quickstart_0`: two of three
    answers become empty, as if the model ended at once."""
    real, copy = directory / "clean-quickstart_0", directory / "recorded-empty_answers"
    if not real.is_dir():
        return []
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(real, copy, ignore=shutil.ignore_patterns("checkpoints", "rollouts"))
    (copy / "rollouts").mkdir()
    records = RunDir(real).tables["rollouts"].read()
    with open(copy / "rollouts" / "000001.jsonl", "w", encoding="utf-8") as stream:
        for number, record in enumerate(records):
            light = {name: value for name, value in record.items() if name not in ("turns", "sequences")}
            stream.write(json.dumps(light | ({"text": "", "reward": 0.0} if number % 3 else {})) + "\n")
    return [("empty_answers", "unparsable", copy)]
