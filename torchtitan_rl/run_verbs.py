"""The verbs of `torchtitan-rl` that look at runs, `rehearse`, which looks at a run before there is one, and `keys`.
Each has a module with `add_arguments(parser)` and `run(args)`, which returns the exit status; the module is imported
when the verb is used."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

__all__ = ["VERBS", "Verb"]


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb's help, the name of its module below `torchtitan_rl`, and an example for the end of its help."""

    text: str
    module: str
    example: str
    overrides: bool = False
    """Whether the verb takes fields of a config, as `args.overrides`."""

    def load(self) -> ModuleType:
        return import_module(f"torchtitan_rl.{self.module}")


VERBS = {
    "view": Verb(
        "a web page over runs: health, curves, evaluations, rollouts", "view.verb", "torchtitan-rl view runs/first"
    ),
    "diagnose": Verb(
        "what is wrong with a run, finished or going on, and what to do",
        "inspection.diagnose",
        "torchtitan-rl diagnose runs/first",
    ),
    "plot": Verb(
        "draw curves of several runs in one picture",
        "inspection.plots",
        "torchtitan-rl plot runs/first runs/second -o curves.png",
    ),
    "compare": Verb(
        "what differs between runs, beside the spread over seeds",
        "inspection.comparison",
        "torchtitan-rl compare runs/first runs/second",
    ),
    "timeline": Verb(
        "where the time of a run's steps went", "inspection.timeline.verb", "torchtitan-rl timeline runs/first"
    ),
    "rehearse": Verb(
        "who would sit where on a cluster, memory, traffic, what limits a step, what is refused",
        "rehearsal.verb",
        "torchtitan-rl rehearse configs/quickstart.py --hosts 4 --gpus-per-host 8",
        overrides=True,
    ),
    "keys": Verb(
        "add, remove and list owners in a file of keys for serve-tinker",
        "server.tinker.owners",
        "torchtitan-rl keys add keys.txt alice",
    ),
    "explain-mismatch": Verb(
        "why trainer and generators disagree about sampled tokens",
        "run.explain_verb",
        "torchtitan-rl explain-mismatch runs/first",
    ),
}
