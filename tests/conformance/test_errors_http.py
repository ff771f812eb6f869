"""Bytes that are no request: a final 4xx or an error of category user, no hang, no 5xx; the server goes on."""

import json
import select
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import numpy as np
import pytest
from kit import RETRIED, Kit, weighted
from raw import PROTOBUF, Raw, message, read_logprobs
from tinker.proto import tinker_public_pb2 as pb

pytestmark = pytest.mark.raw
VERBS = """create_session create_model optim_step save_weights save_weights_for_sampler load_weights asample
create_sampling_session retrieve_future get_info weights_info session_heartbeat""".split()
FIELDS = """session_id model_id model_seq_id seq_id path base_model request_id tinker_path tags sampling_session_id
sampling_session_seq_id prompt sampling_params adam_params""".split()


@pytest.fixture
def model(raw: Raw, state: str) -> str:
    return raw.loaded(raw.session(), state)


def works(kit: Kit, raw: Raw, model: str, seq: int) -> None:
    """The model answers a good request."""
    sent = raw.forward_backward(message(model, seq, [weighted(kit.sequence(6, 400))], forward_only=True))
    assert np.all(np.isfinite(read_logprobs(raw.settle(sent))))


def alive(raw: Raw) -> None:
    assert raw.http.get("/api/v1/healthz").status_code == 200


@pytest.mark.parametrize("body", [b"\xff" * 64, b"{}", b"\x0a\xff\xff\xff\xff\x0f"], ids=["noise", "json", "cut"])
def test_malformed_protobuf(kit: Kit, raw: Raw, model: str, body: bytes) -> None:
    raw.refused(raw.post("forward_backward", body, Content_Type=PROTOBUF))
    works(kit, raw, model, 1)


def test_protobuf_cut_short(kit: Kit, raw: Raw, model: str) -> None:
    whole = message(model, 1, [weighted(kit.sequence(40, 401))]).SerializeToString()
    for size in (len(whole) // 2, len(whole) - 1):
        raw.refused(raw.post("forward_backward", whole[:size], Content_Type=PROTOBUF))
    works(kit, raw, model, 1)


@pytest.mark.parametrize("encoding", ["zstd", "gzip", "no-such-encoding"])
def test_body_that_is_not_in_its_encoding(raw: Raw, model: str, encoding: str) -> None:
    raw.refused(raw.post("forward_backward", b"not compressed", Content_Type=PROTOBUF, Content_Encoding=encoding))
    alive(raw)


def spoil_tokens(request: pb.ForwardBackwardRequest) -> None:
    request.data[0].model_input[0].encoded_text.tokens += b"\0"


def spoil_bytes(request: pb.ForwardBackwardRequest) -> None:
    request.data[0].loss_fn_inputs["weights"].dense += b"\0\0\0"


def spoil_type(request: pb.ForwardBackwardRequest) -> None:
    request.data[0].loss_fn_inputs["weights"].dtype = pb.DTYPE_UNSPECIFIED


def spoil_shape(request: pb.ForwardBackwardRequest) -> None:
    request.data[0].loss_fn_inputs["weights"].shape[:] = [2**62, 4]


def spoil_sign(request: pb.ForwardBackwardRequest) -> None:
    request.data[0].loss_fn_inputs["weights"].shape[:] = [-5]


def no_chunk(request: pb.ForwardBackwardRequest) -> None:
    request.data[0].model_input[0].Clear()


def no_tensor(request: pb.ForwardBackwardRequest) -> None:
    request.data[0].loss_fn_inputs["weights"].Clear()


def sparse(rows: list[int], columns: list[int]) -> Callable[[pb.ForwardBackwardRequest], None]:
    def spoil(request: pb.ForwardBackwardRequest) -> None:
        for name, kind in (("weights", np.float32), ("target_tokens", np.int64)):
            tensor = request.data[0].loss_fn_inputs[name]
            tensor.shape[:] = [5, 3]
            tensor.sparse_csr.values = np.ones(len(columns), kind).tobytes()
            tensor.sparse_csr.crow_indices = np.asarray(rows, np.int64).tobytes()
            tensor.sparse_csr.col_indices = np.asarray(columns, np.int64).tobytes()

    return spoil


SPOILED = {
    "tokens-of-five-bytes": spoil_tokens,
    "tensor-of-odd-bytes": spoil_bytes,
    "tensor-without-type": spoil_type,
    "tensor-shape-overflows": spoil_shape,
    "tensor-shape-negative": spoil_sign,
    "chunk-empty": no_chunk,
    "tensor-empty": no_tensor,
    "csr-column-outside": sparse([0, 1, 1, 1, 1, 1], [9]),
    "csr-column-negative": sparse([0, 1, 1, 1, 1, 1], [-1]),
    "csr-rows-fall": sparse([0, 2, 1, 2, 2, 2], [0, 1]),
    "csr-rows-overflow": sparse([0, 2**62, -(2**63), -(2**62), 0, 0], []),
    "csr-rows-short": sparse([0, 1], [0]),
    "csr-end-beyond-values": sparse([0, 1, 1, 1, 1, 2**40], [0]),
    "csr-starts-late": sparse([1, 1, 1, 1, 1, 1], [0]),
}


@pytest.mark.parametrize("name", SPOILED)
def test_spoiled_tensor(kit: Kit, raw: Raw, model: str, name: str) -> None:
    """A message that parses has its place in the order, so the one after it runs."""
    request = message(model, 1, [weighted(kit.sequence(6, 402))])
    SPOILED[name](request)
    raw.refused(raw.forward_backward(request))
    works(kit, raw, model, 2)


@pytest.mark.parametrize("seq", [0, -1, -(2**31)])
def test_sequence_number_below_one(kit: Kit, raw: Raw, model: str, seq: int) -> None:
    """The SDK counts from 1; 0 is what a message without one says."""
    raw.refused(raw.forward_backward(message(model, seq, [weighted(kit.sequence(6, 403))])))
    works(kit, raw, model, 1)


@pytest.mark.parametrize("verb", VERBS)
def test_malformed_json(raw: Raw, verb: str) -> None:
    """No JSON, cut JSON, another type, nothing, too deep, no text."""
    for body in (b"no json", b'{"model_id": "', b"[1, 2]", b"null", b'"text"', b"", b"[" * 100_000, b"\xff\xfe\0"):
        raw.refused(raw.post(verb, body, Content_Type="application/json"))
    alive(raw)


@pytest.mark.parametrize("verb", VERBS)
def test_fields_of_wrong_types(raw: Raw, verb: str) -> None:
    for value in ({"a": [1]}, [[None]], 1e308):
        raw.refused(raw.post(verb, dict.fromkeys(FIELDS, value)))
    alive(raw)


def test_numbers_that_json_does_not_have(raw: Raw, model: str) -> None:
    body = json.dumps(raw.optim_body(model, 1, float("nan"))).encode()
    raw.refused(raw.post("optim_step", body, Content_Type="application/json"))
    alive(raw)


@pytest.mark.parametrize("request_id", ["no-such-request", "", "../../etc/passwd", "x" * 100_000, "a\0b"])
def test_unknown_future(raw: Raw, request_id: str) -> None:
    """A future that never was, or has expired: an error, since waiting for it would never end."""
    outcome = raw.retrieve(request_id)
    assert outcome.error is not None
    assert outcome.status == 200 or 400 <= outcome.status < 500, f"status={outcome.status}: {outcome.error}"


def test_paths_that_leave_the_checkpoints(raw: Raw, model: str) -> None:
    for name in ("weights/..%2F..%2Fx", "weights%2F..%2F..", "..%2F..%2F..%2Fetc", "weights/no-such-name"):
        for send in (raw.http.delete, raw.http.put):
            extra = {"json": {"ttl_seconds": 7200}} if send == raw.http.put else {}
            end = "/ttl" if extra else ""
            status = send(f"/api/v1/training_runs/{model}/checkpoints/{name}{end}", **extra).status_code
            assert 400 <= status < 500, f"{name}: status={status}"
    alive(raw)


def test_unknown_address(raw: Raw) -> None:
    for answer in (raw.http.get("/api/v1/no_such_verb"), raw.http.get("/api/v1/forward_backward"), raw.post("x", b"")):
        assert 400 <= answer.status_code < 500 and answer.status_code not in RETRIED, answer.text[:300]


def head(kit: Kit, length: int) -> bytes:
    """The head of a forward_backward request that declares a body of `length` bytes."""
    address = urlsplit(kit.url)
    lines = [
        f"POST {address.path}/api/v1/forward_backward HTTP/1.1", f"Host: {address.netloc}", f"X-API-Key: {kit.key}",
        f"Content-Type: {PROTOBUF}", f"Content-Length: {length}", "", "",
    ]  # fmt: skip
    return "\r\n".join(lines).encode()


def connect(kit: Kit) -> socket.socket:
    if urlsplit(kit.url).scheme != "http":
        pytest.skip("speaks plain HTTP only")
    address = urlsplit(kit.url)
    return socket.create_connection((address.hostname, address.port or 80), timeout=kit.patience)


def first_line(line: socket.socket) -> bytes:
    """Of the answer; nothing where the server closed the connection instead."""
    try:
        return line.recv(4096).split(b"\r\n")[0]
    except ConnectionError:
        return b""


def test_half_a_body(kit: Kit, raw: Raw, model: str) -> None:
    """The connection ends within the body: no answer is due, the request does not count, and others go on."""
    whole = message(model, 1, [weighted(kit.sequence(40, 404))]).SerializeToString()
    with connect(kit) as line:
        line.sendall(head(kit, len(whole)) + whole[: len(whole) // 2])
        line.shutdown(socket.SHUT_WR)
        answer = first_line(line)
    assert not answer.startswith((b"HTTP/1.1 2", b"HTTP/1.1 5")), answer
    works(kit, raw, model, 1)


def test_oversized_body(kit: Kit, raw: Raw, model: str) -> None:
    """A body of 1 TiB is refused, with a final 4xx or by closing, and not taken for as long as it comes."""
    deadline, answer = time.monotonic() + kit.patience, None
    with connect(kit) as line:
        line.sendall(head(kit, 2**40))
        while answer is None:
            assert time.monotonic() < deadline, f"the body was taken for {kit.patience:g} s (--patience)"
            readable, writable, _ = select.select([line], [line], [], 1.0)
            if readable:
                answer = first_line(line)
            elif writable:
                try:
                    line.send(b"\0" * 2**20)
                except ConnectionError:
                    answer = first_line(line)
    assert not answer or answer.startswith(b"HTTP/1.1 4"), answer
    assert not answer.startswith(tuple(f"HTTP/1.1 {status}".encode() for status in RETRIED)), answer
    works(kit, raw, model, 1)
