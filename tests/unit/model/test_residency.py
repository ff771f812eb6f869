"""Parts that leave the device: one piece of host memory each, which stays."""

import pytest
import torch

from torchtitan_rl import platform
from torchtitan_rl.model.residency import Part, device_bytes


@pytest.fixture
def pinned(monkeypatch):
    """The addresses of what is pinned, in order; those that are unpinned are taken out."""
    addresses = []
    monkeypatch.setattr(platform, "pin_new", lambda buffer: addresses.append(buffer.data_ptr()))
    monkeypatch.setattr(platform, "unpin", lambda buffer: buffer.numel() and addresses.remove(buffer.data_ptr()))
    return addresses


def test_parts_come_back_bit_for_bit_and_views_stay_valid(pinned):
    first, second = torch.randn(7, 3), torch.randn(5).bfloat16()
    row, expected = first[2], [first.clone(), second.clone()]
    part, tensors = Part(), [first, second, first.view(3, 7)]
    for _ in range(2):
        part.offload(tensors)
        part.offload(tensors)
        assert not part.on_device and device_bytes(tensors) == 0
        part.onload()
        part.onload()
        assert part.on_device and torch.equal(first, expected[0]) and torch.equal(second, expected[1])
        assert torch.equal(row, expected[0][2])
        assert len(pinned) == 1, "the second offload uses the memory of the first"
        first.add_(1), expected[0].add_(1)


def test_host_memory_grows_with_the_part_and_is_pinned_once(pinned):
    part, tensors = Part(), [torch.ones(100)]
    for _ in range(3):
        part.offload(tensors)
        part.onload()
        assert all(bool((tensor == 1).all()) for tensor in tensors) and len(pinned) == 1
        tensors.append(torch.ones(1000))
    empty = Part()
    empty.offload([])
    empty.onload()
    assert empty.on_device and len(pinned) == 1


def test_a_copy_that_fails_leaves_the_part_on_the_device(pinned, monkeypatch):
    part, tensor = Part(), torch.ones(10)
    with monkeypatch.context() as context:
        context.setattr(platform, "wait_for_copies", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            part.offload([tensor])
    assert part.on_device and device_bytes([tensor]) == 40
    part.offload([tensor])
    part.onload()
    assert tensor.tolist() == [1.0] * 10
