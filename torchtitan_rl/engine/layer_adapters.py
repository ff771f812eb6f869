"""Adapters of several models over one base: each token of a batch is computed with the adapters of its own request.

A linear layer with adapters computes x W^T + x A^T B^T (Hu et al. 2021, "LoRA"; B times alpha / rank is one matrix
here). An engine has a number of slots for adapters. A forward sorts its tokens by the slots of their requests, once for
all layers. A layer gathers its inputs in that order, multiplies the tokens of each slot by the slot's A and B, all of
them in one batched product, and adds the results to the tokens' outputs. Its cost is that of one adapter for each
token, whatever the number of models.

A request names its slot in `SamplingParams.extra_args`; vLLM's V1 model runner tells a `LogitsProcessor` which row of
the batch each request is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from torchtitan_rl.engine.noise import move_rows

__all__ = ["EXTRA_ARGUMENT", "NO_SLOT", "AdapterBatch", "LayerAdapters", "RequestSlots"]

EXTRA_ARGUMENT = "adapter_slot"
"""The key of a request's slot in `SamplingParams.extra_args`."""
NO_SLOT = -1
"""The slot of requests that the base answers."""


class RequestSlots(LogitsProcessor):
    """The slot of the request in each row of a V1 batch. Leaves logits alone, as `noise._Streams` does."""

    def __init__(self, max_num_seqs: int) -> None:
        self.slots_R = np.full(max_num_seqs, NO_SLOT, dtype=np.int64)

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row, params, _, _ in batch_update.added:
            self.slots_R[row] = (params.extra_args or {}).get(EXTRA_ARGUMENT, NO_SLOT)
        move_rows(self.slots_R, batch_update)


@dataclass(frozen=True, slots=True)
class _SlotRows:
    """The tokens of a forward that use slots, sorted by slot."""

    slots: slice
    """S neighbouring slots, of which a few may have no token."""
    rows: torch.Tensor
    """The tokens' rows (S x longest), the same number of each slot; filled up with row 0."""
    rows_of_two: torch.Tensor
    """The same in the output of two stacked layers, seen as two rows a token: (S x 2 x longest)."""
    mask_SL1: torch.Tensor | None
    """1 for a token, 0 for what is filled up; None: every slot has as many tokens."""


class AdapterBatch:
    """Which slots the tokens of one forward use: the same for all layers of a model."""

    def __init__(self, num_slots: int, rank: int) -> None:
        self.num_slots, self.rank = num_slots, rank
        self._runner: Any = None
        self._requests: RequestSlots | None = None
        self.groups: list[_SlotRows] = []
        """Slots whose tokens are multiplied together; empty: no token uses a slot."""

    def install(self, runner: Any, max_num_seqs: int) -> None:
        """Follows the rows of a V1 model runner. Until then no token uses a slot."""
        self._runner, self._requests = runner, RequestSlots(max_num_seqs)
        runner.input_batch.logitsprocs.argmax_invariant.append(self._requests)

    def begin(self, device: torch.device, dtype: torch.dtype) -> None:
        """Sorts the tokens of the forward that begins. `dtype`: of its activations."""
        self.groups = []
        if self._requests is None or get_forward_context().attn_metadata is None:  # vLLM measures a call's memory
            return
        num_requests = self._runner.input_batch.num_reqs
        slots_R = self._requests.slots_R[:num_requests]
        lengths_R = np.diff(self._runner.query_start_loc.np[: num_requests + 1])
        slots_T = np.repeat(slots_R, lengths_R)
        order_T = np.argsort(slots_T, kind="stable")
        used, starts, counts = np.unique(slots_T[order_T], return_index=True, return_counts=True)
        rows_by_slot = [
            (int(slot), order_T[start : start + count])
            for slot, start, count in zip(used, starts, counts, strict=True)
            if slot != NO_SLOT
        ]
        if not rows_by_slot:
            return
        # Side by side every slot from the first to the last costs as much as the one with the most tokens, such as that
        # of a prompt.
        longest, span = max(len(rows) for _, rows in rows_by_slot), rows_by_slot[-1][0] - rows_by_slot[0][0] + 1
        if span * longest <= _FREE_ROWS + _MOST_FILLING * sum(len(rows) for _, rows in rows_by_slot):
            self.groups = [_side_by_side(rows_by_slot, span, longest, device, dtype)]
        else:
            self.groups = [_side_by_side([one], 1, len(one[1]), device, dtype) for one in rows_by_slot]


_FREE_ROWS, _MOST_FILLING = 64, 1.5
"""Slots are multiplied side by side while that is so many rows, and so many more for each token that uses a slot."""


def _side_by_side(
    rows_by_slot: list[tuple[int, np.ndarray]], span: int, longest: int, device: torch.device, dtype: torch.dtype
) -> _SlotRows:
    """The rows of each slot, of `span` slots from the first on."""
    rows_SL = np.zeros((span, longest), dtype=np.int64)
    mask_SL = np.zeros((span, longest), dtype=np.float32)
    first = rows_by_slot[0][0]
    for slot, rows in rows_by_slot:
        rows_SL[slot - first, : len(rows)], mask_SL[slot - first, : len(rows)] = rows, 1
    rows_S2L = rows_SL[:, None] * 2 + np.arange(2)[:, None]
    return _SlotRows(
        slots=slice(first, first + span),
        rows=torch.from_numpy(rows_SL.reshape(-1)).to(device, non_blocking=True),
        rows_of_two=torch.from_numpy(rows_S2L.reshape(-1)).to(device, non_blocking=True),
        mask_SL1=None if mask_SL.all() else torch.from_numpy(mask_SL).to(device, dtype, non_blocking=True)[..., None],
    )


class LayerAdapters(torch.nn.Module):
    """The adapters of a matrix in every slot. The matrix has the rows of one layer, or stacks those of two layers of
    one size. A is (slots, layers x rank, in), B transposed (slots, layers, rank, out of a layer)."""

    a: torch.Tensor
    b: torch.Tensor

    def __init__(self, batch: AdapterBatch, weights: Sequence[torch.Tensor]) -> None:
        """`weights`: (out, in) of each layer on this rank."""
        super().__init__()
        self._batch, self._num_layers = batch, len(weights)
        (rows, columns), slots = weights[0].shape, batch.num_slots
        assert self._num_layers in (1, 2) and all(weight.shape == weights[0].shape for weight in weights)
        new = weights[0].new_zeros
        self.register_buffer("a", new(slots, self._num_layers * batch.rank, columns), persistent=False)
        self.register_buffer("b", new(slots, self._num_layers, batch.rank, rows), persistent=False)

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Adds x A^T B^T of each token's slot to `out` (..., layers x out), in place. `x`: (..., in), of the same
        tokens."""
        x_TI, two = x.reshape(-1, x.shape[-1]), self._num_layers == 2
        out_TO = out.view(-1, self.b.shape[-1])
        for group in self._batch.groups:
            a_SRI, b_SRO = self.a[group.slots], self.b[group.slots].flatten(0, 1)
            x_SLI = x_TI.index_select(0, group.rows).view(len(a_SRI), -1, x.shape[-1])
            products_SLR = torch.bmm(x_SLI, a_SRI.transpose(1, 2))
            if group.mask_SL1 is not None:
                products_SLR *= group.mask_SL1
            if two:
                products_SLR = products_SLR.unflatten(-1, (2, -1)).transpose(1, 2).flatten(0, 1)
            rows = group.rows_of_two if two else group.rows
            out_TO.index_add_(0, rows, torch.bmm(products_SLR, b_SRO).view(-1, out_TO.shape[-1]))

    def slot(self, number: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A (rank, in) and B (out, rank) of a slot and of one of the layers, in the memory of all slots."""
        rank = self._batch.rank
        return self.a[number, layer * rank : (layer + 1) * rank], self.b[number, layer].t()
