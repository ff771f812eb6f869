"""Weights in one buffer: where each tensor lies, that it comes out as it went in, and what is said when it does not."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.weights.difference import explain_difference
from torchtitan_rl.weights.layout import TensorEntry, checksum, plan, read
from torchtitan_rl.weights.payload import PayloadWriter

bf16, f32 = torch.bfloat16, torch.float32


def described(tensors, parameters):
    return [(name, tensor.shape, tensor.dtype, name in parameters) for name, tensor in tensors.items()]


def published(tensors, parameters, dtype):
    manifest = plan(3, described(tensors, parameters), dtype)
    buffer = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    writer = PayloadWriter(manifest, buffer, verify=True)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    assert writer.finish() == ""
    return manifest, buffer


def test_tensors_lie_one_after_another_at_multiples_of_64_bytes():
    manifest = plan(
        3,
        [
            ("w", torch.Size([3, 5]), f32, True),  # 15 x 2 bytes
            ("rope", torch.Size([4, 5]), f32, False),  # 20 x 4 bytes, past one multiple of 64
            ("norm", torch.Size([32]), bf16, True),  # 64 bytes exactly
            ("scale", torch.Size([]), f32, True),
        ],
        bf16,
    )
    assert manifest.version == 3
    assert manifest.entries == {
        "w": TensorEntry((3, 5), bf16, 0),
        "rope": TensorEntry((4, 5), f32, 64),
        "norm": TensorEntry((32,), bf16, 192),
        "scale": TensorEntry((), bf16, 256),
    }
    assert [entry.nbytes for entry in manifest.entries.values()] == [30, 80, 64, 2]
    assert manifest.nbytes == 320


def test_parameters_travel_in_the_generators_dtype_and_buffers_in_their_own():
    # 1 + 2^-10 needs more than bfloat16's eight bits of precision.
    fine = torch.tensor([1.0 + 2.0**-10, -2.0])
    manifest, buffer = published({"w": fine, "cache": fine}, {"w"}, bf16)
    received = read(buffer, manifest)
    assert received["w"].dtype == bf16 and received["w"].tolist() == [1.0, -2.0]
    assert received["cache"].dtype == f32 and torch.equal(received["cache"], fine)


def test_bfloat16_parameters_may_travel_as_float32():
    manifest, buffer = published({"w": torch.tensor([1.5, -0.25], dtype=bf16)}, {"w"}, f32)
    (received,) = read(buffer, manifest).values()
    assert received.dtype == f32 and received.tolist() == [1.5, -0.25]


def test_what_is_read_shares_memory_with_the_buffer():
    manifest, buffer = published({"w": torch.ones(2)}, {"w"}, f32)
    received = read(buffer, manifest)["w"]
    buffer.zero_()
    assert received.tolist() == [0.0, 0.0]


@settings(deadline=None, derandomize=True, max_examples=50)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6),
    dtype=st.sampled_from([bf16, f32]),
    own=st.lists(st.sampled_from([bf16, f32]), min_size=6, max_size=6),
    seed=st.integers(0, 2**32),
)
def test_tensors_come_out_as_they_went_in(shapes, dtype, own, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"t{i}": torch.randn(shape, generator=generator).to(own[i]) for i, shape in enumerate(shapes)}
    parameters = {name for i, name in enumerate(tensors) if i % 3}
    manifest, buffer = published(tensors, parameters, dtype)
    received = read(buffer, manifest)
    assert list(received) == list(tensors)
    end = 0
    for name, tensor in tensors.items():
        expected = tensor.to(dtype) if name in parameters else tensor
        assert received[name].dtype == expected.dtype and torch.equal(received[name], expected)
        entry = manifest.entries[name]
        assert entry.offset % 64 == 0 and entry.offset >= end  # aligned, and nothing lies on top of another
        end = entry.offset + entry.nbytes
    assert end <= manifest.nbytes == len(buffer)


def test_a_transposed_tensor_is_written_in_the_order_of_its_shape():
    tensor = torch.arange(6.0).reshape(2, 3).T
    manifest, buffer = published({"w": tensor}, {"w"}, f32)
    assert read(buffer, manifest)["w"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_the_checksum_changes_with_any_one_byte():
    _, buffer = published({"a": torch.ones(3), "b": torch.ones(20)}, set(), f32)
    original = checksum(buffer)
    seen = {original}
    for position in range(len(buffer)):  # padding included
        buffer[position] ^= 1
        seen.add(checksum(buffer))
        buffer[position] ^= 1
    assert len(seen) == len(buffer) + 1
    assert checksum(buffer) == original == checksum(buffer.clone())


def test_the_checksum_is_xxh3_of_the_bytes():
    assert checksum(torch.zeros(0, dtype=torch.uint8)) == "2d06800538d394c2"  # the published value for no input


def test_equal_manifests_have_no_difference():
    entries = plan(0, [("w", torch.Size([2, 3]), f32, True), ("rope", torch.Size([4]), f32, False)], bf16).entries
    assert explain_difference(entries, {"w": (torch.Size([2, 3]), bf16), "rope": ((4,), f32)}) == ""


def test_differences_are_named():
    entries = {"w": TensorEntry((2, 3), bf16, 0)}
    assert explain_difference(entries, {}) == "w is published but not held"
    assert explain_difference({}, {"w": ((2, 3), bf16)}) == "w is held but not published"
    assert explain_difference(entries, {"w": ((3, 2), bf16)}) == "w has shape (2, 3) published, (3, 2) held"
    assert explain_difference(entries, {"w": ((2, 3), f32)}) == (
        "w has dtype torch.bfloat16 published, torch.float32 held"
    )


def test_three_differences_are_listed_and_the_rest_counted():
    entries = {name: TensorEntry((1,), f32, 0) for name in "abcde"}
    held = {"a": ((1,), f32), "b": ((2,), f32), "f": ((1,), f32)}
    assert explain_difference(entries, held) == (
        "b has shape (1,) published, (2,) held; c is published but not held; d is published but not held and 2 more"
    )
