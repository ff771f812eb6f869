"""The collective calls of one microbatch, traced: a forward and backward of the cut model with fake tensors, which have
shapes and no memory, over a process group that sends nothing."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan_rl import platform
from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.model.attention import PackedDocuments
from torchtitan_rl.tools.rehearse.shards import as_rank, cut_for

__all__ = ["Collective", "MicrobatchCalls", "trace_microbatch"]

Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]

_KINDS: dict[str, Kind] = {
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
}
_SILENT = {"wait_tensor", "barrier"}


@dataclass(frozen=True, slots=True)
class Collective:
    """A call in which `size` ranks take part, each `stride` ranks from the one before."""

    kind: Kind
    nbytes: int
    """Bytes of the tensor that all ranks make together: gathered, to be scattered, or reduced."""
    stride: int
    size: int


@dataclass(kw_only=True, slots=True)
class MicrobatchCalls:
    """Collective calls of one rank, with how often each is made."""

    forward: Counter[Collective]
    backward: Counter[Collective]


def trace_microbatch(
    config: TrainerConfig, model: ModelConfig, role: str, num_tokens: int, *, device: str, trains: bool
) -> MicrobatchCalls:
    """What rank 0 sends in a microbatch of `num_tokens` tokens in one document; attention sends nothing, however the
    tokens are packed. The number of bytes is a constant plus a multiple of the tokens. All ranks make the same calls,
    each in its own groups. Without `trains` the forward alone."""
    num_tokens += -num_tokens % config.parallelism.tensor_parallel_degree
    with as_rank(0, config) as parallel_dims:
        cut = cut_for(config, model, role, parallel_dims, device, attention="sdpa").model
        with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(trains), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
            cut.to_empty(device=platform.device_type())
            cut.train()
            with _Recorder() as forward:
                output = _forward(cut, num_tokens)
            with _Recorder() as backward:
                if trains:
                    output.sum().backward()
    return MicrobatchCalls(forward=forward.seen, backward=backward.seen)


def _forward(model: Any, num_tokens: int) -> torch.Tensor:
    positions_T = torch.arange(num_tokens, device=platform.device_type())
    tokens_T = torch.zeros_like(positions_T)
    model.lm_head.target(tokens_T, 1.0)
    masks = PackedDocuments(positions_T, positions_T, ((1, num_tokens),), (num_tokens,))
    output = model(tokens_T[None], positions=positions_T[None], attention_masks=masks)
    return next(iter(output.values()))


class _Recorder(TorchDispatchMode):
    """Notes every collective call. Raises NotImplementedError for one whose bytes have no formula here."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[Collective] = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):  # DTensor makes calls of its own on local tensors
            return NotImplemented
        if operator.namespace in ("c10d", "_c10d_functional"):
            self._note(operator._opname, args)
        return operator(*args, **(kwargs or {}))

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        if name in _SILENT:
            return
        if name not in _KINDS:
            raise NotImplementedError(f"collective={name}: the rehearsal has no formula for its bytes")
        ranks = _ranks(args)
        if len(ranks) == 1:
            return
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        nbytes = max(tensor.nbytes for tensor in tensors)
        if name == "all_gather_into_tensor":  # the functional call is given a rank's part alone
            nbytes *= len(ranks)
        stride = ranks[1] - ranks[0]
        assert ranks == list(range(ranks[0], ranks[0] + stride * len(ranks), stride)), f"ranks={ranks}: no axis"
        self.seen[Collective(_KINDS[name], nbytes, stride, len(ranks))] += 1


def _ranks(args: tuple[Any, ...]) -> list[int]:
    """The ranks of a call's group, which c10d's operators are given as an object and functional ones by name."""
    for leaf in tree_leaves(args):
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            leaf = dist.ProcessGroup.unbox(leaf).group_name
        elif not isinstance(leaf, str) or leaf in ("sum", "avg", "max", "min"):
            continue
        return dist.get_process_group_ranks(_resolve_process_group(leaf))
    raise AssertionError(f"a collective call without a group: {args}")
