"""The experts of a mixture that a generator sent the tokens of a sequence to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Routing", "experts_dtype"]


@dataclass(kw_only=True, slots=True)
class Routing:
    """The generator's experts of each token of a datum, or of each packed token of a microbatch."""

    experts: torch.Tensor
    """(T, layers, K): for every token that the model reads, the K experts of each layer with a mixture, in any order.
    The dtype is `experts_dtype`."""
    replayed: bool
    """Whether the trainer's forward sends tokens to these experts. False: the trainer's own routers choose, and the
    forward only counts how often both agree."""

    def check(self, num_tokens: int) -> None:
        """Raises ValueError unless there are experts for each of `num_tokens` tokens."""
        shape = tuple(self.experts.shape)
        if len(shape) != 3 or shape[0] != num_tokens:
            raise ValueError(
                f"datum.routing.experts: has shape {shape} for {num_tokens} tokens; give (T, layers, K), the experts "
                "of every token that the model reads"
            )


def experts_dtype(num_experts: int) -> torch.dtype:
    """The smallest dtype that holds the number of an expert and can be sorted."""
    return torch.uint8 if num_experts <= 256 else torch.int16
