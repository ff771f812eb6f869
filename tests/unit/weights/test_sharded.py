"""Pieces from real segments over real sockets: what generator ranks assemble equals the whole tensors bit for bit."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from torchtitan_rl.config.meshes import LoRAConfig, WeightSyncConfig
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.dispatch.versions import PolicyVersions
from torchtitan_rl.environment import HOST_ADDRESS
from torchtitan_rl.model import lora
from torchtitan_rl.model.generator_cut import RankPart
from torchtitan_rl.model.module_state import fused_state
from torchtitan_rl.model.spec import build_spec
from torchtitan_rl.weights import layout, peers, piece_server, pieces, sharded_pull
from torchtitan_rl.weights import staging as staging_module
from torchtitan_rl.weights.finite import FiniteCheck
from torchtitan_rl.weights.layout import TensorEntry
from torchtitan_rl.weights.peers import Peers
from torchtitan_rl.weights.pieces import Box, HeadRows, PieceManifest
from torchtitan_rl.weights.remote_fetcher import RemoteFetcher
from torchtitan_rl.weights.sharded_pull import pull
from torchtitan_rl.weights.sharded_push import Publisher, write_pieces
from torchtitan_rl.weights.staging import Staging, part_box, plan_part
from torchtitan_rl.weights.trainer_shards import LocalShard, aliases_of, entries_of, local_shards
from torchtitan_rl.weights.versioned import MemoryStore

HEADS = HeadRows(heads_per_kv=2, head_dim=4)  # 2 KV heads: 32 fused rows
WHOLE = {
    "tok_embeddings.weight": torch.randn(67, 24),
    "layers.0.attention.qkv_linear.wqkv.weight": torch.randn(32, 24),
    "layers.0.attention.wo.weight": torch.randn(24, 16),
    "layers.0.feed_forward.w1.weight": torch.randn(36, 24),
    "layers.0.feed_forward.w2.weight": torch.randn(24, 36),
    "norm.weight": torch.randn(24),
}
ALIASES = {"lm_head.weight": "tok_embeddings.weight"}


@pytest.fixture
def trainers(monkeypatch):
    """`publish(version, hosts)`: two FSDP ranks with uneven shards write their pieces on the hosts of these addresses;
    the manifest of the version. `publish.exchanges`: the ranks."""
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", 512)
    exchanges = [SimpleNamespace(buffers=layout.SharedBuffers(), pieces=Publisher(), n_kv_heads=2) for _ in range(2)]

    def publish(version, hosts=("127.0.0.2", "127.0.0.3")) -> PieceManifest:
        sources, entries = [], {}
        for rank, (exchange, host) in enumerate(zip(exchanges, hosts)):
            monkeypatch.setenv(HOST_ADDRESS, host)
            held = {}
            for name, whole in WHOLE.items():
                values = whole.tensor_split([whole.shape[0] // 3 + 1])[rank]
                first = 0 if rank == 0 else whole.shape[0] // 3 + 1
                box = Box((first, *[0] * (whole.dim() - 1)), tuple(values.shape))
                held[name] = LocalShard(tuple(whole.shape), box, values, HEADS if "wqkv" in name else None)
                entries |= entries_of(name, held[name], torch.bfloat16)
            sources.append(
                write_pieces(exchange, rank, version, held, dict.fromkeys(held, torch.bfloat16), {}, FiniteCheck())
            )
        entries |= {name: entries[kept] for name, kept in ALIASES.items()}
        return PieceManifest(version=version, entries=entries, aliases=ALIASES, sources=sources)

    publish.exchanges = exchanges
    yield publish
    for exchange in exchanges:
        exchange.pieces.close()
        exchange.buffers.close()


def expected(rank: int, size: int) -> dict[str, torch.Tensor]:
    whole = dict(WHOLE)
    fused = whole.pop("layers.0.attention.qkv_linear.wqkv.weight").view(2, 4, 4, 24)
    prefix = "layers.0.attention.qkv_linear."
    whole[f"{prefix}wq.weight"] = fused[:, :2].reshape(16, 24)
    whole[f"{prefix}wk.weight"], whole[f"{prefix}wv.weight"] = fused[:, 2].reshape(8, 24), fused[:, 3].reshape(8, 24)
    whole |= {name: whole[kept] for name, kept in ALIASES.items()}
    return {
        name: tensor[part_box(name, tuple(tensor.shape), rank, size).within(Box((0,) * tensor.dim(), tensor.shape))]
        .bfloat16()
        for name, tensor in whole.items()
    }  # fmt: skip


def check(fetched, rank: int, size: int) -> None:
    manifest, payload = fetched
    held, wanted = layout.read(payload, manifest), expected(rank, size)
    assert held.keys() == wanted.keys() and all(torch.equal(held[name], wanted[name]) for name in held)
    whole = {name: (entry.shape, entry.dtype) for name, entry in manifest.entries.items()}
    assert whole == {name: (tuple(t.shape), torch.bfloat16) for name, t in expected(0, 1).items()}
    assert all(isinstance(tensor, RankPart) == (size > 1) for tensor in held.values())
    assert held["lm_head.weight"].data_ptr() == held["tok_embeddings.weight"].data_ptr()  # a tied head travels once


@pytest.mark.parametrize("host", ["127.0.0.2", "127.0.0.9"])  # with one of the publishers, or with none
@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_gets_its_part_bit_for_bit(trainers, monkeypatch, host, size):
    manifest = trainers(3)
    monkeypatch.setenv(HOST_ADDRESS, host)
    for rank in range(size):
        check(pull(manifest, rank, size, Staging(), verify=True), rank, size)


def counted(monkeypatch) -> dict[str, int]:
    """Bytes by where they came from, over all pulls from here on."""
    found = {"link": 0, "host": 0, "peer": 0}
    have, lock = sharded_pull._Pull._have, threading.Lock()

    def counting(self, wanted, came_from):
        with lock:
            found[came_from] += wanted.piece.nbytes
        have(self, wanted, came_from)

    monkeypatch.setattr(sharded_pull._Pull, "_have", counting)
    return found


def test_each_byte_comes_to_a_host_once_however_many_ranks_need_it(trainers, monkeypatch):
    manifest, found = trainers(1), counted(monkeypatch)
    monkeypatch.setenv(HOST_ADDRESS, "127.0.0.9")
    with ThreadPoolExecutor() as threads:  # two replicas of two ranks
        ranks = [0, 1, 0, 1]
        for rank, fetched in zip(ranks, threads.map(lambda r: pull(manifest, r, 2, Staging(), verify=True), ranks)):
            check(fetched, rank, 2)
    nbytes = 2 * sum(tensor.numel() for tensor in WHOLE.values())
    assert found["link"] == nbytes and found["host"] == 0
    shared = 2 * sum(WHOLE[name].numel() for name in ("tok_embeddings.weight", "norm.weight"))
    assert found["peer"] == 3 * shared + (nbytes - shared)


def test_a_rank_takes_nothing_over_the_network_that_its_host_has(trainers, monkeypatch):
    manifest, found = trainers(1), counted(monkeypatch)
    monkeypatch.setenv(HOST_ADDRESS, "127.0.0.2")
    check(pull(manifest, 0, 1, Staging(), verify=True), 0, 1)
    first = sum(piece.nbytes for piece in manifest.sources[0].pieces)
    assert found == {"host": first, "link": sum(p.nbytes for p in manifest.sources[1].pieces), "peer": 0}


def test_a_segment_that_cannot_be_opened_or_is_another_is_left_alone(trainers, monkeypatch, tmp_path):
    manifest, found = trainers(1), counted(monkeypatch)
    monkeypatch.setenv(HOST_ADDRESS, "127.0.0.2")
    nbytes = sum(piece.nbytes for source in manifest.sources for piece in source.pieces)
    (tmp_path / "another").write_bytes(b"short")
    for times, handle in enumerate((f"{tmp_path}/none", f"{tmp_path}/another"), start=1):
        manifest.sources[0].handle = handle
        check(pull(manifest, 0, 1, Staging(), verify=True), 0, 1)
        assert found["host"] == 0 and found["link"] + found["peer"] == times * nbytes


def test_a_peer_that_is_gone_or_has_given_up_is_not_waited_for(trainers, monkeypatch):
    manifest, found = trainers(1), counted(monkeypatch)
    monkeypatch.setenv(HOST_ADDRESS, "127.0.0.9")
    staging = Staging()
    fetched = pull(manifest, 0, 1, staging, verify=True)
    other = trainers(2)
    monkeypatch.setenv(HOST_ADDRESS, "127.0.0.9")
    del fetched  # the segment is free, and the next version goes there
    check(pull(other, 0, 1, staging, verify=True), 0, 1)
    link = found["link"]
    began = time.monotonic()
    check(pull(manifest, 0, 1, Staging(), verify=True), 0, 1)  # the publisher still thinks that the host has it
    assert found["peer"] == 0 and found["link"] == link * 3 // 2 and time.monotonic() - began < 2


def test_a_peer_that_stands_still_is_waited_for_once(trainers, monkeypatch):
    manifest = trainers(1)
    monkeypatch.setattr(peers, "SILENT_S", 0.3)
    monkeypatch.setenv(HOST_ADDRESS, "127.0.0.9")
    stands = Peers(manifest, plan_part(manifest, 0, 1).nbytes, 4, staging := Staging())
    peer = Peers(manifest, 0, 4, staging).of([stands.handle, 0, 1])
    began = time.monotonic()
    assert [peer.wait_for(region) for region in range(4)] == [False] * 4 and time.monotonic() - began < 0.6
    stands.have(3)
    assert peer.wait_for(3)  # what has come is there to copy


def test_only_a_generator_keeps_the_memory_for_the_next_version(trainers, monkeypatch):
    closed = []
    monkeypatch.setattr(staging_module._Segment, "close", lambda self: closed.append(self.nbytes))
    manifest = trainers(1)
    for keeps in (True, False):
        fetched = pull(manifest, 0, 1, Staging(keeps=keeps), verify=True)
        assert closed == []
        del fetched
        gc.collect()
        assert len(closed) == (not keeps)


async def test_a_version_that_is_published_again_meanwhile_is_fetched_as_it_is_now(trainers, monkeypatch):
    older = trainers(5)
    newer = trainers(5)
    monkeypatch.setenv(HOST_ADDRESS, "127.0.0.9")
    offered = iter((older, older, newer))  # the pieces are offered first

    async def get(key):
        assert key == "5/manifest"
        return next(offered)

    async def gone(key):
        raise KeyError(key)

    fetcher = RemoteFetcher()
    check(await fetcher.fetch(older, True, get, "5/{}".format), 0, 1)
    with pytest.raises(RuntimeError, match="has discarded the version"):
        await fetcher.fetch(older, True, gone, "5/{}".format)


def test_damage_a_discarded_version_and_a_dead_publisher_are_named(trainers, monkeypatch):
    manifest = trainers(5)
    monkeypatch.setenv(HOST_ADDRESS, "127.0.0.9")
    source = manifest.sources[1]
    buffer = trainers.exchanges[1].buffers.used[5][1]
    buffer[source.pieces[0].start] += 1
    with pytest.raises(RuntimeError, match=r"policy_version=5: host .*trainer rank 1\): the checksum of tok_emb"):
        pull(manifest, 0, 1, Staging(), verify=True)
    trainers.exchanges[1].buffers.release(5)
    with pytest.raises(RuntimeError, match=r"policy_version=5: .*127\.0\.0\.3:\d+, trainer rank 1\) has discarded the"):
        pull(manifest, 0, 1, Staging(), verify=True)
    trainers.exchanges[1].pieces.close()
    with pytest.raises(RuntimeError, match=r"policy_version=5: host .*trainer rank 1\) is gone \(.*refused"):
        pull(manifest, 0, 1, Staging(), verify=True)


def test_a_publisher_that_falls_silent_is_named_within_the_limit(trainers, monkeypatch):
    monkeypatch.setattr(piece_server, "SILENT_S", 1.0)
    monkeypatch.setattr(sharded_pull, "SILENT_S", 1.0)
    manifest = trainers(6)
    monkeypatch.setenv(HOST_ADDRESS, "127.0.0.9")
    silent = threading.Event()
    monkeypatch.setattr(piece_server.PieceServer, "answer", lambda self, request: silent.wait(10) and ({}, []))
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"policy_version=6: host .* sent nothing for 1 s"):
        pull(manifest, 0, 1, Staging(), verify=True)
    silent.set()
    assert time.monotonic() - began < 4


def test_a_tied_head_alone_is_found_under_its_own_name(trainers, monkeypatch):
    manifest = trainers(1)
    name, kept = next(iter(ALIASES.items()))
    for source in manifest.sources:
        source.pieces = [piece for piece in source.pieces if piece.name == kept]
    manifest.entries = {name: manifest.entries[name]}
    for host in ("127.0.0.9", "127.0.0.2"):
        monkeypatch.setenv(HOST_ADDRESS, host)
        for _ in range(2):  # from a peer, too
            plan, payload = pull(manifest, 0, 1, Staging(), verify=True)
            held = layout.read(payload, plan)
            assert held.keys() == {name} and torch.equal(held[name], WHOLE[kept].bfloat16())


def test_a_stranger_gets_nothing(trainers):
    source = trainers(1).sources[0]
    request = {"token": "0" * 32, "host": "x", "holder": ["", 0, 1], "pieces": [0], "force": False}
    assert trainers.exchanges[0].pieces.server.answer(request) == ({"error": "has discarded the version"}, [])
    assert trainers.exchanges[0].pieces.server.answer(request | {"token": source.token})[1]


def test_a_segment_is_used_again_once_nobody_reads_it():
    staging = Staging()
    handle, first = staging.take(100)
    part = first[10:20].view(torch.int16)
    other, second = staging.take(100)
    assert other != handle
    del first
    third, kept = staging.take(100)
    assert third not in (handle, other)  # a part is still in use
    del part
    assert staging.take(100)[0] == handle
    assert len({second.data_ptr(), kept.data_ptr()}) == 2


def test_adapters_are_merged_box_by_box(trainers, monkeypatch):
    """Two ranks, a model with adapters; the fused query-key-value weight is cut within a head."""
    torch.manual_seed(0)
    shape = Qwen3Shape(vocab_size=32, dim=32, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=48)
    config = LoRAConfig(rank=4, alpha=8, target_modules=["qkv_proj", "o_proj", "down_proj"])
    model = lora.lora_spec(build_spec(ModelConfig(assets="chars", shape=shape)), config).model.build()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    state = model.state_dict()
    adapters = lora.whole_adapters(state, 2, config)
    merged = {name: lora.merge(name, tensor, adapters) for name, tensor in lora.base_state(state).items()}
    held = local_shards(model)
    of_layers = lora.layer_adapters(fused_state(model), config)
    monkeypatch.setenv(HOST_ADDRESS, "127.0.0.2")
    sources, entries = [], {}
    for rank, exchange in enumerate(trainers.exchanges):
        owned = {}
        for name, tensor in held.items():
            middle = tensor.shape[0] // 2 - 3
            first, end = [(0, middle), (middle, tensor.shape[0])][rank]
            owned[name] = tensor._replace(box=tensor.box.rows(first, end), values=tensor.values[first:end])
            entries |= entries_of(name, tensor, torch.float32)
        sources.append(
            write_pieces(exchange, rank, 1, owned, dict.fromkeys(owned, torch.float32), of_layers, FiniteCheck())
        )
    aliases = aliases_of(model)
    manifest = PieceManifest(version=1, entries=entries, aliases={}, sources=sources)
    plan, payload = pull(manifest, 0, 1, Staging(), verify=True)
    assert aliases == {"lm_head.weight": "tok_embeddings.weight"} and set(merged) - set(entries) == set(aliases)
    for name, tensor in layout.read(payload, plan).items():
        assert torch.allclose(tensor.as_subclass(torch.Tensor), merged[name], rtol=0, atol=1e-6), name
        changed = name.split(".")[-2] in ("wq", "wk", "wv", "wo", "w2")
        assert torch.equal(tensor, state[name]) != changed, name


async def test_a_store_gives_each_process_its_part_and_a_file_has_all(trainers, tmp_path):
    store = MemoryStore()

    class Trainer:
        async def push_weights(self, *args):
            return trainers(7)

    versions = PolicyVersions(Trainer(), store, WeightSyncConfig(), torch.bfloat16, one_host=False)
    await versions.publish_for("test")
    check(await store.fetch(7, verify=True), 0, 1)
    store.fetcher.part = 1, 2
    check(await store.fetch(7, verify=True), 1, 2)
    store.fetcher.part = None
    await versions.save(7, tmp_path / "saved")
    saved = load_file(tmp_path / "saved")
    assert saved.keys() == expected(0, 1).keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected(0, 1).items())
    await store.discard(7)

    assert (await store.versions()) == []
    assert TensorEntry((2,), torch.bfloat16, 0).nbytes == 4
