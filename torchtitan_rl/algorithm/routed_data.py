"""The generator's experts in training data: rollout routing replay, arXiv:2510.11370, and its measurement."""

from __future__ import annotations

import dataclasses

import torch

from torchtitan_rl.types import Datum, Routing, Turn

__all__ = ["with_routing", "without_routing"]


def with_routing(data: list[Datum], turns: list[tuple[str, list[tuple[int, Turn]]]], *, replayed: bool) -> list[Datum]:
    """The data with the experts that a generator sent each of their tokens to.

    For each datum `turns` holds (rollout id, [(position, turn), ...]): the position in the datum's whole sequence of
    the turn's first sampled token. A token of several turns has the experts of the first turn that has it: of the
    forward that sampled it, or, for the tokens between turns, of the next turn's prompt. Raises ValueError for a turn
    whose completion has no experts, or experts of another number of tokens.
    """
    routed = []
    for datum, (rollout, datum_turns) in zip(data, turns, strict=True):
        parts: list[torch.Tensor] = []
        num_routed = 0
        for start, turn in datum_turns:
            experts = _checked(turn, start, rollout)
            parts.append(experts[num_routed:])
            num_routed = len(experts)
        routed.append(dataclasses.replace(datum, routing=Routing(experts=torch.cat(parts), replayed=replayed)))
    return routed


def without_routing(data: list[Datum]) -> list[Datum]:
    """The data for a role that did not sample them: its own routers choose. The data themselves where they have no
    routing."""
    if data[0].routing is None:
        return data
    return [dataclasses.replace(datum, routing=None) for datum in data]


def _checked(turn: Turn, start: int, rollout: str) -> torch.Tensor:
    """The experts of a turn's completion. `start`: tokens of the prompt."""
    experts, num_tokens = turn.completion.routed_experts, start + len(turn.completion.tokens) - 1
    if experts is None:
        raise ValueError(
            f"rollout={rollout}: a completion of it has no routed_experts, which algorithm.expert_routing needs; give "
            "the generator's completions as they are, or set algorithm.expert_routing='own'"
        )
    if experts.dim() != 3 or len(experts) != num_tokens:
        raise ValueError(
            f"rollout={rollout}: completion.routed_experts has shape {tuple(experts.shape)} for a turn whose generator "
            f"has read {num_tokens} tokens; give (tokens, layers, K)"
        )
    if (experts.sort(-1).values.diff(dim=-1) == 0).any():
        raise ValueError(
            f"rollout={rollout}: completion.routed_experts names an expert twice for one token; give K different "
            "experts of each layer"
        )
    return experts
