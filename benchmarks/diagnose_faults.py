"""Seeds faults into short runs of the quickstart's model, and asks `diagnose` what is wrong.

    .venv/bin/python -m benchmarks.diagnose_faults warm DIR
    .venv/bin/python -m benchmarks.diagnose_faults fault DIR NAME [NAME ...]
    .venv/bin/python -m benchmarks.diagnose_faults clean DIR NAME [NAME ...]
    .venv/bin/python -m benchmarks.diagnose_faults report DIR

`warm` makes the starting points: a warm start, and a policy that has seen right answers. `fault` and `clean` run what
`FAULTS` and `CLEAN` name, one after the other in one process. `report` prints what is said of every run in DIR. Faults
that need actors or a kill run in processes of their own (`benchmarks/diagnose_faults_actors.py`); faults that no
short run shows are made from the files of a real run (`benchmarks/diagnose_records.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import diagnose_implants as implants
from benchmarks.diagnose_records import recorded
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.health.diagnosis import examine
from torchtitan_rl.health.run_reader import Run

ROOT = Path(__file__).parents[1]


def quickstart(directory: Path, start: str, steps: int = 24) -> RunConfig:
    """The quickstart in small batches, from a starting point of `warm`."""
    config = load_config(str(ROOT / "configs" / "quickstart.py"))
    config.model.assets = str(directory / start / "checkpoints" / "step-0" / "hf")
    config.supervised.num_steps, config.controller.pass_at_k = 0, 0
    config.algorithm.tasks_per_step, config.controller.num_steps = 16, steps
    config.controller.eval_every, config.controller.eval_tasks, config.controller.test_tasks = 0, 64, 8
    config.controller.checkpoint_export = "none"
    return config


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, the rule that is to name it, and how the run gets it."""

    rule: str
    change: Callable[[RunConfig], None] = lambda config: None
    patch: Callable[[], Any] | None = None
    start: str = "warm"
    steps: int = 24
    backend: Literal["actors", "local"] = "local"


def changed(**values: Any) -> Callable[[RunConfig], None]:
    def change(config: RunConfig) -> None:
        for path, value in values.items():
            *parents, last = path.split("__")
            target: Any = config
            for name in parents:
                target = getattr(target, name)
            setattr(target, last, value)

    return change


FAULTS: dict[str, Fault] = {
    "idle_reward": Fault("idle_trainer", changed(task__reward=implants.slow_reward), steps=8),
    "idle_generator": Fault("idle_trainer", patch=implants.slow_engine, steps=8),
    "slow_step": Fault("slow_step", changed(task__reward=implants.slow_once)),
    "memory": Fault("memory", changed(task__reward=implants.leaks), steps=80, backend="actors"),
    "temperature": Fault("mismatch", patch=lambda: implants.sampled_with(temperature=0.8), steps=10),
    "stale_weights": Fault("mismatch", patch=lambda: implants.weights_lost(reported=True)),
    "old_weights": Fault("lag", patch=lambda: implants.weights_lost(reported=False)),
    "far_lag": Fault(
        "lag",
        changed(algorithm__max_policy_lag=4, trainer__optimizer__lr=4e-3, task__reward=implants.pays_length),
        steps=30,
    ),
    "clipped": Fault("clip_share", changed(algorithm__num_epochs=6, trainer__optimizer__lr=6e-3), steps=72),
    "not_finite": Fault(
        "steps_skipped", changed(algorithm__loss_fn=implants.sometimes_nan, algorithm__loss_config={}), steps=10
    ),
    "bonus_for_certainty": Fault(
        "entropy_collapse", changed(algorithm__loss_fn=implants.wrong_sign, algorithm__loss_config={}), steps=100
    ),
    "constant_reward": Fault("no_signal", changed(task__reward=implants.constant), steps=14),
    "best_reward": Fault("saturation", changed(task__reward=implants.always_best), steps=14),
    "too_few_tokens": Fault("truncation", changed(sampling__max_tokens=4), steps=10),
    "paid_by_length": Fault(
        "length_drift", changed(task__reward=implants.pays_length, sampling__max_tokens=24), steps=60
    ),
    "other_reward": Fault(
        "eval_falls",
        changed(task__reward=implants.pays_backwards, controller__eval_every=10, controller__eval_tasks=256),
        start="sorts",
        steps=50,
    ),
    "same_seed": Fault(
        "duplicates", patch=lambda: implants.sampled_with(seed=lambda tokens: hash(tuple(tokens)) % 2**31), steps=10
    ),
}

CLEAN: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    f"{name}_{seed}": (name, seed, steps, {})
    for name, steps in (("quickstart", 40), ("dapo", 24), ("gspo", 24), ("running_total", 24), ("calculator", 16))
    for seed in (0, 1)
} | {
    "lag_2": ("quickstart", 2, 60, {"algorithm__max_policy_lag": 2}),
    "bfloat16": ("quickstart", 3, 40, {"generator__dtype": "bfloat16"}),
    "ppo_critic_2": ("ppo_critic", 2, 24, {}),
    "rloo_2": ("rloo", 2, 24, {}),
}
"""Name -> config, seed, optimizer steps, changed settings."""


async def trained(config: RunConfig, backend: Literal["actors", "local"] = "local") -> None:
    from torchtitan_rl.train.controller import Controller

    torch.manual_seed(0)
    async with await Controller.launch(config, backend=backend) as controller:
        try:
            await controller.train()
        except Exception as error:
            print(f"{config.output_dir}: {type(error).__name__}: {error}", flush=True)


def warm(directory: Path) -> None:
    """The quickstart's warm start; and the same model after demonstrations that are right three times in ten."""
    for name, correct in (("warm", 0.0), ("sorts", 0.5)):
        config = load_config(str(ROOT / "configs" / "quickstart.py"))
        config.task.correct_demonstrations = correct
        config.controller.num_steps, config.controller.test_tasks, config.controller.pass_at_k = 0, 64, 0
        config.output_dir = str(directory / name)
        asyncio.run(trained(config))


def seeded(directory: Path, name: str) -> None:
    """One run with a fault."""
    fault = FAULTS[name]
    config = quickstart(directory, fault.start, fault.steps)
    config.output_dir = str(directory / f"fault-{name}")
    shutil.rmtree(config.output_dir, ignore_errors=True)
    fault.change(config)
    implants.forget()
    with fault.patch() if fault.patch else nullcontext():
        asyncio.run(trained(config, fault.backend))
    implants.forget()


def clean(directory: Path, name: str) -> None:
    """One short run of a config as it is, with its own warm start."""
    file, seed, steps, changes = CLEAN[name]
    config = load_config(str(ROOT / "configs" / f"{file}.py"))
    config.seed, config.output_dir, config.controller.num_steps = seed, str(directory / f"clean-{name}"), steps
    config.controller.eval_every, config.controller.eval_tasks, config.controller.test_tasks = 8, 64, 64
    config.controller.checkpoint_export = "none"
    changed(**changes)(config)
    if file not in ("running_total", "calculator"):  # the other warm starts are the quickstart's
        config.model.assets, config.supervised.num_steps = str(directory / "warm" / "checkpoints" / "step-0" / "hf"), 0
    shutil.rmtree(config.output_dir, ignore_errors=True)
    asyncio.run(trained(config))


def report(directory: Path) -> int:
    """Prints a row per run of what is said of it. Returns the exit status: 0 if nine faults in ten are named, and no
    clean run has a finding. It is 1 where there is no run."""
    rows = [(name, "run", fault.rule, directory / f"fault-{name}") for name, fault in FAULTS.items()]
    rows += [(path.name.split("-")[2], "run", path.name.split("-")[1], path) for path in directory.glob("actors-*")]
    rows += [(name, "records of a run", rule, path) for name, rule, path in recorded(directory)]
    rows += [(name, "clean", "", directory / f"clean-{name}") for name in CLEAN]
    named = wrong = faults = clean_runs = 0
    for name, how, rule, path in rows:
        if not (path / "config.json").exists() and not (path / "said.json").exists():
            continue
        reported = said_of(path)
        if rule:
            faults, named = faults + 1, named + (rule in reported)
        else:
            clean_runs, wrong = clean_runs + 1, wrong + bool(reported)
        further = ", ".join(other for other in reported if other != rule) or "-"
        print(f"| {name} | {how} | {rule or '-'} | {reported.get(rule, '-')} | {further} |")
    if not faults + clean_runs:
        print(f"error: {directory}: holds no run; make some with `warm`, `fault` and `clean`", file=sys.stderr)
        return 1
    print(f"{named} of {faults} faults named; something said of {wrong} of {clean_runs} clean runs")
    return int(named < 0.9 * faults or wrong > 0)


def said_of(path: Path) -> dict[str, str]:
    """Rule -> what it says of a run, or what was noted while the run hung."""
    if (path / "said.json").exists():
        return {finding["rule"]: finding["what"] for finding in json.loads((path / "said.json").read_text())}
    return {finding.rule: finding.what for finding in examine(Run.open(path)).findings}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("warm", "fault", "clean", "report"))
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args()
    known = list(FAULTS) if args.verb == "fault" else list(CLEAN) if args.verb == "clean" else []
    if known and not args.names:
        parser.error(f"{args.verb}: names nothing to run; use {', '.join(known)}")
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"{args.verb} {unknown[0]}: there is no such name; use {', '.join(known) or 'none'}")
    place = args.directory.absolute()
    if args.verb == "report":
        return report(place)
    place.mkdir(parents=True, exist_ok=True)
    if args.verb == "warm":
        warm(place)
    for name in args.names:
        (seeded if args.verb == "fault" else clean)(place, name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
