"""The protocol without the SDK's clients: bytes posted with httpx, messages built from the SDK's protobuf module."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import tinker
from kit import RETRIED, Kit
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True)
class Outcome:
    """What a request came to: `payload` (a dictionary, or protobuf bytes), or `error` and its category or status."""

    payload: Any = None
    error: str | None = None
    category: str | None = None
    status: int = 200


class Raw:
    """One HTTP client with the kit's key. `post` never raises on a status."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.http = httpx.Client(base_url=kit.url, headers={"X-API-Key": kit.key}, timeout=kit.patience)
        self.sessions: list[str] = []

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: Any) -> None:
        for session in self.sessions:
            self.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
        self.http.close()

    def post(self, verb: str, body: dict | bytes, **headers: str) -> httpx.Response:
        """POST /api/v1/VERB: a dictionary as JSON, bytes as they are. Underscores in header names become dashes."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if isinstance(body, bytes):
            return self.http.post(f"/api/v1/{verb}", content=body, headers=named)
        return self.http.post(f"/api/v1/{verb}", json=body, headers=named)

    def accepted(self, response: httpx.Response) -> dict:
        assert response.status_code == 200, f"status={response.status_code}: {response.text[:300]}"
        return response.json()

    def session(self) -> str:
        body = {"tags": [], "user_metadata": {}, "sdk_version": tinker.__version__, "type": "create_session"}
        self.sessions.append(self.accepted(self.post("create_session", body))["session_id"])
        return self.sessions[-1]

    def create_model_body(self, session: str, seq: int = 0, seed: int = 11) -> dict:
        lora = {"rank": 8, "seed": seed, "train_mlp": True, "train_attn": True, "train_unembed": True}
        return {
            "session_id": session,
            "model_seq_id": seq,
            "base_model": self.kit.base_model,
            "lora_config": lora,
            "optimizer_config": {"type": "adamw"},
            "type": "create_model",
        }

    def model(self, session: str, seq: int = 0, seed: int = 11) -> str:
        outcome = self.settle(self.post("create_model", self.create_model_body(session, seq, seed)))
        assert outcome.error is None, outcome.error
        return outcome.payload["model_id"]

    def loaded(self, session: str, path: str, seq: int = 0) -> str:
        """A model created from the state at `path`, without optimizer state."""
        body = {"session_id": session, "model_seq_id": seq, "path": path, "optimizer": False, "type": "load_weights"}
        outcome = self.settle(self.post("load_weights", body))
        assert outcome.error is None, outcome.error
        return outcome.payload.get("model_id") or f"{session}:train:{seq}"

    def settle(self, response: httpx.Response) -> Outcome:
        """Follows an accepted request to its end; a refused one is an Outcome with its status."""
        if response.status_code != 200:
            return Outcome(error=response.text[:300], status=response.status_code)
        return self.retrieve(response.json()["request_id"])

    def retrieve(self, request_id: str) -> Outcome:
        deadline = time.monotonic() + self.kit.patience
        while time.monotonic() < deadline:
            body = {"request_id": request_id, "allow_metadata_only": False}
            response = self.post("retrieve_future", body, Accept=PROTOBUF)
            if response.status_code == 408:
                continue
            if response.status_code != 200:
                return Outcome(error=response.text[:300], status=response.status_code)
            if PROTOBUF in response.headers.get("content-type", ""):
                return Outcome(payload=response.content)
            answer = response.json()
            if answer.get("type") == "try_again":
                continue
            if "error" in answer:
                return Outcome(error=answer["error"], category=answer.get("category"))
            return Outcome(payload=answer)
        raise AssertionError(f"request_id={request_id}: not done within {self.kit.patience:g} s (--patience)")

    def refused(self, response: httpx.Response) -> Outcome:
        """The request has to end in a final 4xx status or in an error of category user."""
        outcome = self.settle(response)
        assert outcome.error is not None, f"was accepted, expected an error: {str(outcome.payload)[:300]}"
        if outcome.status == 200:
            assert outcome.category == "user", f"category={outcome.category}: expected user: {outcome.error}"
        else:
            final = 400 <= outcome.status < 500 and outcome.status not in RETRIED
            assert final, f"status={outcome.status}: expected 4xx that is final: {outcome.error}"
        return outcome

    def forward_backward(self, message: pb.ForwardBackwardRequest, **headers: str) -> httpx.Response:
        return self.post("forward_backward", message.SerializeToString(), Content_Type=PROTOBUF, **headers)

    def optim_body(self, model: str, seq: int, lr: float, eps: float = 1e-12) -> dict:
        adam = types.AdamParams(learning_rate=lr, eps=eps).model_dump()
        return {"model_id": model, "seq_id": seq, "adam_params": adam, "type": "optim_step"}


def message(model: str, seq: int, data: Sequence[types.Datum], forward_only: bool = False) -> pb.ForwardBackwardRequest:
    """A cross-entropy request, as the SDK encodes it."""
    given = types.ForwardBackwardInput(data=list(data), loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=given, model_id=model, seq_id=seq)
    encoded = forward_backward_request_to_proto(request)
    encoded.forward_only = forward_only
    return encoded


def read_logprobs(outcome: Outcome) -> np.ndarray:
    """All datums' log-probabilities of a forward_backward outcome, one after the other."""
    assert outcome.error is None, outcome.error
    output = deserialize_forward_backward_output(outcome.payload)
    return np.concatenate([np.asarray(one["logprobs"].to_numpy(), np.float64) for one in output.loss_fn_outputs])


def read_tokens(outcome: Outcome) -> list[list[int]]:
    """The token ids of every sequence of a sampling outcome."""
    assert outcome.error is None, outcome.error
    return [sequence.tokens for sequence in deserialize_sample_response(outcome.payload).sequences]
