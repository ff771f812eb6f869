"""What can be looked up: capabilities, training runs, checkpoints, sessions and samplers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.requests import Request

from torchtitan_rl.serve.limits import read_body
from torchtitan_rl.serve.tinker.bodies import TtlBody, parse
from torchtitan_rl.serve.tinker.faults import user
from torchtitan_rl.serve.tinker.saved_states import RECORDS, Checkpoint, ModelRecord, require_intact
from torchtitan_rl.serve.tinker.service import Service

__all__ = ["Catalogue", "download_url"]

_NEVER = "1970-01-01T00:00:00+00:00"


class Catalogue:
    """Answers questions about what an owner has; deletes checkpoints, and lets them expire."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @classmethod
    def routes(cls) -> list[tuple[str, str, Callable[[Catalogue, Request], Awaitable[dict | None]]]]:
        """Path, method and what answers, from the catalogue of the request's owner; None: an answer without content."""
        run = "training_runs/{model_id}"
        return [
            ("get_server_capabilities", "GET", cls.capabilities),
            ("training_runs", "GET", cls.runs),
            (run, "GET", cls.run),
            (f"{run}/checkpoints", "GET", cls.checkpoints_of),
            (f"{run}/checkpoints/{{checkpoint_id:path}}/ttl", "PUT", cls.set_ttl),
            (f"{run}/checkpoints/{{checkpoint_id:path}}/external_weights_urls", "GET", cls.urls),
            (f"{run}/checkpoints/{{checkpoint_id:path}}/publish", "POST", cls.publish),
            (f"{run}/checkpoints/{{checkpoint_id:path}}/publish", "DELETE", cls.unpublish),
            (f"{run}/checkpoints/{{checkpoint_id:path}}", "DELETE", cls.delete),
            ("checkpoints", "GET", cls.checkpoints),
            ("sessions", "GET", cls.sessions),
            ("sessions/{session_id}", "GET", cls.session),
            ("samplers/{sampler_id}", "GET", cls.sampler),
        ]

    async def capabilities(self, request: Request) -> dict[str, Any]:
        served = self._service.served
        context = min(served.context_tokens, served.trained_tokens)  # what is sampled can be trained on
        model = {"model_name": served.base_model, "max_context_length": context}
        return {"supported_models": [model | {"trainable": True, "sampleable": True}]}

    async def runs(self, request: Request) -> dict[str, Any]:
        live = self._service.models.live  # when a model was used last is in memory; its file is written less often
        models = [
            live[record.model_id].record if record.model_id in live else record
            for record in self._service.checkpoints.models()
        ]
        models.sort(key=lambda record: record.last_request, reverse=True)
        shown, cursor = _page(request, models, 20)
        return {"training_runs": [self._as_wire(record) for record in shown], "cursor": cursor}

    async def run(self, request: Request) -> dict[str, Any]:
        return self._as_wire(self._record(request))

    async def checkpoints_of(self, request: Request) -> dict[str, Any]:
        record = self._record(request)
        return {"checkpoints": [checkpoint.as_wire() for checkpoint in self._service.checkpoints.of(record.model_id)]}

    async def checkpoints(self, request: Request) -> dict[str, Any]:
        store = self._service.checkpoints
        checkpoints = [checkpoint for record in store.models() for checkpoint in store.of(record.model_id)]
        checkpoints.sort(key=lambda checkpoint: checkpoint.time, reverse=True)
        shown, cursor = _page(request, checkpoints, 100)
        return {"checkpoints": [checkpoint.as_wire() for checkpoint in shown], "cursor": cursor}

    async def delete(self, request: Request) -> None:
        self._service.checkpoints.remove(request.path_params["model_id"], request.path_params["checkpoint_id"])

    async def set_ttl(self, request: Request) -> None:
        limits = self._service.limits
        body = parse(TtlBody, await read_body(request, limits.max_small_bytes, limits.body_timeout_s))
        place = request.path_params["model_id"], request.path_params["checkpoint_id"]
        self._service.checkpoints.set_ttl(*place, body.ttl_seconds)

    async def urls(self, request: Request) -> dict[str, Any]:
        """A link for each file of weights that were saved for other programs. Raises Fault where they are damaged."""
        checkpoint, directory = self._checkpoint(request)
        if checkpoint.kind != "external_weights":
            raise user(
                f"path={checkpoint.path!r}: is not tinker://MODEL/external_weights/NAME; use save_weights_external"
            )
        await require_intact(directory)
        files = {
            str(file.relative_to(directory)): file
            for file in sorted(directory.rglob("*"))
            if file.is_file() and file.name not in RECORDS
        }
        link = self._service.downloads.link(directory, files)
        return {
            "urls": {name: download_url(request, link.token, name) for name in files},
            "expires": link.expires_at.isoformat(),
        }

    async def publish(self, request: Request) -> None:
        raise user(
            "publish: is not offered: a checkpoint is seen by its owner alone, or by everybody where there is one key; "
            "give others an archive of it, or the key"
        )

    async def unpublish(self, request: Request) -> None:
        raise user(
            "unpublish: is not offered: this server publishes nothing, so no checkpoint is public; "
            "delete_checkpoint deletes one"
        )

    async def sessions(self, request: Request) -> dict[str, Any]:
        shown, _ = _page(request, list(self._service.sessions), 20)
        return {"sessions": shown}

    async def session(self, request: Request) -> dict[str, Any]:
        session_id = request.path_params["session_id"]
        if (session := self._service.sessions.get(session_id)) is None:
            raise user(f"session={session_id[:120]!r}: is not known to this server", status=404)
        samplers = self._service.sampling.samplers
        runs = [record.model_id for record in self._service.checkpoints.models()]
        return {
            "training_run_ids": [model_id for model_id in runs if model_id.startswith(f"{session_id}:train:")],
            "sampler_ids": [sampler.sampler_id for sampler in samplers.values() if sampler.session_id == session_id],
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }

    async def sampler(self, request: Request) -> dict[str, Any]:
        sampler = self._service.sampler(request.path_params["sampler_id"])
        base_model = self._service.served.base_model
        return {"sampler_id": sampler.sampler_id, "base_model": base_model, "model_path": sampler.model_path}

    def _checkpoint(self, request: Request) -> tuple[Checkpoint, Path]:
        return self._service.checkpoints.existing(request.path_params["model_id"], request.path_params["checkpoint_id"])

    def _record(self, request: Request) -> ModelRecord:
        model_id = request.path_params["model_id"]
        live = self._service.models.live.get(model_id)
        record = live.record if live is not None else self._service.checkpoints.model(model_id)
        if record is None:
            raise user(
                f"training_run={model_id[:120]!r}: there is no such run; list_training_runs names them", status=404
            )
        return record

    def _as_wire(self, record: ModelRecord) -> dict[str, Any]:
        saved = self._service.checkpoints.of(record.model_id)
        last = {
            kind: next((c.as_wire() for c in saved if c.kind == kind), None) for kind in ("weights", "sampler_weights")
        }
        return {
            "training_run_id": record.model_id,
            "base_model": record.base_model,
            "model_owner": self._service.owner or "local",
            "is_lora": record.lora_rank > 0,
            "lora_rank": record.lora_rank or None,
            "last_request_time": record.last_request or _NEVER,
            "last_checkpoint": last["weights"],
            "last_sampler_checkpoint": last["sampler_weights"],
            "user_metadata": record.user_metadata,
        }


def download_url(request: Request, token: str, name: str) -> str:
    """Where a file of a link is, by the address under which the client reached the server."""
    return f"{request.base_url}api/v1/downloads/{token}/{quote(name)}"


def _page(request: Request, records: list, limit: int) -> tuple[list, dict[str, int]]:
    try:
        limit, offset = (
            int(request.query_params.get(name, default)) for name, default in (("limit", limit), ("offset", 0))
        )
    except ValueError:
        raise user("limit and offset: are whole numbers; mend the query") from None
    limit, offset = min(max(limit, 0), 1000), max(offset, 0)
    return records[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(records)}
