"""The verb `explain-mismatch`: why trainer and generator disagreed in a run, from its records and checkpoints.

Everything is scored again in this process, on one device: by the trainer's model and by a generator, under each version
that a checkpoint holds.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.config.resolve import rebuilt
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.launch.backend import Stack
from torchtitan_rl.launch.local import LocalLauncher
from torchtitan_rl.launch.stack import start_stack
from torchtitan_rl.mismatch import gap
from torchtitan_rl.mismatch.causes import Cause
from torchtitan_rl.mismatch.gap import GapParts, RoundingLimits, Sample
from torchtitan_rl.mismatch.scores import Rescorer
from torchtitan_rl.mismatch.search import CauseSearch, Predictions
from torchtitan_rl.model.files import assets_dir, load_tokenizer, pad_token_id, write_model_dir
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.record.attempts import read_rollouts
from torchtitan_rl.train.retention import complete
from torchtitan_rl.types import Datum
from torchtitan_rl.weights import checkpoint

__all__ = ["Explanation", "add_arguments", "explain", "run", "samples_of_record", "text"]

_TIMEOUT_S = 3600.0
_NEIGHBOURS = 4
"""Checkpoints of other versions that are tried as the one that really sampled."""


@dataclass(kw_only=True, slots=True)
class Explanation:
    """The parts of the gap on the tokens of a step, and the cause of what is more than it may be."""

    step: int
    """The batch is that of the line of metrics with this step."""
    samples: list[Sample]
    parts: GapParts
    limits: RoundingLimits
    versions: dict[int, str]
    """Each version that the tokens name -> its checkpoint, or why there are no scores under it."""
    causes: list[Cause] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run directory with checkpoints")
    parser.add_argument("--step", type=int, help="the batch of this step; default: the newest that can be explained")
    parser.add_argument("--rollouts", type=int, default=8, metavar="N", help="rollouts that are scored again")
    parser.add_argument(
        "--trust-code", action="store_true", help="import classes of the run's own that its config names"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the parts of the gap and the cause. Returns 1 where a cause was looked for."""
    if args.rollouts < 1:
        raise ValueError(f"--rollouts={args.rollouts}: must be at least 1")
    explaining = explain(Path(args.run), step=args.step, num_rollouts=args.rollouts, trusted=args.trust_code)
    explanation = asyncio.run(explaining)
    print(text(explanation))
    return 1 if explanation.causes else 0


async def explain(path: Path, *, step: int | None = None, num_rollouts: int = 8, trusted: bool = False) -> Explanation:
    """Explains the batch of `step`; None: the newest that a checkpoint's version has sampled. Raises ValueError for a
    run without the records or checkpoints that this needs."""
    run = Run.open(path)
    config = _config(run, trusted)
    checkpoints = _checkpoints_by_version(run)
    records = _records(run, checkpoints, step, num_rollouts)
    samples = [sample for record in records for sample in samples_of_record(record)]
    if not samples:
        raise ValueError(f"step={records[0]['step']}: no rollout of the records trained; give --step of another batch")
    named = sorted({int(version) for sample in samples for version in np.unique(sample.version_N)})
    if not checkpoints.keys() & named:
        raise ValueError(
            f"step={records[0]['step']}: version {_listed(named)} sampled its tokens, and checkpoints hold version "
            f"{_listed(checkpoints)}; give --step of another batch, or none"
        )
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-") as scratch:
        launcher = LocalLauncher(log_dir=scratch, start_timeout_s=_TIMEOUT_S, call_timeout_s=_TIMEOUT_S)
        try:
            stack = await _started(config, launcher, Path(scratch) / "model")
            explanation = Explanation(
                step=records[0]["step"],
                samples=samples,
                parts=gap.decomposed(samples, between="trainer"),
                limits=gap.LIMITS[config.generator.dtype],
                versions={version: str(checkpoints.get(version, "no checkpoint holds it")) for version in named},
            )
            await _score(explanation, config, stack, checkpoints)
            return explanation
        finally:
            await launcher.stop()


def samples_of_record(record: dict[str, Any]) -> list[Sample]:
    """The training sequences of a record of the table `rollouts`, with what generator and trainer said at the time.
    [] for a rollout that did not train, or whose data had several targets a token."""
    turns = record["turns"] or []
    samples: list[Sample] = []
    taken: set[int] = set()
    for sequence in record["sequences"] or []:
        if sequence["target_tokens"] is None or sequence["policy_logprobs"] is None:
            return []
        tokens = [*sequence["tokens"], sequence["target_tokens"][-1]]
        place, turn_of, reported, versions = [], [], [], []
        for index, start, count in _turns_of(sequence, turns, tokens, taken):
            place += range(start, start + count)
            turn_of += [index] * count
            reported += [float(value) for value in turns[index]["logprobs"][:count]]
            versions += turns[index]["policy_versions"][:count]
        if not place:
            continue
        nobody = gap.unknown(len(place))
        sample = Sample(
            rollout=record["rollout_id"],
            tokens=tokens,
            place_N=np.array(place),
            turn_N=np.array(turn_of),
            reported_N=np.where(np.isfinite(reported), reported, np.nan),
            version_N=np.array(versions),
            between_N=nobody.copy(),
            sampled_N=nobody.copy(),
        )
        sample.trainer_N = sample.scored(sequence["policy_logprobs"])
        samples.append(sample)
    return samples


def _turns_of(
    sequence: dict[str, Any], turns: list[dict[str, Any]], tokens: list[int], taken: set[int]
) -> Iterator[tuple[int, int, int]]:
    """(turn, its first token's place in `tokens`, number of its tokens) of a sequence. Records of earlier versions do
    not say: each turn is then of the first sequence that has its tokens at its place, and goes into `taken`."""
    if sequence.get("turns"):
        yield from ((index, first + 1, count) for index, first, count in sequence["turns"])  # `first` is of targets
        return
    for index, turn in enumerate(turns):
        start, count = turn["num_prompt_tokens"], len(turn["tokens"])
        if index not in taken and tokens[start : start + count] == list(turn["tokens"]):
            taken.add(index)
            yield index, start, count


def _config(run: Run, trusted: bool) -> RunConfig:
    """What of the run's config says how its tokens were scored, for one process."""
    if not (saved := run.config()):
        raise ValueError(
            f"run={str(run.path)!r}: has no readable config.json; give the directory of a run that started"
        )
    if not saved["controller"]["record_tokens"]:
        raise ValueError(
            f"run={str(run.path)!r}: was recorded with controller.record_tokens=False, without its tokens; set "
            "record.explain_mismatch_every to have the gap explained while the run goes on"
        )
    trainer = rebuilt(saved["trainer"] | {"post_optimizer_build_fn": None}, trusted=trusted)
    alone = TrainerConfig(lora=trainer.lora, converters=trainer.converters, attention=trainer.attention)
    alone = dataclasses.replace(
        alone, training=trainer.training, max_tokens_per_microbatch=trainer.max_tokens_per_microbatch
    )
    generator = dataclasses.replace(
        rebuilt(saved["generator"], trusted=trusted), num_replicas=1, tensor_parallel_degree=1, num_threads=0
    )
    return RunConfig(
        name=saved["name"],
        task=None,
        model=rebuilt(saved["model"], trusted=trusted),
        trainer=alone,
        generator=generator,
        algorithm=AlgorithmConfig(temperature=saved["algorithm"]["temperature"]),
        seed=saved["seed"],
    )


def _checkpoints_by_version(run: Run) -> dict[int, Path]:
    """Policy version -> the complete checkpoint that holds it."""
    by_version = {}
    for path in complete(run.directory.checkpoints):
        by_version[int(checkpoint.read_state(path)["policy_version"])] = path
    if not by_version:
        raise ValueError(
            f"run={str(run.path)!r}: has no complete checkpoint; set controller.checkpoint_every, or "
            "record.explain_mismatch_every to have the gap explained while the run goes on"
        )
    return by_version


def _records(run: Run, checkpoints: dict[int, Path], step: int | None, number: int) -> list[dict[str, Any]]:
    """Records of one batch, of rollouts that trained; those sampled by a version that a checkpoint holds first."""
    chosen: list[dict[str, Any]] = []
    steps: set[int] = set()
    for record in _with_tokens(read_rollouts(run.directory)):
        fits = checkpoints.keys() & {record["policy_version_min"], record["policy_version_max"]}
        if step is None and not fits or step is not None and record["step"] != step:
            continue
        steps.add(record["step"])
        if chosen and chosen[0]["step"] != record["step"]:
            chosen = []
        if len(chosen) < number:
            chosen.append(record)
    if chosen:
        return chosen
    if step is not None:
        raise ValueError(f"step={step}: has no recorded rollouts that trained; give --step of another batch")
    raise ValueError(
        f"run={str(run.path)!r}: no recorded rollout was sampled by a version that a checkpoint holds "
        f"({_listed(checkpoints)}); controller.checkpoint_every keeps versions that go on sampling"
    )


def _listed(versions: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(versions)))


def _with_tokens(records: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    return (record for record in records if record.get("turns") and record.get("sequences"))


async def _started(config: RunConfig, launcher: LocalLauncher, model_dir: Path) -> Stack:
    tokenizer = load_tokenizer(assets_dir(config.model))
    shape, eos, pad = resolve_shape(config.model), tokenizer.eos_token_id, pad_token_id(tokenizer)
    write_model_dir(model_dir, shape, assets_dir(config.model), eos=eos, pad=pad)
    return await start_stack(config, launcher, model_dir)


async def _score(explanation: Explanation, config: RunConfig, stack: Stack, checkpoints: dict[int, Path]) -> None:
    """Fills in the scores under every version that the tokens name, the parts, and the causes."""
    samples = explanation.samples
    alternatives: Predictions = {}
    rescorer = Rescorer(stack.generator, config.algorithm.temperature, resolve_shape(config.model).vocab_size)
    if config.trainer.lora is not None:  # adapters begin at zero: the trainer holds the base alone
        await stack.generator.push_and_pull()
        words = "the tokens were sampled by the base model: the adapters had not reached the generator"
        alternatives["adapter", words] = np.concatenate(await rescorer.scores(samples))
    named = [version for version in explanation.versions if version in checkpoints]
    near = sorted(checkpoints.keys() - set(named), key=lambda version: abs(version - min(explanation.versions)))
    for version in near[:_NEIGHBOURS]:
        await _load(stack, checkpoints[version], version)
        words = f"version {version} sampled the tokens, not the one that they name"
        alternatives["older_version", words] = np.concatenate(await rescorer.scores(samples))
    for version in named:
        await _load(stack, checkpoints[version], version)
        await _score_under(version, samples, stack, rescorer)
    explanation.parts = gap.decomposed(samples, between="trainer")
    keeps = config.generator.on_update == "keep"
    broken = gap.parts_over_limit(explanation.parts, explanation.limits, keeps=keeps)
    search = CauseSearch(
        rescorer=rescorer,
        limits=explanation.limits,
        dtype=config.generator.dtype,
        adapted=config.trainer.lora is not None,
    )
    if "rest" in broken:  # the generator holds the last version that was loaded
        alike = [
            dataclasses.replace(s, sampled_N=np.where(s.version_N == named[-1], s.sampled_N, np.nan)) for s in samples
        ]
        explanation.causes.append(await search.of_rest(alike, alternatives))
    if "noise" in broken:
        explanation.causes.append(await search.of_noise(samples, []))


def text(explanation: Explanation) -> str:
    """The explanation as lines for a person."""
    parts, samples = explanation.parts, explanation.samples
    lines = [f"step {explanation.step}: {len(parts.gap_N)} tokens of {len({s.rollout for s in samples})} rollouts"]
    lines += [f"  version {version}: {where}" for version, where in explanation.versions.items()]
    lines.append(f"{'nats':<42}{'mean':>10}{'largest':>10}")
    metrics = gap.part_metrics(parts)
    gaps_M = np.abs(parts.gap_N[np.isfinite(parts.gap_N)])
    lines.append(f"{'gap: trainer - reported':<42}{gaps_M.mean():>10.1e}{gaps_M.max():>10.1e}")
    for name, words in _WORDS.items():
        if f"mismatch/{name}_mean" in metrics:
            mean, largest = metrics[f"mismatch/{name}_mean"], metrics[f"mismatch/{name}_max"]
            lines.append(f"{words:<42}{mean:>10.1e}{largest:>10.1e}")
        else:
            lines.append(f"{words:<42}{'no such token' if name == 'kept' else 'unknown':>20}")
    for cause in explanation.causes:
        lines.append(f"cause ({cause.part}: {cause.name}): {cause.words}")
    if not explanation.causes:
        lines.append(f"nothing unusual: every known part is within rounding ({explanation.limits.largest:g} at most)")
    return "\n".join(lines)


_WORDS = {
    "noise": "= noise: trainer against generator",
    "stale": "+ staleness: weights since sampling",
    "kept": "+ kept attention cache of older weights",
    "unexplained": "+ rest: generator now against reported",
}


async def _load(stack: Stack, path: Path, version: int) -> None:
    await stack.roles["policy"].load_checkpoint(path, policy_version=version, optimizer=False)
    await stack.generator.push_and_pull()


async def _score_under(version: int, samples: list[Sample], stack: Stack, rescorer: Rescorer) -> None:
    data = [
        Datum(tokens=torch.tensor(sample.tokens[:-1]), target_tokens=torch.tensor(sample.tokens[1:]), loss_inputs={})
        for sample in samples
    ]
    output = await stack.roles["policy"].forward(data)
    for sample, logprobs_T, scores_N in zip(samples, output.policy_logprobs, await rescorer.scores(samples)):
        by_version_N = sample.version_N == version
        sample.between_N = np.where(by_version_N, sample.scored(logprobs_T.tolist()), sample.between_N)
        sample.sampled_N = np.where(by_version_N, scores_N, sample.sampled_N)
