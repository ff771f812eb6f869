"""Which run, and which of its steps, the weights of a directory come from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.weights import checkpoint

__all__ = ["Origin", "origin"]


@dataclass(kw_only=True, slots=True)
class Origin:
    """The run and the step of a checkpoint; a Hugging Face directory of no run has its own name and no step."""

    name: str
    """The config's name."""
    step: int | None = None
    """Optimizer steps of the reinforcement phase; None: not known."""
    text: str = ""
    """The step in words, such as `step 160` or `supervised step 20`; empty: not known."""


def origin(path: Path) -> Origin:
    """Where the weights of a checkpoint, or of the Hugging Face directory inside a checkpoint, come from."""
    path = path.absolute()
    for place in (path, path.parent):
        if (place / checkpoint.RUN_CONFIG).is_file() and checkpoint.is_complete(place):
            state = checkpoint.read_state(place)
            early = state["phase"] in ("supervised", "preference")
            text = f"{state['phase']} step {state['phase_step']}" if early else f"step {state['step']}"
            name = json.loads((place / checkpoint.RUN_CONFIG).read_text())["name"]
            return Origin(name=name, step=state["step"], text=text)
    return Origin(name=path.name)
