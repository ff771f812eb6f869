"""The routes over HTTP, with a trainer that answers at once: who takes a number, and what is refused where."""

import asyncio
from pathlib import Path

import httpx
import pytest
import zstandard
from tinker.proto import tinker_public_pb2 as pb

from tests.kit.tinker import Trainer, served
from torchtitan_rl.serve.tinker.app import make_app
from torchtitan_rl.serve.tinker.owners import EVERYBODY, OneKey
from torchtitan_rl.serve.tinker.service import Server, TinkerLimits

PROTOBUF = {"Content-Type": "application/x-protobuf"}


class Client:
    """A client of one service in this event loop, with a model."""

    def __init__(self, directory: Path):
        self.trainer = Trainer()
        server = Server(served(directory, base_model="tiny"), self.trainer, None, None, directory, TinkerLimits())
        self.service = server.service(EVERYBODY)
        transport = httpx.ASGITransport(make_app(server, OneKey()))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/api/v1")
        self.model_id = ""

    async def post(self, path, **more):
        return await self.http.post(f"/{path}", **more)

    async def answer(self, response):
        assert response.status_code == 200, response.text
        return (await self.post("retrieve_future", json={"request_id": response.json()["request_id"]})).json()

    async def create(self, **more):
        session = (await self.post("create_session", json={})).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 8}} | more
        answer = await self.answer(await self.post("create_model", json=body))
        self.model_id = answer.get("model_id", "")
        return session, answer

    async def step(self, seq_id):
        body = {"model_id": self.model_id, "seq_id": seq_id, "adam_params": {}}
        async with asyncio.timeout(5):
            return await self.answer(await self.post("optim_step", json=body))


async def answers(tmp_path, play):
    client = Client(tmp_path)
    try:
        return await play(client)
    finally:
        await client.service.close()
        await client.http.aclose()


async def test_a_sample_that_names_a_model_takes_none_of_its_numbers(tmp_path):
    async def play(client):
        await client.create()
        for number in (1, 2):
            body = {"sampling_session_id": client.model_id, "seq_id": number, "sampling_params": {}}
            body |= {"prompt": {"chunks": [{"tokens": [1]}]}}
            assert "is not open" in (await client.answer(await client.post("asample", json=body)))["error"]
        return [(await client.step(number))["type"] for number in (1, 2)], client.trainer.steps

    assert await answers(tmp_path, play) == (["optim_step"] * 2, 2)


@pytest.mark.parametrize("path", ["copy_weights", "a_kind_of_a_newer_sdk"])
async def test_a_kind_that_is_not_offered_ends_at_its_place(tmp_path, path):
    async def play(client):
        await client.create()
        body = {"model_id": client.model_id, "seq_id": 1, "path": "x"}
        refused = await client.answer(await client.post(path, json=body))
        without_number = await client.post(path, json={"path": "x"})
        return refused, without_number.status_code, await client.step(2)

    refused, status, second = await answers(tmp_path, play)
    assert refused["category"] == "user" and f"{path}: is not offered" in refused["error"]
    assert status == 400 and second["type"] == "optim_step"


async def test_weights_that_sampling_clients_are_to_follow_are_refused_at_their_place(tmp_path):
    async def play(client):
        await client.create()
        body = {"model_id": client.model_id, "seq_id": 1, "sampling_session_seq_id": 0, "kind": "inflight"}
        return await client.answer(await client.post("save_weights_for_sampler", json=body)), await client.step(2)

    refused, second = await answers(tmp_path, play)
    assert refused["category"] == "user" and "kind='inflight': is not offered" in refused["error"]
    assert second["type"] == "optim_step"


async def test_a_body_that_expands_too_far_ends_at_its_place(tmp_path):
    async def play(client):
        await client.create()
        head = pb.ForwardBackwardRequest(model_id=client.model_id, seq_id=1).SerializeToString()
        bomb = zstandard.ZstdCompressor().compress(head + b"\x22\x00" * (TinkerLimits().max_body_bytes // 2))
        headers = PROTOBUF | {"Content-Encoding": "zstd"}
        refused = await client.answer(await client.post("forward", content=bomb, headers=headers))
        parts = (
            pb.ForwardBackwardRequest(model_id=client.model_id, seq_id=2).SerializeToString() + b"\x1a\x00" * 300_000
        )
        other = await client.answer(await client.post("forward", content=parts, headers=PROTOBUF))
        return refused["error"], other["error"], await client.step(3)

    refused, other, third = await answers(tmp_path, play)
    assert "without zstd" in refused and "parts" in other and third["type"] == "optim_step"


async def test_a_metric_that_is_no_number_is_left_out_because_the_sdk_takes_numbers_alone(tmp_path):
    async def play(client):
        await client.create()
        return await client.step(1), await client.step(2)

    first, second = await answers(tmp_path, play)
    assert "grad_norm:mean" not in first["metrics"] and second["metrics"]["grad_norm:mean"] == 1.0


async def test_a_model_that_is_refused_takes_no_number_and_one_that_is_there_is_not_begun_anew(tmp_path):
    async def play(client):
        session, refused = await client.create(lora_config={"rank": 99})
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 8}}
        created = await client.answer(await client.post("create_model", json=body))
        client.model_id = created["model_id"]
        await client.step(1)
        client.service.futures._futures.clear()  # as after the time for which answers are kept
        client.service.futures._ended.clear()
        again = await client.answer(await client.post("create_model", json=body))
        return refused, again, await client.step(2)

    refused, again, second = await answers(tmp_path, play)
    assert "rank=99" in refused["error"] and "is in this server already" in again["error"]
    assert second["type"] == "optim_step"


async def test_small_bodies_metadata_and_finished_sessions_are_bounded(tmp_path):
    async def play(client):
        long = await client.post("create_session", content=b" " * (TinkerLimits().max_small_bytes + 1))
        wide = await client.post("create_session", json={"user_metadata": {"a": "b" * 2**17}})
        for _ in range(TinkerLimits().max_finished + 20):
            session = (await client.post("create_session", json={})).json()["session_id"]
            await client.post(f"sessions/{session}/finish", json={})
        return long.status_code, wide.status_code, len(client.service.sessions)

    assert await answers(tmp_path, play) == (413, 400, TinkerLimits().max_finished)
