"""What is known of an agent that others ship, and how its process takes the place of ours."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["PROGRAM", "Attempt", "InstalledAgent", "become"]

PROGRAM = "AGENT_PROGRAM"
"""The environment variable with the path of the agent's program; without it the program is looked for on PATH."""


_WORD_BYTES = 131072
"""Linux takes no longer word on a command line, its end included."""


def _nothing(attempt: Attempt) -> dict[str, str]:
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One task for an agent, and where the policy is; read from the environment of a command (docs/gateway.md)."""

    prompt: str
    base_url: str
    """Of OpenAI's endpoints, with /v1."""
    session_url: str
    """Of Anthropic's endpoints, without /v1."""
    model: str
    home: Path
    """The agent's empty directory, in which it starts."""

    @staticmethod
    def of_environment(environment: Mapping[str, str]) -> Attempt:
        """Exits with a message for a prompt that no command line takes."""
        task = json.loads(Path(environment["TASK_FILE"]).read_text(encoding="utf-8"))
        prompt = _text(task["prompt"])
        num_bytes = len(prompt.encode(errors="replace"))
        if num_bytes >= _WORD_BYTES:
            sys.exit(f"prompt: has {num_bytes} bytes, a command line takes {_WORD_BYTES}; put the rest into files")
        if "\0" in prompt:
            sys.exit("prompt: has a NUL character, which no command line takes; leave it out")
        return Attempt(
            prompt=prompt,
            base_url=environment["OPENAI_BASE_URL"],
            session_url=environment["ANTHROPIC_BASE_URL"],
            model=environment["OPENAI_MODEL"],
            home=Path(environment["HOME"]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class InstalledAgent:
    """An agent as its makers ship it."""

    name: str
    program: str
    """The name of its program on PATH."""
    install: str
    """What to do where it is not there."""
    arguments: Callable[[Attempt], list[str]]
    """The words after the program: no questions, no confirmation, an end. The key is not among them: every user of a
    machine can read a command line."""
    task: Callable[[Attempt], list[str]]
    """The last words, with the prompt. Further words of a config come before them and after `arguments`, whose values
    they may change."""
    ignored: tuple[str, ...] = ()
    """Parameters that it sends and its requests are answered without, see `rollout.ignored_parameters`."""
    environment: Callable[[Attempt], dict[str, str]] = _nothing
    """Variables beside those that every command has."""
    files: Callable[[Attempt], dict[str, str]] = _nothing
    """Path below the agent's home -> text, of files that it reads at its start."""


def become(agent: InstalledAgent) -> NoReturn:
    """Replaces this process by the agent. Words after ours on the command line go to the agent too."""
    attempt = Attempt.of_environment(os.environ)
    for path, text in agent.files(attempt).items():
        file = attempt.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    program = os.environ.get(PROGRAM, agent.program)
    line = [program, *agent.arguments(attempt), *sys.argv[1:], *agent.task(attempt)]
    try:
        os.execvpe(program, line, os.environ | agent.environment(attempt))
    except FileNotFoundError:
        sys.exit(
            f"agent {agent.name!r}: its program {program!r} is not there; {agent.install}, or let its sandbox see it "
            "(read_only)"
        )


def _text(prompt: str | list[dict[str, Any]]) -> str:
    """A prompt as one text; of chat messages their contents, in order. Exits with a message for a prompt of tokens."""
    if isinstance(prompt, str):
        return prompt
    if not all(isinstance(message, dict) for message in prompt):
        sys.exit("prompt: has tokens, and an agent of others reads text; give text or messages")
    return "\n\n".join(str(message["content"]) for message in prompt)
