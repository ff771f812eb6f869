"""Start-up of a run, before a controller exists: reads data, starts meshes, gives the generators weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.launch.backend import Launcher, Stack
from torchtitan_rl.model.files import assets_dir, load_tokenizer, pad_token_id, write_model_dir
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.record.recorder import Recorder
from torchtitan_rl.record.status import note_end
from torchtitan_rl.record.user_code import error_text
from torchtitan_rl.rollout.pair_tokens import check_pair
from torchtitan_rl.tasks.family import TaskFamily, source_of
from torchtitan_rl.tasks.vocabulary import warn_unknown_text
from torchtitan_rl.train.evaluation import eval_families

__all__ = ["Inputs", "read_inputs", "start", "stopped_on_failure", "output_path", "dated"]


@dataclass(kw_only=True, slots=True)
class Inputs:
    """The data of a run: its tokenizer, its task families and the order of its train tasks."""

    tokenizer: Any
    family: TaskFamily
    source: Any
    """The source of the family's train split; see `tasks.family.source_of`."""
    supervised_family: TaskFamily
    preference_family: TaskFamily
    """The family whose pairs train; the run's own in a run without a preference phase."""
    eval_families: dict[str, TaskFamily]
    """Name of each of `controller.eval_sets` -> its task family."""


def read_inputs(config: RunConfig) -> Inputs:
    """Builds the task families, which may read files. Raises ValueError for a split without tasks, and where the
    preference phase would begin with a task without a pair."""
    family = config.task.build()
    for split in ("validation", "test"):
        source_of(family, split, config.seed)  # refuses an empty split now, not at the end of the run
    supervised_family = family if config.supervised.task is None else config.supervised.task.build()
    source_of(supervised_family, "train", config.seed)
    preference, preference_family = config.preference, family
    if preference is not None:
        preference_family = family if preference.task is None else preference.task.build()
        check_pair(source_of(preference_family, "train", config.seed).next(1)[0])
        if preference.eval_pairs:
            check_pair(source_of(preference_family, "validation", config.seed).next(1)[0])
    evaluated = eval_families(config, family)
    tokenizer = load_tokenizer(assets_dir(config.model))
    warn_unknown_text(tokenizer, [family, supervised_family, preference_family, *evaluated.values()])
    return Inputs(
        tokenizer=tokenizer,
        family=family,
        source=source_of(family, "train", config.seed),
        supervised_family=supervised_family,
        preference_family=preference_family,
        eval_families=evaluated,
    )


def output_path(config: RunConfig, *, absolute: bool) -> Path:
    """The path of the run's directory. Use `absolute` when processes run on other hosts, whose working directory may
    differ."""
    path = Path(config.output_dir or dated(config.name))
    return path.absolute() if absolute else path


def dated(name: str) -> str:
    """The path of a new run directory: runs/NAME-DATE-TIME. Raises ValueError for a name that is no part of a path."""
    if not name or "/" in name:
        raise ValueError(f"name={name!r}: names no directory in runs/; use a name without '/', or set output_dir")
    return f"runs/{name}-{datetime.now():%Y%m%d-%H%M%S}"


async def start(
    config: RunConfig, inputs: Inputs, launcher: Launcher, model_dir: Path, hf_weights: Path | None
) -> Stack:
    """Starts the meshes, or a session with a service. The generators hold no weights yet, except with `hf_weights`, a
    Hugging Face directory: then only generators start and load that directory."""
    tokenizer = inputs.tokenizer
    write_model_dir(
        model_dir,
        resolve_shape(config.model),
        assets_dir(config.model),
        eos=tokenizer.eos_token_id,
        pad=pad_token_id(tokenizer),
    )
    if hf_weights is not None:
        stack = await launcher.start_generators(config, model_dir)
        await stack.generator.load_hf(str(hf_weights))
        return stack
    stack = await launcher.start(config, model_dir, eos=tokenizer.eos_token_id)
    reward_model = config.roles.reward_model
    if reward_model is not None and reward_model.checkpoint:
        await stack.roles["reward_model"].load_checkpoint(Path(reward_model.checkpoint), optimizer=False)
    if config.algorithm.distill is not None and config.algorithm.distill.divergence == "full":
        await stack.versions.copy_head(stack.roles["teacher"], stack.roles["policy"])
    return stack


@asynccontextmanager
async def stopped_on_failure(launcher: Launcher, recorder: Recorder) -> AsyncIterator[ExitStack]:
    """Stops the meshes that have started when the block fails or is interrupted; a failure is recorded. The block adds
    to the stack what is to be closed before them."""
    closing = ExitStack()
    try:
        yield closing
    except asyncio.CancelledError:
        closing.close()
        launcher.kill()  # an interrupt does not wait
        if launcher.attached:  # `kill` ends no process there
            await launcher.stop()
        raise
    except Exception as error:
        closing.close()
        await launcher.stop()
        note_end(recorder, "run_failed", error_text(error))
        raise
