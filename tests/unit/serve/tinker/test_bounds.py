"""What a request may cost, before anything of it is widened. Memory is that of a process of its own."""

import json
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
import zstandard
from tinker.proto import tinker_public_pb2 as pb

from torchtitan_rl.serve.tinker import bounds, wire
from torchtitan_rl.serve.tinker.faults import Fault

PROTOBUF = "application/x-protobuf"
INT64 = pb.DTYPE_INT64


def csr(tensor, rows, columns):
    """A tensor of that shape in which nothing is stored."""
    tensor.dtype = INT64
    tensor.shape.extend([rows, columns])
    tensor.sparse_csr.crow_indices = bytes(8 * (rows + 1))


def request(shapes, *, model_id="m", seq_id=1):
    """A request with a datum for each (rows, columns) of its sparse targets."""
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    for rows, columns in shapes:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = bytes(4 * rows)
        csr(datum.loss_fn_inputs["target_tokens"], rows, columns)
    return message.SerializeToString()


def varint(number):
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def refused(read, *args, **more):
    with pytest.raises(Fault) as fault:
        read(*args, **more)
    assert fault.value.category == "user"
    return fault.value


def test_sparse_targets_are_counted_as_dense_as_the_widest_datum_makes_all_of_them():
    wide = request([(1, 65000), (200, 1)])
    message = refused(wire.read_training, wide, PROTOBUF, forward_only=False).message
    assert "201 rows" in message and "65000 columns" in message and str(bounds.MAX_ENTRIES) in message
    assert len(wire.read_training(request([(64, 1000), (64, 1)]), PROTOBUF, forward_only=False).data) == 2


@pytest.mark.parametrize("shape", [[2**40, 2**40], [-(2**40), 3], [2**23, 2], [0, 2**62]])
def test_shapes_that_a_request_only_claims_are_counted(shape):
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    tensor = message.data.add().loss_fn_inputs["target_tokens"]
    tensor.dtype = INT64
    tensor.shape.extend(shape)
    tensor.sparse_csr.SetInParent()
    csr(message.data.add().loss_fn_inputs["target_tokens"], 4, 4)
    refused(wire.read_training, message.SerializeToString(), PROTOBUF, forward_only=False)


def test_json_is_counted_alike():
    tensor = {"data": [], "dtype": "int64", "shape": [4096, 4096], "sparse_crow_indices": [0] * 4097}
    datum = {
        "model_input": {"chunks": [{"tokens": [1]}]},
        "loss_fn_inputs": {"target_tokens": tensor | {"sparse_col_indices": []}},
    }
    body = {"model_id": "m", "seq_id": 1, "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"}}
    assert "16777216 numbers" in refused(wire.read_training, json.dumps(body).encode(), "", forward_only=False).message
    many = b'{"x": [' + b"1," * bounds.MAX_JSON_VALUES + b"1]}"
    assert refused(wire.read_training, many, "", forward_only=False).status == 413


@pytest.mark.parametrize(
    "body",
    [
        b"\x1a\x00" * 400_000,  # empty datums
        b"\x1a" + varint(800_000) + b"\x0a\x00" * 400_000,  # empty chunks of one datum
        b"\x1a" + varint(1_600_000) + b"\x0a\x02\x0a\x00" * 400_000,
        b"\x22\x00" * 400_000,  # the loss's name over and over
        b"\x10\x01" * 400_000,
        b"\xf8\x3f\x01" * 400_000,  # a field that the protocol lacks
        b"\x1a" + varint(400_012) + b"\x12" + varint(400_008) + b"\x12" + varint(400_004) + b"\x22" + varint(400_000)
        + b"\x01" * 400_000,  # a shape of so many numbers
    ],
)  # fmt: skip
def test_a_message_of_many_small_parts_is_refused_before_it_is_parsed(body):
    fault = refused(wire.read_training, b"\x0a\x01m\x10\x05" + body, PROTOBUF, forward_only=False)
    assert fault.status == 413 and "parts" in fault.message
    assert wire.numbers(b"\x0a\x01m\x10\x05" + body, PROTOBUF) in (("m", 5), ("m", 1))


def test_a_large_request_of_the_sdk_has_few_parts():
    body = request([(100, 1)] * 4096)
    assert len(body) > 2**20
    assert len(wire.read_training(body, PROTOBUF, forward_only=False).data) == 4096


@pytest.mark.parametrize("body", [b"\x1a\xff\xff\xff\xff\x0f", b"\xff" * 11, b"\x0b", b"\x09\x00"])
def test_bytes_that_are_no_message_are_refused_by_the_walk_too(body):
    message = refused(wire.read_training, b"\x22\x00" * 40_000 + body, PROTOBUF, forward_only=False).message
    assert "is not a ForwardBackwardRequest" in message


def test_zstd_ends_at_the_limit_and_the_number_is_known_all_the_same():
    bomb = zstandard.ZstdCompressor().compress(request([(2, 1)], seq_id=7) + b"\x22\x00" * 2**21)
    assert len(bomb) < 2000
    fault = refused(bounds.decompressed, bomb, "zstd", 2**20)
    assert fault.status == 413 and "without zstd" in fault.message
    assert wire.numbers(bounds.beginning(bomb, "zstd"), PROTOBUF) == ("m", 7)
    assert bounds.decompressed(bomb, "zstd", 2**23).startswith(b"\x0a\x01m\x10\x07")
    assert "not what zstd writes" in refused(bounds.decompressed, b"nonsense", "zstd", 2**20).message
    assert bounds.beginning(b"nonsense", "zstd") == b""
    assert refused(bounds.decompressed, b"", "gzip", 2**20).status == 415


def test_a_datum_knows_what_it_holds_in_memory():
    sequence = wire.Sequence(tokens=torch.zeros(1000, dtype=torch.int64), inputs={"weights": torch.zeros(1000)})
    assert 12_000 <= sequence.nbytes <= 14_000


ATTACKS = {
    "sparse targets, 116 KiB": "request([(1, 65000)] + [(2, 1)] * 2400)",
    "zstd, 12 KiB of a gibibyte": "zstandard.ZstdCompressor().compress(bytes(2**30))",
    "zstd of empty datums": "zstandard.ZstdCompressor().compress(b'\\x1a\\x00' * 2**25)",
    "JSON of empty lists": "b'[' * 90 + b'[],' * 2**20",
}


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_the_memory_of_a_body_that_attacks_is_bounded(attack):
    """KiB of the largest resident set, before and after."""
    code = f"""
        import resource, zstandard
        from tests.unit.serve.tinker.test_bounds import request
        from torchtitan_rl.serve.tinker import bounds, wire
        from torchtitan_rl.serve.tinker.faults import Fault
        body = {ATTACKS[attack]}
        kind = "" if "JSON" in {attack!r} else "application/x-protobuf"
        wire.read_training(request([(2, 1)]), "application/x-protobuf", forward_only=False)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            plain = bounds.decompressed(body, "zstd" if "zstd" in {attack!r} else None, 2**26)
            wire.read_training(plain, kind, forward_only=False)
        except Fault as fault:
            print(len(body), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, fault.message)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    size, kib, message = done.stdout.split(maxsplit=2)
    print(f"{attack}: {int(size)} bytes cost {int(kib) / 1024:.0f} MiB: {message}")
    assert int(kib) < 300 * 1024


def test_rows_whose_differences_overflow_are_no_matrix():
    """Each difference is 2**62 in 64 bits, and their sum 0: NumPy would write behind the memory that it has taken."""
    rows, nothing = np.array([0, 2**62, -(2**63), -(2**62), 0]), np.zeros(0, dtype=np.int64)
    with pytest.raises(Fault, match="is no compressed sparse matrix of shape"):
        wire._dense(np.zeros(0, dtype=np.float32), [4, 1], rows, nothing, "data[0]")
