"""Tinker's SDK, unmodified, against a server on the real stack; tests/conformance has the whole protocol."""

import asyncio
import math
import threading

import httpx
import numpy as np
import pytest
import torch

from tests.integration.tinker_fuzz import fuzz
from tests.integration.tinker_server import tinker_server

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("forked")]

tinker = pytest.importorskip("tinker")
types = tinker.types

SEQUENCE = [22, 20, 21, 16, 20, 21, 22, 1]
KEY = "tml-a-key-of-the-tests"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tinker")
    (directory / "key").write_text(KEY)
    with tinker_server(directory, "--api-key-file", str(directory / "key"), "--max-models", "5") as (url, process):
        yield url


@pytest.fixture(scope="module")
def service(server):
    with tinker.ServiceClient(base_url=server, api_key=KEY) as client:
        yield client


@pytest.fixture(scope="module")
def base_model(server):
    rest = tinker.RestClient(base_url=server, api_key=KEY)
    return rest.get_server_capabilities().result(30).supported_models[0].model_name


@pytest.fixture(scope="module")
def client(service, base_model):
    return service.create_lora_training_client(base_model, rank=8, seed=1).result()


def datum(tokens=SEQUENCE, weights=None, **more):
    inputs = {"target_tokens": torch.tensor(tokens[1:])}
    if weights is not None:
        wide = isinstance(weights, (torch.Tensor, types.TensorData))
        inputs["weights"] = weights if wide else torch.full((len(tokens) - 1,), weights)
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs | more)


def logprobs(client, data=None):
    outputs = client.forward(data or [datum(weights=1.0)], "cross_entropy").result(60).loss_fn_outputs
    return torch.cat([row["logprobs"].to_torch().flatten() for row in outputs])


def step(client, data=None, lr=1e-2, **more):
    client.forward_backward(data or [datum(weights=1.0)], "cross_entropy")
    return client.optim_step(types.AdamParams(learning_rate=lr, **more)).result(60)


def test_every_loss_is_the_sum_that_the_protocol_defines(client):
    rng = np.random.default_rng(0)
    old = logprobs(client).numpy().astype(np.float64)
    shift = rng.normal(size=len(old)) * 0.5
    advantages = rng.normal(size=len(old)).astype(np.float32)
    sampled = (old + shift).astype(np.float32)
    log_ratio = old - sampled.astype(np.float64)
    ratio, a = np.exp(log_ratio), advantages.astype(np.float64)
    expected = {
        "importance_sampling": -(ratio * a).sum(),
        "ppo": -np.minimum(ratio * a, ratio.clip(0.8, 1.2) * a).sum(),
        "cispo": -(ratio.clip(0.0, 4.0) * old * a).sum(),
        "dro": -(old * a - 0.5 * 0.05 * log_ratio**2).sum(),
    }
    data = [datum(logprobs=torch.from_numpy(sampled), advantages=torch.from_numpy(advantages))]
    for name, value in expected.items():
        for call in (client.forward, client.forward_backward):
            assert call(data, name).result(60).metrics["loss:sum"] == pytest.approx(value, abs=1e-5, rel=1e-5), name
    narrow = {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}
    value = -np.minimum(ratio * a, ratio.clip(0.95, 1.05) * a).sum()
    assert client.forward(data, "ppo", narrow).result(60).metrics["loss:sum"] == pytest.approx(value, abs=1e-5)
    weights = rng.normal(size=len(old)).astype(np.float32)
    value = client.forward([datum(weights=torch.from_numpy(weights))], "cross_entropy").result(60).metrics["loss:sum"]
    assert value == pytest.approx(-(weights.astype(np.float64) * old).sum(), abs=1e-5)
    client.optim_step(types.AdamParams(learning_rate=0.0)).result(60)


def test_several_targets_a_token_dense_and_sparse(client):
    targets, weights = torch.randint(1, 60, (7, 3)), torch.rand(7, 3)
    weights[2:5] = 0.0
    sparse = datum(target_tokens=targets, weights=weights)  # the SDK makes CSR of what is mostly zero
    dense = datum(
        target_tokens=types.TensorData.from_numpy(targets.numpy()), weights=types.TensorData.from_numpy(weights.numpy())
    )
    outputs = [client.forward([given], "cross_entropy").result(60) for given in (sparse, dense)]
    assert outputs[0].loss_fn_outputs[0]["logprobs"].shape == [7, 3]
    rows = [output.loss_fn_outputs[0]["logprobs"].to_torch() for output in outputs]
    assert torch.equal(rows[0][weights > 0], rows[1][weights > 0])
    assert outputs[0].metrics["loss:sum"] == pytest.approx(float(-(weights * rows[1]).sum()), rel=1e-5)


def test_models_are_sampled_from_side_by_side(service, base_model):
    """Three models and the base at once: each answer has the numbers of its own model's trainer."""
    clients = [service.create_lora_training_client(base_model, rank=8, seed=seed).result() for seed in (21, 22, 23)]
    for number, one in enumerate(clients):
        for _ in range(1 + number):
            step(one)
    samplers = [one.save_weights_and_get_sampling_client() for one in clients]
    samplers.append(service.create_sampling_client(base_model=base_model).result())
    prompt = types.ModelInput.from_ints(SEQUENCE[:4])
    params = types.SamplingParams(max_tokens=24, temperature=1.0, seed=5)
    calls = [sampler.sample(prompt, 8, params) for _ in range(3) for sampler in samplers]
    sequences = [call.result(60).sequences for call in calls]
    for one, of_one in zip(clients, sequences, strict=False):
        data = [datum(SEQUENCE[:4] + list(sequence.tokens), 1.0) for sequence in of_one]
        rows = one.forward(data, "cross_entropy").result(60).loss_fn_outputs
        for row, sequence in zip(rows, of_one, strict=True):
            expected = row["logprobs"].to_torch().flatten()[3:]
            torch.testing.assert_close(torch.tensor(sequence.logprobs), expected, rtol=0, atol=2e-5)
    texts = [[list(sequence.tokens) for sequence in of_one] for of_one in sequences]
    assert texts[:4] == texts[4:8] == texts[8:], "the same seed, whoever is in the batch"
    assert all(one != other for i, one in enumerate(texts[:4]) for other in texts[:i])
    for one in clients:
        _unload(service, one)


def test_models_are_independent_of_each_other_and_of_the_order_of_their_requests(service, base_model):
    """Two models with the same seed and the same requests are equal, whatever another model does between."""
    one, two, other = (service.create_lora_training_client(base_model, rank=r, seed=7).result() for r in (4, 4, 32))
    before = logprobs(one)
    assert torch.equal(before, logprobs(other)), "B = 0: every model begins as the base"
    futures = []
    for client in (one, other, two, other):
        futures.append(client.forward_backward([datum(weights=1.0)], "cross_entropy"))
    for client in (two, other, one):
        futures.append(client.optim_step(types.AdamParams(learning_rate=1e-2)))
    for client in (one, two):
        futures += [client.forward_backward([datum(weights=0.5)], "cross_entropy")]
        futures += [client.optim_step(types.AdamParams(learning_rate=1e-2, beta1=0.5, grad_clip_norm=0.1))]
    for future in futures:
        future.result(60)
    assert torch.equal(logprobs(one), logprobs(two)) and (logprobs(one) - before).abs().max() > 1e-2
    assert (logprobs(other) - logprobs(one)).abs().max() > 1e-3
    step(other, lr=0.0)
    assert one.get_info().lora_rank == 4 and other.get_info().lora_rank == 32
    for client in (one, two, other):
        _unload(service, client)


def _unload(service, client):
    """The SDK has no call for it; older ones had."""
    holder = service.holder

    async def send():
        with holder.aclient(tinker.lib.client_connection_pool_type.ClientConnectionPoolType.TRAIN) as http:
            return await http.post("/api/v1/unload_model", body={"model_id": client.model_id}, cast_to=object)

    holder.run_coroutine_threadsafe(send()).result(30)


def test_only_the_layers_that_were_asked_for_train(service, base_model):
    client = service.create_lora_training_client(base_model, rank=8, seed=3, train_attn=False).result()
    step(client, lr=1e-2)
    moved = logprobs(client)
    path = client.save_state("mlp").result(60).path
    info = tinker.RestClient(base_url=service.holder._base_url, api_key=KEY).get_weights_info_by_tinker_path(path)
    assert (info.result(30).train_attn, info.result(30).train_mlp, info.result(30).lora_rank) == (False, True, 8)
    assert moved.isfinite().all()
    _unload(service, client)


def test_save_and_load_continue_bit_for_bit(service, client):
    step(client)
    path = client.save_state("here", overwrite=True).result(60).path
    expected = [step(client, lr=3e-3), logprobs(client)][1]
    again = service.create_training_client_from_state_with_optimizer(path).result()
    step(again, lr=3e-3)
    assert torch.equal(logprobs(again), expected)
    without = service.create_training_client_from_state(path).result()
    step(without, lr=3e-3)
    assert not torch.equal(logprobs(without), expected)
    _unload(service, again), _unload(service, without)


def test_a_custom_loss_runs_through_forward_and_backward(service, client, base_model):
    def loss_fn(data, rows):
        loss = sum((row.exp() ** 2).sum() for row in rows)
        return loss, {"mean:mean": float(loss.detach())}

    path = client.save_state("custom", overwrite=True).result(60).path
    twin = service.create_training_client_from_state_with_optimizer(path).result()
    row = logprobs(client).double()
    client.forward_backward_custom([datum()], loss_fn).result(60)
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result(60)
    step(twin, [datum(weights=(-2 * (2 * row).exp()).float())])
    torch.testing.assert_close(logprobs(client), logprobs(twin), rtol=0, atol=1e-5)
    _unload(service, twin)


def test_what_is_sampled_is_scored_and_trained_on_alike(client):
    step(client)
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt, params = types.ModelInput.from_ints(SEQUENCE[:4]), types.SamplingParams(max_tokens=9, seed=5, stop=[])
    said = sampler.sample(prompt, 3, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result(60)
    again = sampler.sample(prompt, 3, params).result(60)
    assert [s.tokens for s in said.sequences] == [s.tokens for s in again.sequences]
    assert len({tuple(s.tokens) for s in said.sequences}) > 1 and len({s.sequence_id for s in said.sequences}) == 3
    for sequence in said.sequences:
        whole = SEQUENCE[:4] + sequence.tokens
        trained = logprobs(client, [datum(whole, 1.0)])
        torch.testing.assert_close(trained[3:], torch.tensor(sequence.logprobs), rtol=0, atol=1e-4)
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result(60)
        assert scored[0] is None
        torch.testing.assert_close(torch.tensor(scored[1:]), trained, rtol=0, atol=1e-4)
    assert said.prompt_logprobs[1:] == pytest.approx(trained[:3].tolist(), abs=1e-4)
    top = said.topk_prompt_logprobs
    assert top[0] is None and all(len(row) == 2 and row[0][1] >= row[1][1] for row in top[1:])


def test_samplers_of_two_models_and_three_versions_answer_with_their_own_weights(service, client, base_model):
    """Alternately, 200 requests: each log-probability is that of the version which was asked."""
    second = service.create_lora_training_client(base_model, rank=8, seed=11).result()
    samplers, expected = [], []
    for trained in (client, second, client):
        step(trained, lr=2e-2)
        samplers.append(trained.save_weights_and_get_sampling_client().result())
        expected.append(logprobs(trained).tolist())
    samplers.append(service.create_sampling_client(base_model=base_model).result())
    prompt = types.ModelInput.from_ints(SEQUENCE)
    asked = [(i % 4, samplers[i % 4].compute_logprobs(prompt)) for i in range(200)]
    answers = [(which, future.result(120)[1:]) for which, future in asked]
    for which, row in answers:
        if which < 3:
            assert row == pytest.approx(expected[which], abs=1e-4)
    assert len({tuple(np.round(row, 3)) for _, row in answers}) == 4
    _unload(service, second)


def test_a_sampler_with_a_name_is_sampled_from_by_its_path(service, client):
    path = client.save_weights_for_sampler("named").result(60).path
    sampler = service.create_sampling_client(model_path=path).result()
    row = sampler.compute_logprobs(types.ModelInput.from_ints(SEQUENCE)).result(60)[1:]
    assert row == pytest.approx(logprobs(client).tolist(), abs=1e-4)
    with pytest.raises(tinker.RequestFailedError, match="has saved it already"):
        client.save_weights_for_sampler("named").result(60)


def test_mistakes_are_faults_of_the_user_and_poison_nothing(client):
    def failed(future):
        with pytest.raises(tinker.RequestFailedError) as error:
            future.result(60)
        assert error.value.category is types.RequestErrorCategory.User
        return str(error.value)

    before = logprobs(client)
    nan = torch.full((7,), math.nan)
    assert "vocabulary of 64" in failed(client.forward_backward([datum([1, 2, 64])], "cross_entropy"))
    assert "NaN or an infinity" in failed(client.forward_backward([datum(weights=nan)], "cross_entropy"))
    assert "lacks logprobs, advantages" in failed(client.forward_backward([datum()], "ppo"))
    assert "not offered by this server" in failed(client.forward_backward([datum()], "stable_reinforce"))
    assert "loss_fn_config['x']" in failed(client.forward_backward([datum()], "cross_entropy", {"x": 1.0}))
    assert "trainer's context" in failed(client.forward_backward([datum([3] * 300)], "cross_entropy"))
    short = types.TensorData(data=[1, 2], dtype="int64", shape=[2])
    assert "has shape (2,)" in failed(client.forward_backward([datum(target_tokens=short)], "cross_entropy"))
    assert "use another name" in failed(client.save_state("../outside"))
    sampler = client.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=2)
    assert "context has 64" in failed(sampler.sample(types.ModelInput.from_ints([3] * 64), 1, params))
    assert "vocabulary of 64" in failed(sampler.sample(types.ModelInput.from_ints([64]), 1, params))
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result(60)
    assert torch.equal(logprobs(client), before), "no gradient was left behind"


def test_requests_out_of_order_and_sent_twice_run_once_in_order(server, service, base_model):
    """Bare HTTP: the step with number 4 comes first, the first three twice."""
    clients = [service.create_lora_training_client(base_model, rank=8, seed=5).result() for _ in range(2)]
    for _ in range(3):
        step(clients[0], lr=1e-2)
    headers = {"X-API-Key": KEY}
    body = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": SEQUENCE[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": SEQUENCE[1:], "dtype": "int64", "shape": [7]},
            "weights": {"data": [1.0] * 7, "dtype": "float32", "shape": [7]},
        },
    }
    with httpx.Client(base_url=f"{server}/api/v1", headers=headers, timeout=60) as http:
        ids = {}
        for seq_id in (6, 2, 4, 2, 1, 1, 3, 6, 5):
            model = {"model_id": clients[1].model_id, "seq_id": seq_id}
            if seq_id % 2:
                given = {"data": [body], "loss_fn": "cross_entropy"}
                answer = http.post("/forward_backward", json=model | {"forward_backward_input": given})
            else:
                answer = http.post("/optim_step", json=model | {"adam_params": {"learning_rate": 1e-2}})
            assert answer.status_code == 200
            assert ids.setdefault(seq_id, answer.json()["request_id"]) == answer.json()["request_id"]
        for request_id in ids.values():
            while (answer := http.post("/retrieve_future", json={"request_id": request_id})).status_code == 408:
                pass
            assert answer.status_code == 200 and b"error" not in answer.content
    clients[1]._request_id_counter = clients[1]._turn_counter = 6
    assert torch.equal(logprobs(clients[0]), logprobs(clients[1]))
    for client in clients:
        _unload(service, client)


def test_many_datums_in_one_call_answer_in_their_order(client):
    data = [datum([1 + (i + j) % 60 for j in range(3 + i % 5)], 0.0) for i in range(1500)]
    outputs = client.forward_backward(data, "cross_entropy").result(120).loss_fn_outputs
    assert [output["logprobs"].shape[0] for output in outputs] == [2 + i % 5 for i in range(1500)]
    alone = logprobs(client, [data[1499]])
    torch.testing.assert_close(outputs[1499]["logprobs"].to_torch(), alone, rtol=0, atol=1e-5)
    client.optim_step(types.AdamParams(learning_rate=0.0)).result(60)


def test_what_is_unknown_is_said_in_a_sentence(server, service, client):
    with httpx.Client(base_url=f"{server}/api/v1", headers={"X-API-Key": KEY}, timeout=60) as http:
        answer = http.post("/retrieve_future", json={"request_id": "no such"})
        assert answer.json()["category"] == "user" and "has expired" in answer.json()["error"]
        answer = http.post("/optim_step", json={"model_id": "gone:train:0", "seq_id": 1, "adam_params": {}})
        answer = http.post("/retrieve_future", json={"request_id": answer.json()["request_id"]})
        assert answer.json()["category"] == "user" and "is not in this server" in answer.json()["error"]
        for path, content in (("/forward_backward", b"\xff\xff"), ("/optim_step", b"{"), ("/create_model", b"{}")):
            kind = "application/x-protobuf" if path == "/forward_backward" else "application/json"
            answer = http.post(path, content=content, headers={"Content-Type": kind})
            assert answer.status_code == 400 and answer.json()["category"] == "user"
        assert http.get("/nothing/here").status_code == 400
        checkpoint = f"/training_runs/{client.model_id}/checkpoints/weights/here/publish"
        for method, verb in (("POST", "publish"), ("DELETE", "unpublish")):
            answer = http.request(method, checkpoint)
            assert answer.status_code == 400 and answer.json()["error"].startswith(f"{verb}: is not offered")
        assert http.post("/asample", headers={"X-API-Key": "tml-wrong"}, json={}).status_code == 401
    with pytest.raises(tinker.RequestFailedError, match="there is no such checkpoint"):
        service.create_training_client_from_state("tinker://a:train:0/weights/b").result()


def test_random_bodies_are_never_a_fault_of_the_server(server, service, base_model):
    client = service.create_lora_training_client(base_model, rank=8).result()
    counts = fuzz(server, KEY, client.model_id, base_model, max_examples=150)
    assert counts[200] > 15 and counts[400] > 15 and counts["user"] > 5
    _unload(service, client)


async def test_a_body_that_stops_half_way_and_one_that_is_too_long_cost_nobody_else(server, client):
    async def half():
        host, port = server.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /api/v1/optim_step HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY}\r\nContent-Length: 1000\r\n\r\n"
        writer.write(head.encode() + b'{"model_id"')
        await writer.drain()
        return reader, writer

    async def run():
        held = [await half() for _ in range(20)]
        healthy = await asyncio.to_thread(logprobs, client)
        for _, writer in held:
            writer.close()
        return healthy

    assert (await run()).isfinite().all()
    with httpx.Client(base_url=f"{server}/api/v1", headers={"X-API-Key": KEY}, timeout=60) as http:
        assert http.post("/optim_step", content=b" " * (2**26 + 1)).status_code == 413


def test_many_samplers_at_once(client):
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt, errors = types.ModelInput.from_ints(SEQUENCE[:4]), []

    def ask(i):
        try:
            for j in range(3):
                said = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4, seed=i * 10 + j)).result(60)
                assert 1 <= len(said.sequences[0].tokens) <= 4
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors


def test_datums_of_different_widths_in_one_call_answer_in_their_own_shapes(client):
    wide = datum(target_tokens=torch.randint(1, 60, (7, 5)), weights=torch.rand(7, 5))
    data = [datum(weights=1.0), wide, datum(SEQUENCE[:5], 0.5)]
    together, alone = client.forward(data, "cross_entropy"), [client.forward([one], "cross_entropy") for one in data]
    rows = [row["logprobs"].to_torch() for row in together.result(60).loss_fn_outputs]
    assert [list(row.shape) for row in rows] == [[7], [7, 5], [4]]
    for row, single in zip(rows, alone):
        torch.testing.assert_close(row, single.result(60).loss_fn_outputs[0]["logprobs"].to_torch(), rtol=0, atol=1e-5)
    expected = sum(single.result(60).metrics["loss:sum"] for single in alone)
    assert together.result(60).metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    both = client.forward_backward(data, "cross_entropy").result(60)
    assert both.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    client.optim_step(types.AdamParams(learning_rate=0.0)).result(60)


def test_an_sdk_that_does_not_ask_for_protobuf_gets_the_same_in_json(server, client, base_model):
    with httpx.Client(base_url=f"{server}/api/v1", headers={"X-API-Key": KEY}, timeout=60) as http:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": SEQUENCE}]}
        asked = {"prompt": prompt, "sampling_params": {"max_tokens": 3, "seed": 1}, "base_model": base_model}
        asked |= {"prompt_logprobs": True, "topk_prompt_logprobs": 2}
        request_id = http.post("/asample", json=asked).json()["request_id"]
        answers = {}
        for kind in ("application/json", "application/x-protobuf"):
            answers[kind] = http.post("/retrieve_future", json={"request_id": request_id}, headers={"Accept": kind})
    said = tinker.proto.response_conv.deserialize_sample_response(answers["application/x-protobuf"].content)
    plain = answers["application/json"].json()
    assert plain["sequences"][0]["tokens"] == said.sequences[0].tokens
    assert plain["prompt_logprobs"] == said.prompt_logprobs and plain["prompt_logprobs"][0] is None
    tops = [None if row is None else [tuple(pair) for pair in row] for row in plain["topk_prompt_logprobs"]]
    assert tops == said.topk_prompt_logprobs
