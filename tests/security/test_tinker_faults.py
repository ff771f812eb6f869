"""Attacks on a Tinker server by a holder of its key: wrong weights, damaged files, numbers of others, large bodies."""

import json
import os
import shutil

import httpx
import psutil
import pytest
import torch
import zstandard
from safetensors.torch import load_file, save_file

from tests.integration.test_tinker import SEQUENCE, datum, logprobs, step
from tests.integration.tinker_server import tinker_server

tinker = pytest.importorskip("tinker")
types = tinker.types
from tinker.proto import tinker_public_pb2 as pb  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
KEY = "tml-x"
PROMPT = types.ModelInput.from_ints(SEQUENCE[:4])
WAIT_S = 90


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(url, process, the directory of the models)."""
    directory = tmp_path_factory.mktemp("tinker")
    with tinker_server(directory, "--lora-rank", "8", "--max-models", "12", start_s=240) as (url, process):
        yield url, process, directory / "run" / "models"


@pytest.fixture(scope="module")
def service(server):
    with tinker.ServiceClient(base_url=server[0], api_key=KEY) as client:
        yield client


@pytest.fixture(scope="module")
def base_model(server):
    rest = tinker.RestClient(base_url=server[0], api_key=KEY)
    return rest.get_server_capabilities().result(WAIT_S).supported_models[0].model_name


@pytest.fixture
def client(service, base_model):
    return service.create_lora_training_client(base_model, rank=8, seed=1).result()


@pytest.fixture
def http(server):
    with httpx.Client(base_url=f"{server[0]}/api/v1", headers={"X-API-Key": KEY}, timeout=WAIT_S) as opened:
        yield opened


def failed(future):
    """The message of a fault of the user."""
    with pytest.raises(tinker.RequestFailedError) as error:
        future.result(WAIT_S)
    assert error.value.category is types.RequestErrorCategory.User
    return str(error.value)


def drawn(sampler, number=40):
    """Tokens and log-probabilities of so many seeded samples."""
    asked = [
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=20, seed=seed, stop=[])) for seed in range(number)
    ]
    said = [future.result(WAIT_S).sequences[0] for future in asked]
    return [(sequence.tokens, sequence.logprobs) for sequence in said]


def check_alike(said, before):
    """The same tokens; log-probabilities but for the rounding of batches that were put together otherwise."""
    assert [tokens for tokens, _ in said] == [tokens for tokens, _ in before]
    for (_, logprobs_now), (_, logprobs_then) in zip(said, before, strict=True):
        assert logprobs_now == pytest.approx(logprobs_then, abs=1e-4)


def workers(process):
    return sorted(child.pid for child in psutil.Process(process.pid).children(recursive=True))


def test_samples_of_seeded_requests_are_no_more_alike_at_a_lag_than_those_of_other_requests(service, base_model):
    sampler = service.create_sampling_client(base_model=base_model).result()
    params = [types.SamplingParams(max_tokens=24, seed=s, stop=[], temperature=2.0) for s in range(20)]
    said = [future.result(WAIT_S) for future in [sampler.sample(PROMPT, 16, one) for one in params]]
    tokens_SNT = torch.tensor([[sequence.tokens for sequence in answer.sequences] for answer in said])
    hot_SNTV = torch.nn.functional.one_hot(tokens_SNT, 64).double()
    for lag in range(1, 17):
        earlier, later = hot_SNTV[:, :, : 24 - lag].flatten(2), hot_SNTV[:, :, lag:].flatten(2)
        within, own = torch.einsum("snv,smv->", earlier, later), (earlier * later).sum()
        overall = (earlier.sum((0, 1)) * later.sum((0, 1))).sum()
        pairs_within, pairs = 20 * 16 * 15 * (24 - lag), 20 * 19 * 16 * 16 * (24 - lag)
        chance, rate = float((overall - within) / pairs), float((within - own) / pairs_within)
        sigma = (chance * (1 - chance) / pairs_within) ** 0.5
        assert rate <= chance + 3 * sigma, (lag, rate, chance)


def test_weights_that_are_not_finite_spoil_no_other_tenants_samples(server, service, client, base_model):
    base = service.create_sampling_client(base_model=base_model).result()
    before, alive = drawn(base), workers(server[1])
    # Adapters whose product overflows: the version is not published, and the model goes on from a saved state.
    saved = client.save_state("fine").result(WAIT_S).path
    named = client.save_weights_for_sampler("huge").result(WAIT_S).path
    client.forward_backward([datum(weights=1.0)], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=3e38)).result(WAIT_S)
    message = failed(client.save_weights_for_sampler("never"))
    assert ".weight has a NaN or an infinity" in message and "is not published" in message
    client.load_state_with_optimizer(saved).result(WAIT_S)
    client.save_weights_for_sampler("again").result(WAIT_S)
    # Finite weights whose activations overflow: as an older server saved them, without checksums.
    directory = server[2] / client.model_id / "sampler_weights" / "huge"
    tensors = load_file(str(directory / "weights.safetensors"))
    for name in tensors:
        if "ffn_norm" in name:
            tensors[name][:] = 3e30
    save_file(tensors, str(directory / "weights.safetensors"))
    (directory / "files.json").unlink(missing_ok=True)
    spoiling = service.create_sampling_client(model_path=named).result()
    for _ in range(2):
        asked = [
            spoiling.sample(PROMPT, 4, types.SamplingParams(max_tokens=20, seed=s, stop=[])) for s in range(12)
        ]  # fmt: skip
        for future in asked:
            assert "NaN as a log-probability" in failed(future)
        check_alike(drawn(base), before)
    assert workers(server[1]) == alive, "no generator was lost"


def test_one_flipped_bit_is_the_fault_of_who_loads_it_and_others_go_on(server, service, client, base_model):
    base = service.create_sampling_client(base_model=base_model).result()
    before, alive = drawn(base, 4), workers(server[1])
    step(client)
    sampler = client.save_weights_for_sampler("flipped").result(WAIT_S).path
    state = client.save_state("flipped").result(WAIT_S).path
    whole = client.save_state("whole").result(WAIT_S).path
    root = server[2] / client.model_id
    shards = sorted((root / "weights" / "flipped" / "model").glob("*.distcp"))
    for file in (root / "sampler_weights" / "flipped" / "weights.safetensors", shards[0]):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0x40
        file.write_bytes(content)
    damaged = service.create_sampling_client(model_path=sampler).result()
    for _ in range(5):
        assert "is damaged" in failed(damaged.sample(PROMPT, 1, types.SamplingParams(max_tokens=4)))
    with pytest.raises(tinker.RequestFailedError, match="is damaged"):
        service.create_training_client_from_state_with_optimizer(state).result()
    assert "is damaged" in failed(client.load_state_with_optimizer(state))
    expected = logprobs(client)
    again = service.create_training_client_from_state_with_optimizer(whole).result()
    assert torch.equal(logprobs(again), expected)
    check_alike(drawn(base, 4), before)
    assert workers(server[1]) == alive


def test_a_sample_that_names_anothers_model_takes_no_number_of_it(client, http):
    expected = logprobs(client)
    for number in range(1, 6):
        body = {"sampling_session_id": client.model_id, "seq_id": number, "num_samples": 1}
        body |= {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
        request_id = http.post("/asample", json=body).json()["request_id"]
        assert "is not open" in http.post("/retrieve_future", json={"request_id": request_id}).json()["error"]
    assert torch.equal(logprobs(client), expected)


def test_a_number_of_a_sampler_that_another_client_used_answers_nobody_else(service, base_model, http):
    sampler = service.create_sampling_client(base_model=base_model).result()
    for number in range(4):
        body = {"sampling_session_id": sampler._sampling_session_id, "seq_id": number, "num_samples": 1}
        body |= {"prompt": {"chunks": [{"tokens": [3]}]}, "sampling_params": {"max_tokens": 1, "seed": 1}}
        assert http.post("/asample", json=body).status_code == 200
    said = sampler.sample(PROMPT, 2, types.SamplingParams(max_tokens=7, seed=1, stop=[])).result(WAIT_S)
    assert [len(sequence.tokens) for sequence in said.sequences] == [7, 7]


def test_a_refused_request_ends_at_its_place_and_the_model_goes_on_at_once(client, http):
    expected = logprobs(client)
    for kind in ("create_custom_loss", "some_newer_kind"):
        number = client._request_id_counter + 1
        refused = http.post(f"/{kind}", json={"model_id": client.model_id, "seq_id": number}).json()
        error = http.post("/retrieve_future", json=refused).json()["error"]
        assert f"{kind}: is not offered" in error
        client._request_id_counter = client._turn_counter = number
        assert torch.equal(logprobs(client), expected)


def sparse(model_id, seq_id, shapes):
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    for rows, columns in shapes:
        one = message.data.add()
        one.model_input.add().encoded_text.tokens = bytes(4 * rows)
        targets = one.loss_fn_inputs["target_tokens"]
        targets.dtype = pb.DTYPE_INT64
        targets.shape.extend([rows, columns])
        targets.sparse_csr.crow_indices = bytes(8 * (rows + 1))
    return message.SerializeToString()


def resident(process, field):
    """MiB, of `VmRSS` (now) or `VmHWM` (the most since `forgotten`)."""
    with open(f"/proc/{process.pid}/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(field))


def forgotten(process):
    with open(f"/proc/{process.pid}/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    return resident(process, "VmRSS")


def test_bodies_that_expand_cost_little_memory_and_the_model_goes_on(server, client, http):
    process, expected = server[1], logprobs(client)
    number, before = client._request_id_counter, forgotten(server[1])
    compress = zstandard.ZstdCompressor().compress
    wide = [(1, 65000)] + [(2, 1)] * 2400
    bodies = {
        "sparse targets": lambda n: (sparse(client.model_id, n, wide), {}),
        "zstd": lambda n: (
            compress(sparse(client.model_id, n, [(2, 1)]) + b"\x1a\x00" * 2**26),
            {"Content-Encoding": "zstd"},
        ),
        "parts": lambda n: (sparse(client.model_id, n, [(2, 1)]) + b"\x1a\x00" * 2**21, {}),
    }
    for name, make in bodies.items():
        for _ in range(3):
            number += 1
            body, headers = make(number)
            answer = http.post(
                "/forward_backward", content=body, headers={"Content-Type": "application/x-protobuf"} | headers
            )
            assert answer.status_code == 200, answer.text
            fault = http.post("/retrieve_future", json=answer.json()).json()
            assert fault["category"] == "user", fault
        print(f"{name}: {len(body)} bytes; peak {resident(process, 'VmHWM') - before:.0f} MiB above {before:.0f}")
    peak = resident(process, "VmHWM") - before
    assert peak < 400, peak
    for path in ("/asample", "/create_session", "/telemetry"):
        answer = http.post(path, content=b" " * (2**22 + 1), headers={"Content-Type": "application/json"})
        assert answer.status_code == 413, answer.text
    metadata = {"user_metadata": {"x": "y" * 2**17}}
    assert http.post("/create_session", json=metadata).status_code == 400
    client._request_id_counter = client._turn_counter = number
    assert torch.equal(logprobs(client), expected)


def test_requests_numbered_ahead_are_bounded_and_the_model_goes_on(server, client, http):
    process, expected = server[1], logprobs(client)
    first, before = client._request_id_counter + 1, forgotten(server[1])
    statuses = []
    for number in range(first + 1, first + 200):
        body = sparse(client.model_id, number, [(250, 1)] * 300)  # 900 KiB as it is sent, 1.2 MiB in memory
        answer = http.post("/forward", content=body, headers={"Content-Type": "application/x-protobuf"})
        statuses.append(answer.status_code)
    grown = resident(process, "VmHWM") - before
    accepted = statuses.count(200)
    print(f"{accepted} of {len(statuses)} taken, peak {grown:.0f} MiB above {before:.0f}")
    assert set(statuses) == {200, 429} and 30 <= accepted <= 80 and grown < 200
    assert "send seq_id=" in answer.json()["error"]
    # The one that all wait for is taken; those behind it run, too.
    body = {"model_id": client.model_id, "seq_id": first, "adam_params": {"learning_rate": 0.0}}
    assert http.post("/optim_step", json=body).status_code == 200
    client._request_id_counter = client._turn_counter = first + accepted
    assert torch.equal(logprobs(client), expected)


def test_a_damaged_record_leaves_the_catalogue_to_all_others(server, service, client, http):
    paths = [client.save_state(name).result(WAIT_S).path for name in ("one", "two")]
    file = server[2] / client.model_id / "weights" / "one" / "checkpoint.json"
    for damage in ({"expires_at": "garbage"}, {"expires_at": "2030-01-01T00:00:00"}, {"time": None}):
        content = json.loads(file.read_text())
        file.write_text(json.dumps(content | damage))
        for path in ("/checkpoints?limit=1000", "/training_runs", f"/training_runs/{client.model_id}/checkpoints"):
            answer = http.get(path)
            assert answer.status_code == 200, (damage, path, answer.text)
        named = [found["tinker_path"] for found in http.get("/checkpoints?limit=1000").json()["checkpoints"]]
        assert paths[1] in named and paths[0] not in named
        file.write_text(json.dumps(content))
    shutil.rmtree(file.parent)
    assert os.path.exists(file.parent.with_name("two"))
