"""Checkpoints: a directory per step, complete once the marker is written.

step-80/model/       torch's distributed checkpoint of parameters and optimizer, loadable in any layout
step-80/hf/          the weights as a Hugging Face directory
step-80/lora.json    with LoRA, when model/ holds adapters only: the LoRA config, and a fingerprint of the base
step-80/adapter/     with LoRA: the adapters as a PEFT directory
step-80/teacher.safetensors  with self-distillation: the snapshot that teaches, in the generators' dtype
step-80/state.json   the controller's state: step, phase, policy and teacher version, data cursor, seed
step-80/COMPLETE     the marker, written last
"""

from __future__ import annotations

import json
import os
from pathlib import Path

__all__ = [
    "require_complete",
    "hf_weights",
    "begin",
    "write_state",
    "read_state",
    "hf_dir",
    "model_dir",
    "adapter_dir",
    "teacher_file",
    "write_lora",
    "require_lora",
]

_MARKER = "COMPLETE"
_LORA = "lora.json"


def model_dir(checkpoint: Path) -> Path:
    return checkpoint / "model"


def hf_dir(checkpoint: Path) -> Path:
    return checkpoint / "hf"


def adapter_dir(checkpoint: Path) -> Path:
    return checkpoint / "adapter"


def teacher_file(checkpoint: Path) -> Path:
    return checkpoint / "teacher.safetensors"


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


def begin(checkpoint: Path) -> None:
    """Makes the directory; a complete checkpoint there becomes incomplete."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / _MARKER).unlink(missing_ok=True)


def write_state(checkpoint: Path, state: dict) -> None:
    """Writes the controller's state and then the marker that makes the checkpoint complete."""
    for name, text in (("state.json", json.dumps(state, indent=1)), (_MARKER, "")):
        with open(checkpoint / name, "w") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())


def read_state(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "state.json").read_text())


def require_complete(checkpoint: Path) -> Path:
    """Returns `checkpoint`. Raises ValueError for a missing or half-written checkpoint."""
    if not checkpoint.is_dir():
        raise ValueError(f"checkpoint={str(checkpoint)!r}: there is no such directory; give a run's checkpoints/step-N")
    if not (checkpoint / _MARKER).exists():
        raise ValueError(
            f"checkpoint={str(checkpoint)!r}: is incomplete (no {_MARKER} marker: it was cut off while being "
            "written, or is not a checkpoint); use another checkpoints/step-N"
        )
    return checkpoint


def hf_weights(path: Path) -> Path:
    """`path` if `path` is a Hugging Face directory, else the Hugging Face directory of the complete checkpoint `path`.
    Raises ValueError if `path` is neither."""
    if (path / "config.json").exists() and any(path.glob("*.safetensors")):
        return path
    return hf_dir(require_complete(path))
