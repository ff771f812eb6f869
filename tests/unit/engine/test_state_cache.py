"""A delta net's states in vLLM's cache: what a forward reads from the device."""

from types import SimpleNamespace

import pytest
import torch
import vllm.config

from scripts.operator_counts import HostReads
from torchtitan_rl import adapters

adapters.prepare_vllm(eager=True)

from torchtitan_rl.engine import layers  # noqa: E402


@pytest.fixture
def caches(monkeypatch):
    """Three layers' caches."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32), compilation_config=SimpleNamespace(static_forward_context={})
    )
    monkeypatch.setattr(vllm.config, "get_current_vllm_config", lambda: config)
    return [layers.StateCache.Config(layer=layer, sizes=((3, 8), (2, 4, 4))).build() for layer in range(3)]


def forward_context(caches, ends, seq_lens, device="cpu"):
    metadata = SimpleNamespace(
        query_start_loc=torch.tensor(ends, device=device),
        seq_lens=torch.tensor(seq_lens, device=device),
        state_indices_tensor=torch.arange(len(seq_lens), device=device),
    )
    return SimpleNamespace(attn_metadata={cache.prefix: metadata for cache in caches})


def test_every_layer_of_a_forward_has_that_forwards_lengths(monkeypatch, caches):
    for ends, seq_lens, lengths in ([0, 3, 4], [3, 9], (3, 1)), ([0, 1, 2], [4, 10], (1, 1)), ([0, 5], [5], (5,)):
        context = forward_context(caches, ends, seq_lens)
        monkeypatch.setattr(layers, "get_forward_context", lambda context=context: context)
        assert [cache.begin() for cache in caches] == [lengths] * 3
        begins = [length == seq_len for length, seq_len in zip(lengths, seq_lens, strict=True)]
        assert [cache._begins_R.tolist() for cache in caches] == [begins] * 3


def test_a_forward_reads_lengths_from_the_device_once(monkeypatch, caches):
    for forwards in (1, 2):
        context = forward_context(caches, [0, 3, 4], [3, 9], device="meta")
        monkeypatch.setattr(layers, "get_forward_context", lambda context=context: context)
        with HostReads() as host:
            for cache in caches:
                cache.begin()
        assert len(host.reads) == 1, (forwards, host.reads)


def test_before_there_is_a_cache_nothing_is_read(monkeypatch, caches):
    monkeypatch.setattr(layers, "get_forward_context", lambda: SimpleNamespace(attn_metadata=None))
    assert [cache.begin() for cache in caches] == [None] * 3
