"""Bytes that collective calls send over the links of a layout: within hosts and between hosts.

Every call runs as a ring over its group in the order of ranks: a rank sends to the next one only. Of a tensor of N
bytes that n ranks make together, each rank sends (n - 1) / n N to gather or scatter it, and twice that to reduce it for
all (Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"; NCCL's ring).
Ranks of a host are neighbours, so a ring leaves and enters each host once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.tools.rehearse.trace_file import Collective

__all__ = ["Links", "links_of", "purpose", "sent_by_rank"]


@dataclass(kw_only=True, slots=True)
class Links:
    """Bytes sent, by purpose."""

    within: dict[str, int] = field(default_factory=dict)
    """By the rank that sends most to ranks of its own host."""
    between: dict[str, int] = field(default_factory=dict)
    """By the host that sends most to other hosts, all of its ranks together."""
    between_all: dict[str, int] = field(default_factory=dict)
    """By all hosts together, to other hosts."""


def sent_by_rank(collective: Collective) -> float:
    """Bytes that one rank sends in one call."""
    times = 2 if collective.kind == "all_reduce" else 1
    return times * (collective.size - 1) / collective.size * collective.nbytes


def purpose(collective: Collective, config: TrainerConfig) -> str:
    """What a call is for, by the axis of its group."""
    parallel = config.parallelism
    tp, shard = parallel.tensor_parallel_degree, parallel.data_parallel_shard_degree
    group = collective.stride, collective.size
    if tp > 1 and group == (1, tp):
        return "tensor parallel"
    if group == (tp, shard):
        return "FSDP gathers" if collective.kind == "all_gather" else "FSDP gradients"
    if group == (tp * shard, parallel.data_parallel_replicate_degree):
        return "replicas' gradients"
    return "other"


def links_of(calls: Counter[Collective], config: TrainerConfig, host_of: Sequence[int]) -> Links:
    """`host_of`: the host of each rank of the mesh."""
    hosts, ranks = np.asarray(host_of), np.arange(config.num_ranks)
    by_purpose: dict[str, np.ndarray] = {}  # [0]: bytes that each rank sends within its host; [1]: to another host
    for collective, times in calls.items():
        stride, size = collective.stride, collective.size
        first = ranks // (stride * size) * (stride * size) + ranks % stride
        following = first + (ranks // stride + 1) % size * stride
        leaves = hosts[following] != hosts
        sent = by_purpose.setdefault(purpose(collective, config), np.zeros((2, len(ranks))))
        sent += np.stack([~leaves, leaves]) * times * sent_by_rank(collective)
    links = Links()
    for name, (inside, outside) in by_purpose.items():
        links.within[name] = round(inside.max())
        by_host = np.bincount(hosts, weights=outside)
        links.between[name], links.between_all[name] = round(by_host.max()), round(by_host.sum())
    return links
