"""Agents as their makers ship them, as workflows: `rollout.agents` says of each how it is started.

workflow = installed("mini-swe-agent", "-c", "agent.step_limit=8", tool_parser="hermes", timeout_s=300)
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torchtitan_rl
from torchtitan_rl.rollout.agents import aider, claude_code, codex, mini_swe_agent, opencode
from torchtitan_rl.rollout.agents.installed_agent import PROGRAM
from torchtitan_rl.rollout.external import External, external
from torchtitan_rl.tasks.sandbox.config import SandboxConfig

__all__ = ["AGENTS", "installed"]

AGENTS = {
    module.AGENT.name: (module.AGENT, module.__name__)
    for module in (aider, claude_code, codex, mini_swe_agent, opencode)
}
"""Name -> the agent, and the module that starts it."""


def installed(name: str, *arguments: str, **settings: Any) -> External:
    """The workflow of an agent, whose program must be on PATH. `arguments` are further words for its command line,
    `settings` those of `external`; what an agent asks for and no policy here can do is ignored, unless `ignored` is
    among them. In a container the program is the image's own, on the image's PATH, and the image's Python, 3.11 or
    later, starts it. Raises ValueError for a name that is not known, and for an agent that is not installed."""
    if name not in AGENTS:
        raise ValueError(f"agent={name!r}: is not known; use one of {', '.join(AGENTS)}, or external(COMMAND)")
    agent, module = AGENTS[name]
    sandbox = settings.get("sandbox")
    if callable(sandbox) or (isinstance(sandbox, SandboxConfig) and sandbox.is_container):
        package = Path(torchtitan_rl.__file__).parent
        python = sandbox.python if isinstance(sandbox, SandboxConfig) else "python3"
        environment = {"PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
        settings["shown"] = (*settings.get("shown", ()), str(package))
    else:
        python, program = sys.executable, shutil.which(agent.program)
        if program is None:
            raise ValueError(f"agent={name!r}: its program {agent.program!r} is not on PATH; {agent.install}")
        environment = {PROGRAM: program}  # a sandbox has a PATH of its own
    environment |= settings.pop("env", {})
    command = [python, "-m", module, *arguments]
    return external(command, **{"ignored": agent.ignored, "env": environment} | settings)
