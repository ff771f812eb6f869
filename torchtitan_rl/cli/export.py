"""The verb `export`: a Hugging Face directory out of any checkpoint, without the run that wrote it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import traceback
from pathlib import Path
from typing import Any

from torchtitan_rl.cli import exit_status
from torchtitan_rl.record.user_code import error_text

__all__ = ["add_arguments", "export", "run"]

_TIMEOUT_S = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a run's checkpoints/step-N")
    parser.add_argument("directory", help="a new directory")
    parser.add_argument(
        "--trust-code", action="store_true", help="import classes of the run's own that its config names"
    )


def run(args: argparse.Namespace) -> int:
    return exit_status.end_with(_export(args))


async def _export(args: argparse.Namespace) -> int:
    try:
        for directory in await export(Path(args.checkpoint), Path(args.directory), trusted=args.trust_code):
            print(directory)
        return 0
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        return exit_status.fail(error_text(error))


async def export(path: Path, directory: Path, *, trusted: bool = False) -> list[Path]:
    """Writes the policy of a checkpoint as a Hugging Face directory, and with LoRA its adapters alone, for PEFT, in
    `directory/adapter`. Returns the directories. One process, one device; the layout of the run does not matter.

    Nothing that the checkpoint's files name is run but config classes of this package and of torchtitan; `trusted`:
    also others that its config names, such as model converters of the run's own.
    Raises ValueError for a checkpoint that is incomplete or damaged or names other code, and for a directory that is
    a file or not empty.
    """
    from torchtitan_rl.config.meshes import TrainerConfig
    from torchtitan_rl.config.resolve import rebuilt
    from torchtitan_rl.dispatch.mesh_training_client import MeshTrainingClient
    from torchtitan_rl.launch.local import LocalLauncher
    from torchtitan_rl.model.files import assets_dir, load_tokenizer, pad_token_id
    from torchtitan_rl.model.shape import resolve_shape
    from torchtitan_rl.weights import checkpoint

    if problem := checkpoint.problem(checkpoint.require_complete(path)):
        raise ValueError(f"checkpoint={str(path)!r}: cannot be used: {problem}; use another checkpoints/step-N")
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"directory={str(directory)!r}: is a file; give a new directory")
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(f"directory={str(directory)!r}: is not empty; give a new one")
    config = json.loads((path / checkpoint.RUN_CONFIG).read_text())
    model = rebuilt(config["model"], trusted=trusted)
    saved = rebuilt(config["trainer"] | {"post_optimizer_build_fn": None}, trusted=trusted)
    trainer = TrainerConfig(lora=saved.lora, converters=saved.converters)
    trainer = dataclasses.replace(trainer, training=saved.training, attention=saved.attention)
    tokenizer = load_tokenizer(assets_dir(model))
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-") as logs:
        launcher = LocalLauncher(log_dir=logs, start_timeout_s=_TIMEOUT_S, call_timeout_s=_TIMEOUT_S)
        try:
            mesh: Any = await launcher.start_trainer(trainer, model, role="policy", seed=config["seed"])
            client = MeshTrainingClient(
                mesh,
                max_tokens_per_microbatch=trainer.max_tokens_per_microbatch,
                max_datum_tokens=trainer.training.seq_len,
                temperature=1.0,
                vocab_size=resolve_shape(model).vocab_size,
            )
            await client.load_checkpoint(path, optimizer=False)
            await client.save_hf_model(directory, eos=tokenizer.eos_token_id, pad=pad_token_id(tokenizer))
            if saved.lora is None:
                return [directory]
            await client.save_adapter(checkpoint.adapter_dir(directory))
            return [directory, checkpoint.adapter_dir(directory)]
        finally:
            await launcher.stop()
