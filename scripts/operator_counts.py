"""Operators that a generator and a trainer call, and reads by which the host waits for the device: counted without a
GPU.

An operator is a call that torch's dispatcher sees and that computes: on CUDA nearly always one kernel. Views and
allocations are left out, a `foreach` operator on a list counts once. Small models with the layers of Qwen3 run on
the CPU, with 2 and with 3 layers. The difference is a layer; what remains is outside of layers. What CUDA runs and a
CPU does not is put in its place: matrices are not packed, training attention is the kernel of variable lengths (which
computes nothing here), a norm in training is one operator forward and one backward, heads of a decode step are one. The
head is torch's operators, one chunk of tokens.

Reads are counted on the meta device, which has no numbers to give: whatever asks for one is on the list.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan_rl import adapters

adapters.prepare_vllm(eager=True)

from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402

from torchtitan_rl import platform  # noqa: E402
from torchtitan_rl.config.meshes import TrainerConfig  # noqa: E402
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape  # noqa: E402
from torchtitan_rl.model.spec import build_spec, training_spec  # noqa: E402
from torchtitan_rl.types import Microbatch  # noqa: E402

__all__ = ["Counts", "HostReads", "OperatorCount", "decode_counts", "training_counts", "training_reads"]

ATTENTION_OPERATORS = 2
"""vLLM's for one layer of a decode step: keys and values go to the cache, and attention. vLLM's choice of a kernel may
add one that sums up parts of a long context."""
LAYERS = (2, 3)

_FREE = {
    *("aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided"),
    *("aten.detach", "aten.alias", "aten.lift_fresh", "aten._unsafe_view", "aten.resize_", "aten.set_"),
    *("aten._local_scalar_dense", "aten._reshape_alias", "prim.device", "fsdp.set_"),
}
"""Operators that compute nothing and are not marked as views."""
_ROWS = {"aten.embedding", "aten.gather", "aten.index", "aten.index_select"}
"""Operators that read as much of a tensor as they write."""
_READS = {
    *("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal", "aten.is_nonzero"),
    *("aten._unique2", "aten.unique_dim", "aten.repeat_interleave.Tensor", "aten.bincount"),
}
_PRODUCTS = {
    *("aten.mm", "aten.addmm", "aten.addmm_", "aten.bmm", "aten.baddbmm", "aten._grouped_mm"),
    *("torch_attn._varlen_attn", "torch_attn._varlen_attn_backward", "vllm.attention"),
}
"""Matrix products and attention."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Operators of one layer and of everything outside of layers."""

    layer: int
    rest: int

    def total(self, num_layers: int) -> int:
        return self.rest + self.layer * num_layers


class OperatorCount(TorchDispatchMode):
    """Counts the operators that compute, by name, and the bytes of the tensors that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        """Operators whose result the host has to know before it goes on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, result = str(func).rpartition(".")[0], func(*args, **(kwargs or {}))
        if name in _READS:
            self.reads[name] += 1
        if name not in _FREE and not func.is_view:
            self.calls[name] += 1
            written = _num_bytes(result)
            self.moved[name] += written + (written if name in _ROWS else _num_bytes((args, kwargs or {})))
        return result

    @property
    def moved_between_products(self) -> int:
        """Bytes of all operators but matrix products and attention."""
        return sum(size for name, size in self.moved.items() if name not in _PRODUCTS)


def _num_bytes(tree: Any) -> int:
    """Bytes of the tensors in a tree. What an expanded tensor repeats counts once."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)


def _difference(fewer: int, more: int) -> Counts:
    """From the operators of models of `LAYERS` layers."""
    layer = (more - fewer) // (LAYERS[1] - LAYERS[0])
    return Counts(layer, fewer - layer * LAYERS[0])


def sized(num_layers: int) -> ModelConfig:
    """A Qwen3 of sizes that matter to no count."""
    shape = Qwen3Shape(
        vocab_size=128, dim=64, n_layers=num_layers, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=96, max_seq_len=64
    )
    return ModelConfig(assets="chars", shape=shape)


# A decode step.


class _NoAttention(torch.nn.Module):
    """In the place of vLLM's attention, whose operators are `ATTENTION_OPERATORS`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(query)


@torch.library.custom_op("counts::heads", mutates_args=())
def _heads(product: torch.Tensor, queries_per_key: int, head_dim: int) -> list[torch.Tensor]:
    """In the place of the kernel of `engine.fused_heads`."""
    groups = product.unflatten(-1, (-1, queries_per_key + 2, head_dim))
    return [part.flatten(1).clone() for part in groups.split([queries_per_key, 1, 1], dim=2)]


def _fused_heads(product: torch.Tensor, *args: Any, queries_per_key: int, head_dim: int, **kwargs: Any):
    return _heads(product, queries_per_key, head_dim)


@contextmanager
def _fused_layers() -> Iterator[None]:
    """Layers go by the kernels of CUDA."""
    heads = SimpleNamespace(fused_heads=_fused_heads)
    with (
        mock.patch.object(platform, "has_fused_layers", lambda hidden: True),
        mock.patch.dict(sys.modules, {"torchtitan_rl.engine.fused_heads": heads}),
    ):
        yield


def decode_operators(num_layers: int, *, packed: bool = False) -> OperatorCount:
    """Of one decode step up to the logits, as CUDA runs it. `packed`: as a CPU runs it, by packed matrices."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    from torchtitan_rl.engine import layers
    from torchtitan_rl.engine.kernels import pack_matrices
    from torchtitan_rl.engine.plan import generator_spec

    vllm_config = VllmConfig(device_config=DeviceConfig("cpu"))
    with set_current_vllm_config(vllm_config), mock.patch.object(layers, "Attention", _NoAttention):
        decoder = generator_spec(build_spec(sized(num_layers)), 1).model.build()
    with torch.no_grad():
        decoder.init_weights()
    for parameter in decoder.parameters():  # the rotation's table stays in float32
        parameter.data = parameter.data.bfloat16()
    if packed:
        pack_matrices(decoder)
    tokens_T, positions_T = torch.arange(5), torch.arange(5)
    kernels = nullcontext() if packed else _fused_layers()
    with torch.no_grad(), kernels, OperatorCount() as count:  # as `TorchtitanForCausalLM` does
        hidden = decoder.tok_embeddings(tokens_T)[None]
        for layer in decoder.layers.values():
            hidden = layer(hidden, None, positions_T[None])
        decoder.lm_head(decoder.norm(hidden)[0])
    count.calls["vllm.attention"] += ATTENTION_OPERATORS * num_layers
    return count


def decode_counts(*, packed: bool = False) -> Counts:
    """Of the model alone: scheduling, inputs and sampling are vLLM's."""
    return _difference(*(decode_operators(num_layers, packed=packed).calls.total() for num_layers in LAYERS))


# A training step.


def _no_attention(query, key, value, cu_seq_q, *args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    numbers = query.new_zeros((query.shape[1], query.shape[0]), dtype=torch.float32)
    return torch.zeros_like(query), numbers, torch.zeros(2, dtype=torch.uint64)


def _no_attention_backward(grad_out, query, key, value, *args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


@torch.library.custom_op("counts::rms_norm", mutates_args=())
def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x)


@torch.library.custom_op("counts::rms_norm_backward", mutates_args=())
def _rms_norm_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros_like(x), torch.zeros_like(weight)


_rms_norm.register_fake(lambda x, weight: torch.empty_like(x))
_rms_norm_backward.register_fake(lambda grad, x, weight: (torch.empty_like(x), torch.empty_like(weight)))
_rms_norm.register_autograd(
    lambda ctx, grad: _rms_norm_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def _norms_in_one() -> Any:
    """Norms as CUDA computes them, in one operator forward and one backward."""
    return mock.patch.object(torch.nn.functional, "rms_norm", lambda x, shape, weight, eps: _rms_norm(x, weight))


@contextmanager
def _cuda_attention() -> Iterator[None]:
    """Attention of variable lengths may be called on a CPU, where it computes nothing."""
    import torch.nn.attention.varlen  # noqa: F401  (defines the operators)

    with torch.library._scoped_library("torch_attn", "IMPL") as library:
        library.impl("_varlen_attn", _no_attention, "CPU")
        library.impl("_varlen_attn_backward", _no_attention_backward, "CPU")
        yield


def training_operators(num_layers: int, checkpoint: Any) -> dict[str, Counter[str]]:
    """Of a microbatch and of an optimizer step, on one rank in bfloat16. The process group must exist."""
    from scripts.gpu_checks.logprob_chunk import microbatch
    from scripts.gpu_checks.trainer_steps import Trainer
    from torchtitan_rl.algorithm.losses import importance_sampling
    from torchtitan_rl.model.train_step import accumulate_gradients, clip_and_step
    from torchtitan_rl.types import OptimParams

    config = TrainerConfig(activation_checkpoint=checkpoint, attention="varlen")
    config.training.mixed_precision_param, config.training.seq_len = "bfloat16", 32
    trainer = Trainer(config, sized(num_layers), torch.device("cpu"))
    batch, counts = microbatch(2, 32, 128), {}

    def forward_alone(inputs: Any) -> Any:
        counts["forward"] = Counter(count.calls)
        return importance_sampling(inputs)

    def take_step() -> None:
        params = OptimParams(lr=1e-6, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)
        clip_and_step(list(trainer.model.parameters()), trainer.optimizers, params, 0.5, expert_parallel=False)

    accumulate_gradients(trainer.model, [batch], importance_sampling, trainer.device)
    take_step()  # the first one makes the moments
    with OperatorCount() as count:
        accumulate_gradients(trainer.model, [batch], forward_alone, trainer.device)
    counts["microbatch"] = count.calls
    with OperatorCount() as step:
        take_step()
    return counts | {"step": step.calls}


def training_counts(checkpoint: Any) -> dict[str, Counts]:
    """By part: `forward`, `microbatch` (forward, loss, metrics, backward, with what is computed again), `step`
    (clipping and AdamW). The process group must exist."""
    with _cuda_attention(), _norms_in_one():
        fewer, more = (training_operators(num_layers, checkpoint) for num_layers in LAYERS)
    return {part: _difference(fewer[part].total(), more[part].total()) for part in fewer}


# What the host waits for.


@dataclass
class HostReads(TorchFunctionMode):
    """Lists reads of tensors on the meta device, which stands for a GPU, and answers them with zeros; and copies to the
    device that wait for what it does, as those without `non_blocking` do."""

    reads: list[str] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if tensor is not None and tensor.is_meta:
            if name in ("item", "__float__", "__int__", "__bool__", "__index__", "tolist", "cpu", "numpy", "nonzero"):
                return self._answer(name, tensor, kwargs)
            if name == "__getitem__" and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool:
                self.reads.append(f"mask at {_place()}")
                return tensor.flatten()
        result = func(*args, **kwargs)
        from_host = (name == "to" and not tensor.is_meta) or (tensor is None and name in ("tensor", "as_tensor"))
        if from_host and result.is_meta and not kwargs.get("non_blocking"):
            self.uploads.append(f"{name} at {_place()}")
        return result

    def _answer(self, name: str, tensor: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        self.reads.append(f"{name} at {_place()}")
        if name == "nonzero":
            indices = tuple(torch.zeros(2, dtype=torch.int64, device="meta") for _ in range(tensor.dim()))
            return indices if kwargs.get("as_tuple") else torch.stack(indices, 1)
        zeros = torch.zeros(tensor.shape, dtype=tensor.dtype)
        return zeros if name == "cpu" else getattr(zeros, name)()


def _place() -> str:
    """File and function that called torch."""
    frames = [frame for frame in traceback.extract_stack() if "operator_counts" not in frame.filename]
    frame = next(f for f in reversed(frames) if "/torch/" not in f.filename)
    return f"{frame.filename.rpartition('site-packages/')[2].rpartition('torchtitan_rl/')[2]}:{frame.name}"


def meta_model(config: ModelConfig, checkpoint: Any = "none", attention: str = "varlen") -> torch.nn.Module:
    """A trainer's model in bfloat16 on the meta device, without FSDP."""
    spec = training_spec(
        build_spec(config),
        SimpleNamespace(parallelism=TrainerConfig().parallelism),
        attention=attention,
        chunk_bytes=platform.logprob_chunk_bytes(0, "cuda"),
    )
    with torch.device("meta"):
        model = spec.model.build()
    if checkpoint != "none":
        {"selective": SelectiveAC, "full": FullAC}[checkpoint].Config().build(dump_folder="").apply(model)
    return model.to(torch.bfloat16).train()


def training_reads(batches: list[Microbatch], loss: Any, attention: str = "varlen") -> HostReads:
    """Reads and uploads of a forward and backward of these microbatches, with the loss."""
    from torchtitan_rl.model.train_step import accumulate_gradients

    model = meta_model(sized(2), attention=attention)
    with HostReads() as host:
        accumulate_gradients(model, batches, loss, torch.device("meta"))
    return host


def training_traffic(config: ModelConfig, batch: Microbatch, checkpoint: Any) -> int:
    """Bytes that a forward and backward of a microbatch read and write besides matrix products, attention and the
    head, whose logits `roofline` counts."""
    from torchtitan_rl.algorithm.losses import importance_sampling
    from torchtitan_rl.model import logprob_head
    from torchtitan_rl.model.train_step import accumulate_gradients

    def no_head(hidden_TD, weight_VD, targets, **softmax) -> dict[str, torch.Tensor]:
        numbers_T = hidden_TD.sum(-1, dtype=torch.float32)
        return {"policy_logprobs": numbers_T, "entropy": numbers_T}

    patches = mock.patch.object(logprob_head, "target_scores", no_head), _norms_in_one()
    with patches[0], patches[1]:
        model = meta_model(config, checkpoint)
        with HostReads(), OperatorCount() as count:
            accumulate_gradients(model, [batch], importance_sampling, torch.device("meta"))
    return count.moved_between_products


def main() -> None:
    import torch.distributed as dist

    from scripts.gpu_checks.logprob_chunk import microbatch
    from torchtitan_rl.algorithm.losses import importance_sampling

    rows = [("decode step", decode_counts()), ("decode step, packed matrices", decode_counts(packed=True))]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for checkpoint in ("none", "selective", "full"):
        rows += [(f"{part}, {checkpoint}", counts) for part, counts in training_counts(checkpoint).items()]
    dist.destroy_process_group()
    print("| operators of | a layer | the rest | 28 layers |", "|---|---|---|---|", sep="\n")
    for name, counts in rows:
        print(f"| {name} | {counts.layer} | {counts.rest} | {counts.total(28):,} |")
    host = training_reads([microbatch(2, 32, 128)] * 2, importance_sampling)
    print("\nReads of two microbatches:", *host.reads, *host.uploads, sep="\n- ")


if __name__ == "__main__":
    main()
