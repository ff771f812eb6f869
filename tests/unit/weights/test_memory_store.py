"""The store of one process keeps TorchStore's promises: versions, checksums, the same errors."""

import pytest
import torch

from torchtitan_rl.weights import layout
from torchtitan_rl.weights.layout import SharedBuffers
from torchtitan_rl.weights.payload import PayloadWriter
from torchtitan_rl.weights.versioned import MemoryStore


def manifest_and_payload(version):
    manifest = layout.plan(version, [("w", torch.Size([3]), torch.float32, True)], torch.bfloat16)
    payload = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    writer = PayloadWriter(manifest, payload, verify=True)
    writer.add("w", torch.tensor([1.0, 2.0, 3.0]))
    assert writer.finish() == ""
    return manifest, payload


async def test_a_version_comes_back_as_it_was_published_and_goes_when_it_is_discarded():
    store = MemoryStore()
    for version in (3, 4, "copy"):
        await store.publish(*manifest_and_payload(version), handle="")
    held = await store.versions()
    manifest, payload = await store.fetch(4, verify=True)
    await store.discard(3)
    await store.discard(3)  # gone already
    tensors, left = layout.read(payload, manifest), await store.versions()
    assert held == [3, 4] and left == [4]
    assert tensors["w"].dtype == torch.bfloat16 and tensors["w"].tolist() == [1.0, 2.0, 3.0]


async def test_shared_memory_is_opened_by_its_handle_and_given_back():
    store, buffers = MemoryStore(), SharedBuffers()
    manifest, payload = manifest_and_payload(1)
    handle, shared = buffers.take(1, manifest.nbytes)
    shared.copy_(payload)
    await store.publish(manifest, shared, handle=handle)
    _, fetched = await store.fetch(1, verify=True)
    buffers.close()
    assert torch.equal(payload, fetched)
    with pytest.raises(FileNotFoundError):
        open(handle)


async def test_a_missing_or_damaged_version_is_refused():
    store = MemoryStore()
    manifest, payload = manifest_and_payload(1)
    await store.publish(manifest, payload, handle="")
    payload[0] += 1
    with pytest.raises(RuntimeError, match="policy_version=1: the payload's checksum is wrong"):
        await store.fetch(1, verify=True)
    with pytest.raises(RuntimeError, match=r"policy_version=2: is not in the store \(it holds \[1\]\)"):
        await store.fetch(2, verify=True)
