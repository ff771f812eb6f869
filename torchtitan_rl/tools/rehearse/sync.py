"""Bytes that one publication of the policy's weights sends between hosts.

On several hosts every trainer rank offers its own shards, and a shard goes to each host with generators once, unless a
trainer rank of that host has it; ranks of the host share what came. A host has all ranks of a replica, so it needs
every parameter, a tied one once, in the generators' dtype. Hosts that offer the same shard take turns. On one host the
payload lies in memory that its ranks share, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.tools.rehearse.links import Links
from torchtitan_rl.tools.rehearse.shards import MeshShards, axes_of, local_shape

__all__ = ["SYNC", "sync_links"]

SYNC = "weight sync"


def sync_links(
    shards: MeshShards, config: TrainerConfig, dtype: str, trainer_hosts: Sequence[int], generator_hosts: Sequence[int]
) -> tuple[Links, dict[int, int]]:
    """(what hosts of trainers send, bytes that each host of generators takes in from others). `trainer_hosts`: the host
    of each trainer rank."""
    itemsize = 2 if dtype == "bfloat16" else 4
    sent, taken = dict.fromkeys(trainer_hosts, 0.0), dict.fromkeys(sorted(set(generator_hosts)), 0.0)
    axes = [axes_of(rank, config) for rank in range(config.num_ranks)]
    times = {cut: shards.cuts.count(cut) for cut in dict.fromkeys(shards.cuts)}
    for cut, number in times.items():
        holders: dict[tuple[int, ...], list[int]] = {}  # index on each axis that cuts -> ranks that hold the shard
        for rank in range(config.num_ranks):
            position = tuple(axes[rank][name][0] for name, _ in cut[1])
            holders.setdefault(position, []).append(rank)
        for ranks in holders.values():
            nbytes = number * itemsize * prod(local_shape(cut, ranks[0], config))
            hosts = {trainer_hosts[rank] for rank in ranks}
            for host in taken:
                if host not in hosts:
                    taken[host] += nbytes
                    for source in hosts:
                        sent[source] += nbytes / len(hosts)
    links = Links(between={SYNC: round(max(sent.values()))}, between_all={SYNC: round(sum(sent.values()))})
    return links, {host: round(nbytes) for host, nbytes in taken.items()}
