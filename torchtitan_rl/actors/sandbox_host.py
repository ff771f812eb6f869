"""An actor that opens sandboxes on its host for the controller of a run. It needs no GPU and imports no torch."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
from monarch.actor import Actor, concurrent_endpoint

from torchtitan_rl.environment import ignore_interrupts
from torchtitan_rl.record.logs import setup_rank_logging
from torchtitan_rl.tasks.sandbox.config import SandboxConfig
from torchtitan_rl.tasks.sandbox.sandbox import Finished, Sandbox, SandboxError
from torchtitan_rl.tasks.sandbox.streams import Message, Streams

__all__ = ["COLLECT_S", "SILENT_S", "Answer", "SandboxHost"]

logger = logging.getLogger(__name__)

COLLECT_S = 1.0
"""Seconds after which `SandboxHost.collect` answers with nothing. The controller asks again at once, so either side
hears of the other every second."""
SILENT_S = 60.0
"""Seconds without a call of the controller after which its sandboxes end: it is gone, or takes this host for lost."""

Answer = tuple[str, Any]
"""Why an operation failed, empty where it did not; and what it returned. Exceptions of sandboxes are answers: the actor
would report them as its own."""


@dataclass
class _Opened:
    """A sandbox of the controller's."""

    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    """Closes the sandbox."""
    sandbox: Sandbox | None = None
    """None until it has started."""
    works: set[asyncio.Task] = field(default_factory=set)
    """Operations under way."""

    async def outcome(self, work: Coroutine) -> Answer:
        """What becomes of an operation, which ends with the sandbox."""
        task = asyncio.ensure_future(work)
        self.works.add(task)
        try:
            return "", await task
        except asyncio.CancelledError:
            return "sandbox: was closed", None
        except (SandboxError, ValueError, OSError) as error:
            return str(error), None
        finally:
            self.works.discard(task)

    async def start(self, config: SandboxConfig, gateway: str, connect: Any) -> tuple[str, str]:
        """Returns the sandbox's directory and Python."""
        self.sandbox = await self.stack.enter_async_context(config.open_here(gateway=gateway, connect=connect))
        return self.sandbox.directory, self.sandbox.python

    async def close(self) -> None:
        for work in self.works:
            work.cancel()
        await asyncio.gather(*self.works, return_exceptions=True)
        await self.stack.aclose()


class SandboxHost(Actor):
    """The sandboxes of one host, by the numbers that the controller gives them."""

    def __init__(self, name: str, log_dir: str | None) -> None:
        ignore_interrupts()
        if log_dir is not None:
            level = os.environ.get("TORCHTITAN_RL_LOG_LEVEL", "INFO")
            setup_rank_logging(log_dir, name, 0, 1, level, device="none")
        self._opened: dict[int, _Opened] = {}
        self._ended_in_silence: set[int] = set()
        """The sandboxes that ended because nothing had been heard of the controller."""
        self._streams = Streams()
        self._last_call = time.monotonic()
        self._watch: asyncio.Task | None = None

    @concurrent_endpoint
    async def problem(self, configs: Mapping[str, SandboxConfig]) -> str:
        """Why this host cannot run such sandboxes, by the names of their settings; empty where it can."""
        self._watch = self._watch or asyncio.ensure_future(self._close_when_silent())
        for setting, config in configs.items():
            try:
                await asyncio.to_thread(config.check, setting)
            except (RuntimeError, ValueError) as error:
                return str(error)
        return ""

    @concurrent_endpoint
    async def open(self, number: int, config: SandboxConfig, gateway: str) -> Answer:
        """Starts a sandbox. Returns its directory and its Python."""
        opened = self._opened[number] = _Opened()
        return await opened.outcome(opened.start(config, gateway, partial(self._streams.open, number)))

    @concurrent_endpoint
    async def write(self, number: int, files: Mapping[str, bytes]) -> Answer:
        return await self._of(number, lambda sandbox: sandbox.write(files))

    @concurrent_endpoint
    async def run(
        self, number: int, command: Sequence[str], timeout_s: float, env: Mapping[str, str], cwd: str
    ) -> Answer:
        def run(sandbox: Sandbox) -> Coroutine[Any, Any, Finished]:
            return sandbox.run(command, timeout_s=timeout_s, env=env, cwd=cwd)

        return await self._of(number, run)

    @concurrent_endpoint
    async def read(self, number: int, name: str, max_bytes: int) -> Answer:
        return await self._of(number, lambda sandbox: sandbox.read(name, max_bytes=max_bytes))

    @concurrent_endpoint
    async def close(self, number: int) -> Answer:
        """Ends a sandbox, whatever it does. Does nothing for one that is closed."""
        if (opened := self._opened.pop(number, None)) is not None:
            await opened.close()
        return "", None

    @concurrent_endpoint
    async def close_all(self) -> Answer:
        await self._close_all()
        return "", None

    @concurrent_endpoint
    async def collect(self) -> tuple[int, list[Message]]:
        """The free memory of this host in bytes, and what connections of sandboxes send, as soon as there is
        something and after `COLLECT_S` at the latest."""
        self._last_call = time.monotonic()
        messages = await self._streams.messages(within_s=COLLECT_S)
        return psutil.virtual_memory().available, messages

    @concurrent_endpoint
    async def deliver(self, messages: list[Message]) -> None:
        """What the gateway sends to connections of sandboxes."""
        self._streams.take(messages)

    async def _of(self, number: int, work: Any) -> Answer:
        """What becomes of an operation of a sandbox that has started."""
        opened = self._opened.get(number)
        if opened is None or opened.sandbox is None:
            silence = f"; nothing had been heard of the controller for {SILENT_S:g} s"
            return "sandbox: was closed" + (silence if number in self._ended_in_silence else ""), None
        return await opened.outcome(work(opened.sandbox))

    async def _close_all(self) -> None:
        opened = [self._opened.pop(number) for number in list(self._opened)]
        await asyncio.gather(*(one.close() for one in opened), return_exceptions=True)
        await self._streams.close()

    async def _close_when_silent(self) -> None:
        while True:
            await asyncio.sleep(SILENT_S / 10)
            if self._opened and time.monotonic() - self._last_call > SILENT_S:
                num_open = len(self._opened)
                logger.warning("nothing was heard of the controller for %g s: %d sandboxes end", SILENT_S, num_open)
                self._ended_in_silence.update(self._opened)
                await self._close_all()
