"""A payload in blocks: what is written, what is noticed on the way, and that a checksum covers every byte."""

import pytest
import torch

from torchtitan_rl.model import row_blocks
from torchtitan_rl.weights.layout import Block, checksum, plan, read
from torchtitan_rl.weights.payload import PayloadWriter, intact

bf16, f32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(row_blocks, "_BLOCK_BYTES", 40)


def written(tensors, dtype=None, verify=True):
    """(manifest, payload, the tensor that is not finite)."""
    manifest = plan(1, [(name, tensor.shape, tensor.dtype, True) for name, tensor in tensors.items()], dtype)
    payload = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    writer = PayloadWriter(manifest, payload, verify=verify)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    return manifest, payload, writer.finish()


def test_blocks_are_rows_and_have_the_checksums_of_their_bytes():
    w_RC, scale = torch.randn(5, 8), torch.tensor(2.0)
    manifest, payload, _ = written({"w": w_RC, "scale": scale, "none": torch.zeros(0, 3)}, bf16)  # rows of 16 bytes
    cast = w_RC.to(bf16).view(torch.uint8).reshape(-1)
    assert manifest.blocks == [
        Block(0, 48, checksum(cast[:48])),
        Block(48, 80, checksum(cast[48:])),
        Block(128, 130, checksum(scale.to(bf16).reshape(1).view(torch.uint8))),
    ]
    assert torch.equal(read(payload, manifest)["w"], w_RC.to(bf16)) and read(payload, manifest)["scale"] == 2


def test_a_part_of_a_fused_weight_is_written_in_the_shape_of_its_entry():
    heads = torch.arange(48.0).reshape(2, 3, 2, 4)  # KV heads, (two query heads, a key head), head_dim, dim
    manifest = plan(1, [("wq", (8, 4), f32, True), ("wk", (4, 4), f32, True)], None)
    payload = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    writer = PayloadWriter(manifest, payload, verify=True)
    writer.add("wq", heads[:, :2])
    writer.add("wk", heads[:, 2])
    assert writer.finish() == "" and intact(payload, manifest)
    tensors = read(payload, manifest)
    assert torch.equal(tensors["wq"], heads[:, :2].reshape(8, 4))
    assert torch.equal(tensors["wk"], heads[:, 2].reshape(4, 4))


def test_one_wrong_byte_of_any_tensor_is_noticed():
    manifest, payload, _ = written({"a": torch.randn(3, 7), "b": torch.randn(9)})
    assert intact(payload, manifest)
    for entry in manifest.entries.values():
        for position in range(entry.offset, entry.offset + entry.nbytes):
            payload[position] ^= 1
            assert not intact(payload, manifest)
            payload[position] ^= 1
    assert intact(payload, manifest)


@pytest.mark.parametrize("bucket", [1, 2**26])
def test_the_first_tensor_that_is_not_finite_is_named(monkeypatch, bucket):
    monkeypatch.setattr("torchtitan_rl.weights.payload._BUCKET_BYTES", bucket)
    wrong = torch.ones(40)
    wrong[39] = float("inf")
    tensors = {"numbers": torch.ones(3, dtype=torch.int64), "fine": torch.ones(40), "wrong": wrong, "later": wrong}
    assert written(tensors)[2] == "wrong"
    assert written({"large": torch.tensor([3.4e38])}, bf16)[2] == "large"  # finite in float32 alone


def test_without_verify_there_are_no_checksums():
    manifest, payload, _ = written({"w": torch.ones(3)}, verify=False)
    payload.zero_()
    assert manifest.blocks == [] and intact(payload, manifest)
