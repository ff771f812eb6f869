"""Weights on their way from and to a GPU, with CUDA's runtime faked: what is pinned, copied, and when it is let go."""

from types import SimpleNamespace

import pytest
import torch

from torchtitan_rl import platform
from torchtitan_rl.weights import layout
from torchtitan_rl.weights.finite import FiniteCheck
from torchtitan_rl.weights.layout import SharedBuffers, host_name, open_shared
from torchtitan_rl.weights.mapped import MappedPayloads
from torchtitan_rl.weights.payload import PayloadWriter


@pytest.fixture
def pinned(monkeypatch):
    """Address -> bytes of what CUDA holds now. It refuses sizes of 13 and what it holds already."""
    held = {}

    def register(address, nbytes, flags):
        assert flags == 1 and address not in held
        if nbytes == 13:
            return 2
        held[address] = nbytes
        return 0

    def unregister(address):
        del held[address]
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return held


def manifest(handle, nbytes):
    return layout.Manifest(version=1, entries={}, nbytes=nbytes, handle=handle, host=host_name())


def test_a_publishers_segment_is_pinned_once_and_let_go_at_the_end(pinned):
    buffers = SharedBuffers()
    _, first = buffers.take(1, 128)
    assert pinned == {first.data_ptr(): 128}
    buffers.release(1)
    _, again = buffers.take(2, 128)
    assert again.data_ptr() == first.data_ptr() and len(pinned) == 1
    buffers.take(3, 64)
    assert sorted(pinned.values()) == [64, 128]
    buffers.close()
    assert pinned == {}


def test_a_readers_segment_is_mapped_and_pinned_once(pinned):
    buffers, payloads = SharedBuffers(), MappedPayloads()
    handle, published = buffers.take(1, 128)
    published.fill_(7)
    read = payloads.open(manifest(handle, 128))
    assert read.tolist() == [7] * 128 and pinned[read.data_ptr()] == 128
    published.fill_(8)  # published again in the same segment
    again = payloads.open(manifest(handle, 128))
    assert again.data_ptr() == read.data_ptr() and again.tolist() == [8] * 128 and len(pinned) == 2
    payloads.close()
    buffers.close()
    assert pinned == {}


def test_a_segment_that_is_not_there_is_refused_with_the_way_out():
    with pytest.raises(RuntimeError, match="memory cannot be opened .No such file.*use weight_sync.transport='store'"):
        layout.open_shared(manifest("/dev/shm/no-such-segment", 128))


def test_a_segment_whose_publisher_is_gone_is_let_go(pinned):
    old, payloads = SharedBuffers(), MappedPayloads()
    handle, published = old.take(1, 128)
    published.fill_(7)
    kept = payloads.open(manifest(handle, 128))
    old.close()
    new = SharedBuffers()
    handle, published = new.take(1, 128)  # which may well get the same handle
    published.fill_(9)
    assert payloads.open(manifest(handle, 128)).tolist() == [9] * 128
    assert sorted(pinned.values()) == [128, 128] and kept.data_ptr() not in pinned
    assert kept.tolist() == [7] * 128, "whoever still reads it may"
    payloads.close()
    new.close()
    assert pinned == {}


def test_memory_that_cannot_be_pinned_is_used_as_it_is(pinned, caplog):
    buffers = SharedBuffers()
    buffers.take(1, 13)[1].fill_(1)
    assert pinned == {}
    assert "host memory of 13 bytes: could not be pinned (cudaError 2)" in caplog.text
    buffers.close()


def test_a_cpu_pins_nothing_and_keeps_nothing():
    buffers = SharedBuffers()
    handle, _ = buffers.take(1, 128)
    first, second = (open_shared(manifest(handle, 128)) for _ in range(2))
    assert first.data_ptr() != second.data_ptr() and platform._pinned == set()
    buffers.close()


class OnCuda(torch.Tensor):
    """Says that it is on CUDA, and remembers what was done with it."""

    done: list = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if getattr(function, "__self__", None) is torch.Tensor.is_cuda:
            return True
        if function.__name__ != "__get__":
            cls.done.append((function.__name__, args[1:] if function.__name__ == "to" else kwargs))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_tensor_on_cuda_is_cast_there_and_copied_without_waiting(monkeypatch):
    monkeypatch.setattr(OnCuda, "done", [])
    # 1 + 2^-10 needs more than bfloat16's eight bits of precision.
    tensor = torch.tensor([[1.0 + 2.0**-10, -2.0], [3.0, 0.5]]).T
    manifest = layout.plan(1, [("w", tensor.shape, torch.float32, True)], torch.bfloat16)
    there, here = torch.zeros(manifest.nbytes, dtype=torch.uint8), torch.zeros(manifest.nbytes, dtype=torch.uint8)
    writer = PayloadWriter(manifest, there, verify=False)
    monkeypatch.setattr(platform, "wait_for_copies", lambda: OnCuda.done.append("waited"))
    monkeypatch.setattr(FiniteCheck, "add", lambda check, name, source, place: None)
    writer.add("w", tensor.as_subclass(OnCuda))
    writer.finish()
    assert OnCuda.done == [("to", (torch.bfloat16,)), ("copy_", {"non_blocking": True}), "waited"]
    on_host = PayloadWriter(manifest, here, verify=False)
    on_host.add("w", tensor)
    on_host.finish()
    assert torch.equal(there, here)
    assert layout.read(there, manifest)["w"].tolist() == [[1.0, 3.0], [-2.0, 0.5]]
