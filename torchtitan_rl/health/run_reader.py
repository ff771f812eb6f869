"""A run that somebody looks at: its config, metrics and records, finished or going on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.metrics import PHASES
from torchtitan_rl.record import attempts
from torchtitan_rl.record.curves import final_evaluations
from torchtitan_rl.record.json_lines import parsed
from torchtitan_rl.record.run_dir import RunDir

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Run"]

_PER_TOKEN = ("turns", "sequences")


class Run:
    """A run's directory, opened for reading, while the run goes on too. Nothing is ever written.

    Example: `Run.open("runs/first").metrics("reinforcement")["reward/mean"].plot()`.
    """

    def __init__(self, directory: RunDir) -> None:
        self.directory = directory

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Raises ValueError for a path that is no directory."""
        if not Path(path).is_dir():
            raise ValueError(f"run={str(path)!r}: is no directory; give the directory of a run, such as runs/first")
        return cls(RunDir(path))

    @property
    def path(self) -> Path:
        return self.directory.path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def config(self) -> dict[str, Any]:
        """The resolved config; {} where config.json is missing or was cut off."""
        try:
            config = parsed(self.directory.config_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return config if isinstance(config, dict) else {}

    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl. Raises RuntimeError for a line in the middle that is not JSON."""
        return self.directory.read_metrics()

    def metrics(self, phase: str = "") -> pd.DataFrame:
        """One row per line of metrics, in order. With a phase (`reinforcement`, `supervised`, `preference`,
        `evaluation`): its lines by `step`, with the columns that it has."""
        import pandas as pd

        lines = self.lines()
        if not phase:
            return pd.DataFrame(lines, columns=None if lines else ["step", "phase"])
        kept = [{name: x for name, x in line.items() if name != "phase"} for line in lines if line["phase"] == phase]
        return pd.DataFrame(kept, columns=None if kept else ["step"]).set_index("step")

    def evaluations(self) -> pd.DataFrame:
        """One row per evaluation, by `step`: its name, split, accuracy, rewards and intervals."""
        return self.metrics("evaluation")

    def rollouts(self, *, tokens: bool = False) -> pd.DataFrame:
        """One row per rollout that counts, with the columns of docs/run_directory.md; those that hold tokens (`turns`,
        `sequences`) with `tokens` only."""
        import pandas as pd

        every = self.directory.tables["rollouts"].schema.names
        columns = [name for name in every if tokens or name not in _PER_TOKEN]
        return pd.DataFrame(attempts.read_rollouts(self.directory, columns), columns=columns)

    def completions(self) -> pd.DataFrame:
        """One row per recorded completion of an evaluation that counts, with the columns of docs/run_directory.md."""
        import pandas as pd

        columns = self.directory.tables["evaluations"].schema.names
        return pd.DataFrame(attempts.read_evaluations(self.directory), columns=columns)

    def missing(self) -> list[str]:
        """What a complete run has and this directory has not, or not yet, in words."""
        sentences = []
        if not self.config():
            sentences.append("config.json is missing or cut off")
        if not self.directory.metrics_file.exists():
            sentences.append("metrics.jsonl is missing")
        elif not self.lines():
            sentences.append("metrics.jsonl has no complete line yet")
        if not self.directory.tables["rollouts"]:
            sentences.append("no rollouts are recorded")
        return sentences

    def _repr_html_(self) -> str:
        from torchtitan_rl import html

        lines = self.lines()
        facts = {"directory": str(self.path)}
        for phase in PHASES:
            if steps := [line["step"] for line in lines if line["phase"] == phase]:
                facts[f"{phase} steps"] = str(steps[-1])
        for line in final_evaluations(lines):
            accuracy = f"{line.get('eval/accuracy', float('nan')):.3f} after step {line['step']}"
            facts[f"accuracy, {line.get('eval/name')} {line.get('eval/split')}"] = accuracy
        if missing := self.missing():
            facts["missing"] = "; ".join(missing)
        return html.facts(self.name, facts)
