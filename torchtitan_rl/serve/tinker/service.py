"""What stands behind the routes: a server, and for each owner of a key their sessions, models, samplers, futures and
checkpoints. An owner's ids are looked up among their own: those of another owner are not there."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.dispatch.versions import PolicyVersions
from torchtitan_rl.serve.tinker.bodies import LoadWeightsBody, SamplerBody, SaveForSamplerBody, SessionBody
from torchtitan_rl.serve.tinker.downloads import Downloads
from torchtitan_rl.serve.tinker.faults import Fault, user
from torchtitan_rl.serve.tinker.futures import Futures, Shelf
from torchtitan_rl.serve.tinker.models import Model, ModelPlaces, Models
from torchtitan_rl.serve.tinker.owners import EVERYBODY
from torchtitan_rl.serve.tinker.requests import ModelRequests
from torchtitan_rl.serve.tinker.samplers import Versions
from torchtitan_rl.serve.tinker.sampling_sessions import BASE_VERSION, Generators, Sampling, SessionWeights
from torchtitan_rl.serve.tinker.saved_states import Checkpoint, SavedStates

__all__ = ["TinkerLimits", "ServedModel", "Server", "Service"]


@dataclass(kw_only=True, slots=True, frozen=True)
class TinkerLimits:
    """Limits of one server, whoever asks."""

    max_models: int = 8
    """LoRA models that are in the trainer at once."""
    max_published: int = 4
    """Versions to sample from that stay in memory; others wait on disk."""
    max_spooled: int = 64
    """Versions without a name that wait on disk."""
    max_parallel: int = 4096
    """Completions that are awaited at once; more are answered with 429, on which the SDK waits."""
    max_body_bytes: int = 2**26
    """Bytes of a body with data to train on, as it is sent and without zstd."""
    max_small_bytes: int = 2**22
    """Bytes of any other body."""
    body_timeout_s: float = 30.0
    """Seconds in which a body has to arrive."""
    poll_s: float = 20.0
    """Seconds for which a question for an answer waits; the SDK waits 45."""
    max_finished: int = 256
    """Sessions of an owner that were finished and can be looked up still; older ones are forgotten."""
    silent_s: float = 60.0
    """Seconds without a sign of life after which a session's models make place for one that waits; the SDK gives one
    every 10."""
    abandoned_s: float = 86_400.0
    """Seconds without a sign of life after which a session is finished for its client, when the owner begins one."""
    link_s: float = 3600.0
    """Seconds for which a link to weights is valid."""
    place_wait_s: float = 90.0
    """Seconds for which a new model waits for a place in the trainer: longer than a client that has gone is silent."""


@dataclass(kw_only=True, slots=True)
class ServedModel:
    """The model that is served."""

    base_model: str
    """Its name: what clients give, and load the tokenizer from."""
    base_dir: Path
    """A Hugging Face directory with its weights; read for a model that trains all parameters."""
    family: str
    """The family of models, such as `"qwen3"`."""
    vocab_size: int
    context_tokens: int
    """Tokens of a prompt and its completion (`generator.max_model_len`)."""
    trained_tokens: int
    """Tokens of a datum (`trainer.training.seq_len`)."""
    lora: LoRAConfig | None
    adapters_apart: bool
    """Whether generators hold the adapters of several versions side by side."""
    end_tokens: dict[str, int]
    """The tokenizer's ids "eos" and "pad"."""
    write_form: Callable[[Checkpoint, Path, Path], None]
    """Writes what goes into an archive: `downloads.write_hf_form` for the model."""


@dataclass(slots=True)
class _Session:
    heard: float
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    finished: bool = False


class Server:
    """One server: the meshes, what all owners compete for, and a `Service` for each owner. `open` before the first
    request."""

    def __init__(
        self,
        served: ServedModel,
        trainer: TrainingClient,
        versions: PolicyVersions,
        generator: SamplingClient,
        directory: Path,
        limits: TinkerLimits,
    ) -> None:
        self.served, self.limits = served, limits
        self._directory = directory
        self.policy_versions = versions
        self.versions = Versions(
            versions, max_published=limits.max_published, max_spooled=limits.max_spooled, spool=directory / "spool"
        )
        self.places = ModelPlaces(trainer, lora=served.lora, max_models=limits.max_models, wait_s=limits.place_wait_s)
        self.generators = Generators(
            generator, self.versions, max_parallel=limits.max_parallel, side_by_side=served.adapters_apart
        )
        self.downloads = Downloads(directory / "archives", served.write_form, valid_s=limits.link_s)
        self.shelf = Shelf()
        self._services: dict[str, Service] = {}
        self.on_server_fault: Callable[[Exception], None] = lambda error: None
        """Told of every failure that is not a request's."""

    async def open(self) -> None:
        """Publishes the base model, which every generator that starts later loads."""
        version = await self.policy_versions.publish()
        assert version == BASE_VERSION, f"the trainer begins with version {version}"
        await self.generators.client.pull(version)
        self.versions.keep(BASE_VERSION)

    def service(self, owner: str) -> Service:
        """What belongs to an owner. `EVERYBODY` has the directory `models`, an owner of a key `owners/OWNER/models`."""
        if owner not in self._services:
            place = self._directory if owner == EVERYBODY else self._directory / "owners" / owner
            self._services[owner] = Service(self, owner, place / "models")
        return self._services[owner]

    async def close(self) -> None:
        """Ends every request."""
        for service in self._services.values():
            await service.close()


class Service:
    """What belongs to one owner. Nothing in it refers to what belongs to another."""

    def __init__(self, server: Server, owner: str, directory: Path) -> None:
        """`directory`: where the owner's checkpoints are."""
        served = server.served
        self.served, self.limits, self.owner, self.downloads = served, server.limits, owner, server.downloads
        self.futures, self.checkpoints = Futures(server.shelf), SavedStates(directory)
        self.futures.on_server_fault = lambda error: server.on_server_fault(error)
        self.models = Models(
            server.places,
            self.checkpoints,
            self.futures,
            base_model=served.base_model,
            base_dir=served.base_dir,
            vocab_size=served.vocab_size,
            end_tokens=served.end_tokens,
            silent=self._silent,
            hear=self._hear,
        )
        self.requests = ModelRequests(self.models, server.versions, self.futures)
        self.sampling = Sampling(
            server.generators,
            self.checkpoints,
            self.futures,
            base_model=served.base_model,
            context_tokens=served.context_tokens,
            vocab_size=served.vocab_size,
        )
        self.sessions: dict[str, _Session] = {}

    async def close(self) -> None:
        """Ends the owner's requests."""
        for model in list(self.models.live.values()):
            model.order.close("the server stopped")
        await self.futures.close()

    # Sessions.

    async def create_session(self, body: SessionBody) -> str:
        """Begins a session, and finishes those that were abandoned: their clients ended without `close()`."""
        longest = time.monotonic() - self.limits.abandoned_s
        for name, session in list(self.sessions.items()):
            if session.heard < longest and not session.finished:
                await self._finish(name, "its client gave no sign of life")
        session_id = secrets.token_hex(8)
        self.sessions[session_id] = _Session(time.monotonic(), body.user_metadata, body.display_name)
        return session_id

    def session(self, session_id: str) -> _Session:
        """A session that goes on. Raises Fault (410) for any other."""
        session = self.sessions.get(session_id)
        if session is None or session.finished:
            raise user(
                f"session_id={session_id[:120]!r}: has ended, or the server started anew; make a new ServiceClient",
                status=410,
            )
        session.heard = time.monotonic()
        return session

    def _silent(self, session_id: str) -> bool:
        """Whether a session has ended, or its client has given no sign of life for long."""
        session = self.sessions.get(session_id)
        return session is None or session.finished or time.monotonic() - session.heard > self.limits.silent_s

    def _hear(self, session_id: str) -> None:
        """A request of one of its models is a session's sign of life too."""
        if (session := self.sessions.get(session_id)) is not None:
            session.heard = time.monotonic()

    async def finish(self, session_id: str) -> None:
        """Ends a session: its models leave the trainer, its sampling sessions end."""
        self.session(session_id)  # refuses one that has ended
        await self._finish(session_id, "its session was finished")

    async def _finish(self, session_id: str, reason: str) -> None:
        self.sessions[session_id].finished = True
        for model in [model for model in self.models.live.values() if model.session_id == session_id]:
            self.models.remove(model, reason)
        await self.sampling.end(session_id)
        finished = [name for name, known in self.sessions.items() if known.finished]
        for name in finished[: -self.limits.max_finished]:
            del self.sessions[name]

    def load(self, body: LoadWeightsBody) -> str:
        """Weights of a checkpoint, into a model that is named or into a new one of a session."""
        if body.model_id is not None:
            return self.requests.load(body)
        self.require_session(body.session_id)
        return self.requests.create_from(body)

    # Sampling sessions.

    def open_sampler(self, body: SamplerBody) -> SessionWeights:
        self.require_session(body.session_id)
        return self.sampling.open(
            f"{body.session_id}:sample:{body.sampling_session_seq_id}",
            body.session_id,
            base_model=body.base_model,
            model_path=body.model_path,
            version=None,
        )

    def save_for_sampler(self, body: SaveForSamplerBody) -> str:
        """Weights to sample from: with a name a path is the answer, without one a sampling session."""

        def session_of(model: Model, version: int) -> dict[str, str]:
            number: int | str | None = body.sampling_session_seq_id
            if number is None:  # two requests without any number are two; `seq_id` counts a model's requests
                own = secrets.token_hex(8) if body.seq_id is None else body.seq_id
                number = f"s{model.model_id.rpartition(':')[2]}-{own}"
            sampler = self.sampling.open(
                f"{model.session_id}:sample:{number}",
                model.session_id,
                base_model=None,
                model_path=None,
                version=version,
            )
            return {"sampling_session_id": sampler.sampler_id}

        return self.requests.save_for_sampler(body, session_of)

    def sampler(self, sampler_id: str) -> SessionWeights:
        """Raises Fault (404) for a sampling session that is not open."""
        if (sampler := self.sampling.samplers.get(sampler_id)) is None:
            raise user(f"sampler={sampler_id[:120]!r}: is not open; create a sampling client", status=404)
        return sampler

    def require_session(self, session_id: str | None) -> None:
        """Raises Fault (400) unless a session goes on."""
        try:
            self.session(session_id or "")
        except Fault as fault:
            raise user(fault.message) from None  # the SDK would try again after 410
