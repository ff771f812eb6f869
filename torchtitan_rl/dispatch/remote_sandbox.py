"""Sandboxes on another host, as the controller drives them through the host's actor."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from torchtitan_rl.dispatch.role_mesh import NoAnswer, deadline
from torchtitan_rl.tasks.sandbox.config import SandboxConfig
from torchtitan_rl.tasks.sandbox.sandbox import Finished, SandboxError, SandboxLimits, check_name
from torchtitan_rl.tasks.sandbox.streams import Streams

__all__ = ["SILENT_S", "RemoteHost", "RemoteSandbox"]

logger = logging.getLogger(__name__)

SILENT_S = 15.0
"""Seconds without an answer after which a host is lost. A host that lives answers every second, and Monarch takes one
for dead after 8 s of silence."""
_ANSWER_S = 90.0
"""Seconds beyond a command's own: the sandbox has 30 to start or to answer, and a busy host some more."""
_CLOSE_S = 3.0
"""Seconds for a host to close what is open at the end of a run."""


class RemoteHost:
    """A host of the run that opens sandboxes by its actor (`actors.sandbox_host.SandboxHost`), until it is lost."""

    def __init__(self, address: str, actor: Any, *, num_cores: int, free_bytes: int) -> None:
        self.address, self.actor, self.num_cores, self.free_bytes = address, actor, num_cores, free_bytes
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why no sandbox of this host is usable any more, once that is so."""
        self._numbers = itertools.count()
        self._gateways: dict[int, str] = {}
        """URL of the gateway of each open sandbox, which a host cannot choose."""
        self._streams = Streams(self._connected)
        self._exchange = [asyncio.ensure_future(loop()) for loop in (self._collect, self._deliver)]

    @property
    def is_lost(self) -> bool:
        return self.end.done()

    @asynccontextmanager
    async def opened(self, config: SandboxConfig, *, gateway: str) -> AsyncIterator[RemoteSandbox]:
        number = next(self._numbers)
        self._gateways[number] = gateway
        try:
            directory, python = await self.ask(self.actor.open, number, config, gateway, within_s=_ANSWER_S)
            yield RemoteSandbox(self, number, directory, python, config.limits)
        finally:
            del self._gateways[number]
            await self.close_sandbox(number)

    async def ask(self, endpoint: Any, *arguments: Any, within_s: float) -> Any:
        """What an operation of the host's actor returns. Raises SandboxError where it fails, and where the host is
        lost before the answer has come."""
        if self.is_lost:
            raise SandboxError(self.end.result())
        label = f"sandbox on host {self.address}"
        answered = asyncio.ensure_future(deadline(endpoint.call_one(*arguments), within_s, label))
        try:
            await asyncio.wait({answered, self.end}, return_when=asyncio.FIRST_COMPLETED)
            if not answered.done():
                raise SandboxError(self.end.result())
            try:
                problem, value = answered.result()
            except RuntimeError as error:
                raise SandboxError(_reason(error, f"{label}: no answer within {within_s:g} s")) from error
            if problem:
                raise SandboxError(f"{problem} (on host {self.address})")
            return value
        finally:
            answered.cancel()

    async def close(self) -> None:
        """Ends what is still open, at the end of the run."""
        if not self.is_lost:
            try:
                await self.ask(self.actor.close_all, within_s=_CLOSE_S)
            except SandboxError as error:
                logger.warning("sandboxes were left to their host's process: %s", error)
        await self._finish("sandbox: the run has ended")

    async def close_sandbox(self, number: int) -> None:
        """Ends a sandbox. Those of a lost host end with the host's actor, or when it hears nothing of this process."""
        if not self.is_lost:
            try:
                await self.ask(self.actor.close, number, within_s=_ANSWER_S)
            except SandboxError as error:
                logger.warning("a sandbox was left to its host's process: %s", error)

    async def _finish(self, reason: str) -> None:
        if not self.end.done():
            self.end.set_result(reason)
        for loop in self._exchange:
            if loop is not asyncio.current_task():
                loop.cancel()
        await self._streams.close()

    async def _lose(self, error: Exception) -> None:
        reason = _reason(error, f"no answer within {SILENT_S:g} s")
        log_fields = {"event": "sandbox_host_lost", "who": self.address}
        logger.warning("host %s is lost for sandboxes: %s", self.address, reason, extra=log_fields)
        await self._finish(f"sandbox: host {self.address} is lost ({reason}); new sandboxes open on other hosts")

    async def _collect(self) -> None:
        """Takes what connections of the host's sandboxes send, again and again. No answer: the host is lost."""
        try:
            while True:
                self.free_bytes, messages = await _prompt(self.actor.collect.call_one())
                self._streams.take(messages)
        except Exception as error:
            await self._lose(error)

    async def _deliver(self) -> None:
        """Sends what the gateway says to connections of the host's sandboxes."""
        try:
            while True:
                await _prompt(self.actor.deliver.call_one(await self._streams.messages()))
        except Exception as error:
            await self._lose(error)

    async def _connected(self, number: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the gateway of a sandbox, and to nothing else. Raises OSError for a sandbox without one."""
        gateway = urlsplit(self._gateways.get(number, ""))
        if not gateway.port:
            raise ConnectionRefusedError(f"sandbox {number}: has no gateway")
        return await asyncio.open_connection(gateway.hostname, gateway.port)


class RemoteSandbox:
    """A `Sandbox` on another host; `RemoteHost.opened` opens it."""

    def __init__(self, host: RemoteHost, number: int, directory: str, python: str, limits: SandboxLimits) -> None:
        self.directory, self.python, self.limits = directory, python, limits
        self._host, self._number = host, number

    async def write(self, files: Mapping[str, bytes]) -> None:
        content = {check_name(name): bytes(content) for name, content in files.items()}
        await self._host.ask(self._host.actor.write, self._number, content, within_s=_ANSWER_S)

    async def run(
        self, command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, cwd: str = "."
    ) -> Finished:
        arguments = self._number, list(command), timeout_s, dict(env or {}), check_name(cwd)
        return await self._host.ask(self._host.actor.run, *arguments, within_s=timeout_s + _ANSWER_S)

    async def read(self, name: str, *, max_bytes: int = 2**20) -> bytes | None:
        arguments = self._number, check_name(name), max_bytes
        return await self._host.ask(self._host.actor.read, *arguments, within_s=_ANSWER_S)

    async def close(self) -> None:
        """Ends what runs and removes the directory."""
        await self._host.close_sandbox(self._number)


async def _prompt(call: Any) -> Any:
    """The answer of a host that lives. Raises NoAnswer after `SILENT_S` without one, RuntimeError where the call
    fails."""
    answered = asyncio.ensure_future(deadline(call, 2 * SILENT_S, "sandboxes"))
    try:
        # In two waits: where user code has blocked this event loop for all of the first, the answer has come meanwhile
        # and is taken in the second.
        for seconds in (SILENT_S - 1, 1):
            await asyncio.wait({answered}, timeout=seconds)
            if answered.done():
                return answered.result()
        raise NoAnswer(f"sandboxes: no answer within {SILENT_S:g} s")
    finally:
        answered.cancel()


def _reason(error: Exception, late: str) -> str:
    """Why a call failed; `late` where its deadline has passed."""
    return late if isinstance(error, NoAnswer) else str(error)
