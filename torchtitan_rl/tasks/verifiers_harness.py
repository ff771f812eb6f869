"""A harness of the `verifiers` package (0.4) that runs inside the process: asks for one reply, starts no program.

The package's own harnesses install a program and start a process for each rollout. Imported where verifiers is.
"""

from __future__ import annotations

from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["InProcess"]


class InProcess(vf.Harness[vf.HarnessConfig]):
    """Sends the conversation, takes one reply; the environment may go on with it. Serves no tools."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        # Without certificates: they cost 20 ms, and the address is the package's own server on this machine.
        async with httpx.AsyncClient(verify=False, trust_env=False, timeout=None) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions",
                headers={"Authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": messages},
            )
        return vf.ProgramResult(
            exit_code=int(answer.is_error), stdout="", stderr=answer.text if answer.is_error else ""
        )
