"""Answers as JSON, for SDKs that do not ask for protobuf."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from torchtitan_rl.serve.tinker.wire import NO_LOGPROB

__all__ = ["as_json"]


def as_json(kind: str, content: bytes) -> bytes:
    """A protobuf answer of a kind, `"outputs"` (ForwardBackwardOutput) or `"sample"` (SampleResponse)."""
    return json.dumps(_outputs(content) if kind == "outputs" else _sample(content)).encode()


def _outputs(content: bytes) -> dict[str, Any]:
    message = pb.ForwardBackwardOutput.FromString(content)
    rows = []
    for record in message.loss_fn_outputs:
        batched = record.fields["logprobs"]
        values, ends = np.frombuffer(batched.data, np.float32), np.frombuffer(batched.offsets, np.int64) // 4
        for start, end in zip(ends, ends[1:]):
            row = values[start:end].reshape(-1, *batched.trailing_shape)
            rows.append({"logprobs": {"data": row.ravel().tolist(), "dtype": "float32", "shape": list(row.shape)}})
    return {
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": rows,
        "metrics": dict(message.metrics),
    }


def _sample(content: bytes) -> dict[str, Any]:
    message = pb.SampleResponse.FromString(content)
    answer: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": "length" if sequence.stop_reason == pb.STOP_REASON_LENGTH else "stop",
                "tokens": np.frombuffer(sequence.tokens, np.int32).tolist(),
                "logprobs": np.frombuffer(sequence.logprobs, np.float32).tolist(),
            }
            for sequence in message.sequences
        ],
    }
    if message.HasField("prompt_logprobs"):
        logprobs = np.frombuffer(message.prompt_logprobs, np.float32).tolist()
        answer["prompt_logprobs"] = [None if logprob != logprob else logprob for logprob in logprobs]
    if message.HasField("topk_prompt_logprobs"):
        top = message.topk_prompt_logprobs
        tokens = np.frombuffer(top.token_ids, np.int32).reshape(top.length, top.k).tolist()
        logprobs = np.frombuffer(top.logprobs, np.float32).reshape(top.length, top.k).tolist()
        answer["topk_prompt_logprobs"] = [
            None if row[0] == NO_LOGPROB else list(zip(ids, row)) for ids, row in zip(tokens, logprobs)
        ]
    return answer
