"""Tinker's messages, in protobuf or JSON, from and to the package's types.

Tensors of the protocol are flat bytes with a shape, dense or compressed sparse rows (CSR); N is a sequence's length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from torchtitan_rl.serve.tinker import bounds
from torchtitan_rl.serve.tinker.bodies import ForwardBackwardBody, ModelInputBody, NumbersBody, TensorBody, parse
from torchtitan_rl.serve.tinker.faults import Fault, user
from torchtitan_rl.types import Completion

__all__ = [
    "NO_LOGPROB",
    "Sequence",
    "Training",
    "numbers",
    "outputs_message",
    "read_training",
    "sample_message",
    "tokens_of",
]

_OVERHEAD = 512  # bytes of an object around a tensor, roughly
_DTYPES: dict[int, np.dtype] = {
    pb.DTYPE_FLOAT32: np.dtype(np.float32),
    pb.DTYPE_INT64: np.dtype(np.int64),
    pb.DTYPE_INT32: np.dtype(np.int32),
}
NO_LOGPROB = -99999.0
"""The protocol's log-probability of an entry that is not there, with token id 0."""


@dataclass(kw_only=True, slots=True)
class Sequence:
    """A datum of the protocol: what the model reads, and tensors by name."""

    tokens: torch.Tensor
    """int64 (N,)."""
    inputs: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return _OVERHEAD + sum(_OVERHEAD + tensor.nbytes for tensor in (self.tokens, *self.inputs.values()))


@dataclass(kw_only=True, slots=True)
class Training:
    """A request for a forward pass, with a backward pass unless `forward_only`."""

    model_id: str
    seq_id: int
    loss_fn: str
    loss_config: dict[str, float | str] = field(default_factory=dict)
    data: list[Sequence]
    forward_only: bool

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(sequence.nbytes for sequence in self.data)


def read_training(body: bytes, content_type: str, *, forward_only: bool) -> Training:
    """The request in a body, in protobuf or in JSON. Raises Fault for one that cannot be read."""
    if "protobuf" not in content_type:
        bounds.check_json(body)
        return _training_of(parse(ForwardBackwardBody, body), forward_only)
    bounds.check_parts(body)
    message = _message(body)
    bounds.check_entries([_shape(tensor) for tensor in datum.loss_fn_inputs.values()] for datum in message.data)
    if message.seq_id < 1:
        raise user(f"seq_id={message.seq_id}: the requests of a model are counted from 1; number the request")
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return Training(
        model_id=message.model_id,
        seq_id=message.seq_id,
        loss_fn=message.loss_fn,
        loss_config=config,
        data=[
            Sequence(
                tokens=_tokens([_chunk_tokens(chunk, f"data[{i}]") for chunk in datum.model_input]),
                inputs={name: _tensor(t, f"data[{i}].{name}") for name, t in datum.loss_fn_inputs.items()},
            )
            for i, datum in enumerate(message.data)
        ],
        forward_only=forward_only or message.forward_only,
    )


def numbers(body: bytes, content_type: str) -> tuple[str, int] | None:
    """The model and the number of a request that is wrong in itself; None where they cannot be told."""
    if "protobuf" in content_type:
        return bounds.model_and_number(body)
    try:
        bounds.check_json(body)
        message = parse(NumbersBody, body)
    except Fault:
        return None
    return message.model_id, message.seq_id


def _message(body: bytes) -> Any:
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise user(f"body: is not a ForwardBackwardRequest in protobuf ({error}); send it again") from error
    return message


def _training_of(body: ForwardBackwardBody, forward_only: bool) -> Training:
    call = body.forward_backward_input or body.forward_input
    if call is None:
        raise user("forward_backward_input: is missing; send data and loss_fn in it")
    bounds.check_entries(
        [tensor.shape or [len(tensor.data)] for tensor in datum.loss_fn_inputs.values()] for datum in call.data
    )
    return Training(
        model_id=body.model_id,
        seq_id=body.seq_id or 0,
        loss_fn=call.loss_fn,
        loss_config=call.loss_fn_config or {},
        data=[
            Sequence(
                tokens=torch.tensor(tokens_of(datum.model_input), dtype=torch.int64),
                inputs={name: _json_tensor(t, f"data[{i}].{name}") for name, t in datum.loss_fn_inputs.items()},
            )
            for i, datum in enumerate(call.data)
        ],
        forward_only=forward_only,
    )


def tokens_of(prompt: ModelInputBody) -> list[int]:
    """The token ids of a model input. Raises Fault for images and audio."""
    for chunk in prompt.chunks:
        if chunk.tokens is None:
            raise user(f"chunk of type {chunk.type!r}: the model reads text alone; send encoded_text")
    return [token for chunk in prompt.chunks for token in chunk.tokens or ()]


def _tokens(chunks: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(chunks, dtype=np.int64)) if chunks else torch.zeros(0, dtype=torch.int64)


def _chunk_tokens(chunk: Any, path: str) -> np.ndarray:
    if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
        raise user(f"{path}.model_input: has a chunk of {kind or 'nothing'}; the model reads text alone")
    return _from_bytes(chunk.encoded_text.tokens, np.dtype(np.int32), path)


def _from_bytes(content: bytes, dtype: np.dtype, path: str) -> np.ndarray:
    if len(content) % dtype.itemsize:
        raise user(f"{path}: {len(content)} bytes are no whole number of {dtype.name}; send the tensor again")
    return np.frombuffer(content, dtype=dtype)


def _shape(message: Any) -> list[int]:
    """The shape of a tensor once it is dense, before it is read."""
    itemsize = _DTYPES[message.dtype].itemsize if message.dtype in _DTYPES else 4
    return list(message.shape) or [len(message.dense) // itemsize]


def _tensor(message: Any, path: str) -> torch.Tensor:
    if (dtype := _DTYPES.get(message.dtype)) is None:
        raise user(f"{path}.dtype={message.dtype}: is not float32 or int64; convert the tensor")
    if message.WhichOneof("encoding") == "sparse_csr":
        csr, int64 = message.sparse_csr, _DTYPES[pb.DTYPE_INT64]
        rows, columns = _from_bytes(csr.crow_indices, int64, path), _from_bytes(csr.col_indices, int64, path)
        return _dense(_from_bytes(csr.values, dtype, path), list(message.shape), rows, columns, path)
    return _shaped(_from_bytes(message.dense, dtype, path), list(message.shape), path)


def _json_tensor(body: TensorBody, path: str) -> torch.Tensor:
    try:
        values = np.asarray(body.data, dtype=np.int64 if body.dtype == "int64" else np.float32)
        rows, columns = (
            None if indices is None else np.asarray(indices, dtype=np.int64)
            for indices in (body.sparse_crow_indices, body.sparse_col_indices)
        )
    except (OverflowError, ValueError) as error:
        raise user(f"{path}: {error}; send numbers of dtype {body.dtype}") from error
    if rows is not None and columns is not None:
        return _dense(values, body.shape or [], rows, columns, path)
    return _shaped(values, [len(values)] if body.shape is None else body.shape, path)


def _shaped(values: np.ndarray, shape: list[int], path: str) -> torch.Tensor:
    shape = shape or [len(values)]
    if len(shape) > 2 or min(shape) < 0 or int(np.prod(shape, dtype=object)) != len(values):
        raise user(f"{path}.shape={shape[:4]}: {len(values)} numbers came; give the shape (N,) or (N, K) they have")
    return torch.from_numpy(values.copy()).reshape(shape)


def _dense(values: np.ndarray, shape: list[int], rows: np.ndarray, columns: np.ndarray, path: str) -> torch.Tensor:
    """CSR as a dense tensor (N, K), 0 where nothing is stored."""
    wrong = len(shape) != 2 or not 0 <= shape[0] < 2**24 or not 0 <= shape[1] < 2**16 or len(rows) != shape[0] + 1
    if not wrong:
        # Compared in pairs: a difference of two of these numbers may overflow, and pass for one that is not negative.
        stored = len(values) == len(columns) == rows[-1] and rows[0] == 0 and (rows[:-1] <= rows[1:]).all()
        wrong = not stored
        wrong = wrong or (len(columns) > 0 and not 0 <= columns.min() <= columns.max() < shape[1])
    if wrong:
        raise user(f"{path}: is no compressed sparse matrix of shape {shape[:4]}; send it dense, or mend its indices")
    dense = np.zeros(shape, dtype=values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return torch.from_numpy(dense)


def outputs_message(logprobs: list[torch.Tensor], metrics: dict[str, float]) -> bytes:
    """A ForwardBackwardOutput: per datum `logprobs`, float32 (N,) or (N, K), and metrics named `name:reduction`."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics.update(metrics)
    start = 0
    while start < len(logprobs):  # a record is rectangular: datums of one trailing shape
        end = start + 1
        while end < len(logprobs) and logprobs[end].shape[1:] == logprobs[start].shape[1:]:
            end += 1
        rows = [row.float().contiguous().numpy() for row in logprobs[start:end]]
        record = message.loss_fn_outputs.add(type_tag="LossFnOutput", num_datums=len(rows))
        batched = record.fields["logprobs"]
        batched.data, batched.dtype = b"".join(row.tobytes() for row in rows), pb.DTYPE_FLOAT32
        batched.offsets = np.cumsum([0, *(row.nbytes for row in rows)], dtype=np.int64).tobytes()
        batched.trailing_shape.extend(rows[0].shape[1:])
        start = end
    return message.SerializeToString()


def sample_message(
    completions: list[Completion],
    *,
    prompt_logprobs: list[float | None] | None,
    top_prompt: tuple[torch.Tensor, torch.Tensor] | None,
    top_sampled: list[tuple[torch.Tensor, torch.Tensor]] | None,
) -> bytes:
    """A SampleResponse. `top_prompt` and, by completion, `top_sampled`: ids and log-probabilities, both (N, k)."""
    message = pb.SampleResponse()
    for index, completion in enumerate(completions):
        stopped = pb.STOP_REASON_LENGTH if completion.truncated else pb.STOP_REASON_STOP
        sequence = message.sequences.add(stop_reason=stopped)
        sequence.tokens = np.asarray(completion.tokens, dtype=np.int32).tobytes()
        sequence.logprobs = np.asarray(completion.logprobs, dtype=np.float32).tobytes()
        if top_sampled is not None:
            _write_top(sequence.topk_sampled_logprobs, *top_sampled[index])
    if prompt_logprobs is not None:
        known = [float("nan") if logprob is None else logprob for logprob in prompt_logprobs]
        message.prompt_logprobs = np.asarray(known, dtype=np.float32).tobytes()
    if top_prompt is not None:
        tokens, logprobs = top_prompt
        nothing = torch.zeros(1, tokens.shape[1]), torch.full((1, tokens.shape[1]), NO_LOGPROB)
        _write_top(message.topk_prompt_logprobs, torch.cat([nothing[0], tokens]), torch.cat([nothing[1], logprobs]))
    return message.SerializeToString()


def _write_top(message: Any, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
    message.length, message.k = tokens.shape
    message.token_ids = tokens.int().contiguous().numpy().tobytes()
    message.logprobs = logprobs.float().contiguous().numpy().tobytes()
