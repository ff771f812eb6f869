"""Whether a run's data can be read, without downloading any."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchtitan_rl.tasks.family import SPLITS, TaskFamily, source_of

__all__ = ["unread_data", "without_download"]


def unread_data(family: TaskFamily, seed: int) -> str:
    """Why a family's data cannot be read on this machine as it is; empty when they can. Raises ValueError for a split
    without tasks and for a file that is not there."""

    def read() -> None:
        for split in SPLITS:
            source_of(family, split, seed)
        family.task("train", 0)

    return without_download(read)


def without_download(read: Callable[[], object]) -> str:
    """Why `read` cannot read its data on this machine as it is; empty when it can. Passes on a ValueError."""
    try:
        with _offline():
            read()
    except RuntimeError as error:
        return str(error)
    return ""


@contextmanager
def _offline() -> Iterator[None]:
    """Hugging Face's libraries download nothing meanwhile; what is in their cache they read."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"  # for a library that is imported meanwhile
    loaded = [sys.modules[name] for name in ("huggingface_hub.constants", "datasets.config") if name in sys.modules]
    values = [vars(module)["HF_HUB_OFFLINE"] for module in loaded]
    for module in loaded:
        vars(module)["HF_HUB_OFFLINE"] = True
    try:
        yield
    finally:
        for module, value in zip(loaded, values, strict=True):
            vars(module)["HF_HUB_OFFLINE"] = value
        os.environ.pop("HF_HUB_OFFLINE")
        if before is not None:
            os.environ["HF_HUB_OFFLINE"] = before
