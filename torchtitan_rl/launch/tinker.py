"""A run whose trainer and generators are a remote service: nothing is started here but a session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from os import environ
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.role_mesh import describe
from torchtitan_rl.dispatch.tinker.remote_sampler import RemoteSamplingClient
from torchtitan_rl.dispatch.tinker.remote_trainer import RemoteTrainingClient
from torchtitan_rl.dispatch.tinker.session import Samplers, answered, sdk
from torchtitan_rl.dispatch.versions import PolicyVersions
from torchtitan_rl.launch.backend import Launcher, Stack
from torchtitan_rl.model.files import assets_dir
from torchtitan_rl.validation.remote import adapted_parts

__all__ = ["RemoteLauncher"]

_CONNECT_S = 30.0
"""Seconds in which the service has to give its first answers."""
_KILL_S = 3.0
"""Seconds that a run which is ended at once waits for the end of its session."""


@dataclass
class RemoteLauncher(Launcher):
    """Opens a session with the service at TINKER_BASE_URL, by the key in TINKER_API_KEY, and ends it."""

    start_timeout_s: float
    store: Samplers = field(default_factory=Samplers)
    attached: bool = False
    _service: Any = None
    """The SDK's ServiceClient, once it has a session."""

    async def start(self, config: RunConfig, model_dir: Path, *, eos: int) -> Stack:
        """Creates a model at the service, and its clients. Raises ValueError for a model that the service does not
        train, or does not train as the config asks."""
        tinker = sdk()
        # Said again: the SDK keeps one RestClient in a process for whatever address it found there first.
        address = {"base_url": environ.get("TINKER_BASE_URL") or None, "api_key": environ.get("TINKER_API_KEY") or None}
        rest_client = await self._first(partial(tinker.RestClient, **address))
        offered = await answered(rest_client.get_server_capabilities(), "get_server_capabilities", self.start_timeout_s)
        base_model = _base_model(config, [m.model_name for m in offered.supported_models if m.trainable is not False])
        client = await self._created(config, base_model)
        trainer = RemoteTrainingClient(client, rest_client, self.store, config)
        versions = PolicyVersions(trainer, self.store, config.weight_sync, torch.float32, one_host=False)  # type: ignore[arg-type]
        generator = RemoteSamplingClient(
            self.store,
            versions,
            max_model_len=config.generator.max_model_len,
            timeout_s=config.controller.sample_timeout_s,
            eos=eos,
        )
        return Stack(launcher=self, roles={"policy": trainer}, generator=generator, versions=versions, placement=None)

    async def start_generators(self, config: RunConfig, model_dir: Path) -> Stack:
        raise AssertionError("validation.remote.check_remote refuses generators alone")

    async def _created(self, config: RunConfig, base_model: str) -> Any:
        lora = config.trainer.lora
        parts = adapted_parts(lora or LoRAConfig())
        options = {} if lora is None else {"rank": lora.rank, "train_unembed": False}
        options |= {"train_attn": "attention" in parts, "train_mlp": "mlp" in parts, "seed": config.seed}
        service = sdk().ServiceClient()
        created = await self._first(partial(service.create_lora_training_client, base_model, **options))
        self._service = service  # not before: the SDK lets nobody close a session that it is still opening
        client = await answered(created, "create_model", self.start_timeout_s)
        _check_kind(lora, client.get_info())
        return client

    async def _first(self, call: Callable[[], Any]) -> Any:
        """A call of the SDK that opens a connection, and so waits. Raises ValueError where none can be opened."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(_beside(call)), _CONNECT_S)
        except Exception as error:
            reason = f"no answer within {_CONNECT_S:g} s" if isinstance(error, TimeoutError) else describe(error)
            raise ValueError(
                f"backend='tinker': {reason}; look whether the service runs, and set TINKER_BASE_URL and "
                "TINKER_API_KEY as it says"
            ) from error

    async def stop(self) -> None:
        """Ends the session. The service drops what was not saved."""
        if self._service is not None:
            with suppress(Exception):  # a service that is gone has no session to end
                await asyncio.wait_for(self._service.close("success").result_async(), self.start_timeout_s)

    def kill(self) -> None:
        """Ends the session, within seconds."""
        if self._service is not None:
            with suppress(Exception):
                self._service.close("interrupted").future().result(_KILL_S)


def _beside(call: Callable[[], Any]) -> Future[Any]:
    """The call's result, from a thread that ends with the process: the SDK goes on trying for minutes."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def _base_model(config: RunConfig, offered: list[str]) -> str:
    """The service's name of the config's model. Raises ValueError where the service has none."""
    assets = config.model.assets
    spellings = (assets, str(assets_dir(config.model).absolute()), Path(assets).name)
    for name in offered:
        if {name, name.rstrip("/"), name.rstrip("/").split("/")[-1]} & set(spellings):
            return name
    raise ValueError(
        f"model.assets={assets!r}: the service does not train it; its models are {', '.join(offered) or 'none'}; give "
        "a directory with the last part of such a name"
    )


def _check_kind(lora: LoRAConfig | None, info: Any) -> None:
    if lora is None and info.is_lora:
        raise ValueError(
            "trainer.lora=None: asks to train all parameters, and the service trains adapters; set trainer.lora, or "
            "start a service of your own with serve-tinker --lora-rank 0"
        )
    if lora is not None and info.is_lora is False:
        raise ValueError(
            f"trainer.lora={lora}: asks for adapters, and the service trains all parameters; set trainer.lora to None"
        )
