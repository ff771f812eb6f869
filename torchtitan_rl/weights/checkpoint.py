"""Checkpoints: a directory per step, complete once the marker is written.

step-80/model/       torch's distributed checkpoint of parameters and optimizer, loadable in any layout
step-80/critic/, step-80/reference/   the same of other roles whose weights change during a run
step-80/hf/          if exported: the weights as a Hugging Face directory
step-80/lora.json    with LoRA, when model/ holds adapters only: the LoRA config, and a fingerprint of the base
step-80/adapter/     if exported, with LoRA: the adapters as a PEFT directory
step-80/teacher.safetensors  with self-distillation: the snapshot that teaches, in the generators' dtype
step-80/finished.jsonl  with a lag: groups that have been played and have not trained, see rollout/finished.py
step-80/run_config.json  the resolved config of the run; a `config.json` would make a Hugging Face directory
step-80/state.json   the controller's state: step, phase, policy and teacher version, data cursor, seed
step-80/files.json   size and checksum of every other file
step-80/COMPLETE     the marker, written last
step-80.writing/     a checkpoint that is being written, or was when the run was killed
step-80.replaced/    the one in whose place another of the same step is put, until that is there
latest               the name of the newest complete checkpoint
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path

import xxhash

__all__ = [
    "FORMAT",
    "MARKER",
    "RUN_CONFIG",
    "require_complete",
    "is_complete",
    "hf_weights",
    "begin",
    "beside",
    "write_json",
    "read_state",
    "checksums",
    "checksums_file",
    "checksums_of_all",
    "has_checksums",
    "write_checksums",
    "damage",
    "commit",
    "put_back",
    "REPLACED",
    "mark",
    "problem",
    "point_to",
    "latest",
    "remove",
    "hf_dir",
    "model_dir",
    "adapter_dir",
    "teacher_file",
    "finished_file",
    "write_lora",
    "require_lora",
]

FORMAT = 2
"""Version of the directory's format, as `state.json` has it. A reader refuses a higher number. In format 1 query, key
and value weights are apart; in format 2 they are as the model holds them, fused in one."""

RUN_CONFIG, MARKER = "run_config.json", "COMPLETE"

REPLACED = ".replaced"
"""Suffix of a checkpoint in whose place another of the same step is put."""

_STATE, _FILES, _LATEST = "state.json", "files.json", "latest"
_LORA = "lora.json"
_CHUNK = 16 * 2**20  # bytes read at once for a checksum


def model_dir(checkpoint: Path) -> Path:
    return checkpoint / "model"


def hf_dir(checkpoint: Path) -> Path:
    return checkpoint / "hf"


def adapter_dir(checkpoint: Path) -> Path:
    return checkpoint / "adapter"


def teacher_file(checkpoint: Path) -> Path:
    return checkpoint / "teacher.safetensors"


def finished_file(checkpoint: Path) -> Path:
    return checkpoint / "finished.jsonl"


def write_lora(checkpoint: Path, record: dict | None) -> None:
    """Writes the LoRA config and base fingerprint of a checkpoint of adapters; None marks one of all weights."""
    file = checkpoint / _LORA
    if record is None:
        file.unlink(missing_ok=True)
        return
    checkpoint.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1))


def require_lora(checkpoint: Path, record: dict | None) -> None:
    """Raises ValueError unless the checkpoint has `record`'s LoRA config and base; None expects all weights."""
    where, file = f"checkpoint={str(checkpoint)!r}:", checkpoint / _LORA
    saved = json.loads(file.read_text()) if file.exists() else None
    if saved is None and record is None:
        return
    if saved is None:
        raise ValueError(
            f"{where} holds a whole model and trainer.lora is set; start from its hf directory "
            "with model.assets instead"
        )
    if record is None:
        raise ValueError(
            f"{where} holds LoRA adapters only and trainer.lora is None; set trainer.lora, or start from "
            "its hf directory, where they are merged, with model.assets"
        )
    for name, value in record.items():
        if saved.get(name) == value:
            continue
        if name == "base_xxh3":
            raise ValueError(
                f"{where} its adapters belong to other base weights ({saved.get(name)}, here {value}); "
                "give the model.assets or the seed they were trained with"
            )
        raise ValueError(
            f"{where} was saved with trainer.lora.{name}={saved.get(name)}, here it is {value}; set it to what it was"
        )


def beside(checkpoint: Path) -> Path:
    """The directory in which a checkpoint is written, before `commit` renames it."""
    return checkpoint.with_name(f"{checkpoint.name}.writing")


def begin(checkpoint: Path) -> None:
    """Makes an empty directory in the place of what is there."""
    remove(checkpoint)
    checkpoint.mkdir(parents=True)


def write_json(file: Path, content: dict) -> None:
    """Writes a file that survives a power cut once this function has returned."""
    _write(file, json.dumps(content, indent=1))


def read_state(checkpoint: Path) -> dict:
    """The controller's state. Raises ValueError for a state of a newer format."""
    state = json.loads((checkpoint / _STATE).read_text())
    if (written := state.pop("format", FORMAT)) > FORMAT:
        raise ValueError(
            f"checkpoint={str(checkpoint)!r}: has format {written}, and this version reads up to format {FORMAT}; "
            "use the version of torchtitan_rl that wrote it, or a newer one"
        )
    return state


def checksums(directory: Path, files: Iterable[Path]) -> dict[str, list]:
    """Path of each file below `directory` -> [bytes, xxh3 of the content]."""
    return {str(file.relative_to(directory)): [file.stat().st_size, _xxh3(file)] for file in files}


def checksums_of_all(directory: Path) -> dict[str, list]:
    """`checksums` of every file below a directory."""
    return checksums(directory, [file for file in sorted(directory.rglob("*")) if file.is_file()])


def checksums_file(directory: Path) -> Path:
    """The file that `write_checksums` writes."""
    return directory / _FILES


def commit(written: Path, checkpoint: Path, state: dict, files: dict[str, list]) -> None:
    """Makes a checkpoint of the directory `written`: state and checksums, then the rename, then the marker.

    `files` are the checksums that are known already; `commit` computes the others. Every file is on disk before the
    rename: a directory without `.writing` whose checksums are right lacks at most the marker. A checkpoint of the same
    step that is there already keeps its files until the new one has the name, and is deleted then.
    """
    write_json(written / _STATE, {"format": FORMAT, **state})
    remaining = [f for f in sorted(written.rglob("*")) if f.is_file() and str(f.relative_to(written)) not in files]
    for file in remaining:
        _sync(file)
    write_checksums(written, files | checksums(written, remaining))
    for directory in (written, *(d for d in written.rglob("*") if d.is_dir())):
        _sync(directory)
    replaced = checkpoint.with_name(checkpoint.name + REPLACED)
    if checkpoint.exists():
        remove(replaced)
        checkpoint.rename(replaced)
    written.rename(checkpoint)
    _sync(checkpoint.parent)
    mark(checkpoint)
    remove(replaced)


def put_back(replaced: Path) -> Path:
    """Ends a `commit` that was cut off: gives a replaced checkpoint its name again, or deletes it where the one that
    replaces it has the name. Returns the checkpoint with the name."""
    checkpoint = replaced.with_name(replaced.name.removesuffix(REPLACED))
    if checkpoint.exists():
        remove(replaced)
    else:
        replaced.rename(checkpoint)
        _sync(checkpoint.parent)
    return checkpoint


def mark(checkpoint: Path) -> None:
    """Writes the marker of a checkpoint."""
    _write(checkpoint / MARKER, "")
    _sync(checkpoint)


def problem(checkpoint: Path) -> str:
    """Why a checkpoint cannot be used: the first file that is missing, or whose content is not what was written; empty
    when all is well. A missing marker is no problem: `commit` writes the marker when all files are on disk."""
    try:
        json.loads((checkpoint / _STATE).read_text())
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except ValueError as error:
        return f"{checkpoint}: {_STATE} is not JSON ({error})"
    return damage(checkpoint)


def has_checksums(directory: Path) -> bool:
    """Whether `write_checksums` has written into a directory."""
    return (directory / _FILES).exists()


def write_checksums(directory: Path, files: dict[str, list]) -> None:
    """Writes down what `checksums` gave of a directory's files, for `damage`."""
    write_json(directory / _FILES, files)


def damage(checkpoint: Path) -> str:
    """The first file of a directory that is missing, or whose content is not what `write_checksums` wrote down; empty
    when all is well."""
    try:
        files = json.loads((checkpoint / _FILES).read_text())
        entries = [(name, int(size), str(xxh3)) for name, (size, xxh3) in files.items()]
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except (ValueError, TypeError, AttributeError) as error:
        return f"{checkpoint}: {_FILES} is not what was written ({error})"
    for name, size, xxh3 in entries:
        file = checkpoint / name
        if not file.is_file():
            return f"{file}: is missing"
        if file.stat().st_size != size:
            return f"{file}: has {file.stat().st_size} bytes, {size} were written"
        if _xxh3(file) != xxh3:
            return f"{file}: its checksum is {_xxh3(file)}, the content that was written has {xxh3}"
    return ""


def point_to(checkpoint: Path) -> None:
    """Makes `checkpoint` the one that `latest` returns."""
    pointer = checkpoint.parent / _LATEST
    _write(pointer.with_suffix(".new"), checkpoint.name)
    pointer.with_suffix(".new").replace(pointer)
    _sync(checkpoint.parent)


def latest(checkpoints: Path) -> Path | None:
    """The checkpoint that `point_to` named last; None before the first."""
    try:
        return checkpoints / (checkpoints / _LATEST).read_text().strip()
    except FileNotFoundError:
        return None


def remove(checkpoint: Path) -> None:
    """Deletes a directory, marker first: what a killed process leaves behind of it is incomplete. All ranks of a mesh
    may delete the same directory at a time."""

    def failed(_function, _path, error) -> None:
        if not isinstance(error[1], FileNotFoundError):  # another rank was faster
            raise error[1]

    (checkpoint / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, onerror=failed)


def _write(file: Path, text: str) -> None:
    with open(file, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _xxh3(file: Path) -> str:
    digest = xxhash.xxh3_64()
    with open(file, "rb") as f:
        while chunk := f.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint has its marker."""
    return (checkpoint / MARKER).exists()


def require_complete(checkpoint: Path) -> Path:
    """Returns `checkpoint`. Raises ValueError for a missing or half-written checkpoint."""
    if not checkpoint.is_dir():
        raise ValueError(f"checkpoint={str(checkpoint)!r}: there is no such directory; give a run's checkpoints/step-N")
    if not is_complete(checkpoint):
        raise ValueError(
            f"checkpoint={str(checkpoint)!r}: is incomplete (no {MARKER} marker: it was cut off while being "
            "written, or is not a checkpoint); use another checkpoints/step-N"
        )
    return checkpoint


def hf_weights(path: Path) -> Path:
    """`path` if `path` is a Hugging Face directory, else the Hugging Face directory of the complete checkpoint `path`.
    Raises ValueError if `path` is neither."""
    if (path / "config.json").exists() and any(path.glob("*.safetensors")):
        return path
    if not (exported := hf_dir(require_complete(path))).is_dir():
        raise ValueError(
            f"checkpoint={str(path)!r}: holds no Hugging Face directory (controller.checkpoint_export); make one with "
            f"torchtitan-rl export {shlex.quote(str(path))} DIRECTORY and give that"
        )
    return exported
