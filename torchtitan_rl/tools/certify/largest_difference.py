"""One check out of many pairs of tensors: the largest difference, and where it is."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from torchtitan_rl.tools.certify.certificate import CertificateLine

__all__ = ["LOGPROBS", "of_pairs", "of_states"]

LOGPROBS = 2e-5
"""How much two implementations may differ in a log-probability, in float32."""


def of_pairs(
    name: str, pairs: Iterable[tuple[str, torch.Tensor, torch.Tensor]], tolerance: float, *, relative: bool = False
) -> CertificateLine:
    """The pairs are (part, tensor, expected tensor). `relative`: to the largest number of the expected tensor. A part
    whose difference is not a number, or whose shapes differ, has an infinite difference."""
    largest, where = 0.0, ""
    for part, tensor, expected in pairs:
        difference = math.inf
        if tensor.shape == expected.shape:
            difference = float((tensor.double() - expected.double()).abs().max())
            if relative:
                difference /= max(float(expected.abs().max()), 1e-12)
        if math.isnan(difference):
            difference = math.inf
        if difference > largest or not where:
            largest, where = difference, part
    if not where:
        return CertificateLine(name=name, difference=math.inf, tolerance=tolerance, note="there was nothing to compare")
    return CertificateLine(name=name, difference=largest, tolerance=tolerance, part=where if largest else "")


def of_states(
    name: str,
    state: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    tolerance: float,
    *,
    relative: bool = False,
) -> CertificateLine:
    """Tensors by name, which must be the same names."""
    for absent, words in ((expected.keys() - state.keys(), "is missing"), (state.keys() - expected.keys(), "is extra")):
        if absent:
            return CertificateLine(name=name, difference=math.inf, tolerance=tolerance, part=min(absent), note=words)
    return of_pairs(name, ((n, state[n], expected[n]) for n in sorted(expected)), tolerance, relative=relative)
