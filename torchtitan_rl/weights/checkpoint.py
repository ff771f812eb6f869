"""Checkpoints: a directory per step, complete once its marker is there.

    step-80/model/       torch's distributed checkpoint of parameters and optimizer: any layout can load it
    step-80/hf/          the same parameters as a Hugging Face directory
    step-80/state.json   what the controller needs: step, phase, policy version, data cursor, seed
    step-80/COMPLETE     written last
"""

from __future__ import annotations

import json
import os
from pathlib import Path

__all__ = ["require_complete", "hf_weights", "begin", "write_state", "read_state", "hf_dir", "model_dir"]

_MARKER = "COMPLETE"


def model_dir(checkpoint: Path) -> Path:
    return checkpoint / "model"


def hf_dir(checkpoint: Path) -> Path:
    return checkpoint / "hf"


def begin(checkpoint: Path) -> None:
    """Makes the directory; one that was complete no longer is."""
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
    """The checkpoint, if it can be loaded. Raises ValueError when it is missing or half-written."""
    if not checkpoint.is_dir():
        raise ValueError(f"checkpoint={str(checkpoint)!r}: there is no such directory; give a run's checkpoints/step-N")
    if not (checkpoint / _MARKER).exists():
        raise ValueError(
            f"checkpoint={str(checkpoint)!r}: is incomplete (no {_MARKER} marker: it was cut off while being "
            "written, or is not a checkpoint); use another checkpoints/step-N"
        )
    return checkpoint


def hf_weights(path: Path) -> Path:
    """The Hugging Face directory in a complete checkpoint, or `path` itself if it is one. Raises ValueError if neither."""
    if (path / "config.json").exists() and any(path.glob("*.safetensors")):
        return path
    return hf_dir(require_complete(path))
