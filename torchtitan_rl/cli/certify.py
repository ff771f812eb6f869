"""The verb `certify`: a model's numbers beside those of transformers, in trainer, engine and layouts."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.cli import exit_status
from torchtitan_rl.record.console.notices import say
from torchtitan_rl.record.user_code import error_text

if TYPE_CHECKING:
    from torchtitan_rl.families import DecoderShape

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a directory with a config.json, or a family, such as qwen3")
    parser.add_argument(
        "--layouts",
        type=_layouts,
        default=((2, 1), (1, 2)),
        metavar="FSDPxTP,...",
        help="trainer meshes whose gradients are compared with one rank's; default: 2x1,1x2; 2x2 takes four processes",
    )
    parser.add_argument("--family", default="", metavar="FILE.py:CLASS", help="a family of your own")
    parser.add_argument("--json", action="store_true", help="print what certificate.json holds")
    parser.add_argument(
        "--output", default="", metavar="DIR", help="where certificate.json goes; default: the directory of the model"
    )


def run(args: argparse.Namespace) -> int:
    return exit_status.end_with(_certify(args))


async def _certify(args: argparse.Namespace) -> int:
    from torchtitan_rl.tools.certify.certificate import Certificate, text_hash, versions
    from torchtitan_rl.tools.certify.certification import certify
    from torchtitan_rl.tools.certify.small_config import small_config

    try:
        text, hf, output = _config(args)
        _require_writable(output)
        shape_of = _reader(args)
        shape_of(hf, f"model={args.model!r}")  # refuses a model that the family does not compute
        small = small_config(hf)
        shape = shape_of(small, f"model={args.model!r}, made small")
        shape.max_seq_len = small["max_position_embeddings"]  # a scaled rotary embedding may cover more
        began = time.monotonic()
        checks = await certify(shape, small, layouts=args.layouts, note=lambda title: _note(title, began, args.quiet))
        certificate = Certificate(
            family=shape.name,
            model=args.model,
            config_sha256=text_hash(text),
            checks=checks,
            seconds=round(time.monotonic() - began, 1),
            made=datetime.now().isoformat("T", "seconds"),
            versions=versions(),
        )
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        return exit_status.fail(error_text(error))
    print(json.dumps(certificate.as_data(), indent=1) if args.json else certificate.table())
    try:
        path = certificate.write(output)
    except OSError as error:
        return exit_status.fail(f"--output={output}: the certificate could not be written ({error}); give a directory")
    if broken := certificate.broken:
        return exit_status.fail(broken.line)
    say(f"{args.model}: certified in {certificate.seconds:.0f} s; {path}", event="certified")
    return 0


def _require_writable(directory: Path) -> None:
    """Raises ValueError for a place where no directory can be written: minutes later it would be too late."""
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"--output={directory}: cannot be written; give --output DIR, a directory that can")


def _config(args: argparse.Namespace) -> tuple[str, dict[str, Any], Path]:
    """The text of the config.json, what it says, and where the certificate goes."""
    from torchtitan_rl.families import read_config_json
    from torchtitan_rl.tools.certify.small_config import debug_config
    from torchtitan_rl.train.start import dated

    directory = Path(args.model).expanduser()
    if not directory.is_dir():
        output = args.output or dated(f"certify-{args.model}")
        hf = debug_config(args.model)
        return json.dumps(hf), hf, Path(output)
    if not (directory / "config.json").exists():
        raise ValueError(f"model={args.model!r}: has no config.json; give the directory of a model, or a family")
    file = directory / "config.json"
    hf = read_config_json(file, f"model={args.model!r}")
    return file.read_text(), hf, Path(args.output or directory)


def _reader(args: argparse.Namespace) -> Any:
    """What reads the content of a config.json: the package's families, or the user's own."""
    from torchtitan_rl.families import shape_of_hf

    return _own_family(args.family).from_hf_config if args.family else shape_of_hf


def _own_family(text: str) -> type[DecoderShape]:
    from torchtitan_rl.config.python_file import load_module
    from torchtitan_rl.families import DecoderShape

    file, _, name = text.rpartition(":")
    if not file or not Path(file).is_file():
        raise ValueError(f"--family={text!r}: names no file; write FILE.py:CLASS, such as my_model.py:Mine")
    family = getattr(load_module(Path(file), f"--family={text!r}"), name, None)
    if not (isinstance(family, type) and issubclass(family, DecoderShape)):
        raise ValueError(f"--family={text!r}: {name} is no subclass of DecoderShape; docs/families.md has an example")
    return family


def _layouts(text: str) -> tuple[tuple[int, int], ...]:
    try:
        layouts = [tuple(map(int, layout.split("x"))) for layout in text.split(",") if layout]
        meshes = tuple((shard, tensor) for shard, tensor in layouts)
        if not meshes or any(min(mesh) < 1 for mesh in meshes):
            raise ValueError("at least one mesh, of at least one rank")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write FSDPxTP, such as 2x1,1x2,2x2") from None
    if (1, 1) in meshes:
        raise argparse.ArgumentTypeError(f"{text!r}: 1x1 is the one rank that layouts are compared with; leave it out")
    return meshes


def _note(title: str, began: float, quiet: bool) -> None:
    if not quiet:
        say(f"{time.monotonic() - began:5.0f} s  {title}", event="stage", to=sys.stderr)
