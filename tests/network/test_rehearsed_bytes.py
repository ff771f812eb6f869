"""Bytes that a rehearsal says hosts send, beside what their interfaces counted."""

import json
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager

import pytest

from benchmarks.weight_sync_driver import config_of
from tests.integration.layouts import trainer_config
from tests.network.bed import ROOT, Bed
from torchtitan_rl.config.derive import settled
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.launch.inventory import meshes, places
from torchtitan_rl.tools.rehearse.links import links_of
from torchtitan_rl.tools.rehearse.process_placement import host_of_ranks, imagined_hosts
from torchtitan_rl.tools.rehearse.shards import mesh_shards
from torchtitan_rl.tools.rehearse.sync import SYNC, sync_links
from torchtitan_rl.tools.rehearse.trace_file import Collective, trace_microbatch

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(Bed.missing()), reason=Bed.missing() or "-")]

SHAPE = dict(
    vocab_size=1000, dim=256, n_layers=4, n_heads=8, n_kv_heads=4, head_dim=32, hidden_dim=768, max_seq_len=4096
)
LENGTHS, NUM = [100, 90, 80, 130, 112], 4
PORT = "29511"


def spec(layout):
    return json.dumps({"layout": layout, "shape": SHAPE, "lengths": LENGTHS, "num": NUM})


@contextmanager
def trainer_on(bed, layout, ranks_of_host):
    """A trainer's ranks on a bed's hosts, after a first step. Gives a function that trains `NUM` microbatches and a
    step, and returns once all ranks have."""
    command = [sys.executable, "-m", "tests.integration.trainer_process", spec(layout)]
    together = {"WORLD_SIZE": str(sum(ranks_of_host)), "MASTER_ADDR": bed.hosts[0].address, "MASTER_PORT": PORT}
    processes, rank = [], 0
    for host, number in zip(bed.hosts, ranks_of_host, strict=True):
        for _ in range(number):
            environment = {**together, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "eth0"}
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes.append(host.popen(command, env=environment, **pipes))
            rank += 1

    def heard():
        for process in processes:
            assert process.stdout.readline(), f"a rank ended with {process.wait(10)}"

    def step():
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        heard()

    heard()
    try:
        yield step
    finally:
        for process in processes:
            process.kill()


def as_gloo_does(calls: Counter[Collective]) -> Counter[Collective]:
    """gloo has no reduce-scatter in torch: it reduces the whole tensor for all, and a rank keeps its part."""
    changed: Counter[Collective] = Counter()
    for call, times in calls.items():
        kind = "all_reduce" if call.kind == "reduce_scatter" else call.kind
        changed[Collective(kind, call.nbytes, call.stride, call.size)] += times
    return changed


@pytest.mark.parametrize(
    ("layout", "ranks_of_host"),
    [(dict(dp=2), (1, 1)), (dict(dp=2, tp=2), (2, 2)), (dict(replicate=2, dp=2), (2, 2))],
    ids=["FSDP 2 on 2 hosts", "FSDP 2 between, TP 2 within", "2 replicas of FSDP 2"],
)
def test_bytes_between_hosts_are_within_a_twentieth(layout, ranks_of_host):
    config, model = trainer_config(**layout), ModelConfig(shape=Qwen3Shape(**SHAPE))
    traced = trace_microbatch(config, model, "policy", sum(LENGTHS), device="cpu", trains=True)
    calls = Counter({call: NUM * times for call, times in (traced.forward + traced.backward).items()})
    host_of = [host for host, number in enumerate(ranks_of_host) for _ in range(number)]
    said = links_of(as_gloo_does(calls), config, host_of)
    with Bed(len(ranks_of_host)) as bed, trainer_on(bed, layout, ranks_of_host) as step:
        step()
        before = [host.counters() for host in bed.hosts]
        step()
        after = [host.counters() for host in bed.hosts]
    sent = [end[0] - begin[0] for begin, end in zip(before, after, strict=True)]
    ring = sum(links_of(calls, config, host_of).between.values())
    print(f"{layout}: counted {sent}, said {said.between}, NCCL's ring {ring}")
    assert sum(said.between_all.values()) == pytest.approx(sum(sent), rel=0.05)
    assert all(sum(said.between.values()) == pytest.approx(number, rel=0.05) for number in sent)


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp2-across"])
def test_bytes_of_a_weight_sync_are_within_a_twentieth(layout):
    sizes = dict(dim=512, layers=6, vocab_size=16384)
    config = settled(config_of(layout, **sizes, directory=""))
    hosts = imagined_hosts(2, 0, 2, "", 0)
    placed, meshes_of = places(config, hosts), {mesh.role: mesh for mesh in meshes(config)}
    generator_hosts = [host for role in placed if role != "policy" for host in placed[role].hosts]
    links, taken = sync_links(
        mesh_shards(config.trainer, config.model, "policy", "cpu"),
        config.trainer,
        config.generator.dtype,
        host_of_ranks(meshes_of["policy"], placed["policy"]),
        generator_hosts,
    )
    command = [sys.executable, "-m", "benchmarks.weight_sync", "--layout", layout, "--syncs", "4"]
    for name, size in sizes.items():
        command += [f"--{name.replace('_', '-')}", str(size)]
    said = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=240, check=True).stdout
    sent = sum(json.loads(said.splitlines()[0])["sent_mb"])
    print(f"{layout}: counted {sent} MB, said {links.between_all}, {taken}")
    assert links.between_all[SYNC] / 1e6 == pytest.approx(sent, rel=0.05)
