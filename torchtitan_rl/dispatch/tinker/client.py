"""The policy's training client over a remote service, whole: a step's calls, scores and checkpoints."""

from __future__ import annotations

import asyncio
import json
import re
import time
import warnings
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.tinker import loss_terms
from torchtitan_rl.dispatch.tinker.call_order import done
from torchtitan_rl.dispatch.tinker.session import Samplers
from torchtitan_rl.dispatch.tinker.trainer_steps import RemoteSteps, output_of, scored
from torchtitan_rl.types import Datum, ForwardBackwardOutput
from torchtitan_rl.weights import checkpoint

__all__ = ["RECORD", "RemoteTrainingClient"]

RECORD = "remote.json"
"""The file of a checkpoint that has the path of its weights at the service."""

_ODD = re.compile(r"[^A-Za-z0-9._-]+")


class RemoteTrainingClient(RemoteSteps):
    """Scores and trains one model of a remote service. Checkpoints stay at the service: a checkpoint's directory has
    their path."""

    def __init__(self, client: Any, rest: Any, samplers: Samplers, config: RunConfig, *, vocab_size: int) -> None:
        """`client` and `rest` are the SDK's TrainingClient and RestClient. `config` is settled."""
        super().__init__(client, samplers, config, vocab_size=vocab_size)
        self._rest = rest
        self._saving: tuple[Path, asyncio.Future[Any]] | None = None
        self._num_resets = 0

    def forward(
        self, data: list[Datum], *, temperature: float | None = None, top_k: int = 0, hidden: bool = False
    ) -> asyncio.Future[ForwardBackwardOutput]:
        """Log-probabilities of the data's targets. Raises ValueError as `forward_backward` does, and for `top_k` and
        `hidden`."""
        self._check("forward", data, temperature)
        if top_k or hidden:
            raise ValueError(
                f"forward.top_k={top_k}, hidden={hidden}: a remote service answers log-probabilities of the targets "
                "alone; give several targets a token, ask the generator's score_top, or use backend='actors'"
            )
        began = time.time()

        async def send() -> Awaitable[ForwardBackwardOutput]:
            answer = self._sent(data, scored(data), forward_only=True)

            async def computed() -> ForwardBackwardOutput:
                rows = await self._logprobs("forward", answer)
                return output_of(data, rows, loss_terms.Evaluated(loss=0.0, sums={}), began)

            return computed()

        return self._order.submit(send)

    async def stage_checkpoint(self, path: Path) -> None:
        """Begins to save weights and optimizer at the service. Training may go on at once: the service saves at the
        call's place in the order."""

        async def send() -> Awaitable[None]:
            name = _ODD.sub("-", path.name.removesuffix(".writing"))
            future = self._client.save_state(name, overwrite=True)
            self._saving = path, asyncio.ensure_future(self._answered("stage_checkpoint", future))
            return done(None)

        await self._order.submit(send)

    async def checkpoint_written(self) -> dict[str, list]:
        """Waits until the staged checkpoint is saved. Returns the checksum of the file that says where."""
        if self._saving is None:
            raise RuntimeError("policy-0.checkpoint_written: no checkpoint is staged; call stage_checkpoint first")
        (path, saving), self._saving = self._saving, None
        saved = await saving
        path.mkdir(parents=True, exist_ok=True)
        checkpoint.write_json(path / RECORD, {"path": saved.path})
        return checkpoint.checksums(path, [path / RECORD])

    async def load_checkpoint(self, path: Path, *, policy_version: int = 0, optimizer: bool = True) -> None:
        """Loads what a checkpoint's directory names; with `optimizer=False` the weights alone, and the optimizer's
        state is forgotten."""
        remote = _remote_path(path)

        async def send() -> Awaitable[None]:
            self._version = done(policy_version)
            return self._answered("load_checkpoint", self._load(remote, optimizer=optimizer))

        await self._order.submit(send)

    async def init_model(self, path: Path) -> None:
        """Loads the weights of a checkpoint that this backend wrote, and forgets the optimizer's state."""
        await self.load_checkpoint(path, optimizer=False)

    def reset_optimizer(self) -> asyncio.Future[None]:
        """Forgets the optimizer's moments and step count: the protocol has no call for it, but weights that are saved
        and loaded without the optimizer begin anew."""
        self._num_resets += 1
        name = f"reset-{self._num_resets}"

        async def send() -> Awaitable[None]:
            saved = await self._answered("reset_optimizer", self._client.save_state(name, overwrite=True))
            return self._reset(self._load(saved.path, optimizer=False), saved.path)

        return self._order.submit(send)

    async def _reset(self, loading: Any, remote: str) -> None:
        await self._answered("reset_optimizer", loading)
        await self._delete(remote)

    async def remove_checkpoint(self, path: Path) -> None:
        """Deletes a checkpoint at the service and its directory here."""
        await self._delete(_remote_path(path))
        checkpoint.remove(path)

    async def _delete(self, remote: str) -> None:
        await self._answered("remove_checkpoint", self._rest.delete_checkpoint_from_tinker_path(remote))

    def _load(self, remote: str, *, optimizer: bool) -> Any:
        with warnings.catch_warnings():  # see service._not_on_loading
            warnings.simplefilter("ignore", FutureWarning)
            return self._client.load_state_with_optimizer(remote) if optimizer else self._client.load_state(remote)


def _remote_path(path: Path) -> str:
    """Raises ValueError for a directory without the path of its weights at a service."""
    try:
        return json.loads((path / RECORD).read_text())["path"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"checkpoint={str(path)!r}: has no {RECORD} that names weights at a service ({error}); another backend "
            "wrote it: resume with that one"
        ) from error
