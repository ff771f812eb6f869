"""Routes of Tinker's protocol: each reads a body, asks the service and writes an answer. Nothing is decided here."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Collection
from email.utils import format_datetime
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from torchtitan_rl.serve.errors import Refused
from torchtitan_rl.serve.guard import Guard
from torchtitan_rl.serve.keys import bearer
from torchtitan_rl.serve.limits import read_body
from torchtitan_rl.serve.openai.message_spans import MessageSpans
from torchtitan_rl.serve.tinker import bodies, bounds, wire
from torchtitan_rl.serve.tinker.catalogue import Catalogue, download_url
from torchtitan_rl.serve.tinker.faults import Fault, answer, fault_of, server, user
from torchtitan_rl.serve.tinker.json_answers import as_json
from torchtitan_rl.serve.tinker.owners import Keys
from torchtitan_rl.serve.tinker.service import Server, Service

__all__ = ["guarded", "make_app"]

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]

_MAX_WAITING_BYTES = 2**29
"""Of the bodies of all requests that are being read."""


def make_app(server: Server, keys: Keys) -> FastAPI:
    """The application. `keys`: whose request one is that comes with a key in `X-API-Key`."""
    app = FastAPI(openapi_url=None)
    routes = _Routes(server, keys)
    for path, handler in (
        ("client/config", routes.client_config),
        ("client/dynamic_config", routes.dynamic_config),
        ("create_session", routes.create_session),
        ("session_heartbeat", routes.heartbeat),
        ("sessions/{session_id}/finish", routes.finish),
        ("create_model", routes.create_model),
        ("get_info", routes.get_info),
        ("unload_model", routes.unload),
        ("forward_backward", routes.forward_backward),
        ("forward", routes.forward),
        ("optim_step", routes.optim_step),
        ("save_weights", routes.save_weights),
        ("save_weights_for_sampler", routes.save_for_sampler),
        ("save_weights_external", routes.save_external),
        ("load_weights", routes.load_weights),
        ("create_sampling_session", routes.create_sampler),
        ("asample", routes.sample),
        ("retrieve_future", routes.retrieve),
        ("telemetry", routes.telemetry),
        ("weights_info", routes.weights_info),
    ):
        app.add_route(f"/api/v1/{path}", routes.guarded(handler), ["POST"])
    for path, method, answering in Catalogue.routes():
        app.add_route(f"/api/v1/{path}", routes.guarded(_shown(answering)), [method])
    archive = "training_runs/{model_id}/checkpoints/{checkpoint_id:path}/archive"
    app.add_route(f"/api/v1/{archive}", routes.guarded(routes.archive), ["GET"])
    app.add_route("/api/v1/downloads/{token}/{name:path}", routes.guarded(routes.download, open_to_all=True), ["GET"])
    app.add_route("/api/v1/healthz", routes.guarded(routes.health, open_to_all=True), ["GET"])
    for path in ("create_custom_loss", "copy_weights", "join_sampling_session",
                 "retrieve_futures", "cancel_future", "auth/token", "{path:path}"):  # fmt: skip
        app.add_route(f"/api/v1/{path}", routes.guarded(routes.not_offered), ["POST"])
    app.add_exception_handler(HTTPException, _no_route)
    app.state.spans = routes.spans
    return app


def guarded(app: FastAPI, hosts: Collection[str] | None) -> Guard:
    """The application behind a guard that refuses in the protocol's form; `hosts`: see `guard.allowed_hosts`."""
    return Guard(
        app,
        hosts=hosts,
        types=("application/json", "application/x-protobuf"),
        max_waiting_bytes=_MAX_WAITING_BYTES,
        answer=lambda refused, _: answer(Fault(refused.message, "user", status=refused.status)),
    )


class _Routes:
    def __init__(self, server: Server, keys: Keys) -> None:
        self.server, self._keys, self.spans = server, keys, MessageSpans()

    def guarded(self, handler: Handler, *, open_to_all: bool = False) -> Handler:
        """The handler with the key checked, faults as answers, and spans."""

        async def guard(request: Request) -> Response:
            self.spans.go()
            try:
                if not open_to_all:
                    self._check_key(request)
                response = await handler(request)
            except Fault as fault:
                response = answer(fault)
            except Refused as refused:
                response = answer(Fault(refused.message, "user", status=refused.status))
            except ValueError as error:
                response = answer(fault_of(error))
            except Exception:
                logger.exception("the server failed on %s", request.url.path)
                response = answer(server("the server failed; its log says why"))
            self.spans.ended(response.status_code)
            return response

        return guard

    def _check_key(self, request: Request) -> None:
        """Finds out whose request it is."""
        key = request.headers.get("x-api-key") or bearer(request.headers.get("authorization"))
        if (owner := self._keys.owner(key)) is None:
            raise user("X-API-Key: is not the key of this server; set TINKER_API_KEY to it", status=401)
        request.state.service = self.server.service(owner)

    async def _raw(self, request: Request, max_bytes: int) -> bytes:
        with self.spans.away():
            return await read_body(request, max_bytes, self.server.limits.body_timeout_s)

    async def _body(self, request: Request) -> bytes:
        max_bytes = self.server.limits.max_small_bytes
        body = await self._raw(request, max_bytes)
        return bounds.decompressed(body, request.headers.get("content-encoding"), max_bytes)

    async def _parsed(self, request: Request, kind: type) -> Any:
        return bodies.parse(kind, await self._body(request))

    # What the SDK asks when it starts.

    async def client_config(self, request: Request) -> Response:
        await self._body(request)
        return _json(
            {
                "pjwt_auth_enabled": False,
                "credential_default_source": "api_key",
                "parallel_fwdbwd_chunks": False,  # in parallel the first chunk is sent last, and the others wait for it
                "proto_compress_fwdbwd": False,  # loopback is faster than compression
                "use_pyqwest_transport": False,
                "sample_use_retrieve_futures": False,
                "custom_loss_server_side": False,
                "sample_join_sampling_session": False,
            }
        )

    async def dynamic_config(self, request: Request) -> Response:
        await self._body(request)
        return _json({"refresh_interval_sec": 3600, "sample_cancel_enabled": False})

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def telemetry(self, request: Request) -> Response:
        """Read and thrown away."""
        await self._body(request)
        return _json({"status": "accepted"})

    # Sessions.

    async def create_session(self, request: Request) -> Response:
        body = await self._parsed(request, bodies.SessionBody)
        return _json({"type": "create_session", "session_id": await _service(request).create_session(body)})

    async def heartbeat(self, request: Request) -> Response:
        _service(request).session((await self._parsed(request, bodies.SessionBody)).session_id)
        return _json({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        await self._body(request)
        await _service(request).finish(request.path_params["session_id"])
        return Response(status_code=204)

    # Models.

    async def create_model(self, request: Request) -> Response:
        body = await self._parsed(request, bodies.CreateModelBody)
        _service(request).require_session(body.session_id)
        return _future(_service(request).models.create(body))

    async def get_info(self, request: Request) -> Response:
        body = await self._parsed(request, bodies.ModelBody)
        record, served = _service(request).models.model(body.model_id).record, _service(request).served
        base_model = served.base_model
        return _json(
            {
                "type": "get_info",
                "model_data": {"arch": served.family, "model_name": base_model, "tokenizer_id": base_model},
                "model_id": record.model_id,
                "optimizer_config": {"type": "adamw"},
                "is_lora": record.lora_rank > 0,
                "lora_rank": record.lora_rank or None,
                "model_name": base_model,
            }
        )

    async def unload(self, request: Request) -> Response:
        body = await self._parsed(request, bodies.ModelBody)
        return _future(_service(request).models.unload(body.model_id), body.model_id)

    async def forward_backward(self, request: Request) -> Response:
        return await self._train(request, forward_only=False)

    async def forward(self, request: Request) -> Response:
        return await self._train(request, forward_only=True)

    async def _train(self, request: Request, *, forward_only: bool) -> Response:
        kind = request.headers.get("content-type", "")
        read = partial(wire.read_training, content_type=kind, forward_only=forward_only)
        return await self._in_order(request, read, _service(request).requests.train)

    async def optim_step(self, request: Request) -> Response:
        return await self._in_order(
            request, partial(bodies.parse, bodies.OptimStepBody), _service(request).requests.step
        )

    async def save_weights(self, request: Request) -> Response:
        return await self._in_order(
            request, partial(bodies.parse, bodies.SaveWeightsBody), _service(request).requests.save
        )

    async def save_for_sampler(self, request: Request) -> Response:
        read = partial(bodies.parse, bodies.SaveForSamplerBody)
        return await self._in_order(request, read, _service(request).save_for_sampler)

    async def save_external(self, request: Request) -> Response:
        read = partial(bodies.parse, bodies.SaveExternalBody)
        return await self._in_order(request, read, _service(request).requests.save_external)

    async def load_weights(self, request: Request) -> Response:
        return await self._in_order(request, partial(bodies.parse, bodies.LoadWeightsBody), _service(request).load)

    async def _in_order(self, request: Request, read: Callable[[bytes], Any], submit: Callable[[Any], str]) -> Response:
        """A request that has a place in the order of its model, also where it cannot be read."""
        max_bytes, encoding = self.server.limits.max_body_bytes, request.headers.get("content-encoding")
        raw = await self._raw(request, max_bytes)
        try:
            body = read(bounds.decompressed(raw, encoding, max_bytes))
        except Fault as fault:
            return self._refused_in_order(request, bounds.beginning(raw, encoding), fault)
        return _future(submit(body), body.model_id)

    def _refused_in_order(self, request: Request, body: bytes, fault: Fault) -> Response:
        """The fault at the place of the request in the order of its model. Raises the fault where `body` has no
        number."""
        if (numbers := wire.numbers(body, request.headers.get("content-type", ""))) is None:
            raise fault
        return _future(_service(request).models.refuse(*numbers, fault), numbers[0])

    async def not_offered(self, request: Request) -> Response:
        """A kind of request that this server lacks; where it has a number of a model, it fails at its place."""
        path = request.url.path.removeprefix("/api/v1/")[:120]
        fault = user(f"{path}: is not offered by this server; docs/tinker_server.md lists what is")
        return self._refused_in_order(request, await self._body(request), fault)

    async def weights_info(self, request: Request) -> Response:
        body = await self._parsed(request, bodies.WeightsInfoBody)
        record = _service(request).checkpoints.find(body.tinker_path)[0].model
        return _json(
            {
                "base_model": record.base_model,
                "optimizer_config": {"type": "adamw"},
                "is_lora": record.lora_rank > 0,
                "lora_rank": record.lora_rank or None,
                "train_unembed": record.lora_rank == 0,
                "train_mlp": record.train_mlp,
                "train_attn": record.train_attn,
            }
        )

    # Weights to take away.

    async def archive(self, request: Request) -> Response:
        """Leads to a tar of a checkpoint, in the form that all SDKs with archives know, and `curl -L` too."""
        checkpoint, directory = _service(request).checkpoints.existing(
            request.path_params["model_id"], request.path_params["checkpoint_id"]
        )
        with self.spans.away():
            link = await self.server.downloads.archive(checkpoint, directory, self.server.limits.poll_s)
        headers = {
            "Location": download_url(request, link.token, next(iter(link.files))),
            "Expires": format_datetime(link.expires_at, usegmt=True),
        }
        return Response(status_code=302, headers=headers)

    async def download(self, request: Request) -> Response:
        """Whoever has a link may read its files."""
        name = request.path_params["name"]
        return FileResponse(self.server.downloads.file(request.path_params["token"], name), filename=name)

    # Sampling.

    async def create_sampler(self, request: Request) -> Response:
        sampler = _service(request).open_sampler(await self._parsed(request, bodies.SamplerBody))
        return _json({"type": "create_sampling_session", "sampling_session_id": sampler.sampler_id})

    async def sample(self, request: Request) -> Response:
        request_id, sequences = _service(request).sampling.submit(await self._parsed(request, bodies.SampleBody))
        return _json({"request_id": request_id, "sample_sequence_ids": sequences})

    async def retrieve(self, request: Request) -> Response:
        """The answer of a future; after `poll_s` 408, on which the SDK asks again."""
        request_id = (await self._parsed(request, bodies.FutureBody)).request_id
        try:
            with self.spans.away():
                outcome = await _service(request).futures.fetch(request_id, self.server.limits.poll_s)
        except Fault as fault:
            outcome = fault
        if outcome is None:
            waits = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return Response(json.dumps(waits), 408, media_type="application/json")
        if isinstance(outcome, Fault):
            return _json(outcome.body)
        if outcome.kind == "json":
            return Response(outcome.content, media_type="application/json")
        if "protobuf" not in request.headers.get("accept", ""):
            return Response(as_json(outcome.kind, outcome.content), media_type="application/json")
        return Response(outcome.content, media_type="application/x-protobuf")


def _service(request: Request) -> Service:
    """What belongs to the owner of the request's key."""
    return request.state.service


def _future(request_id: str, model_id: str | None = None) -> Response:
    return _json({"request_id": request_id, "model_id": model_id})


def _json(content: dict[str, Any]) -> Response:
    return Response(json.dumps(content).encode(), media_type="application/json")


def _shown(answering: Callable[[Catalogue, Request], Awaitable[dict | None]]) -> Handler:
    async def handler(request: Request) -> Response:
        content = await answering(Catalogue(_service(request)), request)
        return Response(status_code=204) if content is None else _json(content)

    return handler


async def _no_route(request: Request, error: Exception) -> Response:
    """Paths and methods that do not exist: a sentence, and not the 404 that the SDK takes for a lost resource."""
    assert isinstance(error, HTTPException)
    path = f"{request.method} {request.url.path[:120]}"
    return answer(user(f"{path}: is not offered by this server; docs/tinker_server.md lists what is"))
