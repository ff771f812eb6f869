"""One rank of a trainer mesh as a process without actors: `python -m tests.integration.trainer_process SPEC`.

SPEC is JSON: `layout` (arguments of `layouts.trainer_config`), `shape` (of a Qwen3), `lengths` (tokens of each datum of
a microbatch), `num` (microbatches). RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are torch's. After a first step, the
process prints a line of JSON with what it holds. Every line that it then reads makes it train `num` microbatches and a
step, and print another line. It ends with its standard input.
"""

import json
import os
import sys
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.integration.helpers import random_datums
from tests.integration.layouts import trainer_config
from torchtitan_rl.actors.trainer_rank import TrainerRank
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.dispatch.microbatches import pack
from torchtitan_rl.types import OptimParams
from torchtitan_rl.weights.versioned import MemoryStore


class Alive(TorchDispatchMode):
    """The most bytes that tensors besides `held` have at once. Looks after every operator; a storage may have been
    emptied or filled again meanwhile, as FSDP does with gathered parameters."""

    def __init__(self, held):
        super().__init__()
        self.held = {id(storage): storage for storage in _storages(held)}
        self.storages, self.most = {}, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented
        out = operator(*args, **(kwargs or {}))
        for storage in _storages(out):
            if id(storage) not in self.held:
                self.storages[id(storage)] = weakref.ref(storage)
        found = {key: storage for key, ref in self.storages.items() if (storage := ref()) is not None}
        self.storages = {key: self.storages[key] for key in found}
        self.most = max(self.most, sum(storage.nbytes() for storage in found.values()))
        return out


def _storages(values):
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    tensors = [leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in tensors]
    return [(leaf.elem if isinstance(leaf, AsyncCollectiveTensor) else leaf).untyped_storage() for leaf in tensors]


def resident(field):
    """VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def main():
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = trainer_config(**spec["layout"])
    config.training.seq_len = max(spec["lengths"])
    shape = Qwen3Shape(**spec["shape"])
    rank = TrainerRank(config, ModelConfig(shape=shape), "policy", 0, torch.device("cpu"), MemoryStore(), "")
    first, data = True, dist.get_rank() // config.parallelism.tensor_parallel_degree
    lengths = spec["lengths"]
    made = [random_datums(1, seed=100 * data + i, min_len=n, max_len=n)[0] for i, n in enumerate(lengths)]
    batch, said = pack(made), {}

    def forward_backward(number):
        for _ in range(number):
            rank.forward_backward([batch], importance_sampling, 1.0, 1.0)

    forward_backward(1)
    rank.optim_step(OptimParams(lr=1e-3), 1.0)
    while True:
        if first:
            said = {f"{part}_bytes": nbytes for part, nbytes in rank.residency().items()}
            forward_backward(1)
            said |= {"gradients_bytes": rank.residency()["gradients"]}
            with Alive([tensor for part in rank.parts for tensor in rank._tensors(part)]) as alive:
                forward_backward(1)
            said["working_bytes"] = alive.most
            before = resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
            forward_backward(1)
            said["resident_bytes"] = resident("VmHWM") - before
            first = False
        else:
            forward_backward(spec["num"])
            rank.optim_step(OptimParams(lr=1e-3), 1.0)
        dist.barrier()
        print(json.dumps(said), flush=True)
        if not sys.stdin.readline():
            break
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
