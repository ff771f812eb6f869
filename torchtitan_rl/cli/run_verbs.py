"""The verbs of `torchtitan-rl` that look at runs, `rehearse`, which looks at a run before there is one, and `keys`.
Each has a module with `add_arguments(parser)` and `run(args)`, which returns the exit status; the module is imported
when the verb is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

__all__ = ["VERBS", "Verb"]


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb's help, the import of its module, which is heavy, and an example for the end of its help."""

    text: str
    load: Callable[[], ModuleType]
    example: str
    overrides: bool = False
    """Whether the verb takes fields of a config, as `args.overrides`."""


def _view_verb() -> ModuleType:
    from torchtitan_rl.tools.view import view_verb

    return view_verb


def _diagnose() -> ModuleType:
    from torchtitan_rl.tools import diagnose

    return diagnose


def _plots() -> ModuleType:
    from torchtitan_rl.tools import plots

    return plots


def _comparison() -> ModuleType:
    from torchtitan_rl.tools import comparison

    return comparison


def _timeline_verb() -> ModuleType:
    from torchtitan_rl.tools.timeline import timeline_verb

    return timeline_verb


def _rehearse_verb() -> ModuleType:
    from torchtitan_rl.tools.rehearse import rehearse_verb

    return rehearse_verb


def _owners() -> ModuleType:
    from torchtitan_rl.serve.tinker import owners

    return owners


def _explain_mismatch() -> ModuleType:
    from torchtitan_rl.tools import explain_mismatch

    return explain_mismatch


VERBS = {
    "view": Verb(
        "a web page over runs: health, curves, evaluations, rollouts", _view_verb, "torchtitan-rl view runs/first"
    ),
    "diagnose": Verb(
        "what is wrong with a run, finished or going on, and what to do", _diagnose, "torchtitan-rl diagnose runs/first"
    ),
    "plot": Verb(
        "draw curves of several runs in one picture", _plots, "torchtitan-rl plot runs/first runs/second -o curves.png"
    ),
    "compare": Verb(
        "what differs between runs, beside the spread over seeds",
        _comparison,
        "torchtitan-rl compare runs/first runs/second",
    ),
    "timeline": Verb("where the time of a run's steps went", _timeline_verb, "torchtitan-rl timeline runs/first"),
    "rehearse": Verb(
        "who would sit where on a cluster, memory, traffic, what limits a step, what is refused",
        _rehearse_verb,
        "torchtitan-rl rehearse configs/quickstart.py --hosts 4 --gpus-per-host 8",
        overrides=True,
    ),
    "keys": Verb(
        "add, remove and list owners in a file of keys for serve-tinker",
        _owners,
        "torchtitan-rl keys add keys.txt alice",
    ),
    "explain-mismatch": Verb(
        "why trainer and generators disagree about sampled tokens",
        _explain_mismatch,
        "torchtitan-rl explain-mismatch runs/first",
    ),
}
