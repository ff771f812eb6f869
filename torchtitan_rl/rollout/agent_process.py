"""A command that plays one attempt in a sandbox of its own, and the reward that it leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from torchtitan_rl.rollout.agent import AgentFailed, CommandLimits, Endpoint
from torchtitan_rl.tasks.sandbox.config import SandboxConfig
from torchtitan_rl.tasks.sandbox.plain import Plain, no_isolation
from torchtitan_rl.tasks.sandbox.sandbox import Sandbox, SandboxError, SandboxLimits

__all__ = ["no_isolation", "open_sandbox", "run_command"]

_MAX_REWARD_BYTES = 65536
_TASK, _REWARD, _HOME = "task.json", "reward", "home"
"""Names in the sandbox: two files, and the directory in which the command runs."""


@asynccontextmanager
async def open_sandbox(
    config: SandboxConfig | None, limits: CommandLimits, endpoint: Endpoint
) -> AsyncIterator[Sandbox]:
    """The sandbox of one attempt, which reaches the gateway of `endpoint`. Without a config it is a process of the same
    user with `limits`. Raises AgentFailed where it does not start."""
    if config is not None:
        try:
            async with config.open(gateway=endpoint.base_url) as sandbox:
                yield sandbox
        except SandboxError as error:
            raise AgentFailed(f"agent: {error}") from error
        return
    isolated = limits.isolate != "off" and not await asyncio.to_thread(no_isolation)
    plain = Plain(
        SandboxLimits(
            memory_bytes=int(limits.memory_gib * 2**30),
            disk_bytes=int(limits.max_disk_mib * 2**20),
            output_bytes=int(limits.max_output_mib * 2**20),
            processes=limits.max_processes,
            cpu_s=0.0,
        ),
        isolated=isolated,
    )
    try:
        yield plain
    except SandboxError as error:
        raise AgentFailed(f"agent: {error}") from error
    finally:
        await plain.close()


async def run_command(
    sandbox: Sandbox, command: list[str], endpoint: Endpoint, task_json: str, env: dict[str, str], timeout_s: float
) -> tuple[Any, AgentFailed | None]:
    """Runs a command to its end. Returns (the reward that it wrote to `REWARD_FILE`, as `external` takes one, or None;
    its failure, or None). It has failed with an exit status other than 0, or a reward file without a number. Raises
    AgentFailed for a limit that is passed."""
    await sandbox.write({_TASK: task_json.encode()})
    finished = await sandbox.run(
        command, env=_environment(endpoint, sandbox.directory) | env, timeout_s=timeout_s, cwd=_HOME
    )
    if finished.limit:
        raise AgentFailed(f"agent: {_breach(finished.limit, sandbox.limits, timeout_s)}", breach=True)
    failed = None
    if finished.status:
        failed = AgentFailed(f"agent: {command[0]!r} ended with status {finished.status}: {finished.tail()}")
    try:
        return await _reward(sandbox), failed
    except AgentFailed as error:
        return None, failed or error


def _breach(limit: str, limits: SandboxLimits, timeout_s: float) -> str:
    return {
        "time": f"was not done within {timeout_s:g} s",
        "output": f"wrote more than {limits.output_bytes} bytes of output; write less, or raise max_output_mib",
        "memory": f"has too much memory; {limits.memory_bytes / 2**30:g} GiB are allowed (memory_gib)",
        "disk": f"has too many MiB of files; {limits.disk_bytes / 2**20:g} are allowed (max_disk_mib)",
        "processes": f"has too many processes; {limits.processes} are allowed (max_processes)",
    }[limit]


def _environment(endpoint: Endpoint, directory: str) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_MODEL": endpoint.model,
        "ANTHROPIC_BASE_URL": endpoint.session_url,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "ANTHROPIC_MODEL": endpoint.model,
        "SESSION_ID": endpoint.session_id,
        "SESSION_URL": endpoint.session_url,
        "SEED": str(endpoint.seed),
        "TRAINING": "1" if endpoint.training else "0",
        "TASK_FILE": f"{directory}/{_TASK}",
        "REWARD_FILE": f"{directory}/{_REWARD}",
    }


async def _reward(sandbox: Sandbox) -> Any:
    """The content of a reward file: a number, or a JSON object with `reward` and parts. None where there is no file."""
    try:
        text = await sandbox.read(_REWARD, max_bytes=_MAX_REWARD_BYTES)
    except SandboxError as error:
        raise AgentFailed(f"agent: REWARD_FILE is refused ({error}); write a plain file with a number") from error
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise AgentFailed("agent: REWARD_FILE holds neither a number nor JSON; write one of them") from None
    if not isinstance(value, dict):
        return value
    if "reward" not in value:
        raise AgentFailed("agent: REWARD_FILE holds a JSON object without 'reward'; add it")
    return value.pop("reward"), value
