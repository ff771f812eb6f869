"""Whole runs: the quickstart to its accuracy, or a few steps of the Qwen3-0.6B shape with what they cost."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
from statistics import median
from typing import TYPE_CHECKING

from scripts.gpu_checks.catalogue import FAMILIES
from scripts.gpu_checks.configs import STEPS, family, quickstart, steps
from scripts.gpu_checks.device import PeakMemory, gpus, peak_bf16_flops
from scripts.gpu_checks.result import Result, largest_of, run_check
from torchtitan_rl.actors.operations import WorkerProcess
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.model.flops import training_flops
from torchtitan_rl.model.shape import resolve_shape

if TYPE_CHECKING:
    from torchtitan_rl.train.controller import Controller

WHOLE = ("quickstart", "local-quickstart")
PUBLISHED = {"tokens_trained_per_s": 11_900, "tokens_generated_per_s": 12_100, "sync_s": 0.067}
"""Of Qwen3-0.6B on one H100: full training at 16k tokens, decoding at 512 in and 128 out, a weight sync."""
MAX_KL, MIN_ACCURACY = 1e-3, 0.95  # what docs/numerics.md and scripts/acceptance.sh promise on a CPU
EXPERTS_MEDIAN_KL = 1e-4
"""Of a mixture the median of the steps: in one of them a router that rounds otherwise may send a token to other
experts, and one such token can be 1e-3 of a batch of 256 short completions."""
SHOWN = {
    "mismatch/kl": "mismatch/kl",
    "mismatch/logprob_diff_max": "mismatch/logprob_diff_max",
    "time/generate_s": "generate_s",
    "time/forward_backward_s": "forward_backward_s",
    "time/optim_s": "optim_s",
    "time/sync_s": "sync_s",
    "time/step_s": "step_s",
    "tokens/generated_per_s": "tokens_generated_per_s",
}


def costs(line: dict, shape: DecoderShape, device_name: str) -> dict[str, float]:
    """What a step took: seconds by stage, tokens per second of the stage that made or trained them, and where the
    device's peak is known the share of it that training used (prompts, recomputation and optimizer not counted)."""
    train_s = line["time/forward_backward_s"] + line["time/optim_s"]
    figures = {name: line[metric] for metric, name in SHOWN.items()}
    figures["train_s"], figures["tokens_trained_per_s"] = train_s, line["tokens/trained"] / train_s
    if peak := peak_bf16_flops(device_name):
        length = max(1, round(line["completion/length_mean"]))
        flops = line["tokens/trained"] / length * training_flops(shape, [length])
        figures["mfu_of_train"], figures["mfu_of_step"] = flops / train_s / peak, flops / line["time/step_s"] / peak
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


async def train(
    result: Result, config: RunConfig, *, whole: bool, local: bool, min_accuracy: float = 0.0
) -> list[dict]:
    """The lines of the reinforcement phase. `whole`: with warm start, evaluations and checkpoint; its accuracy on test
    must be `min_accuracy`. `local`: in this process, without actors."""
    from torchtitan_rl.train.controller import Controller

    config.output_dir = result.run_directory()
    lines: list[dict] = []
    with PeakMemory() as peak:
        async with await Controller.launch(config, backend="local" if local else "actors") as controller:
            pids = {"the one process": os.getpid()} if local else await _process_ids(controller)
            try:
                if whole:
                    report = await controller.train()
                    accuracies = {name: float(f"{evaluation.accuracy:.4g}") for name, evaluation in report.items()}
                    result.note(accuracies=accuracies)
                    result.require(
                        accuracies["test"] >= min_accuracy,
                        f"test accuracy={accuracies['test']}: is less than {min_accuracy}, reached on CPUs",
                    )
                else:
                    await controller.reinforce()
            finally:  # a run that fails at its last step has measured those before
                lines += [line for line in controller.run_dir.read_metrics() if line["phase"] == "reinforcement"]
                _note_costs(result, config, lines, whole=whole)
    if peak.device:
        result.note(
            peak_mib_device=peak.device,
            peak_mib_process={role: peak.processes[pid] for role, pid in pids.items() if pid in peak.processes},
        )
    return lines


async def _process_ids(controller: Controller) -> dict[str, int]:
    """The first process of every role, by role."""
    from torchtitan_rl.dispatch.mesh_sampling_client import MeshSamplingClient
    from torchtitan_rl.dispatch.mesh_training_client import MeshTrainingClient

    generator, trainers = controller.generator, controller.roles.items()
    assert isinstance(generator, MeshSamplingClient)
    meshes = {role: client._mesh for role, client in trainers if isinstance(client, MeshTrainingClient)}
    meshes |= {replica.mesh.role: replica.mesh for replica in generator._replicas}
    return {role: (await mesh.call_each(WorkerProcess.pid))[0] for role, mesh in meshes.items()}


def _note_costs(result: Result, config: RunConfig, lines: list[dict], *, whole: bool) -> None:
    """Notes what every step took, or the first and the last of a whole run, beside what is published."""
    device_name = next((gpu["name"] for gpu in gpus()), "")
    shape = resolve_shape(config.model)
    shown = [lines[0], lines[-1]] if whole and lines else lines
    result.note(steps=[{"step": line["step"], **costs(line, shape, device_name)} for line in shown])
    if not whole:
        result.note(published=PUBLISHED)


def check(result: Result, args: argparse.Namespace) -> None:
    """Runs a variant. Fails when generator and trainer disagree, a gradient is not finite, or nothing was learned."""
    variant, local = args.variant, args.variant.startswith("local")
    whole = variant in FAMILIES or variant in WHOLE
    if variant in FAMILIES:
        config = family(**FAMILIES[variant])
    else:
        config = quickstart() if whole else steps(**STEPS[variant], tiny=args.tiny)
    # What has few steps learns little.
    min_accuracy = 0.0 if variant in FAMILIES and "num_steps" in FAMILIES[variant] else MIN_ACCURACY
    lines = asyncio.run(train(result, config, whole=whole, local=local, min_accuracy=min_accuracy))
    wanted = config.controller.num_steps
    result.require(len(lines) == wanted, f"steps={len(lines)}: {wanted} were asked for")
    judge(result, lines, has_experts=resolve_shape(config.model).experts is not None)


def judge(result: Result, lines: list[dict], *, has_experts: bool = False) -> None:
    """Fails the check when generator and trainer disagree, or a gradient is not finite or always 0."""
    steps_kl = [line["mismatch/kl"] for line in lines]
    largest, middle = largest_of(steps_kl), median(steps_kl)
    result.note(mismatch_kl_max=float(f"{largest:.2e}"), mismatch_kl_median=float(f"{middle:.2e}"))
    kl, most = (middle, EXPERTS_MEDIAN_KL) if has_experts and not math.isnan(largest) else (largest, MAX_KL)
    result.require(kl <= most, f"mismatch/kl={kl:.1e}: generator and trainer differ by more than {most:g}")
    norms = [line["optim/grad_norm"] for line in lines]
    result.require(
        all(map(math.isfinite, norms)) and any(norms), f"optim/grad_norm={norms}: is not finite, or always 0"
    )


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=check.__doc__)
    arguments.add_argument("--variant", choices=[*WHOLE, *FAMILIES, *STEPS], required=True)
    return arguments


if __name__ == "__main__":
    run_check(check, parser())
