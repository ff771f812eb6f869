"""Two owners of one Tinker server: whatever one asks with the other's ids is answered as ids that do not exist."""

import dataclasses
import itertools
import json
import re
from dataclasses import dataclass

import httpx
import pytest

from tests.integration.test_tinker import SEQUENCE, logprobs, step
from tests.integration.tinker_server import tinker_server
from torchtitan_rl.serve.tinker.app import make_app
from torchtitan_rl.serve.tinker.owners import OneKey, add_key

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("forked")]

tinker = pytest.importorskip("tinker")
types = tinker.types


@dataclass(frozen=True)
class Ids:
    """What an owner has on the server, each by its id."""

    session: str
    model: str
    sampler: str
    future: str
    weights: str
    sampler_weights: str

    @property
    def paths(self):
        return [f"tinker://{self.model}/{checkpoint}" for checkpoint in (self.weights, self.sampler_weights)]

    def of_nobody(self):
        """Ids of the same form, of nothing."""
        session = "0" * len(self.session)
        return dataclasses.replace(
            self,
            session=session,
            **{name: getattr(self, name).replace(self.session, session) for name in ("model", "sampler", "future")},
        )


def prompt():
    return {"chunks": [{"type": "encoded_text", "tokens": SEQUENCE[:-1]}]}


def training(ids, seq_id):
    inputs = {
        "target_tokens": {"data": SEQUENCE[1:], "dtype": "int64", "shape": [7]},
        "weights": {"data": [1.0] * 7, "dtype": "float32", "shape": [7]},
    }
    asked = {"data": [{"model_input": prompt(), "loss_fn_inputs": inputs}], "loss_fn": "cross_entropy"}
    return {"model_id": ids.model, "seq_id": seq_id, "forward_backward_input": asked, "forward_input": asked}


def sample(**more):
    return {"prompt": prompt(), "sampling_params": {"max_tokens": 2, "seed": 1}, **more}


NEXT = 10_000
"""A number that no request of the owner has had; with it and the number after the last one, requests are sent."""
ATTACKS = {
    ("POST", "session_heartbeat"): [lambda ids: {"session_id": ids.session}],
    ("POST", "sessions/{session_id}/finish"): [lambda ids: {}],
    ("POST", "create_model"): [
        lambda ids: {"session_id": ids.session, "model_seq_id": 7, "base_model": "BASE", "lora_config": {"rank": 4}},
        lambda ids: {"session_id": ids.session, "model_seq_id": 0, "base_model": "BASE", "lora_config": {"rank": 4}},
    ],
    ("POST", "get_info"): [lambda ids: {"model_id": ids.model}],
    ("POST", "unload_model"): [lambda ids: {"model_id": ids.model}],
    ("POST", "forward_backward"): [lambda ids: training(ids, 1), lambda ids: training(ids, NEXT)],
    ("POST", "forward"): [lambda ids: training(ids, 1), lambda ids: training(ids, NEXT)],
    ("POST", "optim_step"): [
        lambda ids: {"model_id": ids.model, "seq_id": 2, "adam_params": {}},
        lambda ids: {"model_id": ids.model, "seq_id": NEXT, "adam_params": {"learning_rate": 1.0}},
        lambda ids: {"model_id": ids.model, "adam_params": {"learning_rate": 1.0}},
        lambda ids: {"model_id": ids.model, "seq_id": NEXT, "adam_params": "no object"},
    ],
    ("POST", "save_weights"): [
        lambda ids: {"model_id": ids.model, "seq_id": NEXT, "path": "kept", "overwrite": True},
        lambda ids: {"model_id": ids.model, "path": "another"},
    ],
    ("POST", "save_weights_for_sampler"): [
        lambda ids: {"model_id": ids.model, "seq_id": NEXT, "path": "kept", "overwrite": True},
        lambda ids: {"model_id": ids.model, "sampling_session_seq_id": 0},
    ],
    ("POST", "save_weights_external"): [lambda ids: {"model_id": ids.model, "seq_id": NEXT, "path": "kept"}],
    ("POST", "load_weights"): [
        lambda ids: {"model_id": ids.model, "path": ids.paths[0], "optimizer": True},
        lambda ids: {"session_id": ids.session, "model_seq_id": 3, "path": ids.paths[0], "optimizer": True},
        lambda ids: {"session_id": "OWN", "model_seq_id": "NUMBER", "path": ids.paths[0], "optimizer": True},
    ],
    ("POST", "create_sampling_session"): [
        lambda ids: {"session_id": ids.session, "sampling_session_seq_id": 0},
        lambda ids: {"session_id": "OWN", "sampling_session_seq_id": 9, "model_path": ids.paths[1]},
    ],
    ("POST", "asample"): [
        lambda ids: sample(sampling_session_id=ids.sampler, seq_id=0),
        lambda ids: sample(sampling_session_id=ids.sampler, seq_id=NEXT),
        lambda ids: sample(sampling_session_id=ids.model, seq_id=1),
        lambda ids: sample(model_path=ids.paths[1]),
    ],
    ("POST", "retrieve_future"): [lambda ids: {"request_id": ids.future}],
    ("POST", "weights_info"): [lambda ids: {"tinker_path": ids.paths[0]}, lambda ids: {"tinker_path": ids.paths[1]}],
    ("GET", "training_runs/{model_id}"): [None],
    ("GET", "training_runs/{model_id}/checkpoints"): [None],
    ("PUT", "training_runs/{model_id}/checkpoints/{checkpoint_id:path}/ttl"): [lambda ids: {"ttl_seconds": 3600}],
    ("GET", "training_runs/{model_id}/checkpoints/{checkpoint_id:path}/archive"): [None],
    ("GET", "training_runs/{model_id}/checkpoints/{checkpoint_id:path}/external_weights_urls"): [None],
    ("GET", "downloads/{token}/{name:path}"): [None],
    ("POST", "training_runs/{model_id}/checkpoints/{checkpoint_id:path}/publish"): [None],
    ("DELETE", "training_runs/{model_id}/checkpoints/{checkpoint_id:path}/publish"): [None],
    ("DELETE", "training_runs/{model_id}/checkpoints/{checkpoint_id:path}"): [None],
    ("GET", "sessions/{session_id}"): [None],
    ("GET", "samplers/{sampler_id}"): [None],
}
LISTS = {"training_runs": "training_runs", "checkpoints": "checkpoints", "sessions": "sessions"}
"""Routes that list what there is -> the list in the answer."""
WITHOUT_IDS = {
    "client/config", "client/dynamic_config", "create_session", "telemetry", "get_server_capabilities", "healthz",
    # Refused, whoever asks for whatever.
    "create_custom_loss", "copy_weights", "join_sampling_session", "retrieve_futures",
    "cancel_future", "auth/token", "{path:path}",
}  # fmt: skip


def routes():
    """Method and path of every route of the protocol."""
    for route in make_app(None, OneKey()).routes:
        path = route.path.removeprefix("/api/v1/")
        if path != route.path:
            for method in route.methods - {"HEAD"}:
                yield method, path


class Client:
    """Bare HTTP with an owner's key."""

    def __init__(self, url, key):
        self.http = httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=60)
        self.session = self.http.post("create_session", json={}).json()["session_id"]
        answer = self.http.get("get_server_capabilities").json()
        self.numbers = itertools.count(3)
        self.base_model = answer["supported_models"][0]["model_name"]

    def ask(self, method, path, ids, body):
        """Status and text of the answer, or of its future, with every id replaced by what it is the id of."""
        for name, value in {
            "{session_id}": ids.session, "{model_id}": ids.model, "{sampler_id}": ids.sampler,
            "{checkpoint_id:path}": ids.weights,
        }.items():  # fmt: skip
            path = path.replace(name, value)
        content = None
        if body is not None:
            filled = json.dumps(body(ids)).replace('"BASE"', json.dumps(self.base_model))
            content = filled.replace('"OWN"', json.dumps(self.session)).replace('"NUMBER"', str(next(self.numbers)))
        answer = self.http.request(method, path, content=content)
        status, text = answer.status_code, answer.text
        if path != "retrieve_future" and status == 200 and "request_id" in answer.json():
            followed = self.http.post("retrieve_future", json={"request_id": answer.json()["request_id"]})
            status, text = followed.status_code, followed.text
        text = text.replace(self.session, "OWN")
        for field in dataclasses.fields(ids):
            if field.name != "weights" and field.name != "sampler_weights":
                text = text.replace(getattr(ids, field.name), field.name.upper())
        return status, re.sub(ids.session, "SESSION", text)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys"
    return file, {owner: add_key(file, owner) for owner in ("alice", "bob")}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("owners")


@pytest.fixture(scope="module")
def server(directory, keys):
    with tinker_server(directory, "--keys", str(keys[0]), "--max-models", "4") as (url, _):
        yield url


@pytest.fixture(scope="module")
def alice(server, keys):
    with tinker.ServiceClient(base_url=server, api_key=keys[1]["alice"]) as service:
        yield service


@pytest.fixture(scope="module")
def model(alice, server, keys):
    rest = tinker.RestClient(base_url=server, api_key=keys[1]["alice"])
    base_model = rest.get_server_capabilities().result(30).supported_models[0].model_name
    client = alice.create_lora_training_client(base_model, rank=4, seed=1).result()
    step(client)
    return client


@pytest.fixture(scope="module")
def ids(server, keys, model):
    """What alice has."""
    path = model.save_state("kept").result(60).path
    sampler_path = model.save_weights_for_sampler("kept").result(60).path
    http = Client(server, keys[1]["alice"]).http
    session = model.model_id.split(":")[0]
    asked = {"session_id": session, "sampling_session_seq_id": 50, "model_path": sampler_path}
    sampler = http.post("create_sampling_session", json=asked).json()["sampling_session_id"]
    future = http.post("asample", json=sample(sampling_session_id=sampler, seq_id=0)).json()["request_id"]
    return Ids(
        session=session,
        model=model.model_id,
        sampler=sampler,
        future=future,
        weights=path.removeprefix(f"tinker://{model.model_id}/"),
        sampler_weights=sampler_path.removeprefix(f"tinker://{model.model_id}/"),
    )


@pytest.fixture(scope="module")
def bob(server, keys):
    return Client(server, keys[1]["bob"])


def test_every_route_of_the_protocol_is_attacked():
    assert {path for _, path in routes()} == {path for _, path in ATTACKS} | set(LISTS) | WITHOUT_IDS
    assert set(ATTACKS) <= set(routes())


@pytest.mark.parametrize("route", ATTACKS, ids=" ".join)
def test_anothers_ids_answer_as_ids_that_do_not_exist(route, ids, bob):
    for body in ATTACKS[route]:
        status, text = bob.ask(*route, ids, body)
        assert (status, text) == bob.ask(*route, ids.of_nobody(), body)
        assert status >= 400 or '"category": "user"' in text, text


def test_a_link_is_for_whoever_has_it_until_its_checkpoint_is_deleted(model, bob, server, keys):
    alice = Client(server, keys[1]["alice"]).http
    path = model.save_weights_for_sampler("linked").result(60).path
    checkpoint = f"training_runs/{model.model_id}/checkpoints/{path.removeprefix(f'tinker://{model.model_id}/')}"
    answer = alice.get(f"{checkpoint}/archive")
    assert answer.status_code == 302
    link = answer.headers["Location"]
    assert httpx.get(link).status_code == 200 and alice.get(f"{checkpoint}/archive").headers["Location"] == link
    token = link.split("/")[-2]
    for wrong in (link.replace(token, "x" * len(token)), f"{link}x", link.replace("linked.tar", "../../keys"),
                  link.replace("linked.tar", "%2e%2e%2fmodels"), link.replace("linked.tar", "")):  # fmt: skip
        assert httpx.get(wrong).status_code in (400, 404), wrong
    assert bob.http.delete(checkpoint).status_code == 404 and httpx.get(link).status_code == 200
    assert alice.delete(checkpoint).status_code == 204
    assert httpx.get(link).status_code == 404 and alice.get(f"{checkpoint}/archive").status_code == 404


@pytest.mark.parametrize("path", LISTS)
def test_lists_have_ones_own_alone(path, ids, bob, server, keys):
    answer = bob.http.get(path).json()
    assert answer[LISTS[path]] == ([bob.session] if path == "sessions" else [])
    assert answer.get("cursor", {"total_count": 0})["total_count"] == 0
    own = Client(server, keys[1]["alice"]).http.get(path).json()
    assert ids.session in json.dumps(own[LISTS[path]])


def test_after_all_that_everything_of_its_owner_is_as_it_was(ids, bob, model, alice, server, keys):
    """The model goes on without a stall, its checkpoints are those that were saved, and never expire."""
    before = logprobs(model)
    for route, bodies in ATTACKS.items():
        for body in bodies:
            bob.ask(*route, ids, body)
    assert logprobs(model).equal(before)
    rest = tinker.RestClient(base_url=server, api_key=keys[1]["alice"])
    saved = rest.list_checkpoints(model.model_id).result(30).checkpoints
    assert sorted(c.tinker_path for c in saved) == sorted(ids.paths) and not any(c.expires_at for c in saved)
    again = alice.create_training_client_from_state(ids.paths[0]).result()
    assert logprobs(again).equal(before)
    sampler = alice.create_sampling_client(model_path=ids.paths[1]).result()
    assert sampler.compute_logprobs(types.ModelInput.from_ints(SEQUENCE)).result(60)[0] is None


def test_the_sdk_of_two_owners(server, keys, model, ids):
    """Both train, save and sample beside each other; neither finds what is the other's."""
    with tinker.ServiceClient(base_url=server, api_key=keys[1]["bob"]) as service:
        rest = tinker.RestClient(base_url=server, api_key=keys[1]["bob"])
        base_model = rest.get_server_capabilities().result(30).supported_models[0].model_name
        own = service.create_lora_training_client(base_model, rank=4, seed=1).result()
        step(own)
        path = own.save_state("kept").result(60).path
        assert [c.tinker_path for c in rest.list_user_checkpoints().result(30).checkpoints] == [path]
        assert [run.training_run_id for run in rest.list_training_runs().result(30).training_runs] == [own.model_id]
        assert rest.get_training_run(own.model_id).result(30).model_owner == "bob"
        with pytest.raises(tinker.RequestFailedError, match="there is no such checkpoint"):
            service.create_training_client_from_state(ids.paths[0]).result()
        with pytest.raises(tinker.NotFoundError, match="there is no such checkpoint"):
            rest.delete_checkpoint_from_tinker_path(ids.paths[0]).result(30)
        rest.delete_checkpoint_from_tinker_path(path).result(30)
        assert rest.list_user_checkpoints().result(30).checkpoints == []
    wrong = httpx.post(f"{server}/api/v1/create_session", json={}, headers={"X-API-Key": "tml-wrong"})
    assert wrong.status_code == 401 and "session_id" not in wrong.text
    assert httpx.post(f"{server}/api/v1/create_session", json={}).status_code == 401


def test_owners_of_checkpoints_are_known_after_a_restart(directory, server, keys, ids):
    """A second server on the same directory; a key that was added meanwhile has its own, empty list."""
    added = add_key(keys[0], "carol")
    assert Client(server, added).http.get("checkpoints").json()["checkpoints"] == [], "the file is read again"
    with tinker_server(directory, "--keys", str(keys[0])) as (url, _):
        paths = {
            owner: [c["tinker_path"] for c in Client(url, key).http.get("checkpoints").json()["checkpoints"]]
            for owner, key in (keys[1] | {"carol": added}).items()
        }
    assert set(ids.paths) <= set(paths["alice"]) and not paths["bob"] and not paths["carol"]
