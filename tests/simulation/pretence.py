"""What a simulation puts in the place of processes, files of a start, disks and threads."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.simulation.tasks import Tokenizer
from tests.simulation.world import FakeLauncher, World
from torchtitan_rl.config.resolve import resolved
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.launch.backend import Stack
from torchtitan_rl.launch.choice import ActorBackend
from torchtitan_rl.launch.stack import start_stack
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.tables import Table
from torchtitan_rl.rollout import player
from torchtitan_rl.tasks.family import source_of
from torchtitan_rl.train import checkpoints, controller, lag_metrics, numeric_guard, resume
from torchtitan_rl.train.start import Inputs
from torchtitan_rl.weights import checkpoint

__all__ = ["patched", "pretended"]

Change = tuple[Any, str, Any]
"""(owner, name, new value)."""


@contextmanager
def patched(changes: Iterable[Change]) -> Iterator[None]:
    """Attributes of modules and classes have other values for as long as the block runs."""
    with ExitStack() as undo:
        for owner, name, value in changes:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


@contextmanager
def pretended(world: World, config: RunConfig) -> Iterator[None]:
    """`Controller.launch` starts pretended processes, and nothing waits for a disk.

    Left out, for their time: the check of the config, a second `resolved` of the same config, the order to the disk to
    have written a file, JSON in several lines, Parquet and the types of columns, the data of a bad step, the random
    states of this process, which nothing draws from, and the digests of `record.json`.
    """

    async def start(config: RunConfig, inputs: Inputs, launcher: Any, model_dir: Path, hf_weights: Any) -> Stack:
        stack = await start_stack(config, launcher, model_dir)
        world.client = stack.generator
        return stack

    plain, level = resolved(config), logging.root.manager.disable
    changes: list[Change] = [
        (controller, "validate", _nothing),
        (ActorBackend, "hosts_for", _nothing),
        (ActorBackend, "device_name", _nothing),
        (ActorBackend, "launcher", lambda *args: FakeLauncher(world)),
        (controller, "read_inputs", _inputs),
        (controller, "start", start),
        (player, "run_group", world.watched(player.run_group)),
        (resume, "resolved", lambda config: plain),
        (checkpoints, "resolved", lambda config: plain),
        (checkpoints, "random_states", dict),
        (resume, "set_random_states", _nothing),
        (resume, "begin_record", _nothing),
        (controller, "finish_record", _nothing),
        (checkpoint, "write_json", lambda file, content: file.write_text(json.dumps(content))),
        (Table, "seal", _nothing),
        (Table, "_read_lines", lambda table, file: map(json.loads, file.read_text().splitlines())),
        (RunDir, "write_config", lambda run_dir, content: run_dir.config_file.write_text(json.dumps(content))),
        (numeric_guard.torch, "save", _nothing),
        (checkpoint, "_sync", _nothing),
        (os, "fsync", _nothing),
        (lag_metrics, "_EVERY_S", 5.0),  # looks at the generators
    ]
    logging.disable(logging.CRITICAL)  # replicas are lost all the time
    try:
        with patched(changes):
            yield
    finally:
        logging.disable(level)


def _inputs(config: RunConfig) -> Inputs:
    family = config.task.build()
    source = source_of(family, "train", config.seed)
    return Inputs(
        tokenizer=Tokenizer(),
        family=family,
        source=source,
        supervised_family=family,
        preference_family=family,
        eval_families={},
    )


def _nothing(*args: Any, **named: Any) -> None:
    pass
