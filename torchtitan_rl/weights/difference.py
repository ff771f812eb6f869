"""How the tensors of a manifest differ from those of a model, in words."""

from __future__ import annotations

import torch

from torchtitan_rl.weights.layout import TensorEntry

__all__ = ["explain_difference"]


def explain_difference(
    published: dict[str, TensorEntry], loaded: dict[str, tuple[tuple[int, ...], torch.dtype]]
) -> str:
    """The differences between a manifest's entries and the tensors a model holds (name -> shape, dtype); empty if
    none."""
    problems = [f"{name} is published but not held" for name in published.keys() - loaded.keys()]
    problems += [f"{name} is held but not published" for name in loaded.keys() - published.keys()]
    for name in sorted(published.keys() & loaded.keys()):
        (shape, dtype), entry = loaded[name], published[name]
        if tuple(shape) != entry.shape:
            problems.append(f"{name} has shape {entry.shape} published, {tuple(shape)} held")
        elif dtype != entry.dtype:
            problems.append(f"{name} has dtype {entry.dtype} published, {dtype} held")
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    return "; ".join(sorted(problems)[:3]) + more
