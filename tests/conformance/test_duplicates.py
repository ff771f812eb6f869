"""A request sent again, as a client does when an answer got lost, runs once and gets the same request id."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from kit import Kit, moved, near, weighted
from raw import Raw, message, read_logprobs, read_tokens

pytestmark = pytest.mark.raw
LR, EPS = 1e-2, 1.0  # the step is nearly proportional to the gradient: a gradient counted twice shows


def look(kit: Kit, raw: Raw, model: str, seq: int) -> np.ndarray:
    data = [weighted(kit.sequence(length, 200)) for length in (9, 17)]
    return read_logprobs(raw.settle(raw.forward_backward(message(model, seq, data, forward_only=True))))


def same_id(raw: Raw, *responses) -> str:
    ids = {raw.accepted(response)["request_id"] for response in responses}
    assert len(ids) == 1, f"request_ids={sorted(ids)}: one request sent several times got several"
    return ids.pop()


@pytest.fixture
def expected(kit: Kit, raw: Raw, state) -> tuple[np.ndarray, np.ndarray]:
    """A look before and after one step, every request sent once."""
    model = raw.loaded(raw.session(), state)
    before = look(kit, raw, model, 1)
    assert raw.settle(raw.forward_backward(message(model, 2, [weighted(kit.sequence(20, 201))]))).error is None
    assert raw.settle(raw.post("optim_step", raw.optim_body(model, 3, LR, EPS))).error is None
    return before, look(kit, raw, model, 4)


def test_forward_backward_twice_counts_once(kit: Kit, raw: Raw, state, expected) -> None:
    """Before its result is there, after it, and after it has been fetched."""
    model = raw.loaded(raw.session(), state)
    request = message(model, 1, [weighted(kit.sequence(20, 201))])
    request_id = same_id(raw, raw.forward_backward(request), raw.forward_backward(request))
    result = raw.retrieve(request_id)
    again = same_id(raw, raw.forward_backward(request))
    assert again == request_id
    near(read_logprobs(raw.retrieve(again)), read_logprobs(result), 0.0)
    assert raw.settle(raw.post("optim_step", raw.optim_body(model, 2, LR, EPS))).error is None
    moved(expected[1], expected[0])
    near(look(kit, raw, model, 3), expected[1], 1e-6)


def test_optim_step_twice_moves_once(kit: Kit, raw: Raw, state, expected) -> None:
    model = raw.loaded(raw.session(), state)
    assert raw.settle(raw.forward_backward(message(model, 1, [weighted(kit.sequence(20, 201))]))).error is None
    body = raw.optim_body(model, 2, LR, EPS)
    request_id = same_id(raw, raw.post("optim_step", body), raw.post("optim_step", body))
    assert raw.retrieve(request_id).error is None
    assert same_id(raw, raw.post("optim_step", body)) == request_id
    moved(expected[1], expected[0])
    near(look(kit, raw, model, 3), expected[1], 1e-6)


def test_eight_copies_at_once(kit: Kit, raw: Raw, state, expected) -> None:
    model = raw.loaded(raw.session(), state)
    request = message(model, 1, [weighted(kit.sequence(20, 201))])
    with ThreadPoolExecutor(8) as threads:
        same_id(raw, *threads.map(lambda _: raw.forward_backward(request), range(8)))
        body = raw.optim_body(model, 2, LR, EPS)
        same_id(raw, *threads.map(lambda _: raw.post("optim_step", body), range(8)))
    moved(expected[1], expected[0])
    near(look(kit, raw, model, 3), expected[1], 1e-6)


def test_create_model_twice_is_one_model(raw: Raw) -> None:
    session = raw.session()
    body = raw.create_model_body(session)
    request_id = same_id(raw, raw.post("create_model", body), raw.post("create_model", body))
    model = raw.retrieve(request_id).payload["model_id"]
    assert raw.settle(raw.post("create_model", body)).payload["model_id"] == model
    answer = raw.http.get(f"/api/v1/sessions/{session}", params={"access_scope": "owned"})
    assert answer.status_code == 200 and answer.json()["training_run_ids"] == [model], answer.text[:300]


def test_save_weights_twice_is_one_checkpoint(raw: Raw, state) -> None:
    model = raw.loaded(raw.session(), state)
    body = {"model_id": model, "path": "twice", "seq_id": 1, "type": "save_weights"}
    request_id = same_id(raw, raw.post("save_weights", body), raw.post("save_weights", body))
    saved = raw.retrieve(request_id)
    assert saved.error is None, saved.error
    again = raw.settle(raw.post("save_weights", body))
    assert again.payload == saved.payload


def test_sample_twice_is_one_sample(kit: Kit, raw: Raw) -> None:
    """Without a seed: a second run would draw other tokens."""
    body = {"session_id": raw.session(), "sampling_session_seq_id": 0, "base_model": kit.base_model}
    sampler = raw.accepted(raw.post("create_sampling_session", body))["sampling_session_id"]
    assert raw.accepted(raw.post("create_sampling_session", body))["sampling_session_id"] == sampler
    chunk = {"type": "encoded_text", "tokens": kit.sequence(5, 202).tolist()}
    request = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "num_samples": 2,
        "prompt": {"chunks": [chunk]},
        "sampling_params": {"max_tokens": 16, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "stop": []},
        "type": "sample",
    }
    answers = [raw.accepted(raw.post("asample", request)) for _ in range(2)]
    assert answers[0]["request_id"] == answers[1]["request_id"]
    assert answers[0]["sample_sequence_ids"] == answers[1]["sample_sequence_ids"]
    tokens = read_tokens(raw.retrieve(answers[0]["request_id"]))
    assert read_tokens(raw.settle(raw.post("asample", request))) == tokens
    other = read_tokens(raw.settle(raw.post("asample", {**request, "seq_id": 1})))
    assert [len(one) for one in tokens + other] == [16] * 4
    assert other != tokens, "another sequence number is another request"


def test_result_can_be_fetched_again(kit: Kit, raw: Raw, state) -> None:
    """An answer that got lost on its way: the second fetch gets the same bytes."""
    model = raw.loaded(raw.session(), state)
    sent = raw.accepted(raw.forward_backward(message(model, 1, [weighted(kit.sequence(12, 203))])))
    first = raw.retrieve(sent["request_id"])
    assert first.error is None and first.payload == raw.retrieve(sent["request_id"]).payload
