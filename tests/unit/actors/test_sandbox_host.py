"""Why an operation of a sandbox that has ended fails; tests/unit/tasks/sandbox has sandboxes."""

import asyncio

from torchtitan_rl.actors import sandbox_host
from torchtitan_rl.actors.sandbox_host import SandboxHost


async def test_a_sandbox_that_was_closed_says_so_and_one_that_ended_in_silence_says_that(monkeypatch):
    monkeypatch.setattr(sandbox_host, "ignore_interrupts", lambda: None)
    host = SandboxHost("sandboxes", None)
    host._opened[7] = sandbox_host._Opened()
    monkeypatch.setattr(sandbox_host, "SILENT_S", 0.02)
    watch = asyncio.ensure_future(host._close_when_silent())
    for _ in range(500):
        if not host._opened:
            break
        await asyncio.sleep(0.01)
    watch.cancel()
    assert await host._of(3, None) == ("sandbox: was closed", None)
    assert await host._of(7, None) == ("sandbox: was closed; nothing had been heard of the controller for 0.02 s", None)
