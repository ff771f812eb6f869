"""A mistake reaches the SDK as an error that says whose it is, at once, and changes nothing for later requests."""

from typing import Any

import numpy as np
import pytest
import tinker
from kit import Kit, datum, moved, near, refused, weighted
from raw import Raw, message
from tinker import types

FAR = 2**31 - 1  # a token id outside every vocabulary that still fits the wire


@pytest.fixture
def client(kit: Kit, service: tinker.ServiceClient, state: str) -> tinker.TrainingClient:
    return kit.load(service, state)


@pytest.fixture(scope="module")
def start(kit: Kit, keeper: tinker.ServiceClient, state: str) -> np.ndarray:
    return kit.probe(kit.load(keeper, state))


def ones(count: int) -> np.ndarray:
    return np.ones(count, dtype=np.float32)


def mistakes(kit: Kit) -> dict[str, tuple[list[types.Datum], str, dict | None]]:
    """Name: data, loss and its configuration, of which one thing is wrong."""
    tokens = kit.sequence(8, 300)
    good, ratio = weighted(tokens), {"logprobs": -ones(7), "advantages": ones(7)}
    outside = [*tokens[:-1], FAR]

    def spoiled(index: int, value: float) -> np.ndarray:
        values = ones(7)
        values[index] = value
        return values

    def with_inputs(**inputs: Any) -> list[types.Datum]:
        return [datum(tokens, **inputs)]

    return {
        "weights-short": (with_inputs(weights=ones(6)), "cross_entropy", None),
        "targets-short": (with_inputs(target_tokens=tokens[1:-1], weights=ones(6)), "cross_entropy", None),
        "targets-long": (with_inputs(target_tokens=tokens, weights=ones(8)), "cross_entropy", None),
        "weights-of-another-rank": (with_inputs(weights=np.ones((7, 2))), "cross_entropy", None),
        "targets-of-rank-3": (with_inputs(target_tokens=np.zeros((7, 1, 1), int), weights=np.ones((7, 1, 1))),
                              "cross_entropy", None),
        "targets-of-floats": (with_inputs(target_tokens=tokens[1:] + 0.5, weights=ones(7)), "cross_entropy", None),
        "input-outside-vocabulary": ([weighted(np.array([FAR, *tokens]))], "cross_entropy", None),
        "input-negative": ([weighted(np.array([-1, *tokens]))], "cross_entropy", None),
        "target-outside-vocabulary": (with_inputs(target_tokens=outside[1:], weights=ones(7)), "cross_entropy", None),
        "target-beyond-int32": (with_inputs(target_tokens=[2**40] * 7, weights=ones(7)), "cross_entropy", None),
        "target-negative": (with_inputs(target_tokens=[-1] * 7, weights=ones(7)), "cross_entropy", None),
        "weights-nan": (with_inputs(weights=spoiled(3, np.nan)), "cross_entropy", None),
        "weights-infinite": (with_inputs(weights=spoiled(3, np.inf)), "cross_entropy", None),
        "advantages-nan": (with_inputs(logprobs=-ones(7), advantages=spoiled(0, np.nan)), "ppo", None),
        "logprobs-infinite": (with_inputs(logprobs=spoiled(0, -np.inf), advantages=ones(7)), "ppo", None),
        "unknown-loss": ([good], "no_such_loss", None),
        "unknown-config-key": (with_inputs(**ratio), "ppo", {"no_such_threshold": 0.5}),
        "config-of-another-loss": (with_inputs(**ratio), "importance_sampling", {"beta": 0.5}),
        "config-of-text": (with_inputs(**ratio), "dro", {"beta": "much"}),
        "config-nan": (with_inputs(**ratio), "dro", {"beta": float("nan")}),
        "targets-missing": ([types.Datum(types.ModelInput.from_ints(tokens.tolist()), {})], "cross_entropy", None),
        "logprobs-missing": (with_inputs(advantages=ones(7)), "ppo", None),
        "advantages-missing": (with_inputs(logprobs=-ones(7)), "importance_sampling", None),
        "advantages-short": (with_inputs(logprobs=-ones(7), advantages=ones(3)), "cispo", None),
        "empty-input": ([types.Datum(types.ModelInput.empty(), {"weights": [], "target_tokens": []})],
                        "cross_entropy", None),
        "image": ([types.Datum(types.ModelInput(chunks=[types.ImageChunk(data=b"no image", format="png")]),
                               {"target_tokens": [1], "weights": [1.0]})], "cross_entropy", None),
        "one-of-three": ([good, *with_inputs(weights=ones(6)), good], "cross_entropy", None),
    }  # fmt: skip


NAMES = sorted(mistakes(Kit("", "", "", 64, False, 1.0)))


@pytest.mark.parametrize("name", NAMES)
def test_wrong_data(kit: Kit, client, start, name: str) -> None:
    """Refused with category user; the next request of the same client works and the model is as before."""
    data, loss, config = mistakes(kit)[name]
    refused(kit, lambda: client.forward_backward(data, loss, config))
    assert np.array_equal(kit.probe(client), start)


def test_sequence_too_long(kit: Kit, client, start) -> None:
    offered = kit.wait(kit.rest().get_server_capabilities()).supported_models
    limit = next((one.max_context_length for one in offered if one.model_name == kit.base_model), None)
    if limit is None:
        pytest.skip("get_server_capabilities gives no max_context_length")
    refused(kit, lambda: client.forward_backward([weighted(kit.sequence(limit + 2, 301))], "cross_entropy"))
    assert np.array_equal(kit.probe(client), start)


def test_failed_gradient_is_not_in_the_next_step(kit: Kit, service, state, start) -> None:
    """A call that fails in one datum leaves nothing of its others."""
    bad = mistakes(kit)["one-of-three"][0]
    reached = []
    for spoil in (True, False):
        one = kit.load(service, state)
        if spoil:
            refused(kit, lambda one=one: one.forward_backward(bad, "cross_entropy"))
        kit.step(one, [weighted(kit.sequence(20, 302))], lr=1e-2, eps=1.0)
        reached.append(kit.probe(one))
    moved(reached[1], start)
    near(reached[0], reached[1], 1e-6)


@pytest.mark.parametrize("params", [
    {"learning_rate": -1e-3}, {"beta1": 1.5}, {"beta2": -0.1}, {"eps": -1.0}, {"weight_decay": -1.0},
], ids=["learning_rate", "beta1", "beta2", "eps", "weight_decay"])  # fmt: skip
def test_wrong_optimizer_settings(kit: Kit, service, state, start, params: dict) -> None:
    """torch.optim.AdamW refuses them too. The model stays as it is."""
    client = kit.load(service, state)
    kit.wait(client.forward_backward([weighted(kit.sequence(9, 303))], "cross_entropy"))
    refused(kit, lambda: client.optim_step(types.AdamParams(**params)))
    assert np.array_equal(kit.probe(client), start)


def test_unknown_model_id(kit: Kit, service, client) -> None:
    info = client.get_info()
    for model_id in ("no-such-model", "../../etc", service.holder.get_session_id() + ":train:99"):
        other = tinker.TrainingClient(service.holder, model_seq_id=99, model_id=model_id, info=info)
        refused(kit, lambda other=other: other.forward([weighted(kit.sequence(5, 304))], "cross_entropy"))
    for model_id in ("no-such-model", "no-such-session:train:0"):
        refused(kit, lambda model_id=model_id: kit.rest().get_training_run(model_id))
        refused(kit, lambda model_id=model_id: kit.rest().list_checkpoints(model_id))


def test_unknown_base_model(kit: Kit, service) -> None:
    refused(kit, lambda: service.create_lora_training_client("no/such-model"))
    refused(kit, lambda: service.create_sampling_client(base_model="no/such-model"))


@pytest.mark.parametrize("rank", [0, -1, 10**9])
def test_impossible_rank(kit: Kit, service, rank: int) -> None:
    refused(kit, lambda: service.create_lora_training_client(kit.base_model, rank=rank))


def test_unknown_and_wandering_paths(kit: Kit, service, state) -> None:
    model = state.removeprefix("tinker://").split("/")[0]
    wandering = [
        f"tinker://{model}/weights/no-such-name",
        "tinker://no-such-model/weights/a",
        f"tinker://{model}/weights/../../{model}/weights/conformance-start",
        f"tinker://{model}/weights/..",
        "tinker://../../../etc/passwd",
        "tinker:///etc/passwd",
        "tinker://",
    ]
    for path in [*wandering, "/etc/passwd", "file:///etc/passwd", ""]:
        refused(kit, lambda path=path: service.create_training_client_from_state(path))
    for path in wandering:
        refused(kit, lambda path=path: service.create_sampling_client(model_path=path))
        refused(kit, lambda path=path: kit.rest().get_weights_info_by_tinker_path(path))


@pytest.mark.parametrize("name", ["../x", "..", ".", "a/../../x", "/etc/x", "a\0b", "x" * 5000])
def test_names_that_are_no_names(kit: Kit, client, start, name: str) -> None:
    refused(kit, lambda: client.save_state(name))
    refused(kit, lambda: client.save_weights_for_sampler(name))
    assert np.array_equal(kit.probe(client), start)


def test_wrong_api_key(kit: Kit) -> None:
    if not kit.keyed:
        pytest.skip("needs --api-key: a server without keys takes every one")
    try:
        client = tinker.ServiceClient(base_url=kit.url, api_key="tml-not-the-key-of-this-server")
        refused(kit, lambda: client.create_lora_training_client(kit.base_model))
    except tinker.APIStatusError as error:
        assert error.status_code in (401, 403), error


@pytest.mark.raw
def test_closed_session_takes_nothing_more(kit: Kit, raw: Raw, state) -> None:
    """ServiceClient.close says: further operations against the session are rejected."""
    service = tinker.ServiceClient(base_url=kit.url, api_key=kit.key)
    client = kit.load(service, state)
    session = service.holder.get_session_id()
    kit.wait(service.close("success"))
    raw.refused(raw.post("create_model", raw.create_model_body(session, seq=7)))
    raw.refused(raw.forward_backward(message(client.model_id, 1, [weighted(kit.sequence(6, 305))])))
