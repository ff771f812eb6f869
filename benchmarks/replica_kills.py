"""Kills the replicas of a run's generator in turn and compares the run with undisturbed ones.

    .venv/bin/python benchmarks/replica_kills.py [--kills 8] [--replicas 2] [--spares 0] [--seeds 3] [--lag 0]
                                              [--output-dir DIR]

All runs have the quickstart's config with two replicas. Each kill waits until the replica killed before has completed a
request again. Asked: the run finishes; its accuracy is within the spread of the undisturbed seeds, widened by the 95%
interval of one evaluation; `audit` is clean; the lengths of trained completions are distributed as in the undisturbed
run of the same seed (two-sample Kolmogorov-Smirnov); and the seconds from a kill to the first completed request on the
replacement. Exit status 1 where one of these does not hold. Needs scipy (the test extra).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median

from scipy.stats import ks_2samp

from torchtitan_rl.actors.operations import WorkerProcess
from torchtitan_rl.config.load import load_config
from torchtitan_rl.dispatch.mesh_sampling_client import MeshSamplingClient
from torchtitan_rl.dispatch.replica import Replica
from torchtitan_rl.record.attempts import read_rollouts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tools.audit import audit
from torchtitan_rl.train.controller import Controller

ROOT = Path(__file__).parents[1]
SIGNIFICANT = 0.01
MEDIAN_S, WORST_S = 10.0, 20.0


class Recoveries:
    """Kills replicas in turn, and times each until its replacement has completed a request."""

    def __init__(self, controller: Controller, kills: int, draw: random.Random) -> None:
        self.controller, self.kills, self.draw = controller, kills, draw
        self.seconds: list[float] = []
        self._answered: set[int] = set()
        sample = Replica.sample

        async def noted(replica: Replica, *args) -> AsyncIterator[list]:
            async for answers in sample(replica, *args):
                self._answered.add(id(replica))
                yield answers

        Replica.sample = noted  # type: ignore[assignment]

    async def run(self) -> None:
        generator = self.controller.generator
        assert isinstance(generator, MeshSamplingClient)
        replicas = generator._replicas
        while self.controller.state.phase != "reinforcement" or self.controller.state.step < 2:
            await asyncio.sleep(0.1)
        for number in range(self.kills):
            await asyncio.sleep(self.draw.uniform(0.1, 1.0))
            index = number % len(replicas)
            victim = replicas[index]
            (pid,) = await victim.mesh.call_each(WorkerProcess.pid)
            step, start = self.controller.state.step, time.monotonic()
            os.kill(pid, signal.SIGKILL)
            while replicas[index] is victim or id(replicas[index]) not in self._answered:
                await asyncio.sleep(0.02)
            self.seconds.append(time.monotonic() - start)
            print(
                f"kill {number + 1}: generator-{index} (pid {pid}) after step {step}; its replacement answered after "
                f"{self.seconds[-1]:.1f} s, in step {self.controller.state.step + 1}",
                flush=True,
            )


async def train(path: Path, args: argparse.Namespace, seed: int, kills: int) -> tuple[float, list[float]]:
    """(test accuracy, seconds of each recovery) of one run."""
    config = load_config(str(ROOT / "configs" / "quickstart.py"))
    config.output_dir, config.seed = str(path), seed
    config.generator.num_replicas = args.replicas
    config.generator.max_replica_restarts, config.generator.num_spares = max(1, kills), args.spares if kills else 0
    config.algorithm.max_policy_lag = args.lag
    config.controller.num_steps = args.steps or config.controller.num_steps
    config.controller.test_tasks = args.test_tasks
    async with await Controller.launch(config) as controller:
        recoveries = Recoveries(controller, kills, random.Random(seed))
        training = asyncio.ensure_future(controller.train())
        killing = asyncio.ensure_future(recoveries.run())
        await asyncio.wait([training, killing], return_when=asyncio.FIRST_EXCEPTION if kills else asyncio.ALL_COMPLETED)
        report = await training
        if not killing.done():
            killing.cancel()
        return report["test"].accuracy, recoveries.seconds


def undisturbed(path: Path, args: argparse.Namespace, seed: int) -> float:
    """Test accuracy of a run of that seed; a run that is there already is read and not made again."""
    lines = RunDir(path).read_metrics()
    done = [line["eval/accuracy"] for line in lines if line.get("eval/split") == "test"]
    return done[-1] if done else asyncio.run(train(path, args, seed, 0))[0]


def lengths(path: Path) -> list[int]:
    """Sampled tokens of each rollout that trained."""
    return [sum(r["num_tokens"]) for r in read_rollouts(RunDir(path)) if not r["left_out"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--spares", type=int, help="of the disturbed run; without it as many as the default config has")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="0: as many as the quickstart has")
    parser.add_argument("--test-tasks", type=int, default=256)
    parser.add_argument("--lag", type=int, default=0)
    parser.add_argument("--output-dir", default="")
    args = parser.parse_args()
    place = Path(args.output_dir or tempfile.mkdtemp(prefix="torchtitan-rl-replicas-")).absolute()
    accuracies = [undisturbed(place / f"seed-{seed}", args, seed) for seed in range(args.seeds)]
    accuracy, seconds = asyncio.run(train(place / "disturbed", args, 0, args.kills))
    counts, problems = audit(RunDir(place / "disturbed"))
    for problem in problems:
        print(f"problem: {problem}")
    test = ks_2samp(lengths(place / "seed-0"), lengths(place / "disturbed"))
    margin = 1.96 * (accuracy * (1 - accuracy) / args.test_tasks) ** 0.5
    holds = {
        "all kills": len(seconds) == args.kills,
        "accuracy": min(accuracies) - margin <= accuracy <= max(accuracies) + margin,
        "audit": not problems,
        "lengths": bool(test.pvalue > SIGNIFICANT),
        "recovery": bool(seconds) and median(seconds) <= MEDIAN_S and max(seconds) <= WORST_S,
    }
    print(json.dumps({
        "undisturbed_accuracy": accuracies, "accuracy": accuracy, "recovery_s": [round(s, 1) for s in seconds],
        "recovery_median_s": round(median(seconds), 1) if seconds else None, "ks_statistic": float(test.statistic),
        "ks_pvalue": float(test.pvalue), "audit": counts, "holds": holds,
    }))  # fmt: skip
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
